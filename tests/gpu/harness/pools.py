"""What serving asks for: state pools that are updated in place, and checkpoints of states."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from harness.library import Shape
from harness.reference import INFINITY, TOLERANCE, Options, error, make_inputs, recurrence, to_device
from harness.runner import Runner

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OUTSIDE = (-1, -9, 1 << 31)  # slots that no pool has


def different(a: Tensor, b: Tensor) -> float:
    """How many elements differ; NaN is equal to NaN."""
    return float((a.nan_to_num(nan=12345.0) != b.nan_to_num(nan=12345.0)).sum())


def call(run: Runner, name: str, shape: Shape, t: dict[str, Tensor], o: Tensor, ht: Tensor | None, *,
         h0: Tensor | None = None, indices: Tensor | None = None, checkpoints: Tensor | None = None,
         starts: Tensor | None = None, every: int = 0) -> None:  # fmt: skip
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    arguments = [*(t.get(x) for x in names), h0, o, ht, *[None] * 5, run.cu_seqlens(shape)]
    arguments += [indices, checkpoints, starts]
    run.library.run(name, shape, arguments, (float(every),), kind=None if name == "recurrent_forward" else 0)


def make_pool(run: Runner, states: Tensor, slots: list[int], size: int, padding: int) -> Tensor:
    """The states in their slots, NaN between and beside them."""
    step = states[0].numel() + padding
    memory = torch.full((size * step + 2 * padding,), float("nan"), dtype=states.dtype, device=run.device)
    pool = memory.as_strided((size, *states.shape[1:]), (step, *states.stride()[1:]), padding)
    for n, slot in enumerate(slots):
        if 0 <= slot < size:
            pool[slot] = states[n]
    return pool


def in_place(run: Runner, name: str, shape: Shape, options: Options | None = None) -> None:
    """A pool updated in place gives the bits of separate states and leaves its other slots alone; so do two pools."""
    name = f"pool {name}"
    if not run.wanted(name):
        return
    try:
        t = to_device(make_inputs(shape, options or Options()), run.device)
        h0 = t.pop("h0")
        N, errors = shape.N, {}
        size = N + 3
        slots = [(3 * n + 2) % size if size % 3 else (2 * n + 1) % size for n in range(N)]
        assert len(set(slots)) == N
        missing = [n for n in range(N) if n % 4 == 1]
        slots = [-1 if n in missing else slot for n, slot in enumerate(slots)]
        kept = [n for n in range(N) if n not in missing]
        outside = (*OUTSIDE, size)
        empty = h0.clone()
        empty[missing] = 0.0

        def indices_of(turn: int, dtype: torch.dtype) -> Tensor:
            named = list(slots)
            for n in missing:
                named[n] = min(outside[(n // 4 + turn) % len(outside)], torch.iinfo(dtype).max)
            return torch.tensor(named, dtype=dtype, device=run.device)

        for function in ("forward", "recurrent_forward"):
            o = run.empty(shape.B, shape.T, shape.HV, shape.V, dtype=shape.dtype)
            ht = run.empty(*shape.state(N, shape.HV), dtype=h0.dtype)
            call(run, function, shape, t, o, ht, h0=empty)
            for wide in (False, True):
                pool = make_pool(run, h0, slots, size, 8 * wide)
                expected = pool.clone()
                for n in kept:
                    expected[slots[n]] = ht[n]
                indices = indices_of(2, torch.int64) if wide else indices_of(3, torch.int32)
                again = run.empty(*o.shape, dtype=shape.dtype)
                call(run, function, shape, t, again, pool, h0=pool, indices=indices)
                key = f"{function[0]}{32 << wide}"
                errors[f"{key}_o"] = different(again, o), 0.0
                errors[f"{key}_pool"] = different(pool, expected), 0.0
            target = run.empty(*shape.state(size, shape.HV), dtype=BF16)
            pool = make_pool(run, h0, slots, size, 0)
            before, expected = pool.clone(), target.clone()
            for n in kept:
                expected[slots[n]] = ht[n].to(BF16)
            call(run, function, shape, t, again, target, h0=pool, indices=indices_of(0, torch.int64))
            if h0.dtype == FP32:  # else rounded twice here
                errors[f"{function[0]}_target"] = different(target, expected), 0.0
            errors[f"{function[0]}_source"] = different(pool, before), 0.0
        run.report(name, errors)
    except Exception as exception:
        run.fail(name, exception)


def prefix(shape: Shape, t: dict[str, Tensor], n: int, length: int) -> tuple[Shape, dict[str, Tensor]]:
    """The first tokens of a sequence alone."""
    b, begin, _ = shape.ranges[n]
    tokens = ("q", "k", "v", "g", "beta")
    part = {name: x[b : b + 1, begin : begin + length] if name in tokens else x for name, x in t.items()}
    if "h0" in t:
        part["h0"] = t["h0"][n : n + 1]
    return dataclasses.replace(shape, B=1, T=length, offsets=None), part


def checkpoints(run: Runner, name: str, shape: Shape, every: int, options: Options | None = None,
                exact: bool = True) -> None:  # fmt: skip
    """Against the float64 recurrence of each prefix or, for long ones, against this backend's own final state of it."""
    name = f"checkpoints {name}"
    if not run.wanted(name):
        return
    try:
        inputs = make_inputs(shape, options or Options())
        t = to_device(inputs, run.device)
        counts = [(end - begin) // every for _, begin, end in shape.ranges]
        first = list(itertools.accumulate(counts, initial=0))
        expected = torch.zeros(*shape.state(first[-1], shape.HV), dtype=torch.float64)
        for n, count in enumerate(counts):
            for i in range(count):
                cut, part = prefix(shape, inputs if exact else t, n, (i + 1) * every)
                if exact:
                    _, state = recurrence(cut, {key: x.double() for key, x in part.items()})
                else:
                    _, state = run.forward(cut, Options(), part)
                    assert state is not None
                expected[first[n] + i] = state[0]
        errors = {}
        tolerance = TOLERANCE[shape.dtype]
        for function in ("forward", "recurrent_forward"):
            o = run.empty(shape.B, shape.T, shape.HV, shape.V, dtype=shape.dtype)
            ht = run.empty(*shape.state(shape.N, shape.HV), dtype=FP32)
            call(run, function, shape, t, o, ht, h0=t.get("h0"))
            limit = tolerance if function == "forward" else 1e-5 if exact else tolerance
            for placed in (False, True):
                # Placed: a row of a gap in front of each sequence's.
                rows = [first[n] + (n + 1) * placed for n in range(shape.N + 1)]
                starts = torch.tensor(rows, dtype=torch.int64, device=run.device) if placed else None
                target = run.empty(*shape.state(rows[-1] + 1, shape.HV), dtype=FP32)
                again, state = torch.full_like(o, float("nan")), torch.full_like(ht, float("nan"))
                call(
                    run,
                    function,
                    shape,
                    t,
                    again,
                    state,
                    h0=t.get("h0"),
                    checkpoints=target,
                    starts=starts,
                    every=every,
                )
                key = f"{function[0]}{int(placed)}"
                used = [rows[n] + i for n, count in enumerate(counts) for i in range(count)]
                errors[f"{key}"] = error(target[used], expected), limit
                gaps = [row for row in range(rows[-1] + 1) if row not in used]
                same = not different(again, o) and not different(state, ht) and bool(target[gaps].isnan().all())
                errors[f"{key}_rest"] = 0.0 if same else INFINITY, 0.0
        run.report(name, errors)
    except Exception as exception:
        run.fail(name, exception)


def small(run: Runner, K: int = 64, V: int = 64) -> None:
    """For every backend, also on the emulator."""
    flags = {"l2norm": True, "gate": True, "sigmoid": True, "neg_eigval": True, "v_first": True}
    in_place(run, "bf16", Shape(BF16, B=3, T=70, H=1, HV=2, K=K, V=V))
    packed = Shape(BF16, T=200, H=1, HV=2, K=K, V=V, offsets=[0, 70, 70, 135, 136, 190], **flags)
    in_place(run, "bf16 packed", packed)
    checkpoints(run, "bf16 64", Shape(BF16, B=2, T=200, H=1, HV=2, K=K, V=V), 64)
    packed = Shape(BF16, T=440, H=1, HV=1, K=K, V=V, offsets=[0, 128, 128, 191, 430], **flags)
    checkpoints(run, "bf16 128 packed", packed, 128)


def general(run: Runner) -> None:
    """What the general backend alone takes."""
    in_place(run, "fp32 K60", Shape(FP32, B=2, T=70, H=1, HV=2, K=60, V=100), Options(state_dtype=BF16))
    segments = Shape(FP32, T=800, C=16, K=32, V=40, offsets=[0, 5, 5, 700, 790], v_first=True)
    in_place(run, "fp32 segments packed", segments, Options(gate_scale=0.05))
    checkpoints(run, "fp32 segments packed", segments, 32, Options(gate_scale=0.05))
    checkpoints(run, "fp32 K256", Shape(FP32, T=140, K=256, V=40), 64)
    in_place(run, "bf16 wide", Shape(BF16, T=70, H=35, HV=140, K=128, V=100))
    checkpoints(run, "fp16 wide", Shape(FP16, T=70, H=70, HV=140, V=61), 64)


def segments(run: Runner) -> None:
    """On the Hopper backend few heads and long sequences run in segments: the first reads what the last one writes."""
    for gate_scale in (1.0, 1 / 256):
        options = Options(gate_scale=gate_scale)
        shape = Shape(BF16, B=2, T=4200, H=1, HV=2, K=128, V=128, v_first=gate_scale == 1.0)
        in_place(run, f"bf16 segments, gates * {gate_scale:g}", shape, options)
        checkpoints(run, f"bf16 segments, gates * {gate_scale:g}", shape, 1024, options, exact=False)
    packed = Shape(FP16, T=6300, H=1, HV=2, K=64, V=128, offsets=[0, 0, 4500, 4500, 4565, 4566, 6200])
    in_place(run, "fp16 segments packed", packed, Options(gate_scale=1 / 64))
    checkpoints(run, "fp16 segments packed", packed, 512, Options(gate_scale=1 / 64), exact=False)


def replay(run: Runner) -> None:
    """A captured call follows new slots, and new lengths with them."""
    shape = Shape(BF16, T=700, H=4, HV=8, K=128, V=128, offsets=[0, 60, 128, 700])
    t = to_device(make_inputs(shape, Options()), run.device)
    h0 = t.pop("h0")
    seqlens = torch.tensor(shape.offsets, dtype=torch.int32, device=run.device)
    indices = torch.tensor([3, 0, 1], device=run.device)
    pool = make_pool(run, h0, indices.tolist(), 5, 0)
    o, target = torch.empty_like(t["v"]), run.empty(8, 8, 128, 128, dtype=FP32)
    arguments = [*(t[name] for name in ("q", "k", "v", "g", "beta")), None, None, pool, o, pool, *[None] * 5, seqlens]
    plan = run.library.plan(shape)
    for name, kind in (("forward", 0), ("recurrent_forward", None)):
        prepared = run.library.prepared(name, plan, [*arguments, indices, target], (128.0,), kind=kind)
        prepared()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            prepared()
        other = dataclasses.replace(shape, offsets=[0, 130, 130, 700])
        slots = [2, -1, 4]
        pool.copy_(make_pool(run, h0, slots, 5, 0))
        expected_pool, expected_o = pool.clone(), torch.empty_like(o)
        expected = run.empty(*target.shape, dtype=FP32)
        call(run, name, other, t, expected_o, expected_pool, h0=expected_pool,
             indices=torch.tensor(slots, device=run.device), checkpoints=expected, every=128)  # fmt: skip
        target.fill_(float("nan"))
        seqlens.copy_(torch.tensor(other.offsets, dtype=torch.int32))
        indices.copy_(torch.tensor(slots))
        graph.replay()
        torch.cuda.synchronize()
        errors = {"o": (different(o, expected_o), 0.0), "pool": (different(pool, expected_pool), 0.0)}
        errors["checkpoints"] = (different(target, expected), 0.0)
        run.report(f"graph: {name} follows slots", errors)
        seqlens.copy_(torch.tensor(shape.offsets, dtype=torch.int32))
        indices.copy_(torch.tensor([3, 0, 1]))
    run.library.lib.cula_free_plan(plan)
