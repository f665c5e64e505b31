"""What is checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from harness.library import Shape, Tensor
from harness.reference import INFINITY, Options, error, make_inputs, recurrence, to_device
from harness.runner import Runner

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def small_checks(run: Runner, backward: bool) -> None:
    """Every dtype, flag, and kind of shape; small enough for the emulator."""
    for dtype in (FP32, BF16, FP16):
        d = NAMES[dtype]
        run.stages(f"stages {d}", Shape(dtype, T=75, H=1, HV=2), backward=backward)
        run.stages(
            f"stages {d} K96 V40", Shape(dtype, B=2, T=67, H=1, HV=1, K=96, V=40, v_first=True), backward=backward
        )
        run.stages(
            f"stages {d} packed resets",
            Shape(dtype, T=140, offsets=[0, 37, 37, 130]),
            resets=(3, 4, 90),
            backward=backward,
        )
        run.operator(f"op {d}", Shape(dtype, T=130, H=1, HV=2), backward=backward)
        run.operator(f"op {d} K128 V128", Shape(dtype, T=70, K=128, V=128), backward=backward)
        run.operator(f"op {d} K256 V40", Shape(dtype, T=70, K=256, V=40), backward=backward)
        run.operator(
            f"op {d} all flags packed",
            Shape(dtype, T=150, H=1, HV=3, K=60, V=100, offsets=[0, 1, 64, 64, 140], l2norm=True, gate=True,
                  sigmoid=True, neg_eigval=True, v_first=True),
            backward=backward, factor=1.5,
        )  # fmt: skip
        run.operator(f"op {d} resets", Shape(dtype, T=100, H=1, HV=2), Options(resets=(37, 38, 64)), backward=backward)
    run.stages("stages bf16 no gate C32", Shape(BF16, T=75, C=32), with_gate=False, backward=backward)
    run.stages("stages fp32 K200", Shape(FP32, T=66, K=200, V=24), backward=backward)
    run.operator("op bf16 C16", Shape(BF16, T=75, C=16), backward=backward)
    run.operator(
        "op bf16 no states", Shape(BF16, T=66), Options(initial_state=False, final_state=False), backward=backward
    )
    run.operator("op bf16 strided", Shape(BF16, B=2, T=66, H=2, HV=2), Options(strided=True), backward=backward)
    run.operator(
        "op bf16 unaligned, expanded do",
        Shape(BF16, T=66, K=24, V=17),
        Options(unaligned=True, expanded_do=True),
        backward=backward,
    )
    run.operator(
        "op bf16 all bf16",
        Shape(BF16, T=66),
        Options(gate_dtype=BF16, beta_dtype=BF16, state_dtype=BF16),
        backward=backward,
    )
    for gate in (-2.0, -20.0, -200.0, -1e4):
        run.operator(f"op fp32 gate {gate:g}", Shape(FP32, T=70), Options(constant_gate=gate), backward=backward)
    run.operator("op fp32 strong gates", Shape(FP32, T=128), Options(gate_scale=100.0), backward=backward)
    if backward:
        guarded(run, "masks", masks)
    # Few units and many chunks: sequences run in segments.
    weak = Options(gate_scale=0.05)
    run.operator("op fp32 segments", Shape(FP32, T=640, C=16, H=1, HV=2), backward=backward)
    run.operator(
        "op fp32 segments packed",
        Shape(FP32, T=800, C=16, K=32, V=40, offsets=[0, 5, 5, 700, 790], v_first=True),
        weak,
        backward=backward,
    )
    run.operator("op fp32 segments K200", Shape(FP32, T=640, C=16, K=200, V=24), weak, backward=backward)
    run.operator("op bf16 segments K128", Shape(BF16, T=640, C=16, K=128, V=128), weak, backward=backward)
    # Many units: blocks of 64 value columns.
    run.operator("op bf16 wide K128", Shape(BF16, T=70, H=35, HV=140, K=128, V=100), backward=backward)
    run.operator("op fp16 wide", Shape(FP16, T=70, H=70, HV=140, V=61), backward=backward)
    if backward:
        flags = {"l2norm": True, "gate": True, "sigmoid": True}
        run.unwanted("op bf16 gradients one by one", Shape(BF16, T=70, H=1, HV=2, **flags))
        run.unwanted("op bf16 gradients one by one, segments", Shape(BF16, T=640, C=16, H=1, HV=2))
        run.stages("stages fp32 1/32 heads", Shape(FP32, T=20, H=1, HV=32, K=72, V=24))
    run.operator("op bf16 no tokens", Shape(BF16, T=0), backward=backward)
    run.operator("op bf16 one token", Shape(BF16, T=1, H=1, HV=2), backward=backward)


def masks(run: Runner) -> None:
    """A gate that leaves nothing, as masks are written: the same bits as a reset, whichever number it is."""
    shape = Shape(FP32, T=70, H=1, HV=2)
    t = to_device(make_inputs(shape, Options()), run.device)
    results = []
    for lowest in (-INFINITY, -1e3, -1e12, torch.finfo(torch.float32).min):
        t["g"][0, 5] = lowest
        saved = run.saved(shape)
        o, ht = run.forward(shape, Options(), t, saved=saved)
        assert ht is not None
        results.append([o, ht, *run.backward(shape, Options(), t, saved).values()])
    different = sum(not torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    run.report("masks: lowest gates are resets", {"different": (float(different), 0.0)})


def sanitizer_checks(run: Runner) -> None:
    """Every kernel once, as small as it gets."""
    flags = {"l2norm": True, "gate": True, "sigmoid": True, "v_first": True}
    run.operator("op bf16 packed", Shape(BF16, T=150, H=1, HV=2, K=64, V=64, offsets=[0, 1, 64, 64, 140], **flags))
    run.operator("op bf16 segments", Shape(BF16, T=640, C=16, K=128, V=64), Options(gate_scale=0.05))
    run.operator("op bf16 wide", Shape(BF16, T=66, H=70, HV=140, K=64, V=64))
    run.operator("op bf16 wide K128", Shape(BF16, T=66, H=70, HV=140, K=128, V=64))
    run.operator("op bf16 K256", Shape(BF16, T=70, K=256, V=40))
    run.operator("op fp32", Shape(FP32, T=70, H=1, HV=2, V=17))
    run.stages("stages bf16", Shape(BF16, T=75, H=1, HV=2))
    run.stages("stages fp32 K200", Shape(FP32, T=66, K=200, V=24))


def large_checks(run: Runner) -> None:
    """More shapes, for a GPU."""
    for dtype in (BF16, FP16, FP32):
        d = NAMES[dtype]
        for K, V in ((128, 128), (64, 64), (256, 512), (100, 60), (192, 96), (8, 256)):
            run.operator(f"op {d} {K}x{V}", Shape(dtype, B=2, T=300, H=2, HV=4, K=K, V=V))
        run.operator(f"op {d} long", Shape(dtype, T=2100, H=1, HV=2, K=128, V=128), Options(gate_scale=1 / 16))
        run.operator(f"op {d} many heads", Shape(dtype, B=2, T=130, H=16, HV=64, K=128, V=128))
        run.operator(
            f"op {d} packed", Shape(dtype, T=600, H=2, HV=6, K=128, V=128, offsets=[0, 15, 100, 300, 300, 595])
        )
        run.operator(f"op {d} layer", Shape(dtype, B=1, T=260, H=2, HV=4, K=256, V=512, l2norm=True, gate=True,
                                            sigmoid=True, v_first=True))  # fmt: skip
    run.operator("op fp32 wide", Shape(FP32, T=70, H=70, HV=140))
    many = [16 * i for i in range(301)]
    run.operator("op bf16 300 documents", Shape(BF16, T=many[-1], H=4, HV=4, K=32, V=32, offsets=many))


# Relative L2 errors of FLA 0.6.0 at the shape of `against_baseline`, on an H200.
BASELINE = {"o": 3.97e-3, "ht": 3.71e-3, "dq": 4.31e-3, "dk": 5.71e-3, "dv": 3.64e-3, "dbeta": 4.10e-3, "dg": 4.29e-3,
            "dh0": 2.31e-3}  # fmt: skip


def against_baseline(run: Runner) -> None:
    """Errors at or below the baseline's own, tensor by tensor."""
    shape = Shape(BF16, T=1024, H=2, HV=4, K=128, V=128)
    options = Options(gate_scale=1 / 16)
    t = to_device(make_inputs(shape, options), run.device)
    exact = {key: x.double().requires_grad_(key not in ("do", "dht")) for key, x in t.items()}
    o, ht = recurrence(shape, exact)
    names = ["q", "k", "v", "g", "beta", "h0"]
    gradients = torch.autograd.grad((o * exact["do"]).sum() + (ht * exact["dht"]).sum(), [exact[x] for x in names])
    saved = run.saved(shape)
    actual_o, actual_ht = run.forward(shape, options, t, saved=saved)
    actual = run.backward(shape, options, t, saved)
    assert actual_ht is not None
    errors = {"o": error(actual_o, o), "ht": error(actual_ht, ht)}
    errors |= {f"d{name}": error(actual[name], gradient) for name, gradient in zip(names, gradients, strict=True)}
    run.report("errors at most FLA's", {name: (value, BASELINE[name]) for name, value in errors.items()})


