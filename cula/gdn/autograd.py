"""The chunked operator as torch sees it: two custom operators and the gradient that joins them.

`cula_gdn::chunk_forward` and `cula_gdn::chunk_backward` allocate their results and call the library. Both have fake
implementations, so that torch.compile and torch.export can trace them, and work for any device that the library has a
backend for. Saved for backward are the inputs themselves and A, the inverse of I + L by rows; with
use_qk_l2norm_in_kernel the normalised q and k and their 1 / norm stand in for q and k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cula.gdn import _arguments, _native
from cula.gdn.index import native_offsets

INPUTS_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"
)
# In the order in which the compiled library takes them.
OPTIONS_SCHEMA = (
    "float? scale, int chunk_size, bool use_qk_l2norm, bool use_gate, bool use_beta_sigmoid, bool allow_neg_eigval, "
    "bool state_v_first, bool batch_invariant, str backend"
)


def _names(schema: str) -> list[str]:
    return [argument.split()[-1] for argument in schema.split(", ")]


# Where arguments stand in a call of an operator: its options are the last ones. NUM_INPUTS and CU_SEQLENS hold for the
# two operators that compute outputs, whose inputs are the first ones.
INPUT_NAMES = _names(INPUTS_SCHEMA)
NUM_INPUTS = len(INPUT_NAMES)
CU_SEQLENS = INPUT_NAMES.index("cu_seqlens")
CU_SEQLENS_CPU = INPUT_NAMES.index("cu_seqlens_cpu")
OPTIONS = slice(-len(_names(OPTIONS_SCHEMA)), None)
STATE_V_FIRST = OPTIONS.start + _names(OPTIONS_SCHEMA).index("state_v_first")
# Inputs that may have a gradient: the first ones, up to the lengths.
NUM_DIFFERENTIABLE = CU_SEQLENS

_FORWARD_SCHEMA = (
    f"{INPUTS_SCHEMA}, Tensor? chunk_indices, bool output_final_state, bool save_for_backward, {OPTIONS_SCHEMA}"
)
_CHUNK_INDICES = NUM_INPUTS
_NUM_FORWARD_ARGUMENTS = len(_names(_FORWARD_SCHEMA))
# Results of forward that backward takes; the first, A, is there whenever they are saved.
_SAVED_RESULTS_SCHEMA = "Tensor? A, Tensor? q_normalized, Tensor? k_normalized, Tensor? q_rstd, Tensor? k_rstd"

library: Any = torch.library.Library("cula_gdn", "DEF")  # type: ignore[no-untyped-call]
library.define(f"chunk_forward({_FORWARD_SCHEMA}) -> (Tensor o, Tensor? final_state, {_SAVED_RESULTS_SCHEMA})")

# The gradients of the differentiable inputs, each where its entry of `wanted` is set. q and k are absent where their
# normalised copies stand in for them.
_SAVED_INPUTS_SCHEMA = INPUTS_SCHEMA.replace("Tensor q, Tensor k", "Tensor? q, Tensor? k")
library.define(
    f"chunk_backward(Tensor? grad_o, Tensor? grad_final_state, {_SAVED_INPUTS_SCHEMA}, "
    f"{_SAVED_RESULTS_SCHEMA.replace('Tensor? A', 'Tensor A')}, bool[{NUM_DIFFERENTIABLE}] wanted, {OPTIONS_SCHEMA}) "
    "-> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dg, Tensor? dbeta, Tensor? dA_log, Tensor? ddt_bias, Tensor? dh0)"
)
_SAVED_INPUTS = slice(2, 2 + NUM_INPUTS)  # behind the two gradients
_SAVED_RESULTS = slice(_SAVED_INPUTS.stop, _SAVED_INPUTS.stop + len(_names(_SAVED_RESULTS_SCHEMA)))

OptionalTensors = tuple[Tensor | None, ...]


def _dense_like(x: Tensor) -> Tensor:
    """Uninitialised and contiguous, whatever the strides of x; in half the time of `new_empty`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


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
    batch_invariant: bool,
    backend: str,
) -> OptionalTensors:
    o = _dense_like(v)
    statistics = _arguments.statistics_dtype(q.dtype)
    final_state = A = q_normalized = k_normalized = q_rstd = k_rstd = None
    # Sizes one by one: torch takes longer to look at a tuple of them. What is like an input that has another shape than
    # it should have is not used: the library refuses the input.
    if output_final_state and initial_state is not None and initial_state.dtype == statistics:
        final_state = _dense_like(initial_state)
    elif output_final_state:
        final_state = q.new_empty(*_arguments.state_shape(q, v, cu_seqlens, state_v_first), dtype=statistics)
    if save_for_backward:
        batch, tokens, value_heads, _ = v.shape
        A = q.new_empty(batch, tokens, value_heads, chunk_size)
        if use_qk_l2norm:
            q_normalized, k_normalized = _dense_like(q), _dense_like(k)
            q_rstd = q.new_empty(batch, tokens, q.shape[2], dtype=statistics)
            k_rstd = _dense_like(q_rstd)
    return o, final_state, A, q_normalized, k_normalized, q_rstd, k_rstd


