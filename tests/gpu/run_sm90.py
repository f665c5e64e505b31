"""Checks the Hopper backend against float64 on an H100 or H200, and times it.

    python run_sm90.py --library build/libcula_gdn_test.so [--only NAME] [--no-timing | --no-checks]
    python run_sm90.py --library build/libemulated.so --emulated     checks of backward, on the CPU

Prints one line a check and ends with a status other than 0 if any failed. The checks themselves are run_cuda.py's; what
differs is the backend, and the shapes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable

import torch
from harness import pools
from harness.checks import BF16, FP16, NAMES, against_baseline, alone, batch_invariance, bits, guarded
from harness.chunked import chunked
from harness.library import Library, LibraryError, ScheduleOptions, Shape, Tensor
from harness.reference import INFINITY, TOLERANCE, Options, error, make_inputs, recurrence, to_device
from harness.runner import Runner
from harness.timing import milliseconds


def shapes(run: Runner) -> None:
    for dtype in (BF16, FP16):
        d = NAMES[dtype]
        for K, V in itertools.product((64, 128), (64, 128)):
            run.operator(f"op {d} {K}x{V}", Shape(dtype, B=2, T=300, H=2, HV=4, K=K, V=V))
        for T in (0, 1, 63, 64, 65, 128, 257):
            run.operator(f"op {d} T={T}", Shape(dtype, T=T, H=1, HV=2, K=128, V=128))
        for K, V in ((128, 128), (64, 128), (128, 64)):
            run.operator(
                f"op {d} all flags packed {K}x{V}",
                Shape(dtype, T=400, H=2, HV=6, K=K, V=V, offsets=[0, 1, 64, 64, 140, 340], l2norm=True, gate=True,
                      sigmoid=True, neg_eigval=True, v_first=True),
                factor=1.5,
            )  # fmt: skip
        run.operator(
            f"op {d} packed", Shape(dtype, T=600, H=2, HV=6, K=128, V=128, offsets=[0, 15, 100, 300, 300, 595])
        )
        run.operator(
            f"op {d} resets", Shape(dtype, T=200, H=1, HV=2, K=128, V=128), Options(resets=(0, 37, 38, 64, 127, 190))
        )
        for gate in (-2.0, -20.0, -200.0, -1e4):
            run.operator(f"op {d} gate {gate:g}", Shape(dtype, T=150, HV=2, K=128, V=128), Options(constant_gate=gate))
        run.operator(f"op {d} strong gates", Shape(dtype, T=256, K=128, V=128), Options(gate_scale=100.0))
        run.operator(f"op {d} no decay", Shape(dtype, T=256, K=128, V=128), Options(constant_gate=0.0), factor=1.5)
        for H, HV in ((1, 1), (3, 3), (5, 10), (2, 6), (1, 5), (3, 24)):
            run.operator(f"op {d} {H}/{HV} heads", Shape(dtype, T=130, H=H, HV=HV, K=128, V=128))
        run.operator(f"op {d} many heads", Shape(dtype, B=2, T=130, H=16, HV=64, K=128, V=128))
        run.operator(f"op {d} small betas", Shape(dtype, T=300, HV=2, K=128, V=128), Options(small_betas=True))
        for scale in (-0.3, 1.0):
            run.operator(f"op {d} scale {scale}", Shape(dtype, T=130, K=128, V=128, scale=scale))
        for state in (torch.float64, torch.float16, torch.bfloat16):
            run.operator(
                f"op {d} state {state}"[: 40 + len(d)], Shape(dtype, T=130, HV=2, K=128, V=128),
                Options(state_dtype=state, gate_dtype=BF16, beta_dtype=BF16),
            )  # fmt: skip
        run.operator(
            f"op {d} no states", Shape(dtype, T=66, K=128, V=128), Options(initial_state=False, final_state=False)
        )
        run.operator(f"op {d} strided", Shape(dtype, B=2, T=66, H=2, HV=2, K=128, V=128), Options(strided=True))
        run.operator(f"op {d} unaligned", Shape(dtype, T=66, K=128, V=128), Options(unaligned=True))
    many = [16 * i for i in range(301)]
    run.operator("op bf16 300 documents", Shape(BF16, T=many[-1], H=4, HV=4, K=64, V=64, offsets=many))


def hidden_tokens(run: Runner) -> None:
    """NaN in the tokens behind the last packed sequence, and in the next sequence, reaches no output."""
    shape = Shape(BF16, T=200, H=1, HV=2, K=128, V=128, offsets=[0, 30, 130])
    t = make_inputs(shape, Options())
    expected_o, expected_ht = recurrence(shape, {key: x.double() for key, x in t.items()})
    for name in ("q", "k", "v"):
        t[name][:, 130:] = float("nan")
    t = to_device(t, run.device)
    o, ht = run.forward(shape, Options(), t)
    run.report(
        "hidden tokens: NaN in padding", {"o": (error(o, expected_o), 1e-2), "ht": (error(ht, expected_ht), 1e-2)}
    )
    t["v"][:, 30:130] = float("nan")
    o, ht = run.forward(shape, Options(), t)
    errors = {"o": (error(o[:, :30], expected_o[:, :30]), 1e-2), "ht": (error(ht[0], expected_ht[0]), 1e-2)}
    run.report("hidden tokens: NaN in the next sequence", errors)


def segments(run: Runner) -> None:
    """Few heads and long sequences, which run in segments; from gates that forget within one to none at all."""

    def check(name: str, shape: Shape, options: Options) -> None:
        if "segments of" not in run.library.describe(shape):
            run.report(f"segments {name}", {"not segmented": (INFINITY, 0.0)})
        run.operator(f"segments {name}", shape, options, backward=False)

    for gate_scale in (1.0, 1 / 16, 1 / 256, 0.0):
        options = Options(gate_scale=gate_scale, resets=(700, 701) if gate_scale != 0 else ())
        check(f"bf16 gates * {gate_scale:g}", Shape(BF16, T=4333, H=1, HV=2, K=128, V=128), options)
    for K, V in ((64, 64), (64, 128), (128, 64)):
        check(f"fp16 {K}x{V}", Shape(FP16, T=4333, H=1, HV=2, K=K, V=V, l2norm=True), Options(gate_scale=1 / 256))
    check(
        "bf16 packed",
        Shape(BF16, T=6300, H=1, HV=2, K=128, V=128, offsets=[0, 0, 4500, 4500, 4565, 4566, 6200], v_first=True),
        Options(gate_scale=1 / 64, state_dtype=BF16),
    )
    check("fp16 batch", Shape(FP16, B=2, T=4200, H=1, HV=1, K=128, V=128), Options(gate_scale=1 / 64))


def long_sequence(run: Runner) -> None:
    """The same tokens through the general backend and through this one, 32768 of them."""
    for gate_scale in (1 / 16, 1.0, 1 / 1024):
        shape = Shape(BF16, T=32768, H=1, HV=2, K=128, V=128)
        options = Options(gate_scale=gate_scale)
        t = to_device(make_inputs(shape, options), run.device)
        o, ht = run.forward(shape, options, t)
        run.library.backend = "cuda"
        try:
            expected_o, expected_ht = run.forward(shape, options, t)
        finally:
            run.library.backend = "sm90"
        errors = {"o": (error(o, expected_o), 1e-2), "ht": (error(ht, expected_ht), 1e-2)}
        run.report(f"long sequence, gates / {1 / gate_scale:g}", errors)


def long_errors(run: Runner) -> None:
    """Against float64 in chunks: up to 131072 tokens, from strong to hardly any decay, beta up to 2."""
    for T, gate_scale in itertools.product((8192, 131072), (8.0, 1 / 16, 1 / 1024)):
        shape = Shape(BF16, T=T, H=1, HV=2, K=128, V=128)
        t = to_device(make_inputs(shape, Options(gate_scale=gate_scale)), run.device)
        t["beta"] = 2 * t["beta"]
        o, ht = run.forward(shape, Options(), t)
        assert ht is not None
        heads = {name: x[0].double() for name, x in t.items()}
        q, k = (heads[name].expand(-1, shape.HV, -1) for name in ("q", "k"))
        exact = chunked(q, k, heads["v"], heads["g"], heads["beta"], heads["h0"], shape.K**-0.5)
        errors = {"o": error(o[0], exact[0]), "ht": error(ht[0], exact[1])}
        run.report(
            f"{T} tokens, gates * {gate_scale:g}, beta up to 2",
            {name: (value, TOLERANCE[BF16]) for name, value in errors.items()},
        )


def longest_first(run: Runner) -> None:
    """More blocks than multiprocessors, of sequences that differ: the order in which they run is not theirs."""
    name = "longest first"
    if not run.wanted(name):
        return
    shape = Shape(BF16, T=700, H=4, HV=32, K=64, V=64, offsets=[0, 10, 200, 210, 500, 500, 650, 690])
    described = "longest sequences first" in run.library.describe(shape)
    run.report(f"{name}: plan", {"described": (0.0 if described else INFINITY, 0.0)})
    run.operator(name, shape)


def emulated(run: Runner) -> None:
    """The backward pass, small enough for the emulator."""
    run.operator("emulated 64x64", Shape(BF16, T=70, H=1, HV=2, K=64, V=64))
    run.operator("emulated 128x128", Shape(BF16, T=130, H=1, HV=2, K=128, V=128))
    run.operator("emulated packed", Shape(BF16, T=400, H=1, HV=2, K=128, V=128, offsets=[0, 15, 100, 300, 300, 395]))
    run.operator(
        "emulated all flags",
        Shape(BF16, T=150, H=1, HV=3, K=64, V=128, offsets=[0, 1, 64, 64, 140], l2norm=True, gate=True, sigmoid=True,
              neg_eigval=True, v_first=True),
        factor=1.5,
    )  # fmt: skip
    run.operator(
        "emulated resets", Shape(BF16, B=2, T=200, H=1, HV=2, K=128, V=64),
        Options(resets=(0, 37, 38, 64, 127, 190)),
    )  # fmt: skip
    run.operator("emulated fp16", Shape(FP16, B=2, T=300, H=2, HV=2, K=64, V=64))
    for dtype in (BF16, FP16):
        run.operator(
            f"emulated {NAMES[dtype]} small betas", Shape(dtype, T=150, H=1, HV=2, K=64, V=128),
            Options(small_betas=True),
        )  # fmt: skip
    run.unwanted("emulated gradients one by one", Shape(BF16, T=140, H=1, HV=2, K=64, V=64, offsets=[0, 70, 133]))
    run.operator("emulated no tokens", Shape(BF16, T=0, K=128, V=128))
    no_sequences(run)
    longest_first(run)
    small_workspace(run)
    run.operator("emulated strong gates", Shape(BF16, T=128, K=128, V=128), Options(gate_scale=100.0))
    alone(run, "emulated", Shape(BF16, T=700, H=1, HV=1, K=64, V=64, offsets=[0, 10, 690]), Options(gate_scale=1 / 64))
    run.operator("emulated gate -20", Shape(BF16, T=128, K=128, V=128), Options(constant_gate=-20.0))


def sanitizer_checks(run: Runner) -> None:
    """Every kernel once, as small as it gets."""
    run.reference_device = "cpu"
    flags = {"l2norm": True, "gate": True, "sigmoid": True, "v_first": True}
    run.operator("op bf16 packed", Shape(BF16, T=150, H=1, HV=2, K=64, V=64, offsets=[0, 1, 64, 64, 140], **flags))
    run.operator("op bf16 K128", Shape(BF16, T=150, H=1, HV=2, K=128, V=128))
    run.operator("op fp16 64x128", Shape(FP16, T=150, H=2, HV=2, K=64, V=128))
    run.operator("op bf16 segments", Shape(BF16, T=4333, H=1, HV=1, K=128, V=128), Options(gate_scale=1 / 256))


def emulated_segments(run: Runner) -> None:
    """Backward in segments and windows, whose sizes are set so that few tokens need them."""

    def check(name: str, shape: Shape, options: Options, window_kib: int, shortest: int, *expected: str) -> None:
        run.library.schedules = ScheduleOptions(window_bytes=window_kib << 10, shortest_segment=shortest)
        try:
            how = run.library.describe(shape)
            missing = [text for text in expected if text not in how]
            run.report(f"schedule of {name}", dict.fromkeys(missing, (INFINITY, 0.0)) or {"as expected": (0.0, 0.0)})
            run.operator(name, shape, options)
        finally:
            run.library.schedules = ScheduleOptions()

    # 24 KiB a chunk and value head of K = V = 64, 80 KiB of 128.
    check("emulated two windows", Shape(BF16, T=470, H=1, HV=2, K=128, V=128), Options(gate_scale=1 / 16),
          4 * 160, 64, "segments of 4 chunks", "windows of 4 chunks")  # fmt: skip
    check("emulated rows", Shape(FP16, B=3, T=200, H=1, HV=2, K=64, V=64), Options(gate_scale=1 / 16),
          2 * 4 * 48, 64, "windows of 8 chunks")  # fmt: skip
    for name, gates in (("strong", 4.0), ("weak", 1 / 64), ("no", 0.0)):
        # 52 chunks: no end of the sequence is within reach of the inner ones.
        check(f"emulated segments, {name} decay", Shape(BF16, T=3300, H=1, HV=1, K=64, V=64),
              Options(gate_scale=gates, resets=(1500,) if name == "weak" else ()), 26 * 24, 8, "segments of",
              "windows of")  # fmt: skip
    check("emulated packed segments", Shape(BF16, T=1300, H=1, HV=2, K=64, V=64, offsets=[0, 0, 130, 700, 700, 1290]),
          Options(), 6 * 48, 3, "segments of", "windows of")  # fmt: skip
    wrong_lengths(run)


def wrong_lengths(run: Runner) -> None:
    """Lengths on the device that are not the plan's and leave out its first segments: no access outside the tensors."""
    name = "emulated wrong lengths"
    if not run.wanted(name):
        return
    shape = Shape(BF16, T=1300, H=1, HV=1, K=64, V=64, offsets=[0, 1300])
    t = to_device(make_inputs(shape, Options()), run.device)
    saved = run.saved(shape)
    run.forward(shape, Options(), t, saved=saved)
    run.library.schedules = ScheduleOptions(shortest_segment=3)
    try:
        assert "segments of" in run.library.describe(shape)
        arguments, _ = run.backward_arguments(shape, t, saved)
        cu_seqlens = len(arguments) - 9  # behind it, one gradient an input
        arguments[cu_seqlens] = torch.tensor([900, 1300], dtype=torch.int32, device=run.device)
        run.library.run("backward", shape, arguments, kind=2)
    finally:
        run.library.schedules = ScheduleOptions()
    run.report(name, {"ended": (0.0, 0.0)})