REPEATS = 1000
# Packed, without and with segments; whole sequences; the general backend's sizes, in fp32 too.
REPEATED = {
    "packed": Shape(BF16, T=700, H=4, HV=8, K=128, V=128, offsets=[0, 60, 128, 700]),
    "segments": Shape(BF16, T=4200, H=1, HV=2, K=128, V=128),
    "many heads": Shape(BF16, T=300, H=16, HV=32, K=128, V=128, l2norm=True, gate=True, sigmoid=True),
    "K64": Shape(FP16, B=2, T=500, H=4, HV=4, K=64, V=64),
}
REPEATED_GENERAL = {
    "K256": Shape(BF16, T=500, H=2, HV=2, K=256, V=512),
    "fp32": Shape(FP32, T=300, H=2, HV=4, K=64, V=64),
}


def repeats(run: Runner, name: str, shape: Shape) -> None:
    """Forward and backward over and over, each call right behind the one before."""
    options = Options(gate_scale=1 / 16)
    t = to_device(make_inputs(shape, options), run.device)
    saved = run.saved(shape)
    arguments, o, ht = run.forward_arguments(shape, options, t, saved)
    backward_arguments, gradients = run.backward_arguments(shape, t, saved)
    plan = run.library.plan(shape)
    forward = run.library.prepared("forward", plan, arguments, kind=1)
    backward = run.library.prepared("backward", plan, backward_arguments, kind=2)
    results = [o, ht, *gradients.values(), *(x for x in saved if x is not None)]
    first: list[Tensor] = []
    different = torch.zeros((), device=run.device)  # read once, so that nothing waits in between
    for _ in range(REPEATS):
        for x in results:
            x.fill_(float("nan"))
        forward()
        backward()
        if first:
            different += torch.stack([(a != b).any() for a, b in zip(first, results, strict=True)]).any()
        else:
            first = [x.clone() for x in results]
    finite = all(bool(torch.isfinite(x).all()) for x in first)
    run.library.lib.cula_free_plan(plan)
    run.report(f"bits: {REPEATS} repeats, {name}", {"different": (different.item() if finite else INFINITY, 0.0)})