def _chunk_forward(*arguments: Any) -> OptionalTensors:
    q, k, v, g, *others = arguments[:NUM_DIFFERENTIABLE]
    offsets = native_offsets(arguments[CU_SEQLENS], arguments[CU_SEQLENS_CPU], v)
    if g is None:
        g = _arguments.zero_gate(v)
    results = _allocate_forward(*arguments)
    _native.forward(
        q, k, v, g, *others, *results, *offsets, arguments[_CHUNK_INDICES],
        *arguments[OPTIONS], _native.num_threads(),
    )  # fmt: skip
    return results


def _setup_saving(ctx: Any, inputs: tuple[Any, ...], output: OptionalTensors) -> None:
    A, q_normalized, *statistics = output[2:]
    ctx.set_materialize_grads(False)
    ctx.saves = A is not None
    if not ctx.saves:
        return
    q, k, *others = inputs[:NUM_INPUTS]
    if q_normalized is not None:
        q = k = None
    ctx.save_for_backward(q, k, *others, A, q_normalized, *statistics)
    ctx.options = inputs[OPTIONS]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: OptionalTensors) -> None:
    _setup_saving(ctx, inputs, output)
    ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))


def _gradients(ctx: Any, grad_o: Tensor | None, grad_final_state: Tensor | None) -> OptionalTensors:
    if not ctx.saves:
        raise RuntimeError("cula_gdn::chunk_forward was called with save_for_backward=False, so it has no gradient")
    if grad_o is None and grad_final_state is None:
        return (None,) * NUM_DIFFERENTIABLE
    tensors = (grad_o, grad_final_state, *ctx.saved_tensors)
    wanted = ctx.needs_input_grad[:NUM_DIFFERENTIABLE]
    return _gradient_operator(tensors)(*tensors, wanted, *ctx.options)  # type: ignore[no-any-return]


def _backward(ctx: Any, *gradients: Any) -> OptionalTensors:
    return (*_gradients(ctx, *gradients[:2]), *(None,) * (_NUM_FORWARD_ARGUMENTS - NUM_DIFFERENTIABLE))


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
    return tuple(_dense_like(x) if want and x is not None else None for x, want in zip(models, wanted, strict=True))


def _chunk_backward(*arguments: Any) -> OptionalTensors:
    grad_o, grad_final_state = arguments[:2]
    q, k, v, g, *others, cu_seqlens, cu_seqlens_cpu = arguments[_SAVED_INPUTS]
    offsets = native_offsets(cu_seqlens, cu_seqlens_cpu, v)
    if g is None:
        g = _arguments.zero_gate(v)
    if grad_o is None:
        grad_o = v.new_zeros(()).expand(v.shape)
    results = _allocate_backward(*arguments)
    _native.backward(
        q, k, v, g, *others, *arguments[_SAVED_RESULTS], grad_o, grad_final_state, *results, *offsets, None,
        *arguments[OPTIONS], _native.num_threads(),
    )  # fmt: skip
    return results


def _refuse_double_backward(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "chunk_gated_delta_rule: its gradient can not be differentiated again (create_graph, nested torch.func.grad)"
    )


def _vmap_refusal(function: str) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise NotImplementedError(
            f"{function}: torch.vmap is not implemented; give the mapped dimension as the batch dimension B"
        )

    return refuse


# Registration -------------------------------------------------------------------------------------------------------


