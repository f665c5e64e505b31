"""The stages' formulas, one chunk and head at a time in plain torch float64: what the stage functions are checked with.

Tensors are as the stages have them; everything is computed and returned in float64. E and the decay factors follow the
rule for -inf gates: gamma restarts behind a reset, and a factor between rows that a reset parts is 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Chunk:
    row: int  # of the batch
    sequence: int
    index: int  # global, in h and dh
    position: int  # inside its sequence
    tokens: slice


def chunks_of(B: int, T: int, chunk_size: int, cu_seqlens: Tensor | None) -> list[Chunk]:
    if cu_seqlens is None:
        spans = [(b, b, 0, T) for b in range(B)]
    else:
        ends = cu_seqlens.tolist()
        spans = [(0, n, a, b) for n, (a, b) in enumerate(itertools.pairwise(ends))]
    found: list[Chunk] = []
    for row, sequence, begin, end in spans:
        first = 0 if cu_seqlens is None else len(found)
        for position, start in enumerate(range(begin, end, chunk_size)):
            tokens = slice(start, min(start + chunk_size, end))
            found.append(Chunk(row, sequence, first + position, position, tokens))
    return found


class Gate:
    """Decay factors of a chunk from its gamma: E [n, n], from the start [n], to the end [n], over all of it."""

    def __init__(self, gamma: Tensor) -> None:
        reset = torch.isinf(gamma)
        part = reset.cumsum(0)
        finite = torch.where(reset, 0.0, gamma)
        n = len(gamma)
        same = (part[:, None] == part[None, :]) & torch.ones(n, n, dtype=torch.bool).tril()
        self.E = torch.where(same, 2.0 ** torch.where(same, finite[:, None] - finite[None, :], 0.0), 0.0)
        self.from_start = torch.where(part == 0, 2.0**finite, 0.0)
        self.to_end = self.E[-1]
        self.total = self.from_start[-1]


@dataclass
class Problem:
    """The arguments that all stages share."""

    chunk_size: int = 64
    cu_seqlens: Tensor | None = None
    scale: float = 1.0

    def each(self, B: int, T: int, H: int, HV: int) -> Iterator[tuple[Chunk, int, int]]:
        for chunk in chunks_of(B, T, self.chunk_size, self.cu_seqlens):
            for head in range(HV):
                yield chunk, head, head // (HV // H)

    def num_chunks(self, B: int, T: int) -> int:
        return len(chunks_of(B, T, self.chunk_size, self.cu_seqlens)) // B


def at(x: Tensor, chunk: Chunk, head: int) -> Tensor:
    """The rows of a token-major tensor, or the matrix of a state tensor [.., chunk, head, K, V] (by index)."""
    return x[chunk.row, chunk.tokens, head]


def gate_at(g: Tensor | None, like: Tensor, chunk: Chunk, head: int) -> Gate:
    return Gate(like.new_zeros(len(like)) if g is None else at(g, chunk, head))


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    rstd = 1 / torch.sqrt(x.square().sum(-1) + 1e-6)
    return x * rstd[..., None], rstd


def l2norm_backward(y: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    return rstd[..., None] * (dy - y * (dy * y).sum(-1, keepdim=True))


def gate(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    z = g if dt_bias is None else g + dt_bias
    return -A_log.exp() * torch.logaddexp(z, torch.zeros_like(z))


def gate_backward(g: Tensor, A_log: Tensor, dt_bias: Tensor | None, dyg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = g if dt_bias is None else g + dt_bias
    dg = -A_log.exp() * z.sigmoid() * dyg
    return dg, (dyg * gate(g, A_log, dt_bias)).flatten(0, -2).sum(0), dg.flatten(0, -2).sum(0)


def local_cumsum(p: Problem, g: Tensor, scale: float = 1.0, reverse: bool = False) -> Tensor:
    out = torch.zeros_like(g)
    for chunk, head, _ in p.each(g.shape[0], g.shape[1], 1, g.shape[2]):
        total, rows = 0.0, range(chunk.tokens.start, chunk.tokens.stop)
        for t in reversed(rows) if reverse else rows:
            total = total + g[chunk.row, t, head]
            out[chunk.row, t, head] = total * scale
            if total == -math.inf:
                total = 0.0
    return out


def scaled_dot_kkt(p: Problem, k: Tensor, g: Tensor | None, beta: Tensor) -> Tensor:
    B, T, H, _ = k.shape
    L = k.new_zeros(B, T, beta.shape[2], p.chunk_size)
    for chunk, head, kv in p.each(B, T, H, beta.shape[2]):
        K = at(k, chunk, kv)
        rows = (at(beta, chunk, head)[:, None] * (K @ K.T) * gate_at(g, K, chunk, head).E).tril(-1)
        L[chunk.row, chunk.tokens, head, : len(K)] = rows
    return L


def solve_tril(p: Problem, L: Tensor) -> Tensor:
    A = torch.zeros_like(L)
    for chunk, head, _ in p.each(*L.shape[:2], 1, L.shape[2]):
        rows = at(L, chunk, head)
        n = len(rows)
        A[chunk.row, chunk.tokens, head, :n] = torch.linalg.inv(torch.eye(n, dtype=L.dtype) + rows[:, :n])
    return A


def recompute_w_u(p: Problem, k: Tensor, v: Tensor, beta: Tensor, A: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    w, u = k.new_zeros(B, T, HV, K), k.new_zeros(B, T, HV, V)
    for chunk, head, kv in p.each(B, T, H, HV):
        keys, b = at(k, chunk, kv), at(beta, chunk, head)[:, None]
        a = at(A, chunk, head)[:, : len(keys)]
        from_start = gate_at(g, keys, chunk, head).from_start[:, None]
        u[chunk.row, chunk.tokens, head] = a @ (b * at(v, chunk, head))
        w[chunk.row, chunk.tokens, head] = a @ (b * from_start * keys)
    return w, u


def state_forward(
    p: Problem, k: Tensor, w: Tensor, u: Tensor, g: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, K = k.shape
    HV, V = u.shape[2:]
    N = B if p.cu_seqlens is None else len(p.cu_seqlens) - 1
    states = k.new_zeros(N, HV, K, V) if initial_state is None else initial_state.clone()
    h, v_new = k.new_zeros(B, p.num_chunks(B, T), HV, K, V), torch.zeros_like(u)
    for chunk, head, kv in p.each(B, T, H, HV):
        S, keys = states[chunk.sequence, head], at(k, chunk, kv)
        decay = gate_at(g, keys, chunk, head)
        h[chunk.row, chunk.index, head] = S
        Y = at(u, chunk, head) - at(w, chunk, head) @ S
        v_new[chunk.row, chunk.tokens, head] = Y
        states[chunk.sequence, head] = decay.total * S + keys.T @ (decay.to_end[:, None] * Y)
    return h, v_new, states


def output(p: Problem, q: Tensor, k: Tensor, v: Tensor, h: Tensor, g: Tensor | None) -> Tensor:
    o = torch.zeros_like(v)
    for chunk, head, kv in p.each(*q.shape[:3], v.shape[2]):
        Q, K = at(q, chunk, kv), at(k, chunk, kv)
        decay = gate_at(g, K, chunk, head)
        through_state = decay.from_start[:, None] * (Q @ h[chunk.row, chunk.index, head])
        inside = (Q @ K.T).tril() * decay.E @ at(v, chunk, head)
        o[chunk.row, chunk.tokens, head] = p.scale * (through_state + inside)
    return o


def local_value_gradient(p: Problem, q: Tensor, k: Tensor, g: Tensor | None, do: Tensor) -> Tensor:
    dv = torch.zeros_like(do)
    for chunk, head, kv in p.each(*q.shape[:3], do.shape[2]):
        Q, K = at(q, chunk, kv), at(k, chunk, kv)
        P = p.scale * (Q @ K.T).tril() * gate_at(g, K, chunk, head).E
        dv[chunk.row, chunk.tokens, head] = P.T @ at(do, chunk, head)
    return dv


def state_backward(
    p: Problem, q: Tensor, k: Tensor, w: Tensor, g: Tensor | None, dht: Tensor | None, do: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, K = q.shape
    HV, V = do.shape[2:]
    N = B if p.cu_seqlens is None else len(p.cu_seqlens) - 1
    states = q.new_zeros(N, HV, K, V) if dht is None else dht.clone()
    dh, dv2 = q.new_zeros(B, p.num_chunks(B, T), HV, K, V), torch.zeros_like(dv)
    for chunk, head, kv in reversed(list(p.each(B, T, H, HV))):
        D, Q, keys = states[chunk.sequence, head], at(q, chunk, kv), at(k, chunk, kv)
        decay = gate_at(g, keys, chunk, head)
        dh[chunk.row, chunk.index, head] = D
        X = decay.to_end[:, None] * (keys @ D) + at(dv, chunk, head)
        dv2[chunk.row, chunk.tokens, head] = X
        states[chunk.sequence, head] = (
            decay.total * D
            + p.scale * (decay.from_start[:, None] * Q).T @ at(do, chunk, head)
            - at(w, chunk, head).T @ X
        )
    return dh, states, dv2


def operand_gradients(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, h: Tensor, dv: Tensor, do: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, H, K = q.shape
    HV = v.shape[2]
    dq, dk, dw, dg = torch.zeros_like(q), torch.zeros_like(k), q.new_zeros(B, T, HV, K), q.new_zeros(B, T, HV)
    for chunk, head, kv in p.each(B, T, H, HV):
        Q, keys, Y, dO, X = (at(x, chunk, i) for x, i in ((q, kv), (k, kv), (v, head), (do, head), (dv, head)))
        S, D = h[chunk.row, chunk.index, head], dh[chunk.row, chunk.index, head]
        decay = gate_at(g, keys, chunk, head)
        dS = p.scale * (dO @ Y.T).tril() * decay.E
        dq_head = p.scale * decay.from_start[:, None] * (dO @ S.T) + dS @ keys
        dk_in = decay.to_end[:, None] * (Y @ D.T)
        dk_head = dk_in + dS.T @ Q
        dq[chunk.row, chunk.tokens, kv] += dq_head
        dk[chunk.row, chunk.tokens, kv] += dk_head
        dw[chunk.row, chunk.tokens, head] = -X @ S.T
        rows = (dq_head * Q).sum(-1) - (dk_head * keys).sum(-1)
        rows[-1] += decay.total * (S * D).sum() + (dk_in * keys).sum()
        dg[chunk.row, chunk.tokens, head] = rows
    return dq, dk, dw, dg


def wy_backward(
    p: Problem, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, A: Tensor, dw: Tensor, du: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dk, dv, db, dg = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(beta), torch.zeros_like(beta)
    for chunk, head, kv in p.each(*k.shape[:3], v.shape[2]):
        K, V, b = at(k, chunk, kv), at(v, chunk, head), at(beta, chunk, head)[:, None]
        a = at(A, chunk, head)[:, : len(K)]
        decay = gate_at(g, K, chunk, head)
        gamma = decay.from_start[:, None]
        dW, X = at(dw, chunk, head), at(du, chunk, head)
        Z_w, Z_u = a.T @ dW, a.T @ X
        dA = (dW @ (b * gamma * K).T + X @ (b * V).T).tril(-1)
        dP = -(a.T @ dA @ a.T).tril(-1) * decay.E
        M = b * (K @ K.T)
        dk[chunk.row, chunk.tokens, kv] += b * gamma * Z_w + b * (dP @ K) + dP.T @ (b * K)
        dv[chunk.row, chunk.tokens, head] = b * Z_u
        db[chunk.row, chunk.tokens, head] = gamma[:, 0] * (Z_w * K).sum(-1) + (Z_u * V).sum(-1) + ((dP @ K) * K).sum(-1)
        dg[chunk.row, chunk.tokens, head] = (Z_w * b * gamma * K).sum(-1) + (dP * M).sum(-1) - (dP * M).sum(0)
    return dk, dv, db, dg
