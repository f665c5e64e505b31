"""The operator under context parallelism: what a rank computes before and after each of the two exchanges.

A pass is an object, so that its exchange can be anything: `torch.distributed` here, a loop over simulated ranks
elsewhere. Forward (`ForwardPass`) and backward (`BackwardPass`) have the same outline:

    pass_.payload               what this rank sends, made first
    pass_.run_independent()     the sequences that no other rank has a part in: runs under the exchange
    pass_.receive(gathered)     the states that enter here, from the entries of all ranks, which are not needed any more
    pass_.finish()              the other sequences

The library sees ranges of whole sequences, each of which is a problem of its own with the same bits as in one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from cula.gdn import _arguments, _native
from cula.gdn.autograd import NUM_DIFFERENTIABLE, OptionalTensors
from cula.gdn.index import host_offsets, native_offsets

# Options of the library's functions that are read here, in the order in which it takes them (autograd.OPTIONS_SCHEMA).
_CHUNK_SIZE, _USE_QK_L2NORM, _STATE_V_FIRST = 1, 2, 6


# Partition ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A slot of this rank: some of its sequences, of which the first and the last may belong to other slots too."""

    slot: int  # position in the chain of all slots
    first_sequence: int  # of the local ones
    last_sequence: int
    pre: int  # slots before that have tokens of the first sequence
    post: int  # slots behind that have tokens of the last sequence

    @property
    def receives(self) -> bool:
        return self.pre > 0

    @property
    def hands_on(self) -> bool:
        return self.post > 0

    @property
    def is_one_sequence(self) -> bool:
        return self.first_sequence == self.last_sequence

    @property
    def last_begins_here(self) -> bool:
        return not (self.is_one_sequence and self.receives)


def _checked_offsets(cu_seqlens: Tensor) -> list[int]:
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(
            f"cp_context: expected cu_seqlens [N + 1] of int32 or int64, got {list(cu_seqlens.shape)} of "
            f"{cu_seqlens.dtype}"
        )
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets != sorted(offsets):
        raise ValueError(f"cp_context: expected ascending cu_seqlens from 0, got {offsets}")
    return offsets


def _of_parts(context: Any, name: str) -> tuple[Any, Any]:
    value = getattr(context, name, None)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"cp_context: expected two numbers of ranks for {name}, got {value!r}")
    return value[0], value[1]


@dataclass(frozen=True)
class Partition:
    """A rank's view of a context, FLA's or ours."""

    parts: tuple[Part, ...]
    world_size: int
    offsets: list[int]  # of the local sequences
    cu_seqlens: Tensor
    accepts_padding: bool

    @staticmethod
    def of(context: Any, rank: int, world_size: int) -> Partition:
        host = host_offsets(context.cu_seqlens, context.cu_seqlens_cpu)
        assert host is not None  # cu_seqlens is there
        offsets = _checked_offsets(host)
        N = len(offsets) - 1
        layout = getattr(context, "layout", "contiguous")
        if layout == "contiguous":
            parts: tuple[Part, ...] = (Part(rank, 0, N - 1, context.pre_num_ranks, context.post_num_ranks),)
        elif layout == "zigzag":
            slots, front = (rank, 2 * world_size - 1 - rank), context.front_num_seqs
            if type(front) is not int or not (0 < front < N and 2 * offsets[front] == offsets[-1]):
                raise ValueError(
                    f"cp_context: expected front_num_seqs sequences in the first half of {offsets}, got {front!r}"
                )
            pre, post = (_of_parts(context, name) for name in ("pre_num_ranks_by_part", "post_num_ranks_by_part"))
            parts = (Part(slots[0], 0, front - 1, pre[0], post[0]), Part(slots[1], front, N - 1, pre[1], post[1]))
        else:
            raise ValueError(f"cp_context: expected layout 'contiguous' or 'zigzag', got {layout!r}")
        for part in parts:
            for name, count in (("pre_num_ranks", part.pre), ("post_num_ranks", part.post)):
                if not isinstance(count, int) or count < 0 or (count > 0 and N == 0):
                    raise ValueError(f"cp_context: expected a number of ranks for {name}, got {count!r}")
            if part.slot - part.pre < 0 or part.slot + part.post >= len(parts) * world_size:
                raise ValueError(
                    f"cp_context: expected one of rank {rank} of {world_size}, got sequences that begin {part.pre} "
                    f"slots before slot {part.slot} or end {part.post} behind it"
                )
        accepts_padding = getattr(context, "rank_lengths", None) is not None
        return Partition(parts, world_size, offsets, context.cu_seqlens, accepts_padding)

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    def entry(self, slot: int) -> int:
        """Where a slot's payload lies among the gathered ones: by rank, a rank's parts side by side."""
        if len(self.parts) == 1:
            return slot
        is_front = slot < self.world_size
        return 2 * slot if is_front else 2 * (2 * self.world_size - 1 - slot) + 1

    def check_tokens(self, tokens: int) -> None:
        expected = self.offsets[-1]
        if tokens == expected or (self.accepts_padding and tokens > expected):
            return
        raise ValueError(
            f"q: expected T = {expected}, this rank's share of the stream (a range of consecutive tokens, wherever "
            f"documents begin), got T = {tokens}"
        )

    def runs(self, keys: list[Hashable]) -> Iterator[tuple[Hashable, int, int]]:
        """Maximal ranges [first, last) of local sequences of one key each; one empty range if there are none."""
        if not keys:
            yield None, 0, 0
        begin = 0
        for key, group in itertools.groupby(keys):
            end = begin + len(list(group))
            yield key, begin, end
            begin = end