def define(
    name: str, implementation: Callable[..., Any], allocate: Callable[..., Any], function: str
) -> Callable[..., Any]:
    """Registers an operator of the library for every device, and its fake; returns the operator.

    `function` is the public one that its messages name.
    """
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cula_gdn::{name}", allocate, lib=library)
    torch.library.register_vmap(f"cula_gdn::{name}", _vmap_refusal(function), lib=library)
    return getattr(torch.ops.cula_gdn, name).default  # type: ignore[no-any-return]


_FUNCTION = "chunk_gated_delta_rule"
chunk_forward = define("chunk_forward", _chunk_forward, _allocate_forward, _FUNCTION)
chunk_backward = define("chunk_backward", _chunk_backward, _allocate_backward, _FUNCTION)
torch.library.register_autograd("cula_gdn::chunk_forward", _backward, setup_context=_setup_context, lib=library)
torch.library.register_autograd("cula_gdn::chunk_backward", _refuse_double_backward, lib=library)


# The dispatcher takes longer than all the rest that a short call costs the host. A call that nobody listens to can do
# without it: plain tensors whose memory says what they hold, and no mode, transform, compiler, tracer or profiler to
# see the operator.
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
# Looked up once: a step asks for all of them twice.
_tracing_state = torch._C._get_tracing_state
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiler_enabled = torch._C._autograd._profiler_enabled


def is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Also says that each is a tensor or None, and that none is a meta tensor."""
    if torch.compiler.is_compiling() or _tracing_state() is not None or _transforms_active():
        return False
    if _dispatch_modes() or _function_modes() or _profiler_enabled():
        return False
    if not _PLAIN_TYPES.issuperset(map(type, tensors)):
        return False
    for x in tensors:  # noqa: SIM110 - a generator would take as long again
        if x is not None and (x.is_meta or x.is_neg() or x._is_zerotensor()):
            return False
    return True


class _ChunkFunction(torch.autograd.Function):
    """The same gradient as registered with torch.library, at a fifth of the time a call: for eager calls."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> OptionalTensors:
        results = chunk_forward(*arguments)
        _setup_context(ctx, arguments, results)
        return results  # type: ignore[no-any-return]

    backward = staticmethod(_backward)


class _PlainFunction(torch.autograd.Function):
    """The same without the dispatcher, and with as few arguments and results as torch has to look at: the inputs that
    may have a gradient and all other arguments as one, o and the final state."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> OptionalTensors:
        *inputs, others = arguments
        results = _chunk_forward(*inputs, *others)
        _setup_saving(ctx, (*inputs, *others), results)
        return results[:2]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> OptionalTensors:
        return (*_gradients(ctx, *gradients), None)


def _plain_forward(*arguments: Any) -> OptionalTensors:
    return _PlainFunction.apply(*arguments[:NUM_DIFFERENTIABLE], arguments[NUM_DIFFERENTIABLE:])  # type: ignore[no-any-return]


class _TransformedFunction(torch.autograd.Function):
    """The same again in the form that torch.func's transforms need; slower than either."""

    forward = staticmethod(chunk_forward)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    vmap = staticmethod(_vmap_refusal(_FUNCTION))


class _TransformedGradient(torch.autograd.Function):
    forward = staticmethod(chunk_backward)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_refuse_double_backward)
    vmap = staticmethod(_vmap_refusal(_FUNCTION))


def _gradient_operator(tensors: Sequence[Tensor | None]) -> Callable[..., Any]:
    # With gradients on, a gradient of this gradient may be asked for: the registered operator refuses it by name.
    if not torch.is_grad_enabled() and is_plain(tensors):
        return _chunk_backward
    if torch._C._are_functorch_transforms_active():
        return _TransformedGradient.apply  # type: ignore[no-any-return]
    return chunk_backward


def forward_operator(saves: bool, plain: bool) -> Callable[..., Any]:
    """What computes a call: the registered operator itself for all who listen to operators (see is_plain)."""
    if plain:
        return _plain_forward if saves else _chunk_forward
    if torch._C._are_functorch_transforms_active():
        return _TransformedFunction.apply  # type: ignore[no-any-return]
    return _ChunkFunction.apply if saves and not torch.compiler.is_compiling() else chunk_forward