def bits(run: Runner) -> None:
    """The same bits every time, whatever runs beside; replay of a captured graph follows cu_seqlens."""
    for name, shape in (REPEATED | (REPEATED_GENERAL if run.library.backend == "cuda" else {})).items():
        repeats(run, name, shape)

    shape = REPEATED["packed"]
    t = to_device(make_inputs(shape, Options()), run.device)
    saved = run.saved(shape)
    first = run.forward(shape, Options(), t, saved=saved)
    seqlens = torch.tensor(shape.offsets, dtype=torch.int32, device=run.device)
    o, ht = torch.empty_like(first[0]), torch.empty_like(first[1])
    arguments = [*(t[name] for name in ("q", "k", "v", "g", "beta")), None, None, t["h0"], o, ht, *saved, seqlens]
    plan = run.library.plan(shape)
    call = run.library.prepared("forward", plan, arguments, kind=1)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    other = dataclasses.replace(shape, offsets=[0, 100, 128, 700])
    expected = run.forward(other, Options(), t)
    seqlens.copy_(torch.tensor(other.offsets, dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    same = torch.equal(o, expected[0]) and torch.equal(ht, expected[1])
    run.report("graph: replay follows cu_seqlens", {"different": (0.0 if same else INFINITY, 0.0)})


def alone(run: Runner, name: str, shape: Shape, options: Options) -> None:
    """With batch_invariant, each packed sequence has the bits that it has by itself."""
    shape = dataclasses.replace(shape, batch_invariant=True)
    t = to_device(make_inputs(shape, options), run.device)

    def results(shape: Shape, t: dict[str, Tensor]) -> dict[str, Tensor]:
        saved = run.saved(shape)
        o, ht = run.forward(shape, options, t, saved=saved)
        assert ht is not None
        gradients = run.backward(shape, options, t, saved)
        return {"o": o, "ht": ht, **{name: x for name, x in gradients.items() if name not in ("A_log", "dt_bias")}}

    together = results(shape, t)
    different = dict.fromkeys(together, 0)
    for n, (_, begin, end) in enumerate(shape.ranges):

        def part(name: str, x: Tensor, n: int = n, begin: int = begin, end: int = end) -> Tensor:
            if name in ("A_log", "dt_bias"):
                return x
            return x[n : n + 1] if name in ("h0", "ht", "dht") else x[:, begin:end].contiguous()

        own = dataclasses.replace(shape, T=end - begin, offsets=None)
        expected = results(own, {name: part(name, x) for name, x in t.items()})
        for what, x in together.items():
            different[what] += not torch.equal(part(what, x), expected[what])
    run.report(f"alone: {name}", {what: (float(count), 0.0) for what, count in different.items()})


def batch_invariance(run: Runner) -> None:
    """Sequences that would be cut by themselves, or not, beside others."""
    weak = Options(gate_scale=1 / 64)
    flags = {"l2norm": True, "gate": True, "sigmoid": True}
    alone(run, "1/2 heads", Shape(BF16, T=6400, H=1, HV=2, K=128, V=128, offsets=[0, 0, 4500, 4565, 6300]), weak)
    alone(run, "all flags", Shape(FP16, T=3000, H=1, HV=2, K=64, V=64, offsets=[0, 130, 2999], **flags), weak)
    alone(run, "64 heads", Shape(BF16, T=500, H=16, HV=64, K=128, V=128, offsets=[0, 64, 430]), weak)


def guarded(run: Runner, name: str, check: Callable[[Runner], None]) -> None:
    if not run.wanted(name):
        return
    try:
        check(run)
    except Exception as exception:
        run.fail(name, exception)
