"""Context parallelism: which tokens of packed sequences a rank holds, and what crosses between ranks.

    context = build_cp_context(cu_seqlens, group)           # cu_seqlens of the whole stream, the same on all ranks
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)   # this rank's tokens

The protocol is that of flash-linear-attention (FLA) 0.6.0, whose ranks can sit in the same group and whose context
objects the operator takes as well. Each direction costs one all-gather of `[HV, K, V + K]` float32 a rank: what the
rank's tokens do to the state (forward) and to its gradient (backward).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cula.gdn.index import host_offsets

__all__ = ["CPContext", "build_cp_context", "get_cp_cu_seqlens"]

LAYOUTS = ("contiguous", "zigzag")


@dataclass(eq=False)
class CPContext:
    """What a rank knows of the partition. Immutable by convention; fields as FLA's `FLACPContext`, then two more.

    "First" and "last" are said of chains: `is_first_rank` says that the first local sequence begins here, and
    `pre_num_ranks` on how many earlier ranks it has tokens; `is_last_rank` and `post_num_ranks` say the same of the
    end of the last local sequence. With layout 'zigzag', rank r of W holds the slots r and 2 W - 1 - r of 2 W, one
    behind the other; the fields `.._by_part` are (front, back), ranks are counted in slots, and the scalar ones are
    None.
    """

    group: Any = None  # None: no exchange, the local sequences stand alone
    cu_seqlens: Tensor | None = None  # [N + 1] int32, of the local sequences
    cu_seqlens_cpu: Tensor | None = None
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    is_first_rank: bool | None = None
    post_num_ranks: int | None = None
    conv1d_kernel_size: int | None = None  # of a convolution in the same layer; not used here
    pre_num_conv_tokens: int | None = None  # tokens of the first local sequence on earlier ranks, for the same
    pre_num_ranks_dev: Tensor | None = None
    post_num_ranks_dev: Tensor | None = None
    layout: str = "contiguous"
    part_len: int | None = None
    front_num_seqs: int | None = None
    pre_num_ranks_by_part: tuple[int, int] | None = None
    post_num_ranks_by_part: tuple[int, int] | None = None
    is_first_by_part: tuple[bool, bool] | None = None
    is_last_by_part: tuple[bool, bool] | None = None
    pre_num_conv_tokens_by_part: tuple[int, int] | None = None
    # Not in FLA: which sequences of the stream the local ones are, and the ranks' lengths where they were given.
    sequence_ids: tuple[int, ...] | None = None
    rank_lengths: tuple[int, ...] | None = None

    def copy_for_backward(self) -> CPContext:
        """A copy with offsets of its own."""
        return replace(
            self,
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.clone(),
            cu_seqlens_cpu=None if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu.clone(),
        )

    @property
    def num_seqs(self) -> int:
        """Number of local sequences."""
        return 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None


@dataclass(frozen=True)
class _Interval:
    """One slot's share of the stream."""

    offsets: list[int]  # local boundaries
    sequence_ids: tuple[int, ...]
    num_conv_tokens: int
    pre_num_slots: int
    post_num_slots: int


def _interval(ends: list[int], bounds: list[int], slot: int) -> _Interval:
    """`ends`: offsets of the sequences; `bounds`: offsets of the slots."""
    begin, end = bounds[slot], bounds[slot + 1]
    first = bisect_right(ends, begin, lo=1) - 1  # the first sequence that ends behind `begin`
    if begin == end:
        # No tokens. Inside a sequence the slot still hands the state on, as a sequence of no tokens would.
        if first + 1 >= len(ends) or ends[first] >= begin:
            return _Interval([0], (), 0, 0, 0)
        last = first
    else:
        last = bisect_left(ends, end, hi=len(ends) - 1) - 1  # the last one that begins before `end`
    held = [n for n in range(first, last + 1) if begin == end or ends[n] < ends[n + 1]]
    offsets = [0, *(min(ends[n + 1], end) - begin for n in held)]
    return _Interval(
        offsets,
        tuple(held),
        num_conv_tokens=begin - ends[first],
        # Of the slots that begin at one place, the last one has the tokens.
        pre_num_slots=slot - (bisect_right(bounds, ends[first]) - 1),
        post_num_slots=(bisect_right(bounds, ends[last + 1] - 1) - 1) - slot,
    )


def _check_offsets(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    if x.dim() != 1:
        raise ValueError(f"{name}: expected one dimension [N + 1], got shape {list(x.shape)}")


def _check_stream(ends: list[int]) -> None:
    if len(ends) < 2 or ends[0] != 0 or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"cu_seqlens: expected at least two ascending offsets that start at 0, got {ends}")


