"""Processes that form a group of ranks, and what they run in it. One set of processes serves many tests."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from kcp import Rank
from support import make_inputs, offsets, output_gradients
from torch import Tensor

from cula.gdn import _native, chunk_gated_delta_rule
from cula.gdn.cp import build_cp_context
from cula.gdn.simulation import rank_tokens

# Sizes of the groups that one set of processes holds: their first ranks.
GROUP_SIZES = (1, 2, 3, 4, 8)


# The test's side ----------------------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


class WorkerFailure(Exception):
    pass


class Workers:
    """`call(world_size, name, ..)` runs a function of this module on the first ranks, and gives their results."""

    def __init__(self, count: int, timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")  # imports torch once for all
        context.set_forkserver_preload(["torch", "torch.distributed", "cula.gdn", "support", "cp_workers"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (rank, count, os.path.join(self.folder.name, "group"), timeout, there)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)

    def start(self, ranks: range, name: str, **arguments: Any) -> None:
        for rank in ranks:
            self.pipes[rank].send_bytes(pack((len(ranks), name, arguments)))

    def result(self, rank: int, patience: float = 100.0) -> Any:
        """What the rank returns, or `WorkerFailure` with its traceback."""
        good, value = self._outcome(rank, patience)
        if not good:
            raise WorkerFailure(f"rank {rank}: {value}")
        return value

    def _outcome(self, rank: int, patience: float) -> tuple[bool, Any]:
        if not self.pipes[rank].poll(patience):
            return False, f"nothing for {patience} s"
        return unpack(self.pipes[rank].recv_bytes())

    def call(self, world_size: int, name: str, **arguments: Any) -> list[Any]:
        self.start(range(world_size), name, **arguments)
        outcomes = [self._outcome(rank, 100.0) for rank in range(world_size)]  # of all, or the next call would get them
        failures = [f"rank {rank}: {value}" for rank, (good, value) in enumerate(outcomes) if not good]
        if failures:
            raise WorkerFailure("\n".join(failures))
        return [value for _, value in outcomes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # ends the loop in _serve
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


# The workers' side --------------------------------------------------------------------------------------------------


def _serve(rank: int, count: int, rendezvous: str, timeout: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count, timeout=patience)
    groups = {size: dist.new_group(list(range(size)), timeout=patience) for size in GROUP_SIZES if size <= count}
    try:
        while True:
            world_size, name, arguments = unpack(pipe.recv_bytes())
            pipe.send_bytes(pack(_outcome(globals()[name], groups[world_size], arguments)))
    except (EOFError, ConnectionError):  # the test is over
        return


def _outcome(function: Any, group: Any, arguments: dict[str, Any]) -> tuple[bool, Any]:
    try:
        return True, function(group, **arguments)
    except Exception:
        return False, traceback.format_exc()


class Collectives:
    """Notes the exchanges and what the library computes around them, and refuses every other collective."""

    OTHERS = ("all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter_tensor", "all_to_all", "send", "recv",
              "isend", "irecv", "barrier", "gather", "scatter", "all_gather_object")  # fmt: skip

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.events: list[str] = []

    def __enter__(self) -> Collectives:
        self.real = {name: getattr(dist, name) for name in (*self.OTHERS, "all_gather_into_tensor")}
        for name in self.OTHERS:
            setattr(dist, name, self._refuse)
        dist.all_gather_into_tensor = self._exchange
        self.computations = {name: getattr(_native, name) for name in ("cp_advance", "cp_backward")}
        for name, function in self.computations.items():
            setattr(_native, name, self._noted(name, function))
        return self

    def _noted(self, name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.events.append(name)
            return function(*arguments)

        return call

    def __exit__(self, *_: Any) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)
        for name, function in self.computations.items():
            setattr(_native, name, function)

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a collective that is not part of the protocol")

    def _exchange(self, output: Tensor, payload: Tensor, group: Any, async_op: bool) -> Any:
        assert async_op
        self.bytes.append(payload.numel() * payload.element_size())
        self.events.append("start")
        work = self.real["all_gather_into_tensor"](output, payload, group=group, async_op=True)
        collectives = self

        class Work:
            def wait(self) -> None:
                collectives.events.append("wait")
                work.wait()

        return Work()


def whole_problem(
    lengths: list[int], flags: dict[str, Any], replace: dict[str, Tensor], **sizes: Any
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs of the whole stream, and the gradients of o and the final state."""
    inputs = {**make_inputs(lengths=lengths, flags=flags, **sizes), **replace}
    return inputs, *output_gradients(inputs, flags)


def make_context(group: Any, cu_seqlens: Tensor, layout: str, rank_lengths: list[int] | None) -> Any:
    return build_cp_context(cu_seqlens, group, layout=layout, rank_lengths=rank_lengths)


def padded(rows: Tensor, padding: int) -> Tensor:
    """With NaN for tokens that no result may depend on."""
    return torch.cat([rows, rows.new_full((1, padding, *rows.shape[2:]), float("nan"))], dim=1)