def windows(run: Runner) -> None:
    """Inputs so large that backward goes through them in windows and segments, against the general backend."""
    lengths = (0, 7000, 0, 20001, 4000)
    offsets = list(itertools.accumulate(lengths))
    for name, shape, gate_scale in (
        ("one sequence", Shape(BF16, T=32768, H=16, HV=32, K=128, V=128), 1 / 16),
        ("three windows", Shape(BF16, T=70001, H=16, HV=32, K=128, V=128), 1 / 16),
        ("weak decay", Shape(BF16, T=16384, H=8, HV=16, K=128, V=128), 1 / 4096),
        ("few heads", Shape(BF16, T=32768, H=2, HV=4, K=128, V=128), 1 / 16),
        ("few heads, weak decay", Shape(BF16, T=32768, H=2, HV=4, K=128, V=128), 1 / 1024),
        ("packed", Shape(BF16, T=32000, H=16, HV=32, K=128, V=128, offsets=offsets), 1 / 16),
        ("packed, few heads", Shape(FP16, T=32000, H=2, HV=4, K=128, V=128, offsets=offsets), 1 / 256),
        ("rows", Shape(FP16, B=3, T=12000, H=16, HV=32, K=128, V=128), 1 / 16),
    ):
        if not run.wanted(f"windows: {name}"):
            continue
        options = Options(gate_scale=gate_scale)
        t = make_inputs(shape, options, device=run.device)
        saved = run.saved(shape)
        run.forward(shape, options, t, saved=saved)
        actual = run.backward(shape, options, t, saved)
        run.library.backend = "cuda"
        try:
            expected = run.backward(shape, options, t, saved)
        finally:
            run.library.backend = "sm90"
        # Two roundings of each result and of what it is made of.
        run.report(f"windows: {name}", {key: (error(actual[key], expected[key]), 1e-2) for key in actual})