# Native calls -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranges:
    """Slices of a rank's tensors by ranges of its sequences, and the offsets that go with them."""

    partition: Partition
    tokens: int
    options: tuple[Any, ...]
    like: Tensor  # a tensor on the device of the call

    def rows(self, x: Tensor | None, first: int, last: int) -> Tensor | None:
        """Tokens of sequences [first, last); the last range has the padding behind them too."""
        if x is None:
            return None
        offsets, N = self.partition.offsets, self.partition.num_sequences
        return x[:, offsets[first] : self.tokens if last == N else offsets[last]]

    def shared(self, first: int, last: int, chunk_indices: Tensor | None = None) -> tuple[Any, ...]:
        """The arguments that all functions of the library take last."""
        offsets = self.partition.offsets
        host = torch.tensor([x - offsets[first] for x in offsets[first : last + 1]], dtype=torch.int64)
        if self.like.is_cpu:
            return host, None, chunk_indices, *self.options, _native.num_threads()
        device = self.partition.cu_seqlens[first : last + 1] - offsets[first]
        return *native_offsets(device, host, self.like), chunk_indices, *self.options, _native.num_threads()


def _merge(gathered: Tensor, order: list[int], options: tuple[Any, ...]) -> Tensor:
    """The state that the entries of `order` make, [1, HV, K, V] (or V, K)."""
    _, HV, K, columns = gathered.shape
    V = columns - K
    state = gathered.new_empty((1, HV, V, K) if options[_STATE_V_FIRST] else (1, HV, K, V))
    _native.cp_merge(gathered, order, state[0], HV, K, V, None, None, None, *options, _native.num_threads())
    return state


