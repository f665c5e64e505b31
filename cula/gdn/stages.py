"""The stages of the chunked algorithm, each callable alone.

Names, arguments, layouts and results are those of flash-linear-attention 0.6.0, so that any stage can be exchanged with
its own; formulas stand with each function. Letters: B batch, T tokens, H query/key heads, HV value heads, K key dim,
V value dim, N sequences, C chunk size, NT chunks (of one batch row, or of all packed sequences). x is the common dtype
of q, k, v and the stored operands; accumulated results are float32 (float64 if x is float64).

`g`, where a stage takes it, is the chunk-local running sum gamma of the log decay in log2 units, as
`chunk_local_cumsum(..., scale=RCP_LN2)` makes it; None is no decay. Inside a chunk of n rows, gamma_L is its last row
and E_ij = 2^(gamma_i - gamma_j) on and below the diagonal, 0 above. A log decay of -inf stays in gamma at its own row
only; rows that it parts have E = 0. Matrices of one chunk and head: Q, K, W [n, K]; V, U, dO [n, V]; S, D [K, V].

Common arguments: cu_seqlens `[N + 1]` packs sequences on the token axis (B = 1); chunk_indices and chunk_offsets, the
tables of `prepare_chunk_indices` and `prepare_chunk_offsets`, are not needed and are checked where they are on the CPU;
state_v_first makes states [.., V, K]; scale None is K^-0.5 (1 for running sums); backend names one, None lets the
library choose. The functions are not differentiable: they are the parts that `chunk_gated_delta_rule` and its gradient
are made of.

All raise ValueError (shape, length or option), TypeError (dtype, unknown keyword) naming the argument, AssertionError
for K > 256, and RuntimeError if the build has no backend for the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cula.gdn import _native
from cula.gdn._arguments import (
    check_chunk_size,
    check_tensor,
    checked_types,
    refuse_keywords,
    state_shape,
    statistics_dtype,
)
from cula.gdn.index import host_offsets, native_offsets, prepare_chunk_offsets

__all__ = [
    "RCP_LN2",
    "chunk_bwd_dqkwg",
    "chunk_bwd_dv_local",
    "chunk_fwd_o",
    "chunk_gated_delta_rule_bwd_dhu",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_gated_delta_rule_fwd_intra",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt_fwd",
    "fused_beta_sigmoid_bwd",
    "fused_beta_sigmoid_fwd",
    "gdn_gate_bwd",
    "gdn_gate_chunk_cumsum",
    "gdn_gate_fwd",
    "l2norm_bwd",
    "l2norm_fwd",
    "prepare_wy_repr_bwd",
    "recompute_w_u_fwd",
    "solve_tril",
]

# Natural-log gates times this are in log2 units.
RCP_LN2 = 1 / math.log(2)

_L2NORM_EPS = 1e-6


class _Stage:
    """A stage of the compiled library: `stage(*members, sizes=..., ...)` fills its results and returns nothing."""

    def __init__(self, name: str) -> None:
        self.run = _native.direct_function(name)

    def __call__(
        self,
        *members: Any,
        dtype: torch.dtype,
        sizes: tuple[int, int, int, int, int, int] = (1, 0, 1, 1, 1, 1),  # B, T, H, HV, K, V
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        chunk_size: int = 64,
        scale: float | None = None,
        state_v_first: bool = False,
        backend: str | None = None,
    ) -> None:
        offsets = native_offsets(cu_seqlens, cu_seqlens_cpu, members[0])
        self.run(
            *members, *sizes, dtype, *offsets, chunk_indices, scale, chunk_size, False, False, False, False,
            state_v_first, False, backend or "auto", _native.num_threads(),
        )  # fmt: skip


def _shape(name: str, tensor: Any, letters: str) -> tuple[int, ...]:
    """The sizes of an argument whose number of dimensions must be that of `letters`."""
    check_tensor(name, tensor)
    if tensor.dim() != len(letters.split()):
        raise ValueError(f"{name}: expected shape [{letters.replace(' ', ', ')}], got {list(tensor.shape)}")
    return tuple(tensor.shape)


def _check_raw_gate(g: Tensor) -> None:
    if g.dim() == 0:
        raise ValueError("g: expected shape [.., HV], got []")


def _refuse(function: str, **arguments: Any) -> None:
    """Options of other operators that share these stages in flash-linear-attention."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: {function} of Gated DeltaNet does not have it; expected the default")