def no_sequences(run: Runner) -> None:
    """Padding alone: gradients are written, as zeros."""
    name = "no sequences: gradients of padding"
    if not run.wanted(name):
        return
    shape = Shape(BF16, T=66, K=64, V=64, offsets=[0])
    t = to_device(make_inputs(shape, Options()), run.device)
    saved = run.saved(shape)
    run.forward(shape, Options(), t, saved=saved)
    gradients = run.backward(shape, Options(), t, saved)
    run.report(name, {f"d{key}": (error(x, torch.zeros_like(x)), 0.0) for key, x in gradients.items()})


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except LibraryError as raised:
        return str(raised)
    return "no error"


def small_workspace(run: Runner) -> None:
    """Operands for the general kernels with the workspace of others: an error that names one."""
    name = "workspace too small for unaligned operands"
    if not run.wanted(name):
        return
    shape = Shape(BF16, T=300, H=1, HV=2, K=64, V=64)
    t = to_device(make_inputs(shape, Options(unaligned=True)), run.device)
    saved = run.saved(shape)
    run.forward(shape, Options(), t, saved=saved)
    library = run.library.lib
    exact = library.cula_forward_workspace, library.cula_backward_workspace
    library.cula_forward_workspace = lambda plan, _: library.cula_workspace(plan, 0)
    library.cula_backward_workspace = lambda plan, _: library.cula_workspace(plan, 2)
    texts = [
        error_of(lambda: run.forward(shape, Options(), t)),
        error_of(lambda: run.backward(shape, Options(), t, saved)),
    ]
    library.cula_forward_workspace, library.cula_backward_workspace = exact
    wanted = ("ValueError", "workspace: expected", "since q ", "aligned to 16 bytes")
    missing = [part for text in texts for part in wanted if part not in text]
    run.report(name, dict.fromkeys(missing, (INFINITY, 0.0)) or {"as expected": (0.0, 0.0)})
    run.operator("unaligned operands", shape, Options(unaligned=True))
    # dv is on the way to the other gradients: where it is not wanted, the workspace holds it.
    t = to_device(make_inputs(shape, Options()), run.device)
    run.forward(shape, Options(), t, saved=saved)
    library.cula_backward_workspace = lambda plan, _: library.cula_workspace(plan, 2)
    text = error_of(lambda: run.backward(shape, Options(), t, saved, ("q", "k")))
    library.cula_backward_workspace = exact[1]
    missing = [part for part in ("ValueError", "workspace: expected", "there is no dv") if part not in text]
    run.report("workspace too small without dv", dict.fromkeys(missing, (INFINITY, 0.0)) or {"as expected": (0.0, 0.0)})