def own_share(
    group: Any, inputs: dict[str, Tensor], context: Any, layout: str, rank_lengths: list[int] | None, padding: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """This rank's inputs, `padding` NaN tokens behind them, and which tokens of the stream they are."""
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens = rank_tokens(int(inputs["cu_seqlens"][-1]), world_size, rank, layout, rank_lengths)
    share = {}
    for name, x in inputs.items():
        if name in ("q", "k", "v", "g", "beta"):
            share[name] = padded(x[:, tokens], padding)
        elif name == "initial_state":
            share[name] = x[list(context.sequence_ids)]
        elif name != "cu_seqlens":
            share[name] = x
    return share, tokens


def run_rank(
    group: Any,
    *,
    lengths: list[int],
    flags: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    layout: str = "contiguous",
    rank_lengths: list[int] | None = None,
    replace: dict[str, Tensor] | None = None,
    padding: int = 0,
    states: bool = False,
    fla_context: bool = False,
    wrapper: str = "none",
    **sizes: Any,
) -> dict[str, Any]:
    """Forward and backward on this rank, its share found and cut here. With `states`, states go in and out too."""
    flags, options, replace = flags or {}, options or {}, replace or {}
    inputs, do, dht = whole_problem(lengths, flags, replace, state=states, **sizes)
    context = make_context(group, inputs["cu_seqlens"], layout, rank_lengths)
    share, tokens = own_share(group, inputs, context, layout, rank_lengths, padding)
    ids = list(context.sequence_ids)
    if fla_context:  # an object of another class, with FLA's fields alone
        fields = {name: x for name, x in vars(context).items() if name not in ("sequence_ids", "rank_lengths")}
        context = type("FLACPContext", (), fields)()
    leaves = {name: x.detach().clone().requires_grad_() for name, x in share.items()}

    def call(*values: Tensor) -> Any:
        arguments = dict(zip(leaves, values, strict=True))
        return chunk_gated_delta_rule(
            **{"g": None, **arguments}, cp_context=context, output_final_state=states, **flags, **options
        )

    if wrapper == "compile":
        call = torch.compile(call, backend="eager")
    with Collectives() as collectives:
        if wrapper == "checkpoint":
            from torch.utils.checkpoint import checkpoint

            o, final_state = checkpoint(call, *leaves.values(), use_reentrant=False)
        else:
            o, final_state = call(*leaves.values())
        forward_collectives = list(collectives.bytes)
        upstream = padded(do[:, tokens], padding)
        outputs, gradients = [o], [upstream]
        if final_state is not None:
            # The gradient of a sequence's final state belongs to the rank where the sequence ends.
            ends = _ends_here(inputs["cu_seqlens"], tokens, ids, context.cu_seqlens)
            local_dht = torch.stack([dht[n] * end for n, end in zip(ids, ends, strict=True)]) if ids else dht[:0]
            outputs.append(final_state)
            gradients.append(local_dht)
        found = torch.autograd.grad(outputs, list(leaves.values()), gradients, materialize_grads=True)
    result: dict[str, Any] = {
        "tokens": tokens,
        "ids": ids,
        "o": o.detach(),
        "forward_bytes": forward_collectives,
        "bytes": collectives.bytes,
        "events": collectives.events,
        **{f"d{name}": x for name, x in zip(leaves, found, strict=True)},
    }
    if final_state is not None:
        result |= {"final_state": final_state.detach(), "ends": ends}
    return result


def _ends_here(cu_seqlens: Tensor, tokens: Tensor, ids: list[int], local_offsets: Tensor) -> list[bool]:
    """For each local sequence, whether its last token here is the last one of the sequence. Zigzag may have two."""
    ends = local_offsets[1:].tolist()
    return [end > 0 and int(tokens[end - 1]) == int(cu_seqlens[n + 1]) - 1 for n, end in zip(ids, ends, strict=True)]


def mixed_rank(
    group: Any, *, plain_ranks: list[int], lengths: list[int], layout: str, chunk_size: int, **sizes: Any
) -> dict[str, Any]:
    """Some ranks run the library, others the formulas of kcp.py; none knows which."""
    rank = dist.get_rank(group)
    if rank not in plain_ranks:
        return run_rank(group, lengths=lengths, layout=layout, options={"chunk_size": chunk_size}, **sizes)
    inputs, do, _ = whole_problem(lengths, {}, {}, state=False, **sizes)
    world_size = dist.get_world_size(group)
    tokens = rank_tokens(sum(lengths), world_size, rank, layout)

    def gather(payload: Tensor) -> Tensor:
        out = payload.new_empty((world_size, *payload.shape))
        dist.all_gather_into_tensor(out.flatten(0, 1), payload.contiguous(), group=group)
        return out

    plain = Rank(inputs["cu_seqlens"].tolist(), world_size, rank, layout, gather)
    o = plain.forward(*(inputs[n][:, tokens] for n in ("q", "k", "v", "g", "beta")), chunk_size=chunk_size)
    gradients = {name: x.to(inputs[name[1:]].dtype) for name, x in plain.backward(do[:, tokens]).items()}
    return {"tokens": tokens, "ids": [], "o": o, **gradients}


def two_contexts(group: Any, *, first: list[int], second: list[int], **sizes: Any) -> list[dict[str, Any]]:
    """Forward A, forward B, backward A, backward B."""
    runs = []
    for lengths in (first, second):
        inputs, do, _ = whole_problem(lengths, {}, {}, state=False, **sizes)
        context = make_context(group, inputs["cu_seqlens"], "contiguous", None)
        share, tokens = own_share(group, inputs, context, "contiguous", None)
        leaves = {name: x.detach().clone().requires_grad_() for name, x in share.items()}
        o, _ = chunk_gated_delta_rule(**leaves, cp_context=context)
        runs.append((leaves, o, do[:, tokens], tokens))
    results = []
    for leaves, o, do, tokens in runs:
        found = torch.autograd.grad(o, list(leaves.values()), do)
        results.append({"tokens": tokens, "ids": [], "o": o.detach()} | {
            f"d{name}": x for name, x in zip(leaves, found, strict=True)
        })  # fmt: skip
    return results


def running_states(group: Any, *, tokens: int, grad_states: Tensor, **sizes: Any) -> dict[str, Any]:
    """One sequence; the loss has the state behind each rank's last token in it, with these gradients by rank."""
    inputs, do, _ = whole_problem([tokens], {}, {}, state=True, **sizes)
    context = make_context(group, inputs["cu_seqlens"], "contiguous", None)
    share, own = own_share(group, inputs, context, "contiguous", None)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in share.items()}
    o, state = chunk_gated_delta_rule(**leaves, cp_context=context, output_final_state=True)
    gradients = [do[:, own], grad_states[dist.get_rank(group)]]
    found = torch.autograd.grad([o, state], list(leaves.values()), gradients)
    return {"tokens": own, "ids": [0], **{f"d{name}": x for name, x in zip(leaves, found, strict=True)}}