def _num_chunks(tokens: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, chunk_size: int) -> int:
    offsets = host_offsets(cu_seqlens, cu_seqlens_cpu)
    if offsets is None:
        return -(-tokens // max(chunk_size, 1))
    chunks = int(prepare_chunk_offsets(offsets, chunk_size)[-1])
    values = offsets.tolist()  # the results are allocated by them, before the library looks at them
    if values[0] != 0 or values != sorted(values) or values[-1] > tokens:
        raise ValueError(f"cu_seqlens: expected ascending offsets from 0 to at most T = {tokens}, got {values}")
    return chunks


def _check_chunk_offsets(chunk_offsets: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int) -> None:
    if chunk_offsets is None:
        return
    if cu_seqlens is None:
        raise ValueError("chunk_offsets: expected cu_seqlens with it, got it alone")
    if chunk_offsets.shape != cu_seqlens.shape:
        raise ValueError(f"chunk_offsets: expected shape {list(cu_seqlens.shape)}, got {list(chunk_offsets.shape)}")
    if chunk_offsets.device.type == "cpu" and cu_seqlens.device.type == "cpu":
        expected = prepare_chunk_offsets(cu_seqlens, chunk_size).tolist()
        if chunk_offsets.tolist() != expected:
            raise ValueError(f"chunk_offsets: expected {expected}, got {chunk_offsets.tolist()}")


# Per-head and per-token preparation ---------------------------------------------------------------------------------

_l2norm_fwd = _Stage("l2norm_fwd")
_l2norm_bwd = _Stage("l2norm_bwd")
_fused_beta_sigmoid_fwd = _Stage("fused_beta_sigmoid_fwd")
_fused_beta_sigmoid_bwd = _Stage("fused_beta_sigmoid_bwd")
_chunk_local_cumsum = _Stage("chunk_local_cumsum")
_gdn_gate_fwd = _Stage("gdn_gate_fwd")
_gdn_gate_chunk_cumsum = _Stage("gdn_gate_chunk_cumsum")
_gdn_gate_bwd = _Stage("gdn_gate_bwd")


def _check_eps(eps: float) -> None:
    if eps != _L2NORM_EPS:
        raise ValueError(f"eps: expected {_L2NORM_EPS}, got {eps}")


@checked_types
def l2norm_fwd(
    x: Tensor, eps: float = _L2NORM_EPS, output_dtype: torch.dtype | None = None, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """y = x rstd with rstd = 1 / sqrt(sum x^2 + 1e-6) over the last dimension.

    Args:
        x: `[.., D]` float, of at most 6 dimensions.
        output_dtype: of y; None is that of x.

    Returns:
        y: like x; rstd: `[..]` float32 (float64 for float64 x).
    """
    _check_eps(eps)
    y = x.new_empty(x.shape, dtype=output_dtype or x.dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=statistics_dtype(x.dtype))
    _l2norm_fwd(x, y, rstd, dtype=x.dtype, backend=backend)
    return y, rstd


@checked_types
def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = _L2NORM_EPS, *, backend: str | None = None) -> Tensor:
    """dx = rstd (dy - y <dy, y>), like y, from the results of `l2norm_fwd`."""
    _check_eps(eps)
    dx = y.new_empty(y.shape)
    _l2norm_bwd(y, rstd, dy, dx, dtype=y.dtype, backend=backend)
    return dx


@checked_types
def fused_beta_sigmoid_fwd(x: Tensor, scale: float = 1.0, *, backend: str | None = None) -> Tensor:
    """scale sigmoid(x) for logits x of at most 6 dimensions; float32 (float64 for float64 x)."""
    y = x.new_empty(x.shape, dtype=statistics_dtype(x.dtype))
    _fused_beta_sigmoid_fwd(x, scale, y, dtype=x.dtype, backend=backend)
    return y


@checked_types
def fused_beta_sigmoid_bwd(x: Tensor, dy: Tensor, scale: float = 1.0, *, backend: str | None = None) -> Tensor:
    """dx = dy scale s (1 - s) with s = sigmoid(x), like x."""
    dx = x.new_empty(x.shape)
    _fused_beta_sigmoid_bwd(x, dy, scale, dx, dtype=x.dtype, backend=backend)
    return dx


@checked_types
def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    use_graph: bool = False,
    *,
    backend: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Inclusive running sum inside each chunk, from its end if reverse, times scale: `[B, T, HV]`.

    Args:
        g: `[B, T, HV]` float.
        output_dtype: float32 unless given; None is that of g. The sum itself runs in float32 (float64 for float64 g).
    """
    refuse_keywords("chunk_local_cumsum", kwargs)
    _refuse("chunk_local_cumsum", use_graph=use_graph)
    B, T, HV = _shape("g", g, "B T HV")
    out = g.new_empty(g.shape, dtype=output_dtype or g.dtype)
    _chunk_local_cumsum(
        g, 1.0 if scale is None else scale, reverse, out,
        sizes=(B, T, HV, HV, 1, 1), dtype=statistics_dtype(g.dtype), cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    return out


@checked_types
def gdn_gate_fwd(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
) -> Tensor:
    """The log decay -exp(A_log) softplus(g + dt_bias), in nats.

    Args:
        g: `[.., HV]` float, the raw gate; A_log, dt_bias: HV elements.
    """
    _check_raw_gate(g)
    HV = g.shape[-1]
    out = g.new_empty(g.shape, dtype=output_dtype)
    flat = g.reshape(1, math.prod(g.shape[:-1]), HV)
    _gdn_gate_fwd(
        flat, A_log, dt_bias, out.view(flat.shape),
        sizes=(1, flat.shape[1], HV, HV, 1, 1), dtype=statistics_dtype(g.dtype), backend=backend,
    )  # fmt: skip
    return out


@checked_types
def gdn_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    backend: str | None = None,
) -> Tensor:
    """`gdn_gate_fwd` with `chunk_local_cumsum` behind it: `[B, T, HV]`."""
    B, T, HV = _shape("g", g, "B T HV")
    out = g.new_empty(g.shape, dtype=output_dtype or g.dtype)
    _gdn_gate_chunk_cumsum(
        g, A_log, dt_bias, 1.0 if scale is None else scale, out,
        sizes=(B, T, HV, HV, 1, 1), dtype=statistics_dtype(g.dtype), cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    return out


@checked_types
def gdn_gate_bwd(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None, dyg: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `gdn_gate_fwd` for the gradient dyg `[.., HV]` of the log decay.

    With z = g + dt_bias: dg = -exp(A_log) sigmoid(z) dyg; dA_log = sum of dyg times the log decay; ddt_bias = sum of
    the unrounded dg. Each like its input; ddt_bias is None without dt_bias.
    """
    _check_raw_gate(g)
    if dyg.shape != g.shape:
        raise ValueError(f"dyg: expected the shape of g, {list(g.shape)}, got {list(dyg.shape)}")
    HV = g.shape[-1]
    dg, dA_log = g.new_empty(g.shape), A_log.new_empty(A_log.shape)
    ddt_bias = None if dt_bias is None else dt_bias.new_empty(dt_bias.shape)
    flat = g.reshape(1, math.prod(g.shape[:-1]), HV)
    _gdn_gate_bwd(
        flat, A_log, dt_bias, dyg.reshape(flat.shape), dg.view(flat.shape), dA_log, ddt_bias,
        sizes=(1, flat.shape[1], HV, HV, 1, 1), dtype=statistics_dtype(g.dtype), backend=backend,
    )  # fmt: skip
    return dg, dA_log, ddt_bias


# Forward ------------------------------------------------------------------------------------------------------------

_chunk_scaled_dot_kkt_fwd = _Stage("chunk_scaled_dot_kkt_fwd")
_solve_tril = _Stage("solve_tril")
_chunk_gated_delta_rule_fwd_intra = _Stage("chunk_gated_delta_rule_fwd_intra")
_recompute_w_u_fwd = _Stage("recompute_w_u_fwd")
_chunk_gated_delta_rule_fwd_h = _Stage("chunk_gated_delta_rule_fwd_h")
_chunk_fwd_o = _Stage("chunk_fwd_o")


@checked_types
def chunk_scaled_dot_kkt_fwd(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """L = strictly lower part of beta_i <k_i, k_j> E_ij, by rows.

    Args:
        k: `[B, T, H, K]`; g: `[B, T, HV]` gamma; beta: `[B, T, HV]`, required.

    Returns:
        `[B, T, HV, C]`: row of token t, column = position inside the chunk; 0 elsewhere.
    """
    check_chunk_size(chunk_size)
    B, T, H, K = _shape("k", k, "B T H K")
    HV = _shape("beta", beta, "B T HV")[2]
    L = k.new_empty((B, T, HV, chunk_size), dtype=output_dtype)
    _chunk_scaled_dot_kkt_fwd(
        k, g, beta, L, sizes=(B, T, H, HV, K, 1), dtype=k.dtype, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
        chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    return L


@checked_types
def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    backend: str | None = None,
) -> Tensor:
    """(I + A)^-1 of the strictly lower triangular chunks A `[B, T, HV, C]` (L of `chunk_scaled_dot_kkt_fwd`).

    The diagonal of the result is exactly 1; above it and past the chunk it is 0. output_dtype None is that of A.
    """
    B, T, HV, C = _shape("A", A, "B T HV C")
    inverse = A.new_empty(A.shape, dtype=output_dtype or A.dtype)
    _solve_tril(
        A, inverse, sizes=(B, T, HV, HV, 1, 1), dtype=statistics_dtype(A.dtype), cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, chunk_size=C, backend=backend,
    )  # fmt: skip
    return inverse


@checked_types
def chunk_gated_delta_rule_fwd_intra(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A = (I + L)^-1 of `chunk_scaled_dot_kkt_fwd`, then w and u of `recompute_w_u_fwd`.

    Args:
        k: `[B, T, H, K]`; v: `[B, T, HV, V]`; g: `[B, T, HV]` gamma; beta: `[B, T, HV]`, required.

    Returns:
        w: `[B, T, HV, K]`; u: `[B, T, HV, V]`; A: `[B, T, HV, C]`, all in the dtype of k.
    """
    check_chunk_size(chunk_size)
    B, T, H, K = _shape("k", k, "B T H K")
    HV, V = _shape("v", v, "B T HV V")[2:]
    w, u, A = (k.new_empty((B, T, HV, size)) for size in (K, V, chunk_size))
    _chunk_gated_delta_rule_fwd_intra(
        k, v, g, beta, w, u, A, sizes=(B, T, H, HV, K, V), dtype=k.dtype, cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    return w, u, A


@checked_types
def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """U = A diag(beta) V; W = A diag(beta 2^gamma) K.

    Args:
        k: `[B, T, H, K]`; v: `[B, T, HV, V]`; beta: `[B, T, HV]`; A: `[B, T, HV, C]`; g: `[B, T, HV]` gamma.

    Returns:
        w: `[B, T, HV, K]`; u: `[B, T, HV, V]`.
    """
    B, T, H, K = _shape("k", k, "B T H K")
    HV, V = _shape("v", v, "B T HV V")[2:]
    C = _shape("A", A, "B T HV C")[3]
    w, u = k.new_empty((B, T, HV, K)), v.new_empty((B, T, HV, V))
    _recompute_w_u_fwd(
        k, v, beta, A, g, w, u, sizes=(B, T, H, HV, K, V), dtype=k.dtype, cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, chunk_size=C, backend=backend,
    )  # fmt: skip
    return w, u


@checked_types
def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The state over the chunks of each sequence, S = initial_state at first.

    For each chunk: h = S; v_new = U - W S; S <- 2^gamma_L S + K^T diag(2^(gamma_L - gamma)) v_new.

    Args:
        k: `[B, T, H, K]`; w: `[B, T, HV, K]`; u: `[B, T, HV, V]`; g: `[B, T, HV]` gamma.
        gk: must be None.
        initial_state: `[N, HV, K, V]` float.
        save_new_value: whether to return v_new.

    Returns:
        h: `[B, NT, HV, K, V]`, the state at the START of each chunk; v_new: `[B, T, HV, V]`, without the factor
        2^(gamma_L - gamma), or None; final_state: `[N, HV, K, V]` float32 (float64 for float64), or None.
    """
    _refuse("chunk_gated_delta_rule_fwd_h", gk=gk)
    _check_chunk_offsets(chunk_offsets, cu_seqlens, chunk_size)
    B, T, H, K = _shape("k", k, "B T H K")
    HV, V = _shape("u", u, "B T HV V")[2:]
    states = state_shape(k, u, cu_seqlens, state_v_first)
    h = k.new_empty((B, _num_chunks(T, cu_seqlens, cu_seqlens_cpu, chunk_size), *states[1:]))
    v_new = u.new_empty(u.shape) if save_new_value else None
    final_state = k.new_empty(states, dtype=statistics_dtype(k.dtype)) if output_final_state else None
    _chunk_gated_delta_rule_fwd_h(
        k, w, u, g, initial_state, h, v_new, final_state,
        sizes=(B, T, H, HV, K, V), dtype=k.dtype, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_indices=chunk_indices, chunk_size=chunk_size, state_v_first=state_v_first, backend=backend,
    )  # fmt: skip
    return h, v_new, final_state


@checked_types
def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    g_gamma: None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """O = scale diag(2^gamma) Q h + scale (Q K^T * E) v: `[B, T, HV, V]`.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`, v_new; h: `[B, NT, HV, K, V]`; g: `[B, T, HV]` gamma.
        g_gamma: must be None.
    """
    _refuse("chunk_fwd_o", g_gamma=g_gamma)
    B, T, H, K = _shape("q", q, "B T H K")
    HV, V = _shape("v", v, "B T HV V")[2:]
    o = v.new_empty(v.shape)
    _chunk_fwd_o(
        q, k, v, h, g, o, sizes=(B, T, H, HV, K, V), dtype=q.dtype, scale=scale, cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, chunk_size=chunk_size, state_v_first=state_v_first, backend=backend,
    )  # fmt: skip
    return o


# Backward -----------------------------------------------------------------------------------------------------------

_chunk_bwd_dv_local = _Stage("chunk_bwd_dv_local")
_chunk_gated_delta_rule_bwd_dhu = _Stage("chunk_gated_delta_rule_bwd_dhu")
_chunk_bwd_dqkwg = _Stage("chunk_bwd_dqkwg")
_prepare_wy_repr_bwd = _Stage("prepare_wy_repr_bwd")


@checked_types
def chunk_bwd_dv_local(
    q: Tensor,
    k: Tensor,
    do: Tensor,
    g: Tensor | None = None,
    g_gamma: None = None,
    A: None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """dv = (scale Q K^T * E)^T dO: `[B, T, HV, V]` like do.

    Args:
        q, k: `[B, T, H, K]`; do: `[B, T, HV, V]`; g: `[B, T, HV]` gamma.
        g_gamma, A: must be None.
    """
    _refuse("chunk_bwd_dv_local", g_gamma=g_gamma, A=A)
    B, T, H, K = _shape("q", q, "B T H K")
    HV, V = _shape("do", do, "B T HV V")[2:]
    dv = do.new_empty(do.shape)
    _chunk_bwd_dv_local(
        q, k, g, do, dv, sizes=(B, T, H, HV, K, V), dtype=q.dtype, scale=scale, cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, chunk_size=chunk_size, backend=backend,
    )  # fmt: skip
    return dv


@checked_types
def chunk_gated_delta_rule_bwd_dhu(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    do: Tensor,
    dv: Tensor,
    g: Tensor | None = None,
    gk: None = None,
    h0: Tensor | None = None,
    dht: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_graph: bool = False,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradient of the state over the chunks of each sequence in reverse, D = dht (or 0) at first.

    For each chunk: dh = D; dv2 = diag(2^(gamma_L - gamma)) K D + dv;
    D <- 2^gamma_L D + scale (diag(2^gamma) Q)^T dO - W^T dv2. What is left of D is dh0.

    Args:
        q, k: `[B, T, H, K]`; w: `[B, T, HV, K]`; do, dv: `[B, T, HV, V]`, dv from `chunk_bwd_dv_local`;
            g: `[B, T, HV]` gamma; dht: `[N, HV, K, V]`.
        gk, use_graph: must be None and False.
        h0: `[N, HV, K, V]`: that dh0 is wanted; its values are not read.

    Returns:
        dh: `[B, NT, HV, K, V]`, the gradient of the state at the END of each chunk; dh0: `[N, HV, K, V]` float32
        (float64 for float64), or None without h0; dv2: like dv.
    """
    _refuse("chunk_gated_delta_rule_bwd_dhu", gk=gk, use_graph=use_graph)
    _check_chunk_offsets(chunk_offsets, cu_seqlens, chunk_size)
    B, T, H, K = _shape("q", q, "B T H K")
    HV, V = _shape("do", do, "B T HV V")[2:]
    _shape("dv", dv, "B T HV V")
    dh = q.new_empty((B, _num_chunks(T, cu_seqlens, None, chunk_size), *state_shape(q, do, None, state_v_first)[1:]))
    dh0 = None if h0 is None else h0.new_empty(h0.shape, dtype=statistics_dtype(q.dtype))
    dv2 = dv.new_empty(dv.shape)
    _chunk_gated_delta_rule_bwd_dhu(
        q, k, w, g, dht, do, dv, dh, dh0, dv2,
        sizes=(B, T, H, HV, K, V), dtype=q.dtype, scale=scale, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
        chunk_size=chunk_size, state_v_first=state_v_first, backend=backend,
    )  # fmt: skip
    return dh, dh0, dv2


@checked_types
def chunk_bwd_dqkwg(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    g_gamma: None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of `chunk_fwd_o` and `chunk_gated_delta_rule_fwd_h` by q, k, w and g.

    With P' = scale (dO v^T) * E, kept lower part: dq = scale diag(2^gamma) dO h^T + P' K;
    dk_in = diag(2^(gamma_L - gamma)) v dh^T and dk = dk_in + P'^T Q, both summed over each group of value heads;
    dw = -dv h^T; dg = rowsum(dq * Q) - rowsum(dk * K), plus 2^gamma_L <h, dh> + sum(dk_in * K) in the chunk's last row.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`, v_new; do: `[B, T, HV, V]`; h, dh: `[B, NT, HV, K, V]`;
            w: `[B, T, HV, K]` and dv: `[B, T, HV, V]` (dv2), required; g: `[B, T, HV]` gamma.
        g_gamma: must be None.

    Returns:
        dq, dk: `[B, T, H, K]`; dw: `[B, T, HV, K]`; dg: `[B, T, HV]` float32 (float64 for float64) by the natural-log
        running sum, before `chunk_local_cumsum(reverse=True)`, or None without g.
    """
    _refuse("chunk_bwd_dqkwg", g_gamma=g_gamma)
    B, T, H, K = _shape("q", q, "B T H K")
    HV, V = _shape("v", v, "B T HV V")[2:]
    _shape("w", w, "B T HV K")
    _shape("dv", dv, "B T HV V")
    dq, dk, dw = q.new_empty((B, T, H, K)), k.new_empty((B, T, H, K)), q.new_empty((B, T, HV, K))
    dg = None if g is None else g.new_empty((B, T, HV), dtype=statistics_dtype(q.dtype))
    _chunk_bwd_dqkwg(
        q, k, v, w, g, h, dv, do, dh, dq, dk, dw, dg,
        sizes=(B, T, H, HV, K, V), dtype=q.dtype, scale=scale, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
        chunk_size=chunk_size, state_v_first=state_v_first, backend=backend,
    )  # fmt: skip
    return dq, dk, dw, dg


@checked_types
def prepare_wy_repr_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    dw: Tensor,
    du: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of `chunk_gated_delta_rule_fwd_intra` by k, v, beta and g.

    With Zw = A^T dW, Zu = A^T dU, dA = tril1(dW (diag(beta 2^gamma) K)^T + dU (diag(beta) V)^T),
    dP = -tril1(A^T dA A^T) * E and M_ij = beta_i <k_i, k_j>, tril1 the strictly lower part:
    dk = diag(beta 2^gamma) Zw + diag(beta) dP K + dP^T diag(beta) K, summed over each group of value heads;
    dv = diag(beta) Zu; db = 2^gamma rowsum(Zw * K) + rowsum(Zu * V) + rowsum(dP K * K);
    dg = rowsum(Zw * diag(beta 2^gamma) K) + rowsum(dP * M) - colsum(dP * M).

    Args:
        k: `[B, T, H, K]`; v: `[B, T, HV, V]`; beta: `[B, T, HV]`; A: `[B, T, HV, C]`; dw: `[B, T, HV, K]`;
            du: `[B, T, HV, V]`, dv2; g: `[B, T, HV]` gamma.

    Returns:
        dk: like k; dv: like v; db: like beta; dg: `[B, T, HV]` float32 (float64 for float64) or None without g.
    """
    B, T, H, K = _shape("k", k, "B T H K")
    HV, V = _shape("v", v, "B T HV V")[2:]
    C = _shape("A", A, "B T HV C")[3]
    _shape("beta", beta, "B T HV")
    dk, dv, db = k.new_empty(k.shape), v.new_empty(v.shape), beta.new_empty(beta.shape)
    dg = None if g is None else g.new_empty((B, T, HV), dtype=statistics_dtype(k.dtype))
    _prepare_wy_repr_bwd(
        k, v, beta, g, A, dw, du, dk, dv, db, dg, sizes=(B, T, H, HV, K, V), dtype=k.dtype, cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices, chunk_size=C, backend=backend,
    )  # fmt: skip
    return dk, dv, db, dg
