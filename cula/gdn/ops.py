"""The chunked operator as torch sees it: a differentiable function, two custom operators behind it.

`cula_gdn::chunk_forward` and `cula_gdn::chunk_backward` allocate their results and call the library. Both have fake
implementations, so that torch.compile and torch.export can trace them, and work for any device that the library has a
backend for. Saved for backward are the inputs themselves and A, the inverse of I + L by rows; with
use_qk_l2norm_in_kernel the normalised q and k and their 1 / norm stand in for q and k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cula.gdn import _arguments, _native
from cula.gdn.index import native_offsets

__all__ = ["chunk_gated_delta_rule", "chunk_gdn"]

INPUTS_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
# In the order in which the compiled library takes them.
OPTIONS_SCHEMA = (
    "float? scale, int chunk_size, bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, "
    "bool state_v_first, str backend"
)
# Inputs that may have a gradient: the first ones.
NUM_DIFFERENTIABLE = 8
NUM_FORWARD_ARGUMENTS = 21

library: Any = torch.library.Library("cula_gdn", "DEF")  # type: ignore[no-untyped-call]
library.define(
    f"chunk_forward({INPUTS_SCHEMA}, Tensor? chunk_indices, bool output_final_state, bool save_for_backward, "
    f"{OPTIONS_SCHEMA}) -> (Tensor o, Tensor? final_state, Tensor? A, Tensor? q_normalized, Tensor? k_normalized, "
    "Tensor? q_rstd, Tensor? k_rstd)"
)
# The gradients of the differentiable inputs, each where its entry of `wanted` is set. q and k are absent where their
# normalised copies stand in for them.
_SAVED_SCHEMA = INPUTS_SCHEMA.replace("Tensor q, Tensor k", "Tensor? q, Tensor? k")
library.define(
    f"chunk_backward(Tensor? grad_o, Tensor? grad_final_state, {_SAVED_SCHEMA}, Tensor A, Tensor? q_normalized, "
    f"Tensor? k_normalized, Tensor? q_rstd, Tensor? k_rstd, bool[{NUM_DIFFERENTIABLE}] wanted, {OPTIONS_SCHEMA}) -> "
    "(Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dg, Tensor? dbeta, Tensor? dA_log, Tensor? ddt_bias, Tensor? dh0)"
)

OptionalTensors = tuple[Tensor | None, ...]


# Forward ------------------------------------------------------------------------------------------------------------


def _allocate_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    output_final_state: bool,
    save_for_backward: bool,
    scale: float | None,
    chunk_size: int,
    use_qk_l2norm: bool,
    use_gate: bool,
    use_beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    backend: str,
) -> OptionalTensors:
    o = q.new_empty(v.shape)
    statistics = _arguments.statistics_dtype(q.dtype)
    final_state = A = q_normalized = k_normalized = q_rstd = k_rstd = None
    if output_final_state:
        final_state = q.new_empty(_arguments.state_shape(q, v, cu_seqlens, state_v_first), dtype=statistics)
    if save_for_backward:
        A = q.new_empty((*v.shape[:3], chunk_size))
        if use_qk_l2norm:
            q_normalized, k_normalized = q.new_empty(q.shape), k.new_empty(k.shape)
            q_rstd, k_rstd = (x.new_empty(x.shape[:-1], dtype=statistics) for x in (q, k))
    return o, final_state, A, q_normalized, k_normalized, q_rstd, k_rstd


def _chunk_forward(*arguments: Any) -> OptionalTensors:
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, chunk_indices = arguments[:11]
    offsets = native_offsets(cu_seqlens, cu_seqlens_cpu, v)
    if g is None:
        g = _arguments.zero_gate(v)
    results = _allocate_forward(*arguments)
    _native.forward(
        q, k, v, g, beta, A_log, dt_bias, initial_state, *results, *offsets, chunk_indices,
        *arguments[13:], _native.num_threads(),
    )  # fmt: skip
    return results


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: OptionalTensors) -> None:
    A, q_normalized, *statistics = output[2:]
    ctx.set_materialize_grads(False)
    ctx.saves = A is not None
    if not ctx.saves:
        return
    q, k, *others = inputs[:10]
    if q_normalized is not None:
        q = k = None
    ctx.save_for_backward(q, k, *others, A, q_normalized, *statistics)
    ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))
    ctx.options = inputs[13:]


def _backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None, *_: Any) -> OptionalTensors:
    if not ctx.saves:
        raise RuntimeError("cula_gdn::chunk_forward was called with save_for_backward=False, so it has no gradient")
    if grad_o is None and grad_final_state is None:
        return (None,) * NUM_FORWARD_ARGUMENTS
    wanted = ctx.needs_input_grad[:NUM_DIFFERENTIABLE]
    gradients = chunk_backward(grad_o, grad_final_state, *ctx.saved_tensors, wanted, *ctx.options)
    return (*gradients, *(None,) * (NUM_FORWARD_ARGUMENTS - NUM_DIFFERENTIABLE))


# Backward -----------------------------------------------------------------------------------------------------------


def _allocate_backward(
    grad_o: Tensor | None,
    grad_final_state: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    A: Tensor,
    q_normalized: Tensor | None,
    k_normalized: Tensor | None,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    wanted: list[bool],
    *options: Any,
) -> OptionalTensors:
    models = (
        q if q is not None else q_normalized,
        k if k is not None else k_normalized,
        v, g, beta, A_log, dt_bias, initial_state,
    )  # fmt: skip
    return tuple(
        x.new_empty(x.shape) if want and x is not None else None for x, want in zip(models, wanted, strict=True)
    )


def _chunk_backward(*arguments: Any) -> OptionalTensors:
    grad_o, grad_final_state, q, k, v, g, *others = arguments[:10]
    offsets = native_offsets(arguments[10], arguments[11], v)
    if g is None:
        g = _arguments.zero_gate(v)
    if grad_o is None:
        grad_o = v.new_zeros(()).expand(v.shape)
    results = _allocate_backward(*arguments)
    _native.backward(
        q, k, v, g, *others, *arguments[12:17], grad_o, grad_final_state, *results, *offsets, None,
        *arguments[18:], _native.num_threads(),
    )  # fmt: skip
    return results


def _refuse_double_backward(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "chunk_gated_delta_rule: gradients of gradients are not implemented; its backward can be differentiated once"
    )


def _refuse_vmap(*_: Any) -> None:
    raise NotImplementedError(
        "chunk_gated_delta_rule: torch.vmap is not implemented; give the mapped dimension as the batch dimension B"
    )


# Registration -------------------------------------------------------------------------------------------------------


def define(name: str, implementation: Callable[..., Any], allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operator of the library for every device, and its fake; returns the operator."""
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cula_gdn::{name}", allocate, lib=library)
    torch.library.register_vmap(f"cula_gdn::{name}", _refuse_vmap, lib=library)
    return getattr(torch.ops.cula_gdn, name).default  # type: ignore[no-any-return]