def refusals(group: Any) -> list[str]:
    """What wrong calls raise: all before the exchange, so that no rank waits for another."""
    lengths = [96, 32]
    inputs, *_ = whole_problem(lengths, {}, {}, state=False, K=16, V=16)
    context = make_context(group, inputs["cu_seqlens"], "contiguous", None)
    share, _ = own_share(group, inputs, context, "contiguous", None)
    N = len(context.sequence_ids)
    without = type("Context", (), {"group": group, "cu_seqlens": None, "cu_seqlens_cpu": None})()
    foreign = make_context(group, inputs["cu_seqlens"], "contiguous", None)
    foreign.pre_num_ranks, foreign.post_num_ranks = 5, 5
    striped = make_context(group, inputs["cu_seqlens"], "contiguous", None)
    striped.layout = "striped"
    half = {name: x[:, :32] for name, x in share.items()}  # of the first document, as if cut by documents
    double = {name: x.repeat(1, 2, *(1,) * (x.dim() - 2)) for name, x in share.items()}
    two = {name: x.reshape(2, 32, *x.shape[2:]) for name, x in share.items()}
    calls: list[dict[str, Any]] = [
        {**share, "cp_context": without},
        {**half, "cp_context": context},
        {**double, "cp_context": context},
        {**share, "cp_context": foreign},
        {**share, "cp_context": striped},
        {**share, "cp_context": context, "initial_state": torch.zeros(N + 1, 2, 16, 16)},
        {**share, "cp_context": context, "chunk_indices": torch.zeros(7, 2, dtype=torch.int64)},
        {**two, "cp_context": make_context(group, offsets([64]), "contiguous", None)},
    ]

    def outcome(arguments: dict[str, Any]) -> str:
        try:
            chunk_gated_delta_rule(**arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return [outcome(arguments) for arguments in calls]


def without_group(group: Any) -> dict[str, Tensor]:
    """A context without a group: the local sequences stand alone."""
    inputs, *_ = whole_problem([70, 58], {}, {}, state=False, K=16, V=16)
    context = make_context(group, inputs["cu_seqlens"], "contiguous", None)
    share, _ = own_share(group, inputs, context, "contiguous", None)
    context.group = None
    with Collectives() as collectives:
        o, _ = chunk_gated_delta_rule(**share, cp_context=context)
    assert not collectives.bytes
    return {"o": o, "expected": chunk_gated_delta_rule(**share, cu_seqlens=context.cu_seqlens)[0]}


def leave(group: Any, *, rank: int, how: str, when: str) -> float:
    """One rank does not take part in an exchange, by dying or by doing something else; the others' time to notice."""
    inputs, *_ = whole_problem([96], {}, {}, state=False, K=16, V=16)
    context = make_context(group, inputs["cu_seqlens"], "contiguous", None)
    share, _ = own_share(group, inputs, context, "contiguous", None)
    leaves = {name: x.requires_grad_(when == "backward") for name, x in share.items()}
    o = chunk_gated_delta_rule(**leaves, cp_context=context)[0] if when == "backward" else None
    if dist.get_rank(group) == rank:
        if how == "dies":
            os._exit(1)
        return 0.0
    start = time.monotonic()
    try:
        if o is None:
            chunk_gated_delta_rule(**leaves, cp_context=context)
        else:
            o.sum().backward()
    except RuntimeError:
        return time.monotonic() - start
    raise AssertionError("the exchange ended without a rank")
