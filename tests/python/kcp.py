"""Context parallelism of flash-linear-attention 0.6.0 by its formulas, in plain torch float64: a rank that knows
nothing of the library. It sits in one group with the library's ranks, and its partition, found token by token, is what
`build_cp_context` is checked with.

A chain is a row of slots of equally many tokens; a rank holds one of them (contiguous) or two (zigzag).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import formulas
import torch
from torch import Tensor


@dataclass
class Slot:
    """One interval. `lengths`: of its pieces of sequences; `pre`, `post`: how many slots the outer ones reach."""

    position: int
    lengths: list[int]
    ids: list[int]
    pre: int
    post: int
    conv_tokens: int


def slot_of(cu_seqlens: list[int], num_slots: int, position: int) -> Slot:
    owner = [n for n in range(len(cu_seqlens) - 1) for _ in range(cu_seqlens[n], cu_seqlens[n + 1])]
    size = len(owner) // num_slots
    tokens = range(position * size, (position + 1) * size)
    ids = sorted({owner[t] for t in tokens})
    slots_of = lambda n: {t // size for t, m in enumerate(owner) if m == n}  # noqa: E731
    first, last = slots_of(ids[0]), slots_of(ids[-1])
    return Slot(
        position,
        [sum(owner[t] == n for t in tokens) for n in ids],
        ids,
        pre=sum(s < position for s in first),
        post=sum(s > position for s in last),
        conv_tokens=sum(m == ids[0] and t < tokens.start for t, m in enumerate(owner)),
    )


def slots_of_rank(cu_seqlens: list[int], world_size: int, rank: int, layout: str) -> list[Slot]:
    if layout == "contiguous":
        return [slot_of(cu_seqlens, world_size, rank)]
    return [slot_of(cu_seqlens, 2 * world_size, s) for s in (rank, 2 * world_size - 1 - rank)]


def chain(gathered: Tensor, layout: str) -> Tensor:
    """Entries of all ranks [W, (2,) HV, K, V + K] in the order of their slots."""
    if layout == "contiguous":
        return gathered
    return torch.cat([gathered[:, 0], gathered[:, 1].flip(0)])


class Rank:
    """Forward, then backward; `gather(payload)` gives the payloads of all ranks, [W, ..]. Tensors are [1, T, ..]."""

    def __init__(
        self, cu_seqlens: list[int], world_size: int, rank: int, layout: str, gather: Callable[[Tensor], Tensor]
    ) -> None:
        self.slots = slots_of_rank(cu_seqlens, world_size, rank, layout)
        self.layout, self.gather = layout, gather
        lengths = [n for slot in self.slots for n in slot.lengths]
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        # First and last local sequence of each slot.
        ends = torch.tensor([0] + [len(slot.lengths) for slot in self.slots]).cumsum(0).tolist()
        self.outer = [(a, b - 1) for a, b in itertools.pairwise(ends)]

    def _fragment(self, n: int, *tensors: Tensor) -> list[Tensor]:
        return [x[:, self.offsets[n] : self.offsets[n + 1]] for x in tensors]

    def _transition(self, k: Tensor, w: Tensor, gamma: Tensor, reverse: bool) -> Tensor:
        """M (or dM) [HV, K, K] of one sequence."""
        HV, K = w.shape[2:]
        M = torch.eye(K, dtype=w.dtype).repeat(HV, 1, 1)
        chunks = formulas.chunks_of(1, k.shape[1], self.problem.chunk_size, None)
        for chunk in reversed(chunks) if reverse else chunks:
            for head in range(HV):
                keys = formulas.at(k, chunk, head // (HV // k.shape[2]))
                W, gate = formulas.at(w, chunk, head), formulas.gate_at(gamma, keys, chunk, head)
                one = gate.total * torch.eye(K, dtype=w.dtype)
                step = W.T @ (gate.to_end[:, None] * keys) if reverse else keys.T @ (gate.to_end[:, None] * W)
                M[head] = (one - step) @ M[head]
        return M

    def _exchange(self, parts: list[Tensor | None], HV: int, K: int, V: int) -> Tensor:
        none = torch.zeros(HV, K, V + K, dtype=torch.float32)
        payload = torch.stack([none if x is None else x.float() for x in parts])
        gathered = self.gather(payload[0] if self.layout == "contiguous" else payload)
        return chain(gathered, self.layout).double()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64) -> Tensor:
        dtype = q.dtype
        q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
        HV, V = v.shape[2:]
        K = q.shape[3]
        p = self.problem = formulas.Problem(chunk_size, self.offsets, K**-0.5)
        gamma = formulas.local_cumsum(p, g, 1 / math.log(2))
        A = formulas.solve_tril(p, formulas.scaled_dot_kkt(p, k, gamma, beta))
        w, u = formulas.recompute_w_u(p, k, v, beta, A, gamma)
        alone = formulas.Problem(chunk_size, None, p.scale)
        parts: list[Tensor | None] = []
        for slot, (_, n) in zip(self.slots, self.outer, strict=True):
            if slot.post == 0:
                parts.append(None)
                continue
            k_n, w_n, u_n, gamma_n = self._fragment(n, k, w, u, gamma)
            S_ext = formulas.state_forward(alone, k_n, w_n, u_n, gamma_n, None)[2][0]
            parts.append(torch.cat([S_ext, self._transition(k_n, w_n, gamma_n, False)], -1))
        entries = self._exchange(parts, HV, K, V)
        initial = q.new_zeros(len(self.offsets) - 1, HV, K, V)
        for slot, (n, _) in zip(self.slots, self.outer, strict=True):
            for i in range(slot.position - slot.pre, slot.position):
                initial[n] = entries[i, :, :, V:] @ initial[n] + entries[i, :, :, :V]
        h, v_new, _ = formulas.state_forward(p, k, w, u, gamma, initial)
        self.saved = (q, k, v, gamma, beta, A, w, h, v_new)
        return formulas.output(p, q, k, v_new, h, gamma).to(dtype)

    def backward(self, do: Tensor) -> dict[str, Tensor]:
        q, k, v, gamma, beta, A, w, h, v_new = self.saved
        do = do.double()
        HV, V = v.shape[2:]
        K = q.shape[3]
        p = self.problem
        alone = formulas.Problem(p.chunk_size, None, p.scale)
        dv = formulas.local_value_gradient(p, q, k, gamma, do)
        parts: list[Tensor | None] = []
        for slot, (n, _) in zip(self.slots, self.outer, strict=True):
            if slot.pre == 0:
                parts.append(None)
                continue
            q_n, k_n, w_n, gamma_n, do_n, dv_n = self._fragment(n, q, k, w, gamma, do, dv)
            dS_ext = formulas.state_backward(alone, q_n, k_n, w_n, gamma_n, None, do_n, dv_n)[1][0]
            parts.append(torch.cat([dS_ext, self._transition(k_n, w_n, gamma_n, True)], -1))
        entries = self._exchange(parts, HV, K, V)
        dht = q.new_zeros(len(self.offsets) - 1, HV, K, V)
        for slot, (_, n) in zip(self.slots, self.outer, strict=True):
            for i in range(slot.position + slot.post, slot.position, -1):
                dht[n] = entries[i, :, :, V:] @ dht[n] + entries[i, :, :, :V]
        dh, _, dv2 = formulas.state_backward(p, q, k, w, gamma, dht, do, dv)
        dq, dk_1, dw, dg_1 = formulas.operand_gradients(p, q, k, v_new, gamma, h, dv2, do, dh)
        dk_2, dv, dbeta, dg_2 = formulas.wy_backward(p, k, v, beta, gamma, A, dw, dv2)
        dg = formulas.local_cumsum(p, dg_1 + dg_2, reverse=True)
        return {"dq": dq, "dk": dk_1 + dk_2, "dv": dv, "dg": dg, "dbeta": dbeta}