def overflow(run: Runner) -> None:
    """fp16 gradients past the type's range become infinite, so that loss scaling notices."""
    name = "overflow: fp16 gradients"
    if not run.wanted(name):
        return
    shape = Shape(FP16, T=130, H=1, HV=1, K=64, V=64, scale=1.0)
    t = to_device(make_inputs(shape, Options(constant_gate=0.0, initial_state=False, final_state=False)), run.device)
    t["k"] = t["k"][:, :1].expand_as(t["k"]).contiguous()
    t["q"] = t["k"].clone()
    t["do"].fill_(6e4)
    exact = {key: x.double().requires_grad_(key != "do") for key, x in t.items()}
    o, _ = recurrence(shape, exact)
    expected = torch.autograd.grad((o * exact["do"]).sum(), [exact[key] for key in ("q", "k", "v")])
    saved = run.saved(shape)
    run.forward(shape, Options(final_state=False), t, saved=saved)
    actual = run.backward(shape, Options(final_state=False), t, saved)
    errors = {}
    for key, gradient in zip(("q", "k", "v"), expected, strict=True):
        past = gradient.abs() > 1e5
        hidden = int(torch.isfinite(actual[key][past]).sum()) if bool(past.any()) else INFINITY
        errors[f"d{key} finite"] = (float(hidden), 0.0)
    run.report(name, errors)


