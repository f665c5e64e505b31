"""Ranks of context parallelism one after another in one process: what they compute, without the processes.

Each rank runs exactly what it would run in its group; only the exchange is a concatenation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cula.gdn import _arguments
from cula.gdn.autograd_cp import BackwardPass, ForwardPass, Part, Partition
from cula.gdn.cp import CPContext, get_cp_cu_seqlens

__all__ = ["SimulatedRank", "rank_tokens", "simulate", "simulated_ranks"]

# The operator's differentiable inputs, in its order; the first ones are rows of tokens.
_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
_BY_TOKEN = 5


def rank_tokens(
    total: int, world_size: int, rank: int, layout: str = "contiguous", rank_lengths: Sequence[int] | None = None
) -> Tensor:
    """Which tokens of the stream a rank holds, in the order in which it holds them."""
    if layout == "zigzag":
        part = total // (2 * world_size)
        slots = (rank, 2 * world_size - 1 - rank)
        return torch.cat([torch.arange(slot * part, (slot + 1) * part) for slot in slots])
    lengths = rank_lengths or [total // world_size] * world_size
    ends = [0, *itertools.accumulate(lengths)]
    return torch.arange(ends[rank], ends[rank + 1])


@dataclass(frozen=True)
class SimulatedRank:
    """What one rank of a simulated group holds."""

    context: CPContext
    partition: Partition
    tokens: Tensor  # of the stream

    def part_of(self, sequence: int) -> Part:
        return next(p for p in self.partition.parts if p.first_sequence <= sequence <= p.last_sequence)

    def begins_here(self, sequence: int) -> bool:
        part = self.part_of(sequence)
        return not (part.receives and sequence == part.first_sequence)

    def ends_here(self, sequence: int) -> bool:
        part = self.part_of(sequence)
        return not (part.hands_on and sequence == part.last_sequence)

    def sequences(self) -> list[tuple[int, int]]:
        """(local, in the stream) of each."""
        assert self.context.sequence_ids is not None
        return list(enumerate(self.context.sequence_ids))


def simulated_ranks(
    cu_seqlens: Tensor, world_size: int, layout: str = "contiguous", rank_lengths: Sequence[int] | None = None
) -> list[SimulatedRank]:
    """All ranks of a group, as `build_cp_context` would partition the stream over them."""
    ranks = []
    for rank in range(world_size):
        context = get_cp_cu_seqlens(
            cu_seqlens, world_size=world_size, rank=rank, layout=layout, rank_lengths=rank_lengths
        )
        tokens = rank_tokens(int(cu_seqlens[-1]), world_size, rank, layout, rank_lengths)
        ranks.append(SimulatedRank(context, Partition.of(context, rank, world_size), tokens))
    return ranks


def _check_ranks(cu_seqlens: Tensor, v: Tensor, ranks: Sequence[SimulatedRank]) -> None:
    _arguments.check_tensor("cu_seqlens", cu_seqlens)
    _arguments.check_tensor("v", v)
    total = int(cu_seqlens[-1])
    if v.dim() != 4 or v.shape[1] != total:
        raise ValueError(f"v: expected shape [1, T, HV, V] with cu_seqlens' T = {total}, got {list(v.shape)}")
    held = [token for rank in ranks for token in rank.tokens.tolist()]
    if sorted(held) != list(range(total)):
        raise ValueError(
            f"ranks: expected all those of simulated_ranks for these cu_seqlens, which hold each of {total} tokens "
            f"once, got {len(ranks)} ranks with {len(held)} tokens"
        )


def simulate(
    inputs: dict[str, Tensor],
    ranks: Sequence[SimulatedRank],
    *,
    gradients: tuple[Tensor, Tensor | None] | None = None,
    output_final_state: bool = False,
    scale: float | None = None,
    chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    backend: str | None = None,
) -> dict[str, Tensor]:
    """The operator on the whole stream as its ranks compute it.

    Args:
        inputs: those of `chunk_gated_delta_rule` by name, for the whole stream; initial_state by sequence of it.
        ranks: of `simulated_ranks`.
        gradients: of o and, with output_final_state, of the final state; absent: forward only.

    Returns:
        o and final_state, and the gradient `d<name>` of every input, put together from all ranks. A sequence without
        tokens is on no rank: its final state is its initial one.

    Raises:
        TypeError: an input that the operator does not have.
        ValueError: no cu_seqlens; ranks that do not hold each of the stream's tokens once; a gradient of the final
            state without output_final_state.
    """
    unknown = [name for name in inputs if name not in (*_INPUTS, "cu_seqlens")]
    if unknown:
        raise TypeError(f"{unknown[0]}: expected inputs among {', '.join(_INPUTS)} and cu_seqlens")
    if "cu_seqlens" not in inputs:
        raise ValueError("cu_seqlens: expected the offsets of the stream among the inputs, got none")
    if gradients is not None and gradients[1] is not None and not output_final_state:
        raise ValueError("gradients: expected output_final_state=True with a gradient of the final state")
    options = (
        scale, chunk_size, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, False, backend or "auto",
    )  # fmt: skip
    v = inputs["v"]
    _check_ranks(inputs["cu_seqlens"], v, ranks)
    given = {"g": _arguments.zero_gate(v)} | {name: x for name, x in inputs.items() if x is not None}

    def local(rank: SimulatedRank, name: str) -> Tensor | None:
        x = given.get(name)
        if x is None or name in ("A_log", "dt_bias"):
            return x
        return x[[n for _, n in rank.sequences()]] if name == "initial_state" else x[:, rank.tokens]

    local_inputs = [tuple(local(rank, name) for name in _INPUTS) for rank in ranks]
    forward = [
        ForwardPass(rank.partition, x, None, output_final_state, options)
        for rank, x in zip(ranks, local_inputs, strict=True)
    ]
    _exchange(forward)
    results = {"o": v.new_zeros(v.shape)}
    for rank, pass_ in zip(ranks, forward, strict=True):
        results["o"][:, rank.tokens] = pass_.o
    states = [pass_.final_state for pass_ in forward]
    if output_final_state:
        assert states[0] is not None
        N = len(inputs["cu_seqlens"]) - 1
        results["final_state"] = states[0].new_zeros((N, *states[0].shape[1:]))
        empty = [n for n, length in enumerate(inputs["cu_seqlens"].diff().tolist()) if length == 0]
        if "initial_state" in inputs:
            results["final_state"][empty] = inputs["initial_state"][empty].to(results["final_state"])
        for rank, state in zip(ranks, states, strict=True):
            assert state is not None
            for i, n in rank.sequences():
                if rank.ends_here(i):
                    results["final_state"][n] = state[i]
    if gradients is None:
        return results

    do, dht = gradients
    backward = []
    for rank, x, pass_, state in zip(ranks, local_inputs, forward, states, strict=True):
        local_dht = None
        if state is not None and dht is not None:
            local_dht = torch.zeros_like(state)
            for i, n in rank.sequences():
                if rank.ends_here(i):
                    local_dht[i] = dht[n]
        kept = (None, None, *x[2:]) if use_qk_l2norm_in_kernel else x
        wanted = tuple(name in inputs for name in _INPUTS)
        backward.append(
            BackwardPass(
                rank.partition, kept, pass_.saved, pass_.merged, pass_.transitions(), do[:, rank.tokens], local_dht,
                wanted, options,
            )
        )  # fmt: skip
    _exchange(backward)
    for index, name in enumerate(_INPUTS):
        if name not in inputs:
            continue
        whole = torch.zeros_like(inputs[name])
        exact = whole.double()  # where the ranks' shares are added
        for rank, found in zip(ranks, backward, strict=True):
            gradient = found.gradients[index]
            assert gradient is not None
            if index < _BY_TOKEN:
                whole[:, rank.tokens] = gradient
            elif name == "initial_state":
                for i, n in rank.sequences():
                    exact[n] += gradient[i]
            else:
                exact += gradient
        if name == "initial_state" and output_final_state and dht is not None:
            exact[empty] += dht[empty]
        results[f"d{name}"] = whole if index < _BY_TOKEN else exact.to(whole)
    return results


def _exchange(passes: Sequence[ForwardPass] | Sequence[BackwardPass]) -> None:
    gathered = torch.cat([pass_.payload for pass_ in passes])
    for pass_ in passes:
        pass_.run_independent()
        pass_.receive(gathered)
        pass_.finish()