def _slot_bounds(total: int, world_size: int, layout: str, rank_lengths: Sequence[int] | None) -> list[int]:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected 'contiguous' or 'zigzag', got {layout!r}")
    if rank_lengths is not None:
        if layout != "contiguous":
            raise ValueError(f"rank_lengths: expected layout='contiguous' with it, got {layout!r}")
        if not isinstance(rank_lengths, Sequence) or not all(type(length) is int for length in rank_lengths):
            raise TypeError(f"rank_lengths: expected a sequence of ints, got {rank_lengths!r}")
        if len(rank_lengths) != world_size or min(rank_lengths) < 0 or sum(rank_lengths) != total:
            raise ValueError(
                f"rank_lengths: expected world_size = {world_size} numbers of tokens that add up to "
                f"total_tokens = {total}, got {list(rank_lengths)}"
            )
        return [0, *itertools.accumulate(rank_lengths)]
    slots, divisor = (world_size, "world_size") if layout == "contiguous" else (2 * world_size, "2 * world_size")
    if total < slots:
        raise ValueError(f"cu_seqlens: expected total_tokens of at least {divisor} = {slots}, got {total}")
    if total % slots != 0:
        raise ValueError(
            f"cu_seqlens: expected total_tokens to be a multiple of {divisor} = {slots}, got {total} "
            "(pad the stream, or give rank_lengths)"
        )
    return [slot * (total // slots) for slot in range(slots + 1)]


def get_cp_cu_seqlens(
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    group: Any = None,
    conv1d_kernel_size: int | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    *,
    rank_lengths: Sequence[int] | None = None,
) -> CPContext:
    """`build_cp_context` for any rank of any number: with `world_size` and `rank`, no process group is asked."""
    if use_tf32x3_affine_chain is False:
        raise ValueError("use_tf32x3_affine_chain: expected True (states are float32 throughout), got False")
    if world_size is None:
        if group is None:
            raise AssertionError("group: expected a process group, or world_size and rank, got None")
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank is None or not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 <= rank < world_size = {world_size}, got {rank}")
    _check_offsets("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is not None:
        _check_offsets("cu_seqlens_cpu", cu_seqlens_cpu)
    host = host_offsets(cu_seqlens, cu_seqlens_cpu)
    assert host is not None  # cu_seqlens is a tensor
    ends: list[int] = host.tolist()
    _check_stream(ends)
    bounds = _slot_bounds(ends[-1], world_size, layout, rank_lengths)

    front = _interval(ends, bounds, rank)
    if layout == "contiguous":
        on_host = torch.tensor(front.offsets, dtype=torch.int32)
        return CPContext(
            group=group,
            cu_seqlens=on_host.to(cu_seqlens.device, non_blocking=True),
            cu_seqlens_cpu=on_host,
            is_last_rank=front.post_num_slots == 0,
            pre_num_ranks=front.pre_num_slots,
            is_first_rank=front.pre_num_slots == 0,
            post_num_ranks=front.post_num_slots,
            conv1d_kernel_size=conv1d_kernel_size,
            pre_num_conv_tokens=front.num_conv_tokens,
            sequence_ids=front.sequence_ids,
            rank_lengths=None if rank_lengths is None else tuple(rank_lengths),
        )
    back = _interval(ends, bounds, 2 * world_size - 1 - rank)
    part_len = bounds[1]
    parts = (front, back)
    on_host = torch.tensor([*front.offsets, *(part_len + x for x in back.offsets[1:])], dtype=torch.int32)
    return CPContext(
        group=group,
        cu_seqlens=on_host.to(cu_seqlens.device, non_blocking=True),
        cu_seqlens_cpu=on_host,
        conv1d_kernel_size=conv1d_kernel_size,
        layout="zigzag",
        part_len=part_len,
        front_num_seqs=len(front.offsets) - 1,
        pre_num_ranks_by_part=(front.pre_num_slots, back.pre_num_slots),
        post_num_ranks_by_part=(front.post_num_slots, back.post_num_slots),
        is_first_by_part=(front.pre_num_slots == 0, back.pre_num_slots == 0),
        is_last_by_part=(front.post_num_slots == 0, back.post_num_slots == 0),
        pre_num_conv_tokens_by_part=(front.num_conv_tokens, back.num_conv_tokens),
        sequence_ids=tuple(n for part in parts for n in part.sequence_ids),
    )


def build_cp_context(
    cu_seqlens: Tensor,
    group: Any,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    *,
    rank_lengths: Sequence[int] | None = None,
) -> CPContext:
    """The partition of packed sequences over the ranks of a group, as this rank sees it.

    The stream of all sequences is cut as it lies, into equal ranges of consecutive tokens: rank r of W holds tokens
    [r P, (r + 1) P), P = total / W, wherever sequences and chunks begin. Each rank passes the operator its own tokens
    of q, k, v, g and beta; per-document halves are another partition and give other results.

    Args:
        cu_seqlens: `[N + 1]` int32 or int64, offsets of the sequences in the whole stream; the same on all ranks.
        group: process group of the ranks.
        conv1d_kernel_size: carried along for a convolution in the same layer; the operator does not read it.
        cu_seqlens_cpu: cu_seqlens on the CPU; spares a device synchronisation.
        use_tf32x3_affine_chain: must be True, as in FLA.
        layout: 'contiguous', or 'zigzag': rank r holds slots r and 2 W - 1 - r of 2 W equal slots, the former in front.
        rank_lengths: tokens of the stream on each rank, instead of equal ones; 0 is allowed ('contiguous' only; the
            same on all ranks). A rank may then pass more tokens than it has of the stream: the rest is padding.

    Returns:
        A context for `chunk_gated_delta_rule(.., cp_context=)`. Its `sequence_ids` say which sequences of the stream
        the local ones are, which is what states are indexed by.

    Raises:
        ValueError: total_tokens below or no multiple of the number of ranks (of slots), lengths that do not add up,
            another layout, use_tf32x3_affine_chain=False.
        TypeError: an unknown keyword; offsets that are not int32 or int64.
        AssertionError: group is None.
    """
    return get_cp_cu_seqlens(
        cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        group=group,
        conv1d_kernel_size=conv1d_kernel_size,
        use_tf32x3_affine_chain=use_tf32x3_affine_chain,
        layout=layout,
        rank_lengths=rank_lengths,
    )