def gate_gradients(run: Runner) -> None:
    """Gradients of gates, A_log and dt_bias where the decay is strong (CASES 14 and 23)."""
    for name, T, gate in (("decay 5 to 20", 128, True), ("-5", 128, False), ("training", 2048, True),
                          ("training, long", 17000, True)):  # fmt: skip
        name = f"gate gradients: {name}"
        if not run.wanted(name):
            continue
        shape = Shape(BF16, T=T, H=2, HV=2, K=128, V=128, gate=gate)
        t = make_inputs(shape, Options(constant_gate=-5.0), device=run.device)
        if gate:
            generator = torch.Generator(run.device).manual_seed(1)
            uniform = torch.rand(2, shape.HV, device=run.device, generator=generator)
            t["A_log"] = (16 * uniform[0].clamp(min=1 / 16)).log()
            if T == 128:
                t["dt_bias"].fill_(1.0)
            else:  # softplus(dt_bias) is log-uniform over (1e-3, 0.1)
                step = torch.exp(uniform[1] * 4.6 - 6.9)
                t["dt_bias"] = step + torch.log(-torch.expm1(-step))
                t["g"] = 5 * t["g"]
        exact = {key: x.double().requires_grad_(key not in ("do", "dht")) for key, x in t.items()}
        o, ht = recurrence(shape, exact)
        names = [key for key in exact if key not in ("do", "dht")]
        loss = (o * exact["do"]).sum() + (ht * exact["dht"]).sum()
        expected = dict(zip(names, torch.autograd.grad(loss, [exact[key] for key in names]), strict=True))
        saved = run.saved(shape)
        run.forward(shape, Options(), t, saved=saved)
        actual = run.backward(shape, Options(), t, saved)
        errors = {f"d{key}": error(actual[key], expected[key]) for key in names}
        limit = min(2e-2, 4 * errors["dv"])
        gates = ("dg", "dA_log", "ddt_bias")
        run.report(name, {key: (value, limit if key in gates else 1.2e-2) for key, value in errors.items()})


