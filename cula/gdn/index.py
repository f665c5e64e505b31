"""Chunk tables of packed sequences, and the host copy of their lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from cula.gdn._arguments import check_bits, check_tensor, refuse_other_layouts

__all__ = ["prepare_checkpoint_offsets", "prepare_chunk_indices", "prepare_chunk_offsets"]


def _lengths(cu_seqlens: Tensor, size_name: str, size: int) -> Tensor:
    """Of the sequences; `size` is what they are to be divided by."""
    check_tensor("cu_seqlens", cu_seqlens)
    refuse_other_layouts(cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected one dimension [N + 1], got shape {list(cu_seqlens.shape)}")
    if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
        raise TypeError(f"{size_name}: expected an int, got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{size_name}: expected a positive number, got {size}")
    if isinstance(size, int):
        check_bits(size_name, size)
    lengths = torch.diff(cu_seqlens.long())
    if cu_seqlens.device.type == "cpu" and bool((lengths < 0).any()):
        raise ValueError(f"cu_seqlens: expected ascending offsets, got {cu_seqlens.tolist()}")
    return lengths


def _chunk_counts(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    lengths = _lengths(cu_seqlens, "chunk_size", chunk_size)
    return -(-lengths).div(chunk_size, rounding_mode="floor")  # rounded up, without a sum that could overflow


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """One row (sequence, position of the chunk inside its sequence) for each chunk of packed sequences.

    Args:
        cu_seqlens: `[N + 1]` int32 or int64, ascending offsets of the sequences on the token axis.
        chunk_size: tokens in a chunk.
        cu_seqlens_cpu: the same offsets on the CPU; spares the device synchronisation that reading them would cost.

    Returns:
        `[NT, 2]`, dtype and device of `cu_seqlens`. Row number = index of the chunk in `h` and `dh`.

    Raises:
        ValueError: `cu_seqlens` is not one-dimensional, or descends (checked on the CPU only), or is not what
            `cu_seqlens_cpu` holds (likewise), or `chunk_size` is not positive.
        TypeError: `cu_seqlens` is no tensor of int32 or int64, `chunk_size` no int.
    """
    if cu_seqlens_cpu is not None:
        check_tensor("cu_seqlens", cu_seqlens)
        check_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
        _check_host_copy(cu_seqlens, cu_seqlens_cpu)
    counts = _chunk_counts(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, chunk_size)
    sequence = torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)
    first_chunk = counts.cumsum(0) - counts
    index = torch.arange(sequence.shape[0], device=counts.device) - first_chunk[sequence]
    return torch.stack([sequence, index], dim=1).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Number of chunks before each sequence, and in all: `[N + 1]` int64 on the device of `cu_seqlens`.

    Chunk c of sequence n is row `offsets[n] + c` of `prepare_chunk_indices`.

    Raises:
        ValueError: `cu_seqlens` is not one-dimensional, or descends (checked on the CPU only), or `chunk_size` is not
            positive.
        TypeError: `cu_seqlens` is no tensor of int32 or int64, `chunk_size` no int.
    """
    return torch.nn.functional.pad(_chunk_counts(cu_seqlens, chunk_size).cumsum(0, dtype=torch.int64), (1, 0))


def prepare_checkpoint_offsets(cu_seqlens: Tensor, checkpoint_every_n_tokens: int) -> Tensor:
    """Number of checkpoints before each sequence, and in all: `[N + 1]` int64 on the device of `cu_seqlens`.

    The state behind the first `(i + 1) * checkpoint_every_n_tokens` tokens of sequence n is row `offsets[n] + i` of
    state_checkpoints. What checkpoint_cu_starts is by default, and how many rows state_checkpoints needs.

    Raises:
        ValueError: `cu_seqlens` is not one-dimensional, or descends (checked on the CPU only), or
            `checkpoint_every_n_tokens` is not positive.
        TypeError: `cu_seqlens` is no tensor of int32 or int64, `checkpoint_every_n_tokens` no int.
    """
    lengths = _lengths(cu_seqlens, "checkpoint_every_n_tokens", checkpoint_every_n_tokens)
    counts = lengths.div(checkpoint_every_n_tokens, rounding_mode="floor")
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int64), (1, 0))


# Device tensor -> (version when it was read, host copy), so that the layers of a model share one synchronisation.
_host_copies = WeakIdKeyDictionary()


def host_offsets(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    """The offsets as a CPU tensor, with at most one device synchronisation for each tensor and content."""
    if cu_seqlens is None:
        return None
    if cu_seqlens_cpu is not None:
        _check_host_copy(cu_seqlens, cu_seqlens_cpu)
        return cu_seqlens_cpu
    if cu_seqlens.device.type == "cpu":
        return cu_seqlens
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "cu_seqlens: lengths on the device can not be read during CUDA graph capture; pass cu_seqlens_cpu with it"
        )
    if cu_seqlens.is_inference():  # has no version counter, so a copy could go stale unnoticed
        return cu_seqlens.cpu()
    version = cu_seqlens._version
    known = _host_copies.get(cu_seqlens)  # type: ignore[no-untyped-call]
    if known is not None and known[0] == version:
        return known[1]  # type: ignore[no-any-return]
    copy = cu_seqlens.cpu()
    _host_copies[cu_seqlens] = (version, copy)
    return copy


def native_offsets(
    cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, operand: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The offsets as the library takes them: on the host, and for a GPU on the device of the operand as well."""
    host = host_offsets(cu_seqlens, cu_seqlens_cpu)
    if cu_seqlens is None or operand.is_cpu:
        return host, None
    return host, cu_seqlens.to(operand.device)


def _check_host_copy(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor) -> None:
    if cu_seqlens_cpu is cu_seqlens:
        return
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(f"cu_seqlens_cpu: expected a tensor on the CPU, got one on {cu_seqlens_cpu.device}")
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_cpu: expected the shape of cu_seqlens, {list(cu_seqlens.shape)}, "
            f"got {list(cu_seqlens_cpu.shape)}"
        )
    # On another device the values are taken on trust: reading them is the synchronisation to be spared.
    if cu_seqlens.device.type == "cpu" and cu_seqlens.tolist() != cu_seqlens_cpu.tolist():
        raise ValueError(
            f"cu_seqlens_cpu: expected the values of cu_seqlens, {cu_seqlens.tolist()}, got {cu_seqlens_cpu.tolist()}"
        )