chunk_forward = define("chunk_forward", _chunk_forward, _allocate_forward)
chunk_backward = define("chunk_backward", _chunk_backward, _allocate_backward)
torch.library.register_autograd("cula_gdn::chunk_forward", _backward, setup_context=_setup_context, lib=library)
torch.library.register_autograd("cula_gdn::chunk_backward", _refuse_double_backward, lib=library)


class _ChunkFunction(torch.autograd.Function):
    """The same gradient as registered with torch.library, at a fifth of the time a call: the eager path."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> OptionalTensors:
        results = chunk_forward(*arguments)
        _setup_context(ctx, arguments, results)
        return results  # type: ignore[no-any-return]

    backward = staticmethod(_backward)


# Compilers and function transforms (torch.func) see the registered operator itself.
_is_compiling = torch.compiler.is_compiling
_transforms_active = torch._C._are_functorch_transforms_active


# Public function ----------------------------------------------------------------------------------------------------

# What runs a call with `cp_context`: takes the arguments of chunk_gated_delta_rule by keyword, without those that the
# context decides, and returns its result. cula.gdn.cp sets it when it is imported.
context_parallel_operator: Callable[..., tuple[Tensor, None]] | None = None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    backend: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet's delta rule with decay, computed in chunks; differentiable.

    Per value head, with a K x V state S (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024):

        S   <- exp(g_t) S
        r_t  = beta_t (v_t - S^T k_t)
        S   <- S + k_t r_t^T
        o_t  = scale S^T q_t

    B batch, T tokens, H query/key heads, HV value heads (a multiple of H; value head j reads query/key head
    j // (HV / H)), K <= 256 key dim, V value dim, N sequences. "Float" is float64, float32, bfloat16 or float16. Any
    strides are accepted.

    Args:
        q, k: `[B, T, H, K]`, float, one dtype with v.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV]`, float: log decay in nats (natural logarithm, usually negative); -inf resets the state. None
            is no decay. With use_gate_in_kernel: the raw gate.
        beta: `[B, T, HV]`, float: strength of the update; a logit with use_beta_sigmoid_in_kernel.
        scale: factor of the output; None is K^-0.5.
        initial_state: `[N, HV, K, V]`, float; None is zeros.
        output_final_state: whether to return the state behind the last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6) first.
        use_beta_sigmoid_in_kernel: beta <- sigmoid(beta).
        allow_neg_eigval: beta <- 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]`, int32 or int64: sequences packed on the token axis, B = 1; ascending offsets that start
            at 0. The state restarts at each; empty ones are allowed. Outputs and gradients of tokens behind the last
            offset are zero. On a device, the values are read once per tensor and content (one synchronisation) and
            are not checked against anything else.
        cu_seqlens_cpu: cu_seqlens on the CPU; spares that synchronisation. Must agree with cu_seqlens, which is
            checked where cu_seqlens is on the CPU too.
        chunk_indices: `[NT, 2]`, as of `prepare_chunk_indices`. Not needed; if given it must agree with cu_seqlens
            and chunk_size, which is checked where it is on the CPU.
        cp_context: context parallelism; the context then supplies the lengths.
        use_gate_in_kernel: the log decay is -exp(A_log) softplus(g + dt_bias).
        A_log: HV elements, float; required with use_gate_in_kernel.
        dt_bias: HV elements, float; only with use_gate_in_kernel.
        chunk_size: 16, 32 or 64 tokens; the result is the same up to rounding.
        backend: "cpu" or "cuda"; None lets the library choose for the device of the tensors.
        kwargs: the deprecated spelling transpose_state_layout of state_v_first.

    Returns:
        o: `[B, T, HV, V]` in the dtype of q.
        final_state: `[N, HV, K, V]`, float32 (float64 for float64 inputs), or None.

    Gradients have the dtype of their input. Under autocast q, k and v are cast to its dtype (float64 is not); g, beta,
    A_log, dt_bias and states keep theirs. Unlike flash-linear-attention, an argument that would have no effect is an
    error: an unknown keyword, A_log or dt_bias without use_gate_in_kernel.

    Raises:
        ValueError: a shape, length or option does not fit; the message names the argument.
        TypeError: a dtype does not fit, or an unknown keyword.
        AssertionError: K > 256; use_gate_in_kernel without A_log; cp_context with states or without cu_seqlens.
        DeprecationWarning: head_first, which no longer exists, was passed.
        RuntimeError: no backend for this device in this build; lengths on a device during CUDA graph capture;
            a gradient of a gradient.
        NotImplementedError: torch.vmap.
    """
    if kwargs:
        state_v_first = _arguments.resolve_state_layout("chunk_gated_delta_rule", state_v_first, kwargs)
    _arguments.check_inputs(q, k, v, g, beta, use_gate_in_kernel)
    if chunk_size not in (16, 32, 64):  # it is a dimension of A
        raise ValueError(f"chunk_size: expected 16, 32 or 64, got {chunk_size}")
    if cp_context is not None:
        return _run_context_parallel(
            cp_context, initial_state, output_final_state,
            q=q, k=k, v=v, g=g, beta=beta, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
            chunk_size=chunk_size, backend=backend,
        )  # fmt: skip
    if cu_seqlens is None and (cu_seqlens_cpu is not None or chunk_indices is not None):
        name = "chunk_indices" if cu_seqlens_cpu is None else "cu_seqlens_cpu"
        raise ValueError(f"{name}: expected cu_seqlens with it, got it alone")
    q, k, v = _arguments.autocast(q, k, v)

    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    saves = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    run = _ChunkFunction.apply if saves and not _is_compiling() and not _transforms_active() else chunk_forward
    o, final_state, *_ = run(
        *inputs, cu_seqlens, cu_seqlens_cpu, chunk_indices, bool(output_final_state), saves,
        scale, chunk_size, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, backend or "auto",
    )  # fmt: skip
    return o, final_state


def _run_context_parallel(
    cp_context: Any, initial_state: Tensor | None, output_final_state: bool, **arguments: Any
) -> tuple[Tensor, None]:
    if initial_state is not None:
        raise AssertionError("initial_state: expected None with cp_context, got a tensor")
    if output_final_state:
        raise AssertionError("output_final_state: expected False with cp_context, got True")
    if cp_context.cu_seqlens is None:
        raise AssertionError("cp_context: expected a context with cu_seqlens, got one without")
    if context_parallel_operator is None:
        raise NotImplementedError("cp_context: context parallelism is not part of this build")
    return context_parallel_operator(cp_context=cp_context, **arguments)


chunk_gdn = chunk_gated_delta_rule
