"""The partition of packed sequences over ranks: worked examples, every field by brute force, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from kcp import slots_of_rank
from support import offsets, parametrize

from cula.gdn.autograd_cp import Partition
from cula.gdn.cp import CPContext, build_cp_context, get_cp_cu_seqlens

# rank: (local offsets, pre, post, is_first, is_last, tokens before)
EXAMPLE = {
    0: ([0, 512], 0, 1, True, False, 0),
    1: ([0, 188, 512], 1, 2, False, False, 512),
    2: ([0, 512], 1, 1, False, False, 324),
    3: ([0, 364, 512], 2, 0, False, True, 836),
}


@parametrize(dtype=[torch.int32, torch.int64])
@parametrize(rank=list(EXAMPLE))
def test_worked_example(rank, dtype):
    context = get_cp_cu_seqlens(offsets([700, 1200, 148], dtype), world_size=4, rank=rank, conv1d_kernel_size=4)
    expected, pre, post, is_first, is_last, before = EXAMPLE[rank]
    assert context.cu_seqlens.tolist() == context.cu_seqlens_cpu.tolist() == expected
    assert context.cu_seqlens.dtype == context.cu_seqlens_cpu.dtype == torch.int32
    assert (context.pre_num_ranks, context.post_num_ranks) == (pre, post)
    assert (context.is_first_rank, context.is_last_rank) == (is_first, is_last)
    assert (context.pre_num_conv_tokens, context.conv1d_kernel_size) == (before, 4)
    assert context.layout == "contiguous"
    assert (context.part_len, context.front_num_seqs, context.is_first_by_part) == (None, None, None)
    assert context.num_seqs == len(expected) - 1
    assert not context.is_cp_enabled


def test_flash_linear_attentions_own_check():
    context = get_cp_cu_seqlens(offsets([5, 7]), world_size=3, rank=1)
    assert context.cu_seqlens.tolist() == [0, 1, 4]
    assert (context.pre_num_ranks, context.post_num_ranks, context.pre_num_conv_tokens) == (1, 1, 4)


def test_worked_zigzag_example():
    contexts = [get_cp_cu_seqlens(offsets([700, 1200, 148]), world_size=2, rank=r, layout="zigzag") for r in (0, 1)]
    fields = [
        (c.cu_seqlens.tolist(), c.front_num_seqs, c.pre_num_ranks_by_part, c.post_num_ranks_by_part,
         c.pre_num_conv_tokens_by_part, c.is_first_by_part, c.is_last_by_part, c.part_len)
        for c in contexts
    ]  # fmt: skip
    assert fields == [
        ([0, 512, 876, 1024], 1, (0, 2), (1, 0), (0, 836), (True, False), (False, True), 512),
        ([0, 188, 512, 1024], 2, (1, 1), (2, 1), (512, 324), (False, False), (False, False), 512),
    ]
    assert all(c.layout == "zigzag" and c.is_first_rank is None and c.pre_num_ranks is None for c in contexts)


def random_streams(count: int):
    generator = random.Random(0)
    for _ in range(count):
        world_size, layout = generator.choice([1, 2, 3, 4, 8]), generator.choice(["contiguous", "zigzag"])
        total = world_size * (1 + (layout == "zigzag")) * generator.randint(1, 7)
        cuts = sorted(generator.randint(0, total) for _ in range(generator.randint(0, 7)))
        yield [0, *cuts, total], world_size, layout


def test_every_field_equals_the_partition_found_token_by_token():
    for ends, world_size, layout in random_streams(150):
        for rank in range(world_size):
            context = get_cp_cu_seqlens(torch.tensor(ends), world_size=world_size, rank=rank, layout=layout)
            slots = slots_of_rank(ends, world_size, rank, layout)
            lengths = [n for slot in slots for n in slot.lengths]
            assert context.cu_seqlens.tolist() == [0, *itertools.accumulate(lengths)]
            assert context.sequence_ids == tuple(n for slot in slots for n in slot.ids)
            pre, post = tuple(s.pre for s in slots), tuple(s.post for s in slots)
            before = tuple(s.conv_tokens for s in slots)
            first, last = tuple(n == 0 for n in pre), tuple(n == 0 for n in post)
            if layout == "contiguous":
                assert (context.pre_num_ranks,) == pre
                assert (context.post_num_ranks,) == post
                assert (context.pre_num_conv_tokens,) == before
                assert (context.is_first_rank,) == first
                assert (context.is_last_rank,) == last
            else:
                assert context.front_num_seqs == len(slots[0].lengths)
                assert context.pre_num_ranks_by_part == pre
                assert context.post_num_ranks_by_part == post
                assert context.pre_num_conv_tokens_by_part == before
                assert context.is_first_by_part == first
                assert context.is_last_by_part == last


def test_equals_flash_linear_attention():
    peer = pytest.importorskip("fla.ops.cp.context", exc_type=ImportError)
    names = [field.name for field in dataclasses.fields(peer.FLACPContext)]
    for ends, world_size, layout in random_streams(150):
        for rank in range(world_size):
            arguments = {"world_size": world_size, "rank": rank, "layout": layout, "conv1d_kernel_size": 4}
            ours = get_cp_cu_seqlens(torch.tensor(ends), **arguments)
            theirs = peer.get_cp_cu_seqlens(torch.tensor(ends), **arguments)
            for name in names:
                a, b = getattr(ours, name), getattr(theirs, name)
                if isinstance(b, torch.Tensor):
                    assert a.dtype == b.dtype
                    assert torch.equal(a, b), name
                else:
                    assert a == b, name


def test_fields_are_those_of_flash_linear_attention_in_its_order():
    assert [field.name for field in dataclasses.fields(CPContext)] == [
        "group", "cu_seqlens", "cu_seqlens_cpu", "is_last_rank", "pre_num_ranks", "is_first_rank", "post_num_ranks",
        "conv1d_kernel_size", "pre_num_conv_tokens", "pre_num_ranks_dev", "post_num_ranks_dev", "layout", "part_len",
        "front_num_seqs", "pre_num_ranks_by_part", "post_num_ranks_by_part", "is_first_by_part", "is_last_by_part",
        "pre_num_conv_tokens_by_part", "sequence_ids", "rank_lengths",
    ]  # fmt: skip


def test_uneven_lengths():
    cu = offsets([100, 30])
    uneven = [get_cp_cu_seqlens(cu, world_size=5, rank=r, rank_lengths=[64, 0, 40, 26, 0]) for r in range(5)]
    seen = [(c.cu_seqlens.tolist(), c.pre_num_ranks, c.post_num_ranks, c.sequence_ids) for c in uneven]
    assert seen == [
        ([0, 64], 0, 2, (0,)),
        ([0, 0], 1, 1, (0,)),  # no tokens, but a sequence passes through
        ([0, 36, 40], 2, 1, (0, 1)),
        ([0, 26], 1, 0, (1,)),
        ([0], 0, 0, ()),  # behind the stream
    ]
    assert [c.pre_num_conv_tokens for c in uneven] == [0, 64, 64, 4, 0]
    assert uneven[4].is_first_rank
    assert uneven[4].is_last_rank
    even = [get_cp_cu_seqlens(cu, world_size=2, rank=r, rank_lengths=[65, 65]) for r in range(2)]
    for context, plain in zip(even, (get_cp_cu_seqlens(cu, world_size=2, rank=r) for r in range(2)), strict=True):
        assert context.cu_seqlens.tolist() == plain.cu_seqlens.tolist()
        assert (context.pre_num_ranks, context.post_num_ranks) == (plain.pre_num_ranks, plain.post_num_ranks)


def test_a_rank_without_tokens_between_two_sequences_belongs_to_none():
    contexts = [get_cp_cu_seqlens(offsets([10, 6]), world_size=3, rank=r, rank_lengths=[10, 0, 6]) for r in range(3)]
    assert [c.cu_seqlens.tolist() for c in contexts] == [[0, 10], [0], [0, 6]]
    assert all(c.is_first_rank and c.is_last_rank for c in contexts)


@pytest.mark.parametrize(("total", "world_size"), [(10, 3), (14, 4), (2, 3)])
def test_case_49_token_total_not_divisible_by_the_ranks(total, world_size):
    with pytest.raises(ValueError, match=rf"total_tokens.*world_size = {world_size}, got {total}"):
        get_cp_cu_seqlens(offsets([total]), world_size=world_size, rank=0)
    with pytest.raises(ValueError, match=rf"total_tokens.*world_size = {2 * world_size}, got {total}"):
        get_cp_cu_seqlens(offsets([total]), world_size=world_size, rank=0, layout="zigzag")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"layout": "striped"}, ValueError, "layout: expected 'contiguous' or 'zigzag', got 'striped'"),
        ({"use_tf32x3_affine_chain": False}, ValueError, "use_tf32x3_affine_chain"),
        ({"chunk_size": 64}, TypeError, "chunk_size"),
        ({"rank": 4}, ValueError, "rank: .*world_size = 4, got 4"),
        ({"cu_seqlens": torch.tensor([0, 9, 4, 16])}, ValueError, "cu_seqlens: .*ascending"),
        ({"cu_seqlens": torch.tensor([1, 16])}, ValueError, "cu_seqlens: .*start at 0"),
        (
            {"cu_seqlens": torch.tensor([0.0, 16.0])},
            TypeError,
            "cu_seqlens: expected int32 or int64, got torch.float32",
        ),
        ({"cu_seqlens_cpu": torch.tensor([0.0, 16.0])}, TypeError, "cu_seqlens_cpu: expected int32 or int64"),
        ({"cu_seqlens": [0, 16]}, TypeError, "cu_seqlens: expected a tensor, got list"),
        (
            {"cu_seqlens": torch.tensor([[0, 16]])},
            ValueError,
            r"cu_seqlens: expected one dimension .*got shape \[1, 2\]",
        ),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, "cu_seqlens: expected at least two"),
        ({"cu_seqlens_cpu": torch.tensor([0, 15])}, ValueError, "cu_seqlens_cpu"),
        ({"rank_lengths": [4, 4, 4, 4.0]}, TypeError, "rank_lengths: expected a sequence of ints"),
        ({"rank_lengths": 16}, TypeError, "rank_lengths: expected a sequence of ints, got 16"),
        ({"rank_lengths": [4, 4, 8]}, ValueError, r"rank_lengths: .*world_size = 4 .*got \[4, 4, 8\]"),
        ({"rank_lengths": [4, 4, 4, 8]}, ValueError, "rank_lengths: .*total_tokens = 16"),
        ({"rank_lengths": [20, -4, 0, 0]}, ValueError, "rank_lengths"),
        ({"rank_lengths": [4, 4, 4, 4], "layout": "zigzag"}, ValueError, "rank_lengths: expected layout='contiguous'"),
        ({"world_size": None}, AssertionError, "group"),
    ],
)
def test_refused(change, kind, message):
    arguments = {"cu_seqlens": torch.tensor([0, 16]), "world_size": 4, "rank": 0, **change}
    with pytest.raises(kind, match=message):
        get_cp_cu_seqlens(**arguments)


def test_build_cp_context_refuses_no_group_and_unknown_keywords():
    with pytest.raises(AssertionError, match="group"):
        build_cp_context(torch.tensor([0, 16]), None)
    with pytest.raises(TypeError, match="frobnicate"):
        build_cp_context(torch.tensor([0, 16]), None, frobnicate=1)


def test_copy_for_backward_has_offsets_of_its_own():
    context = get_cp_cu_seqlens(offsets([5, 7]), world_size=3, rank=1)
    copy = context.copy_for_backward()
    copy.cu_seqlens.zero_()
    copy.cu_seqlens_cpu.zero_()
    assert context.cu_seqlens.tolist() == context.cu_seqlens_cpu.tolist() == [0, 1, 4]
    assert (copy.pre_num_ranks, copy.post_num_ranks) == (1, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens": torch.tensor([5, 10])},
        {"cu_seqlens": torch.tensor([0, 7, 3])},
        {"cu_seqlens": torch.tensor([0.0, 10.0])},
        {"cu_seqlens": torch.tensor([], dtype=torch.int64)},
        {"cu_seqlens": torch.tensor([[0, 10]])},
        {"pre_num_ranks": -1},
        {"post_num_ranks": -3},
        {"pre_num_ranks": None},
        {"pre_num_ranks": 2},
        {"layout": "zigzag", "front_num_seqs": 0},
        {"layout": "zigzag", "front_num_seqs": 2},
        {"layout": "zigzag", "front_num_seqs": 1, "cu_seqlens": torch.tensor([0, 4, 10])},
        {"layout": "zigzag", "front_num_seqs": None},
        {"layout": "zigzag", "pre_num_ranks_by_part": (0, -1)},
    ],
)
def test_malformed_contexts_are_refused_by_name(changes):
    fields = {
        "cu_seqlens": torch.tensor([0, 5, 10]), "layout": "contiguous", "pre_num_ranks": 1, "post_num_ranks": 0,
        "front_num_seqs": 1, "pre_num_ranks_by_part": (0, 0), "post_num_ranks_by_part": (0, 0),
    }  # fmt: skip

    def partition(values):
        return Partition.of(SimpleNamespace(**values, cu_seqlens_cpu=None), 1, 2)

    partition(fields)
    partition({**fields, "layout": "zigzag"})
    with pytest.raises(ValueError, match=r"^cp_context: expected "):
        partition({**fields, **changes})