# heads, value heads, sequences, tokens of each; the best peer's forward on an H200, ms (FLA 0.6.0, FlashQLA 0.1.3,
# FlashInfer 0.7.2).
TIMED = [
    (16, 64, 1, 32768, (3.468, 1.521, 1.348)),
    (16, 64, 4, 8192, (3.490, 1.224, 0.730)),
    (16, 64, 1, 8192, (0.846, 0.398, 0.382)),
    (16, 64, 1, 2048, (0.233, 0.117, 0.139)),
    (16, 32, 1, 32768, (1.953, 1.241, 0.718)),
    (16, 32, 4, 8192, (1.981, 0.629, 0.369)),
    (16, 32, 1, 4096, (0.258, 0.159, 0.145)),
    (2, 8, 1, 32768, (0.927, 0.392, 0.233)),
    (2, 8, 8, 1024, (0.137, 0.063, 0.156)),
    (2, 8, 1, 8192, (0.242, 0.166, 0.114)),
    (2, 8, 1, 2048, (0.084, 0.071, 0.063)),
]


def print_kernels(call: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.device_time_total > 0:
            times, name = event.count // 5, event.key[:60]
            print(f"     {event.device_time_total / 5e3:8.4f} ms in {times} launches {name}", flush=True)


def timings(run: Runner, kernels: bool, json_path: pathlib.Path | None) -> None:
    rows = []
    product = 1.0
    for H, HV, B, T, peers in TIMED:
        # The larger of the tensor work at 680 TFLOP/s and of the bytes of q, k, v, o and the states at 4.3 TB/s.
        work = B * T / 64 * HV * 9.4e6 / 680e12
        moved = B * (T * 2 * 128 * 2 * (H + HV) + 2 * HV * 128 * 128 * 4) / 4.3e12
        bound = 1e3 * max(work, moved)
        shape = Shape(BF16, B=B, T=T, H=H, HV=HV, K=128, V=128)
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*dims: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*dims, device="cuda", generator=generator, dtype=torch.float32)

        q = torch.nn.functional.normalize(normal(B, T, H, 128), dim=-1).to(BF16)
        k = torch.nn.functional.normalize(normal(B, T, H, 128), dim=-1).to(BF16)
        v = normal(B, T, HV, 128).to(BF16)
        g = torch.nn.functional.logsigmoid(normal(B, T, HV)) / 16
        beta = torch.rand(B, T, HV, device="cuda", generator=generator)
        h0, ht, o = normal(B, HV, 128, 128), normal(B, HV, 128, 128), torch.empty_like(v)
        plan = run.library.plan(shape)
        call = run.library.prepared("forward", plan, [q, k, v, g, beta, None, None, h0, o, ht] + [None] * 6, kind=0)
        taken = milliseconds(call, 30)
        ratio = min(peers) / taken
        product *= ratio
        how = next(line for line in run.library.describe(shape).splitlines() if "thread blocks" in line)
        line = f"time {H}/{HV} {B}x{T}: {taken:.4f} ms, best peer {min(peers):.3f}, ratio {ratio:.2f}, "
        line += f"{bound / taken:.0%} of the bound;{how}"
        print(line, flush=True)
        rows.append({
            "direction": "forward", "heads": f"{H}/{HV}", "dims": "128/128", "lengths": f"{B}x{T}",
            "ours_ms": round(taken, 4), "peers_ms": dict(zip(("fla", "flashqla", "flashinfer"), peers, strict=True)),
            "peak_mib": None, "workspace_mib": round(run.library.lib.cula_workspace(plan, 0) / 2**20, 1),
        })  # fmt: skip
        if kernels:
            print_kernels(call)
        run.library.lib.cula_free_plan(plan)
    print(f"geometric mean of the ratios: {product ** (1 / len(TIMED)):.3f}", flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1))