def _state_rows(state: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if state is None else state[first:last]


# Forward ------------------------------------------------------------------------------------------------------------


class ForwardPass:
    """Forward on one rank. `inputs` are the operator's differentiable ones, g present."""

    def __init__(
        self,
        partition: Partition,
        inputs: OptionalTensors,
        chunk_indices: Tensor | None,
        output_final_state: bool,
        options: tuple[Any, ...],
    ) -> None:
        q, k, v, _, _, _, _, initial_state = inputs
        assert q is not None
        assert k is not None
        assert v is not None
        self.partition, self.inputs, self.options = partition, inputs, options
        partition.check_tokens(q.shape[1])
        self.ranges = Ranges(partition, q.shape[1], options, v)
        statistics = _arguments.statistics_dtype(q.dtype)
        self.o = q.new_empty(v.shape)
        self.final_state = None
        if output_final_state:
            shape = _arguments.state_shape(q, v, partition.cu_seqlens, options[_STATE_V_FIRST])
            self.final_state = q.new_empty(shape, dtype=statistics)
        # A, normalised q and k, and their 1 / norm: prepared for all tokens, then read by everything else.
        self.saved: OptionalTensors = (q.new_empty((*v.shape[:3], options[_CHUNK_SIZE])), None, None, None, None)
        if options[_USE_QK_L2NORM]:
            rows = [x.new_empty(x.shape) for x in (q, k)]
            norms = [x.new_empty(x.shape[:-1], dtype=statistics) for x in (q, k)]
            self.saved = (self.saved[0], *rows, *norms)
        N = partition.num_sequences
        _native.cp_prepare(
            *inputs, self.o, self.final_state, *self.saved, *self.ranges.shared(0, N, chunk_indices)
        )  # fmt: skip

        HV, K, V = v.shape[2], q.shape[3], v.shape[3]
        self.payload = q.new_zeros((len(partition.parts), HV, K, V + K), dtype=statistics)
        for index, part in enumerate(partition.parts):
            if part.hands_on:
                n = part.last_sequence
                start = _state_rows(initial_state, n, n + 1) if part.last_begins_here else None
                self._summarize(n, start, self.payload[index : index + 1])
        self.merged: dict[int, Tensor] = {}  # first sequence of a part -> [1, HV, K, V], the state that enters it

    def _summarize(self, n: int, start: Tensor | None, summary: Tensor) -> None:
        _, k, v, g, beta, A_log, dt_bias, _ = self.inputs
        A, _, k_normalized, *_ = self.saved
        k, v, g, beta, A, k_normalized = (
            self.ranges.rows(x, n, n + 1) for x in (k, v, g, beta, A, k_normalized)
        )  # fmt: skip
        _native.cp_summarize(
            k, v, g, beta, A_log, dt_bias, start, A, k_normalized, [0], summary, *self.ranges.shared(n, n + 1)
        )  # fmt: skip

    def _advance(self, first: int, last: int, initial_state: Tensor | None) -> None:
        *tokenwise, A_log, dt_bias, _ = self.inputs
        rows = (self.ranges.rows(x, first, last) for x in tokenwise)
        o, *saved = (self.ranges.rows(x, first, last) for x in (self.o, *self.saved))
        final_state = _state_rows(self.final_state, first, last)
        _native.cp_advance(
            *rows, A_log, dt_bias, initial_state, o, final_state, *saved, *self.ranges.shared(first, last)
        )  # fmt: skip

    def _receiving(self) -> list[Hashable]:
        """For each local sequence: whether its state comes from earlier slots."""
        receivers = {part.first_sequence for part in self.partition.parts if part.receives}
        return [n in receivers for n in range(self.partition.num_sequences)]

    def run_independent(self) -> None:
        initial_state = self.inputs[-1]
        for receives, first, last in self.partition.runs(self._receiving()):
            if not receives:
                self._advance(first, last, _state_rows(initial_state, first, last))

    def receive(self, gathered: Tensor) -> None:
        """`gathered`: the payloads of all ranks, [W P, HV, K, V + K]."""
        for part in self.partition.parts:
            if part.receives:
                order = [self.partition.entry(slot) for slot in range(part.slot - part.pre, part.slot)]
                self.merged[part.first_sequence] = _merge(gathered, order, self.options)

    def finish(self) -> None:
        for n, state in self.merged.items():
            self._advance(n, n + 1, state)

    def transitions(self) -> dict[int, Tensor]:
        """M of the parts that are one sequence: backward would compute its transpose again."""
        K = self.payload.shape[2]
        return {
            index: self.payload[index : index + 1, :, :, -K:].clone()
            for index, part in enumerate(self.partition.parts)
            if part.is_one_sequence and part.receives and part.hands_on
        }


# Backward -----------------------------------------------------------------------------------------------------------


class BackwardPass:
    """Backward on one rank, of what `ForwardPass` computed there. q and k are absent where `saved` normalises them."""

    def __init__(
        self,
        partition: Partition,
        inputs: OptionalTensors,
        saved: OptionalTensors,
        merged: dict[int, Tensor],
        transitions: dict[int, Tensor],
        grad_output: Tensor | None,
        grad_final_state: Tensor | None,
        wanted: tuple[bool, ...],
        options: tuple[Any, ...],
    ) -> None:
        q, k, v, *_, initial_state = inputs
        assert v is not None
        self.partition, self.inputs, self.saved, self.merged = partition, inputs, saved, merged
        self.grad_output = v.new_zeros(()).expand(v.shape) if grad_output is None else grad_output
        self.grad_final_state, self.options = grad_final_state, options
        self.ranges = Ranges(partition, v.shape[1], options, v)
        self.statistics = _arguments.statistics_dtype(v.dtype)
        models = (q if q is not None else saved[1], k if k is not None else saved[2], *inputs[2:])
        gradients = [
            x.new_empty(x.shape) if want and x is not None else None for x, want in zip(models, wanted, strict=True)
        ]
        # Those of the gate's parameters are sums over tokens: kept in the accumulators' type until all ranges are in.
        self.gradients: list[Tensor | None] = gradients
        self.parameter_sums: list[list[Tensor]] = [[], []]
        if initial_state is not None and gradients[-1] is not None:
            for part in partition.parts:
                if part.receives:  # that row is not read
                    gradients[-1][part.first_sequence].zero_()

        self.received: dict[int, Tensor] = {}  # last sequence of a part -> gradient of the state that leaves it
        HV, V = v.shape[2:]
        first_model = models[0]
        assert first_model is not None
        K = first_model.shape[3]
        self.payload = v.new_zeros((len(partition.parts), HV, K, V + K), dtype=self.statistics)
        for index, part in enumerate(partition.parts):
            if part.receives:
                self._summarize(part.first_sequence, transitions.get(index), self.payload[index : index + 1])

    def _summarize(self, n: int, transition: Tensor | None, summary: Tensor) -> None:
        q, k, _, g, beta, A_log, dt_bias, _ = self.inputs
        A, q_normalized, k_normalized, *_ = self.saved
        q, k, g, beta, A, q_normalized, k_normalized, grad_output = (
            self.ranges.rows(x, n, n + 1) for x in (q, k, g, beta, A, q_normalized, k_normalized, self.grad_output)
        )
        _native.cp_summarize_adjoint(
            q, k, g, beta, A_log, dt_bias, A, q_normalized, k_normalized, grad_output,
            _state_rows(self.grad_final_state, n, n + 1), transition, [0], summary, *self.ranges.shared(n, n + 1),
        )  # fmt: skip

    def _differentiate(self, first: int, last: int, grad_final_state: Tensor | None) -> None:
        *tokenwise, A_log, dt_bias, initial_state = self.inputs
        merged = self.merged.get(first)
        initial_state = _state_rows(initial_state, first, last) if merged is None else merged
        rows = (self.ranges.rows(x, first, last) for x in tokenwise)
        saved = (self.ranges.rows(x, first, last) for x in self.saved)
        grad_output = self.ranges.rows(self.grad_output, first, last)
        *by_tokens, dA_log, ddt_bias, dh0 = self.gradients
        sums = [None if x is None else x.new_empty(x.shape, dtype=self.statistics) for x in (dA_log, ddt_bias)]
        for total, part in zip(self.parameter_sums, sums, strict=True):
            if part is not None:
                total.append(part)
        _native.cp_backward(
            *rows, A_log, dt_bias, initial_state, *saved, grad_output, grad_final_state,
            *(self.ranges.rows(x, first, last) for x in by_tokens), *sums,
            _state_rows(dh0, first, last) if merged is None else None, *self.ranges.shared(first, last),
        )  # fmt: skip

    def _runs(self) -> Iterator[tuple[Part | None, int, int]]:
        """Ranges of sequences; with the part whose last one it is where its gradient comes from later slots."""
        givers = {part.last_sequence: part for part in self.partition.parts if part.hands_on}
        keys = [(givers.get(n), n if n in self.merged else None) for n in range(self.partition.num_sequences)]
        for key, first, last in self.partition.runs(list[Hashable](keys)):
            yield (None if key is None else key[0]), first, last  # type: ignore[index]

    def run_independent(self) -> None:
        for part, first, last in self._runs():
            if part is None:
                self._differentiate(first, last, _state_rows(self.grad_final_state, first, last))

    def receive(self, gathered: Tensor) -> None:
        """`gathered`: the payloads of all ranks, [W P, HV, K, V + K]."""
        for part in self.partition.parts:
            if part.hands_on:
                order = [self.partition.entry(slot) for slot in range(part.slot + part.post, part.slot, -1)]
                self.received[part.last_sequence] = _merge(gathered, order, self.options)

    def finish(self) -> list[Tensor | None]:
        """The gradients of the inputs."""
        for part, first, last in self._runs():
            if part is None:
                continue
            gradient = self.received[part.last_sequence]
            own = _state_rows(self.grad_final_state, first, last)
            self._differentiate(first, last, gradient if own is None else gradient + own)
        for index, sums in zip((5, 6), self.parameter_sums, strict=True):
            gradient_of_parameter = self.gradients[index]
            if gradient_of_parameter is not None:
                gradient_of_parameter.copy_(torch.stack(sums).sum(0))
        return self.gradients


# Exchange and autograd ----------------------------------------------------------------------------------------------


def _exchange(pass_: ForwardPass | BackwardPass, group: Any) -> None:
    """The one collective of a direction; the work that needs nothing from others runs meanwhile.

    What was gathered, a payload of every rank, goes with the end of this function: the rest of the pass needs memory.
    """
    payload = pass_.payload
    gathered = payload.new_empty((dist.get_world_size(group) * payload.shape[0], *payload.shape[1:]))
    work: Any = dist.all_gather_into_tensor(gathered, payload, group=group, async_op=True)
    try:
        pass_.run_independent()
    finally:
        work.wait()  # also behind an exception: the buffers must outlive the exchange
    pass_.receive(gathered)


class _ContextParallelFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: Any,
        partition: Partition,
        chunk_indices: Tensor | None,
        output_final_state: bool,
        saves: bool,
        options: tuple[Any, ...],
        *inputs: Any,
    ) -> Any:
        pass_ = ForwardPass(partition, inputs, chunk_indices, output_final_state, options)
        _exchange(pass_, group)
        pass_.finish()
        if saves:
            q, k, *others = inputs
            if options[_USE_QK_L2NORM]:
                q = k = None
            transitions = pass_.transitions()
            ctx.merged, ctx.transitions = list(pass_.merged), list(transitions)
            ctx.save_for_backward(q, k, *others, *pass_.saved, *pass_.merged.values(), *transitions.values())
            ctx.set_materialize_grads(False)
            ctx.group, ctx.partition, ctx.options = group, partition, options
        return pass_.o, pass_.final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_final_state: Tensor | None) -> Any:
        tensors = list(ctx.saved_tensors)
        inputs, tensors = tensors[:NUM_DIFFERENTIABLE], tensors[NUM_DIFFERENTIABLE:]
        saved, tensors = tensors[:5], tensors[5:]
        merged = dict(zip(ctx.merged, tensors, strict=False))
        transitions = dict(zip(ctx.transitions, tensors[len(merged) :], strict=True))
        wanted = ctx.needs_input_grad[-NUM_DIFFERENTIABLE:]
        pass_ = BackwardPass(
            ctx.partition, tuple(inputs), tuple(saved), merged, transitions, grad_output, grad_final_state, wanted,
            ctx.options,
        )  # fmt: skip
        _exchange(pass_, ctx.group)
        gradients = pass_.finish()
        return *(None,) * (len(ctx.needs_input_grad) - NUM_DIFFERENTIABLE), *gradients


# Compiled graphs break here. torch.compiler.disable would import the compiler with this module.
@_disable_dynamo
def context_parallel(
    context: Any,
    inputs: OptionalTensors,
    chunk_indices: Tensor | None,
    output_final_state: bool,
    saves: bool,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None]:
    """The operator on this rank's tokens. `inputs` and `options` in the order of the registered operator."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "cp_context: torch.func's transforms (grad, vmap, ..) are not implemented with context parallelism; "
            "expected torch.autograd"
        )
    partition = Partition.of(context, dist.get_rank(context.group), dist.get_world_size(context.group))
    q, k, v, g, *others = inputs
    if g is None:
        assert v is not None
        g = _arguments.zero_gate(v)
    return _ContextParallelFunction.apply(  # type: ignore[no-any-return]
        context.group, partition, chunk_indices, output_final_state, saves, options, q, k, v, g, *others
    )
