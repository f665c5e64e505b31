"""What serving asks of the operator beside its results: buffers of the caller's, state pools, checkpoints of states.

`cula_gdn::chunk_forward_out` and `cula_gdn::recurrent_forward_out` write into their arguments and return nothing, which
is how torch's tracers want it. They have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cula.gdn import _arguments, _native
from cula.gdn.autograd import (
    INPUT_NAMES,
    INPUTS_SCHEMA,
    NUM_DIFFERENTIABLE,
    NUM_INPUTS,
    OPTIONS_SCHEMA,
    STATE_V_FIRST,
    define,
    library,
)
from cula.gdn.index import native_offsets

_SERVING_SCHEMA = (
    "Tensor? state_indices, Tensor? checkpoint_cu_starts, int checkpoint_every_n_tokens, "
    "Tensor(a!) o, Tensor(b!)? final_state, Tensor(c!)? state_checkpoints"
)
library.define(f"chunk_forward_out({INPUTS_SCHEMA}, Tensor? chunk_indices, {_SERVING_SCHEMA}, {OPTIONS_SCHEMA}) -> ()")
library.define(f"recurrent_forward_out({INPUTS_SCHEMA}, {_SERVING_SCHEMA}, {OPTIONS_SCHEMA}) -> ()")

Inputs = tuple[Tensor | None, ...]
Lengths = tuple[Tensor | None, Tensor | None]


def _call(
    operator: Callable[..., None],
    inputs: tuple[Any, ...],
    chunk_indices: Tensor | None,
    indices: tuple[Any, ...],
    results: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
) -> None:
    q, k, v, g, *others = inputs[:NUM_DIFFERENTIABLE]
    cu_seqlens, cu_seqlens_cpu = inputs[NUM_DIFFERENTIABLE:]
    state_indices, checkpoint_cu_starts, every = indices
    o, final_state, state_checkpoints = results
    offsets = native_offsets(cu_seqlens, cu_seqlens_cpu, v)
    if g is None:
        g = _arguments.zero_gate(v)
    operator(
        q, k, v, g, *others, o, final_state, state_indices, state_checkpoints, checkpoint_cu_starts, every, *offsets,
        chunk_indices, *options, _native.num_threads(),
    )  # fmt: skip
    # What autograd has saved of these tensors has changed; inference tensors keep no count.
    written = [x for x in results if x is not None and not x.is_inference()]
    torch.autograd.graph.increment_version(written)


def _chunk_forward_out(*arguments: Any) -> None:
    inputs, (chunk_indices, *rest) = arguments[:NUM_INPUTS], arguments[NUM_INPUTS:]
    _call(_native.serve_forward, inputs, chunk_indices, tuple(rest[:3]), tuple(rest[3:6]), tuple(rest[6:]))


def _recurrent_forward_out(*arguments: Any) -> None:
    inputs, rest = arguments[:NUM_INPUTS], arguments[NUM_INPUTS:]
    _call(_native.serve_recurrent_forward, inputs, None, rest[:3], rest[3:6], rest[6:])


def _nothing(*_: Any) -> None:
    return None


_chunk = define("chunk_forward_out", _chunk_forward_out, _nothing, "chunk_gated_delta_rule")
_recurrent = define("recurrent_forward_out", _recurrent_forward_out, _nothing, "fused_recurrent_gated_delta_rule")


# Checks before C++ sees the call: of what it could not see, or knows under another name -------------------------------


def _check_shape(name: str, x: Tensor, letters: str, shape: tuple[int | None, ...], device: torch.device) -> None:
    """None in `shape`: any number."""
    if x.dim() != len(shape) or any(a is not None and a != b for a, b in zip(shape, x.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape {letters} = [{sizes}], got {list(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device} as q, got one on {x.device}")


class Serving(NamedTuple):
    """The keyword arguments of the public functions that are for serving."""

    output: Tensor | None
    output_state: Tensor | None
    state_indices: Tensor | None
    state_checkpoints: Tensor | None
    checkpoint_cu_starts: Tensor | None
    checkpoint_every_n_tokens: int

    @staticmethod
    def of(
        output: Tensor | None,
        output_state: Tensor | None,
        state_indices: Tensor | None,
        state_checkpoints: Tensor | None,
        checkpoint_cu_starts: Tensor | None,
        checkpoint_every_n_tokens: int,
    ) -> Serving | None:
        """None if nothing of it is asked for."""
        every = checkpoint_every_n_tokens
        nothing = output is output_state is state_indices is state_checkpoints is checkpoint_cu_starts is None
        if nothing and type(every) is int and every == 0:
            return None
        if isinstance(every, bool) or not isinstance(every, int | torch.SymInt):
            raise TypeError(f"checkpoint_every_n_tokens: expected an int, got {type(every).__name__}")
        if isinstance(every, int):
            _arguments.check_bits("checkpoint_every_n_tokens", every)
        if nothing and every == 0:
            return None
        return Serving(
            output, output_state, state_indices, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens
        )

    def first_given(self) -> str:
        tensors = zip(self._fields, self[:-1], strict=False)
        return next((name for name, x in tensors if x is not None), self._fields[-1])

    def chunk(
        self,
        inputs: Inputs,
        lengths: Lengths,
        chunk_indices: Tensor | None,
        output_final_state: bool,
        options: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """`inputs`: all that may have a gradient elsewhere; `lengths`: cu_seqlens, cu_seqlens_cpu."""
        try:
            o, final_state = self._results(inputs, lengths[0], output_final_state, options[STATE_V_FIRST])
            _chunk(*inputs, *lengths, chunk_indices, *self._arguments(o, final_state), *options)
        except RuntimeError:
            self._explain_failure("chunk_gated_delta_rule", inputs, lengths, chunk_indices)
            raise
        return o, final_state

    def recurrent(
        self, inputs: Inputs, lengths: Lengths, output_final_state: bool, options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor | None]:
        try:
            o, final_state = self._results(inputs, lengths[0], output_final_state, options[STATE_V_FIRST])
            _recurrent(*inputs, *lengths, *self._arguments(o, final_state), *options)
        except RuntimeError:
            self._explain_failure("fused_recurrent_gated_delta_rule", inputs, lengths, None)
            raise
        return o, final_state

    def _explain_failure(self, function: str, inputs: Inputs, lengths: Lengths, chunk_indices: Tensor | None) -> None:
        names = (*INPUT_NAMES, "chunk_indices", *self._fields[:-1])
        _arguments.explain_failure(
            function, **dict(zip(names, (*inputs, *lengths, chunk_indices, *self[:-1]), strict=True))
        )
        for name in ("output", "output_state", "state_checkpoints"):
            x = getattr(self, name)
            if x is not None and x.is_neg():
                raise ValueError(f"{name}: expected a tensor whose memory holds its values, got a negated view")

    def _arguments(self, o: Tensor, final_state: Tensor | None) -> tuple[Any, ...]:
        """As _SERVING_SCHEMA has them."""
        indices = (self.state_indices, self.checkpoint_cu_starts, self.checkpoint_every_n_tokens)
        return (*indices, o, final_state, self.state_checkpoints)

    def _results(
        self, inputs: Inputs, cu_seqlens: Tensor | None, output_final_state: bool, state_v_first: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Where o and the final state go, after all checks."""
        q, _, v, *_, initial_state = inputs
        assert q is not None
        assert v is not None
        self._check_kinds(q)
        self._check_gradients(inputs)
        self._check_checkpoints()
        state_shape = _arguments.state_shape(q, v, cu_seqlens, state_v_first)
        if self.output is not None:
            _check_shape("output", self.output, "[B, T, HV, V]", tuple(v.shape), q.device)
            if self.output.dtype != q.dtype:
                raise TypeError(f"output: expected {q.dtype} as q, got {self.output.dtype}")
        if self.output_state is not None:
            if not output_final_state:
                raise ValueError("output_state: expected output_final_state=True with it, got False")
            inner = "V, K]" if state_v_first else "K, V]"
            if self.state_indices is None:
                _check_shape("output_state", self.output_state, f"[N, HV, {inner}", state_shape, q.device)
            else:
                _check_shape(
                    "output_state", self.output_state, f"[slots, HV, {inner}", (None, *state_shape[1:]), q.device
                )
        if self.state_indices is not None and initial_state is None and self.output_state is None:
            raise ValueError("state_indices: expected a pool with it (initial_state or output_state), got none")
        o = self.output if self.output is not None else q.new_empty(v.shape)
        if self.output_state is not None or not output_final_state:
            return o, self.output_state
        if self.state_indices is not None:
            return o, initial_state
        return o, q.new_empty(state_shape, dtype=_arguments.statistics_dtype(q.dtype))

    def _check_kinds(self, q: Tensor) -> None:
        _arguments.check_others(q, **dict(zip(self._fields, self[:-1], strict=False)))
        for name in ("output", "output_state", "state_checkpoints"):
            x = getattr(self, name)
            if x is not None and not x.is_floating_point():
                raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {x.dtype}")
        for name in ("state_indices", "checkpoint_cu_starts"):
            x = getattr(self, name)
            if x is not None and x.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")

    def _check_gradients(self, inputs: Inputs) -> None:
        if not torch.is_grad_enabled():
            return
        buffers = (self.output, self.output_state, self.state_checkpoints)
        if any(x is not None and x.requires_grad for x in (*inputs, *buffers)):
            raise ValueError(
                f"{self.first_given()}: expected no tensor that requires a gradient with it, since there is none where "
                "results go to the caller's memory; call under torch.no_grad()"
            )

    def _check_checkpoints(self) -> None:
        if self.checkpoint_every_n_tokens != 0:
            if self.state_checkpoints is None:
                raise ValueError("state_checkpoints: expected a tensor with checkpoint_every_n_tokens, got None")
            return
        for name in ("state_checkpoints", "checkpoint_cu_starts"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: expected checkpoint_every_n_tokens with it, got it alone")