def all_flags(run: Runner, kernels: bool) -> None:
    """The call of a layer: norms, gates and beta in the operator."""
    H, HV, T = 16, 32, 8192
    shape = Shape(BF16, T=T, H=H, HV=HV, K=128, V=128, l2norm=True, gate=True, sigmoid=True, v_first=True)
    t = to_device(make_inputs(shape, Options(gate_dtype=BF16, beta_dtype=BF16)), run.device)
    o, ht = torch.empty_like(t["v"]), torch.empty(1, HV, 128, 128, device="cuda")
    plan = run.library.plan(shape)
    arguments = [t[x] for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")]
    call = run.library.prepared("forward", plan, [*arguments, o, ht] + [None] * 6, kind=0)
    print(f"time {H}/{HV} 1x{T}, all flags: {milliseconds(call, 30):.4f} ms", flush=True)
    if kernels:
        print_kernels(call)
    saved = run.saved(shape)
    run.library.prepared("forward", plan, [*arguments, o, ht, *saved, None], kind=1)()
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")
    gradients = [torch.empty_like(t[x]) for x in names]
    inputs = [None, None, *arguments[2:], t["do"], t["dht"], *saved, None]
    call = run.library.prepared("backward", plan, [*inputs, *gradients], kind=2)
    print(f"time {H}/{HV} 1x{T}, all flags, backward: {milliseconds(call, 30):.4f} ms", flush=True)
    if kernels:
        print_kernels(call)
    run.library.lib.cula_free_plan(plan)


# As TIMED, for backward alone: FLA 0.6.0, FlashQLA 0.1.3.
TIMED_BACKWARD: list[tuple[int, int, int, int, tuple[float, ...]]] = [
    (16, 32, 1, 32768, (6.267, 2.970)),
    (16, 32, 1, 8192, (1.561, 0.823)),
    (16, 32, 8, 4096, (6.311, 1.936)),
    *(
        (H, 2 * H, B, tokens // B, ())
        for H, tokens, B in itertools.product((2, 4, 8), (8192, 32768), (1, 2, 4, 8))
    ),
]  # fmt: skip


def backward_timings(run: Runner, kernels: bool) -> None:
    for H, HV, B, T, peers in TIMED_BACKWARD:
        shape = Shape(BF16, B=B, T=T, H=H, HV=HV, K=128, V=128)
        t = make_inputs(shape, Options(gate_scale=1 / 16), device=run.device)
        saved = run.saved(shape)
        run.forward(shape, Options(), t, saved=saved)
        names = ("q", "k", "v", "g", "beta")
        out = [torch.empty_like(t[name]) for name in names]
        arguments = [*(t[name] for name in names), None, None, t["h0"], t["do"], t["dht"], *saved, None]
        plan = run.library.plan(shape)
        call = run.library.prepared("backward", plan, [*arguments, *out, None, None, torch.empty_like(t["h0"])], kind=2)
        taken = milliseconds(call, 30)
        workspace = run.library.lib.cula_workspace(plan, 2) / 2**20
        against = f", best peer {min(peers):.3f}, ratio {min(peers) / taken:.2f}" if peers else ""
        how = next(line for line in run.library.describe(shape).splitlines() if "  backward:" in line)
        print(f"backward {H}/{HV} {B}x{T}: {taken:.4f} ms{against}; workspace {workspace:.0f} MiB;{how}", flush=True)
        if kernels:
            print_kernels(call)
        run.library.lib.cula_free_plan(plan)


def short_call(run: Runner) -> None:
    for T in (64, 512):
        shape = Shape(BF16, T=T, H=16, HV=32, K=128, V=128)
        t = to_device(make_inputs(shape, Options()), run.device)
        o = torch.empty_like(t["v"])
        ht = torch.empty(1, 32, 128, 128, device="cuda")
        plan = run.library.plan(shape)
        arguments = [*(t[x] for x in ("q", "k", "v", "g", "beta")), None, None, t["h0"], o, ht]
        call = run.library.prepared("forward", plan, arguments + [None] * 6, kind=0)
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            call()
        host = (time.perf_counter() - start) / 500
        torch.cuda.synchronize()
        total = (time.perf_counter() - start) / 500
        print(f"short call T={T}: host {host * 1e6:.0f} us, with the device {total * 1e6:.0f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--emulated", action="store_true", help="checks of backward on the emulator")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="time by kernel")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
    parser.add_argument("--sanitizer", action="store_true", help="the few checks that compute-sanitizer runs over")
    parser.add_argument("--as-it-comes", action="store_true", help="do not fill memory first: for initcheck")
    arguments = parser.parse_args()
    device = "cpu" if arguments.emulated else "cuda"
    library = Library(arguments.library, device, "sm90", filled=not arguments.as_it_comes)
    run = Runner(library, arguments.only)
    start = time.time()
    if arguments.sanitizer:
        sanitizer_checks(run)
        print(f"{run.count - len(run.failures)} of {run.count} checks passed", flush=True)
        return 1 if run.failures or run.count == 0 else 0
    if arguments.emulated:
        emulated(run)
        emulated_segments(run)
        overflow(run)
        print(f"{run.count - len(run.failures)} of {run.count} checks passed", flush=True)
        return 1 if run.failures or run.count == 0 else 0
    if not arguments.no_checks:
        library.backend = "auto"
        chosen = "backend sm90" in library.describe(Shape(BF16, K=128, V=128))
        run.report("plan: sm90 is chosen here", {"chosen": (0.0 if chosen else INFINITY, 0.0)})
        # What users get, and backward's own kernels.
        for backend in ("auto", "sm90"):
            library.backend = backend
            print(f"---- backend {backend}", flush=True)
            shapes(run)
            guarded(run, "errors at most FLA's", against_baseline)
            guarded(run, "bits", bits)
            guarded(run, "alone", batch_invariance)
        pools.small(run, 128, 128)
        pools.segments(run)
        guarded(run, "pools: replay", pools.replay)
        guarded(run, "segments", segments)
        guarded(run, "hidden tokens", hidden_tokens)
        guarded(run, "long sequence", long_sequence)
        guarded(run, "long errors", long_errors)
        guarded(run, "windows", windows)
        guarded(run, "windows and segments of few tokens", emulated_segments)
        guarded(run, "gate gradients", gate_gradients)
        guarded(run, "overflow", overflow)
        guarded(run, "no sequences", no_sequences)
        guarded(run, "longest first", longest_first)
        guarded(run, "workspace", small_workspace)
        print(
            f"{run.count - len(run.failures)} of {run.count} checks passed in {time.time() - start:.0f} s", flush=True
        )
        for failure in run.failures:
            print("failed:", failure, flush=True)
    if not arguments.no_timing:
        timings(run, arguments.kernels, arguments.json)
        backward_timings(run, arguments.kernels)
        all_flags(run, arguments.kernels)
        short_call(run)
    return 1 if run.failures or (run.count == 0 and not arguments.no_checks) else 0


if __name__ == "__main__":
    sys.exit(main())
