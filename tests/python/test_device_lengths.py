"""How often the lengths of packed sequences are read from a device, without a device: a stand-in counts the reads."""

from __future__ import annotations

import pytest
import torch
from support import offsets

from cula.gdn import index


class DeviceTensor:
    """As much of a tensor on a GPU as `host_offsets` looks at."""

    is_cuda = True
    device = torch.device("cuda")

    def __init__(self, lengths: list[int], inference: bool = False) -> None:
        self.values, self.reads, self._version, self.inference = offsets(lengths), 0, 0, inference

    @property
    def shape(self):
        return self.values.shape

    def is_inference(self) -> bool:
        return self.inference

    def cpu(self) -> torch.Tensor:
        self.reads += 1
        return self.values.clone()

    def write(self, lengths: list[int]) -> None:
        self.values = offsets(lengths)
        self._version += 1


@pytest.fixture(autouse=True)
def capturing(monkeypatch):
    state = {"capturing": False}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(index, "_host_copies", {})
    return state


def test_case_59_one_read_for_all_layers():
    lengths = DeviceTensor([30, 40])
    for _ in range(48):
        assert index.host_offsets(lengths, None).tolist() == [0, 30, 70]
    assert lengths.reads == 1


def test_case_59_no_read_when_host_lengths_are_given():
    lengths = DeviceTensor([30, 40])
    assert index.host_offsets(lengths, offsets([30, 40])).tolist() == [0, 30, 70]
    assert lengths.reads == 0


def test_written_lengths_are_read_again():
    lengths = DeviceTensor([30, 40])
    index.host_offsets(lengths, None)
    lengths.write([10, 60])
    assert index.host_offsets(lengths, None).tolist() == [0, 10, 70]
    assert lengths.reads == 2


def test_tensors_without_a_version_are_always_read():
    lengths = DeviceTensor([30, 40], inference=True)
    for _ in range(2):
        index.host_offsets(lengths, None)
    assert lengths.reads == 2


def test_case_47_capture_asks_for_host_lengths(capturing):
    lengths = DeviceTensor([60, 68])
    index.host_offsets(lengths, None)
    capturing["capturing"] = True
    with pytest.raises(RuntimeError, match=r"^cu_seqlens: .*capture.*cu_seqlens_cpu"):
        index.host_offsets(lengths, None)
    assert index.host_offsets(lengths, offsets([60, 68])).tolist() == [0, 60, 128]


def test_host_lengths_must_be_on_the_host():
    with pytest.raises(ValueError, match=r"^cu_seqlens_cpu: expected a tensor on the CPU"):
        index.host_offsets(offsets([3]), DeviceTensor([3]))


def test_copies_are_forgotten_with_their_tensor(monkeypatch):
    from torch.utils.weak import WeakIdKeyDictionary

    copies = WeakIdKeyDictionary()
    monkeypatch.setattr(index, "_host_copies", copies)
    lengths = DeviceTensor([30, 40])
    index.host_offsets(lengths, None)
    assert len(copies) == 1
    del lengths
    assert len(copies) == 0
