"""The token recurrence itself, for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.gdn import _arguments, _native
from cula.gdn.autograd import (
    CU_SEQLENS,
    CU_SEQLENS_CPU,
    INPUT_NAMES,
    INPUTS_SCHEMA,
    NUM_DIFFERENTIABLE,
    NUM_INPUTS,
    OPTIONS,
    OPTIONS_SCHEMA,
    STATE_V_FIRST,
    OptionalTensors,
    define,
    library,
)
from cula.gdn.index import native_offsets
from cula.gdn.serving import Serving

__all__ = ["fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]

library.define(
    f"recurrent_forward({INPUTS_SCHEMA}, bool output_final_state, {OPTIONS_SCHEMA}) -> (Tensor o, Tensor? final_state)"
)
_OUTPUT_FINAL_STATE = NUM_INPUTS


def _allocate(*arguments: Any) -> OptionalTensors:
    q, _, v, *_ = arguments
    final_state = None
    if arguments[_OUTPUT_FINAL_STATE]:
        shape = _arguments.state_shape(q, v, arguments[CU_SEQLENS], arguments[STATE_V_FIRST])
        final_state = q.new_empty(shape, dtype=_arguments.statistics_dtype(q.dtype))
    return q.new_empty(v.shape), final_state


def _recurrent_forward(*arguments: Any) -> OptionalTensors:
    q, k, v, g, *others = arguments[:NUM_DIFFERENTIABLE]
    offsets = native_offsets(arguments[CU_SEQLENS], arguments[CU_SEQLENS_CPU], v)
    if g is None:
        g = _arguments.zero_gate(v)
    results = _allocate(*arguments)
    _native.recurrent_forward(
        q, k, v, g, *others, *results, *offsets, None, *arguments[OPTIONS], _native.num_threads()
    )  # fmt: skip
    return results


def _refuse_backward(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(
        "fused_recurrent_gated_delta_rule: has no backward, since the gradient of g needs the state of every token; "
        "train with chunk_gated_delta_rule"
    )


recurrent_forward = define("recurrent_forward", _recurrent_forward, _allocate, "fused_recurrent_gated_delta_rule")
torch.library.register_autograd("cula_gdn::recurrent_forward", _refuse_backward, lib=library)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    backend: str | None = None,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The operator of `chunk_gated_delta_rule` token by token: for decoding, without gradients.

    Arguments, shapes, dtypes and results are those of `chunk_gated_delta_rule`, except those below. Results are always
    batch-invariant: the bits of a sequence's do not depend on the other sequences of the batch.

    Args:
        g: None is no decay.
        gk, gv: must be None; decay by key or value channel is not part of Gated DeltaNet.
        beta: None is ones (not with use_beta_sigmoid_in_kernel, where beta is a logit).
        checkpoint_every_n_tokens: any number of tokens; 1 keeps the state behind each, to go back to.

    Returns:
        o: `[B, T, HV, V]` in the dtype of q.
        final_state: `[N, HV, K, V]` (`[N, HV, V, K]` with state_v_first), float32, float64 for float64 inputs, or
            None; output_state or the pool of states if given. Pass it as the next call's initial_state.

    Raises:
        ValueError: a shape, length or option does not fit, gk or gv is given, A_log is missing with
            use_gate_in_kernel; the message names the argument.
        TypeError: a dtype does not fit, or an unknown keyword.
        AssertionError: K > 256.
        DeprecationWarning: head_first, which no longer exists, was passed.
        RuntimeError: no backend for this device in this build.
        NotImplementedError: in backward, for torch.func's transforms, forward-mode derivatives and torch.jit.trace.
    """
    if kwargs:
        state_v_first = _arguments.resolve_state_layout("fused_recurrent_gated_delta_rule", state_v_first, kwargs)
    for name, channel_gate in (("gk", gk), ("gv", gv)):
        if channel_gate is not None:
            raise ValueError(f"{name}: expected None (Gated DeltaNet decays by head only, with g), got a tensor")
    if beta is None:
        if use_beta_sigmoid_in_kernel:
            raise ValueError("beta: expected logits with use_beta_sigmoid_in_kernel=True, got None")
        _arguments.check_tensor("v", v)
        beta = v.new_ones((), dtype=torch.float32).expand(v.shape[:-1])
    _arguments.check_inputs(q, k, v, g, beta, use_gate_in_kernel)
    _arguments.check_others(
        q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
    )  # fmt: skip
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log: expected a tensor with use_gate_in_kernel=True, got None")
    if cu_seqlens is None and cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu: expected cu_seqlens with it, got it alone")
    _arguments.check_options(
        scale, backend, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, output_final_state=output_final_state,
    )  # fmt: skip
    _arguments.refuse_tangents(
        "fused_recurrent_gated_delta_rule", q, k, v, g, beta, A_log, dt_bias, initial_state, output, output_state,
        state_checkpoints,
    )  # fmt: skip
    q, k, v = _arguments.autocast(q, k, v)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options = (
        scale, 64, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, False, "auto" if backend is None else backend,
    )  # fmt: skip
    wanted = Serving.of(
        output, output_state, state_indices, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens
    )
    if wanted is not None:
        return wanted.recurrent(inputs, (cu_seqlens, cu_seqlens_cpu), output_final_state, options)
    try:
        return recurrent_forward(  # type: ignore[no-any-return]
            *inputs, cu_seqlens, cu_seqlens_cpu, output_final_state, *options
        )
    except RuntimeError as error:
        function = "fused_recurrent_gated_delta_rule"
        tensors = zip(INPUT_NAMES, (*inputs, cu_seqlens, cu_seqlens_cpu), strict=True)
        _arguments.explain_failure(function, **dict(tensors))
        if function not in str(error):
            _arguments.refuse_transforms(function)
        raise


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
