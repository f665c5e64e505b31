"""The operator as its definition reads: the token recurrence and its exact adjoint in float64, on the CPU.

What every backend is checked against, and what a user can check the library with. It shares no arithmetic with the
backends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.gdn import _arguments, _native

__all__ = ["reference_gated_delta_rule"]


class _ReferenceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output_final_state: bool, options: tuple[Any, ...], *inputs: Any) -> Any:
        q, v, cu_seqlens, state_v_first = inputs[0], inputs[2], inputs[8], options[6]
        o = v.new_empty(v.shape, dtype=torch.float64)
        final_state = None
        if output_final_state:
            final_state = v.new_empty(_arguments.state_shape(q, v, cu_seqlens, state_v_first), dtype=torch.float64)
        _native.reference_forward(*inputs[:8], o, final_state, cu_seqlens, None, None, *options, _native.num_threads())
        ctx.save_for_backward(*inputs)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None) -> Any:
        *inputs, cu_seqlens = ctx.saved_tensors
        if grad_o is None:
            v = inputs[2]
            grad_o = v.new_zeros((), dtype=torch.float64).expand(v.shape)
        gradients = [
            torch.empty_like(x) if wanted else None for x, wanted in zip(inputs, ctx.needs_input_grad[2:], strict=False)
        ]
        _native.reference_backward(
            *inputs, grad_o, grad_final_state, *gradients, cu_seqlens, None, None, *ctx.options, _native.num_threads()
        )
        return None, None, *gradients, None


def reference_gated_delta_rule(
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
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` by its definition in float64; differentiable, once.

    Takes that function's arguments, less those that can not change a result (chunk_size, backend, precomputed
    indices). Inputs may be of any float dtype, each its own, on any device; they are read exactly. The computation
    is token by token on the CPU: for checking, not for speed.

    Returns:
        o: `[B, T, HV, V]` float64 on the device of q.
        final_state: `[N, HV, K, V]` (`[N, HV, V, K]` with state_v_first) float64, or None.

    Gradients are rounded once, to their input's dtype; pass float64 inputs for float64 gradients.

    Raises:
        ValueError, TypeError, AssertionError: as `chunk_gated_delta_rule`, naming the argument.
        NotImplementedError: torch.func's transforms; forward-mode derivatives.
    """
    _arguments.check_inputs(q, k, v, g, beta, use_gate_in_kernel)
    _arguments.check_others(
        q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    _arguments.check_options(
        scale, None, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, output_final_state=output_final_state,
    )  # fmt: skip
    _arguments.refuse_other_layouts(
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    _arguments.refuse_tangents("reference_gated_delta_rule", q, k, v, g, beta, A_log, dt_bias, initial_state)
    _arguments.refuse_transforms("reference_gated_delta_rule")
    if g is None:
        g = _arguments.zero_gate(v)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    on_cpu = (None if x is None else x.cpu() for x in inputs)
    options = (
        scale, 64, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, False, "cpu",
    )  # fmt: skip
    o, final_state = _ReferenceFunction.apply(output_final_state, options, *on_cpu)
    return o.to(q.device), None if final_state is None else final_state.to(q.device)
