"""What the library decides for a problem, and what it says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cula.gdn import _native
from cula.gdn._arguments import check_bits, check_options, check_tensor
from cula.gdn.index import host_offsets

__all__ = ["LibraryInfo", "Plan", "library_info", "plan"]

# DLPack's device types.
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True)
class Plan:
    """How a call of `chunk_gated_delta_rule` would run. Sizes in bytes."""

    backend: str
    num_sequences: int
    num_chunks: int
    num_threads: int  # of the CPU backend
    value_block: int  # columns of the state that one unit of work advances
    inference_workspace_bytes: int
    forward_workspace_bytes: int  # when saving for backward
    backward_workspace_bytes: int
    description: str

    def __str__(self) -> str:
        return self.description


@dataclass(frozen=True)
class LibraryInfo:
    version: str
    backends: tuple[str, ...]  # compiled into the library
    cpu_isa: str  # instruction set that the CPU backend uses on this machine
    hardware_threads: int


def plan(
    batch: int,
    tokens: int,
    heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Plan:
    """The schedule and the workspace of a call with these sizes, without running it.

    Raises:
        ValueError, TypeError, AssertionError, RuntimeError: as `chunk_gated_delta_rule` would for these sizes.
    """
    sizes = {
        "batch": batch, "tokens": tokens, "heads": heads, "value_heads": value_heads, "key_dim": key_dim,
        "value_dim": value_dim, "chunk_size": chunk_size,
    }  # fmt: skip
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}: expected an int, got {type(size).__name__}")
        check_bits(name, size)
    check_options(
        None, backend, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens)
    place = torch.device(device)
    if place.type not in _DEVICE_TYPES:
        raise ValueError(f"device: expected cpu or cuda, got {place}")
    info = _native.plan_info(
        batch, tokens, heads, value_heads, key_dim, value_dim, dtype, _DEVICE_TYPES[place.type], place.index or 0,
        host_offsets(cu_seqlens, None), None, None, None, chunk_size, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, False, False, False, batch_invariant, "auto" if backend is None else backend,
        _native.num_threads(),
    )  # fmt: skip
    values: dict[str, Any] = {str(key): value if isinstance(value, int) else str(value) for key, value in info.items()}
    return Plan(**values)


def library_info() -> LibraryInfo:
    """Version, backends and processor of the compiled library."""
    info = _native.library_info()
    return LibraryInfo(
        version=str(info["version"]),
        backends=tuple(str(name) for name in info["backends"]),
        cpu_isa=str(info["cpu_isa"]),
        hardware_threads=int(info["hardware_threads"]),
    )
