"""Checks the stages of the Hopper backend against their formulas in float64 on an H100 or H200, and times each beside
the general backend's.

    python run_stages.py --library build/libcula_gdn_test.so [--only NAME] [--no-timing | --no-checks] [--json FILE]
    python run_stages.py --library build/libemulated.so --emulated     a part of the checks, on the CPU

Prints one line a check and ends with a status other than 0 if any failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import sys

import torch
from harness.checks import BF16, FP16, NAMES
from harness.library import Library, Shape, Tensor
from harness.reference import INFINITY, Options, error, make_inputs, to_device
from harness.runner import Runner
from harness.timing import milliseconds


def emulated(run: Runner) -> None:
    """Small, but with every size of K and V, both layouts of the state, tails, empty sequences and restarts."""
    run.stages("64x64 one row more than a chunk", Shape(BF16, T=65, H=1, HV=2))
    run.stages("128x128 V first", Shape(BF16, T=130, H=1, HV=2, K=128, V=128, v_first=True))
    run.stages(
        "64x128 packed, restarts",
        Shape(BF16, T=300, H=1, HV=3, K=64, V=128, offsets=[0, 15, 100, 100, 233]), resets=(0, 20, 21, 110, 150),
    )  # fmt: skip
    run.stages("128x64 without gates", Shape(FP16, B=2, T=130, H=2, HV=2, K=128, V=64), with_gate=False)
    run.stages("128x64 packed V first",
               Shape(FP16, T=200, H=2, HV=4, K=128, V=64, v_first=True, offsets=[0, 64, 65, 200]))  # fmt: skip
    run.stages("no tokens", Shape(BF16, T=0, K=128, V=128))
    run.stages("negative scale", Shape(BF16, B=2, T=64, H=3, HV=3, scale=-0.3))
    run.stages("128x128 five value heads a key head", Shape(FP16, T=100, H=1, HV=5, K=128, V=128))


def sanitizer_checks(run: Runner) -> None:
    """Every kernel once, as small as it gets."""
    run.stages("bf16 64x64 packed", Shape(BF16, T=150, H=1, HV=2, offsets=[0, 1, 64, 64, 140]))
    run.stages("bf16 128x128 V first", Shape(BF16, T=150, H=1, HV=2, K=128, V=128, v_first=True))
    run.stages("fp16 64x128", Shape(FP16, T=70, H=2, HV=2, K=64, V=128))
    run.stages("fp16 128x64 four value heads", Shape(FP16, T=70, H=1, HV=4, K=128, V=64))


def on_device(run: Runner) -> None:
    for dtype, (K, V), v_first in itertools.product(
        (BF16, FP16), itertools.product((64, 128), repeat=2), (False, True)
    ):
        name = f"{NAMES[dtype]} {K}x{V}{' V first' if v_first else ''}"
        sizes = {"K": K, "V": V, "v_first": v_first}
        run.stages(name, Shape(dtype, B=2, T=300, H=2, HV=4, **sizes))
        run.stages(
            f"{name} packed, restarts",
            Shape(dtype, T=700, H=2, HV=6, offsets=[0, 15, 100, 100, 333, 690], **sizes), resets=(0, 20, 21, 110, 350),
        )  # fmt: skip
    for T in (0, 1, 63, 64, 65, 128):
        run.stages(f"bf16 T={T}", Shape(BF16, T=T, H=1, HV=2, K=128, V=128))
    for H, HV in ((1, 1), (3, 3), (2, 8), (1, 5), (3, 24)):
        run.stages(f"bf16 {H}/{HV} heads", Shape(BF16, T=130, H=H, HV=HV, K=128, V=128))
    run.stages("bf16 without gates", Shape(BF16, B=2, T=130, H=2, HV=4, K=128, V=128), with_gate=False)
    run.stages("bf16 negative scale", Shape(BF16, T=130, H=2, HV=4, K=128, V=128, scale=-0.3))
    many = [16 * i for i in range(301)]
    run.stages("bf16 300 documents", Shape(BF16, T=many[-1], H=4, HV=4, offsets=many))


def stage_calls(run: Runner, shape: Shape, options: Options) -> dict[str, list[Tensor | None]]:
    """The arguments of every stage, made by the stages before it."""
    x = shape.dtype
    B, T, H, HV, K, V, C = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V, shape.C
    t = to_device(make_inputs(shape, options), run.device)
    seqlens = run.cu_seqlens(shape)
    key = [run.empty(B, T, H, K, dtype=x) for _ in range(3)]
    w, dw = (run.empty(B, T, HV, K, dtype=x) for _ in range(2))
    u, v_new, o, dv, dv2, grad_v = (run.empty(B, T, HV, V, dtype=x) for _ in range(6))
    gamma, dg, db, dg2 = (run.empty(B, T, HV, dtype=torch.float32) for _ in range(4))
    A = run.empty(B, T, HV, C, dtype=x)
    h, dh = (run.empty(*shape.state(B, shape.NT, HV), dtype=x) for _ in range(2))
    ht, dh0 = (run.empty(*shape.state(shape.N, HV), dtype=torch.float32) for _ in range(2))
    q, k, v, beta, do = t["q"], t["k"], t["v"], t["beta"], t["do"]
    calls = {
        "chunk_local_cumsum": [t["g"], gamma, seqlens],
        "chunk_gated_delta_rule_fwd_intra": [k, v, gamma, beta, w, u, A, seqlens],
        "recompute_w_u_fwd": [k, v, beta, A, gamma, w, u, seqlens],
        "chunk_gated_delta_rule_fwd_h": [k, w, u, gamma, t["h0"], h, v_new, ht, seqlens],
        "chunk_fwd_o": [q, k, v_new, h, gamma, o, seqlens],
        "chunk_bwd_dv_local": [q, k, gamma, do, dv, seqlens],
        "chunk_gated_delta_rule_bwd_dhu": [q, k, w, gamma, t["dht"], do, dv, dh, dh0, dv2, seqlens],
        "chunk_bwd_dqkwg": [q, k, v_new, w, gamma, h, dv2, do, dh, key[0], key[1], dw, dg, seqlens],
        "prepare_wy_repr_bwd": [k, v, beta, gamma, A, dw, dv2, key[2], grad_v, db, dg2, seqlens],
    }
    for name, tensors in calls.items():
        run.library.run(name, shape, tensors, SCALARS.get(name, ()))
    return calls


# Which arguments a stage writes.
OUTPUTS = {
    "chunk_local_cumsum": (1,),
    "chunk_gated_delta_rule_fwd_intra": (4, 5, 6),
    "recompute_w_u_fwd": (5, 6),
    "chunk_gated_delta_rule_fwd_h": (5, 6, 7),
    "chunk_fwd_o": (5,),
    "chunk_bwd_dv_local": (4,),
    "chunk_gated_delta_rule_bwd_dhu": (7, 8, 9),
    "chunk_bwd_dqkwg": (9, 10, 11, 12),
    "prepare_wy_repr_bwd": (7, 8, 9, 10),
}
SCALARS = {"chunk_local_cumsum": (1 / math.log(2), 0.0)}
READ_NOT = {"chunk_bwd_dqkwg": (3,)}  # w is there for FLA's sake

TIMED = [
    (16, 32, 1, 32768, 128, 128),
    (16, 32, 4, 8192, 128, 128),
    (16, 64, 1, 8192, 128, 128),
    (8, 8, 4, 8192, 64, 64),
]


def timings(run: Runner) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for H, HV, B, T, K, V in TIMED:
        shape = Shape(BF16, B=B, T=T, H=H, HV=HV, K=K, V=V)
        run.library.backend = "sm90"
        calls = stage_calls(run, shape, Options(gate_scale=1 / 16))
        for name, tensors in calls.items():
            taken = {}
            for backend in ("sm90", "cuda"):
                run.library.backend = backend
                plan = run.library.plan(shape)
                taken[backend] = milliseconds(run.library.prepared(name, plan, tensors, SCALARS.get(name, ())), 15)
                run.library.lib.cula_free_plan(plan)
            skipped = READ_NOT.get(name, ())
            moved = sum(
                x.numel() * x.element_size() for i, x in enumerate(tensors) if x is not None and i not in skipped
            )
            rate = moved / taken["sm90"] / 1e9
            print(f"time {H}/{HV} {K}x{V} {B}x{T} {name:<34} sm90 {taken['sm90']:.4f} ms, cuda {taken['cuda']:.4f} ms, "
                  f"ratio {taken['cuda'] / taken['sm90']:.2f}, {rate:.2f} TB/s", flush=True)  # fmt: skip
            rows.append({
                "stage": name, "heads": f"{H}/{HV}", "dims": f"{K}/{V}", "lengths": f"{B}x{T}",
                "sm90_ms": round(taken["sm90"], 4), "cuda_ms": round(taken["cuda"], 4), "tb_per_s": round(rate, 2),
            })  # fmt: skip
    return rows


def repeats(run: Runner) -> None:
    """The same bits every time, while other blocks come and go."""
    shape = Shape(BF16, T=4000, H=8, HV=16, K=128, V=128, offsets=[0, 700, 701, 1900, 4000])
    calls = stage_calls(run, shape, Options(gate_scale=1 / 16))
    errors = {}
    for name, tensors in calls.items():
        before = [None if x is None else torch.nan_to_num(x.float()) for x in tensors]
        for _ in range(20):
            run.library.run(name, shape, tensors, SCALARS.get(name, ()))
        same = all(
            b is None or torch.equal(b, torch.nan_to_num(x.float())) for b, x in zip(before, tensors, strict=True)
        )
        errors[name] = (0.0 if same else INFINITY, 0.0)
    run.report("20 repeats", errors)


def gates(run: Runner, T: int) -> None:
    """Gates that hide all tokens from each other, or none: what is left of their gradients is right."""
    for name, options in {
        "strong gates": Options(gate_scale=100.0),
        "no decay": Options(constant_gate=0.0),
        "gates of -20": Options(constant_gate=-20.0),
        "bf16 beta and states": Options(beta_dtype=BF16, state_dtype=BF16),
    }.items():
        run.stages(name, Shape(BF16, T=T, H=1, HV=2, K=128, V=128), options=options)


def hidden_tokens(run: Runner) -> None:
    """NaN in what follows a sequence reaches none of its results. Also: operands out of line, dv2 in place of dv."""
    shape = Shape(BF16, T=200, H=1, HV=2, K=128, V=128, offsets=[0, 30, 130])
    calls = stage_calls(run, shape, Options())
    errors = {}
    for name, tensors in calls.items():
        hidden: list[Tensor | None] = []
        for i, x in enumerate(tensors):
            if x is None or i in OUTPUTS[name] or not x.is_floating_point() or x.shape[0] != 1:
                hidden.append(None if x is None else x.clone())
                continue
            copy = x.clone()
            copy[:, 30 if x.shape[1] == shape.T else 1 :] = float("nan")
            hidden.append(copy)
        run.library.run(name, shape, hidden, SCALARS.get(name, ()))
        same = True
        for i in OUTPUTS[name]:
            actual, expected = hidden[i], tensors[i]
            assert actual is not None
            assert expected is not None
            if expected.shape[0] == 1:
                rows = 30 if expected.shape[1] == shape.T else 1
                actual, expected = actual[:, :rows], expected[:, :rows]
            else:
                actual, expected = actual[0], expected[0]
            same = same and torch.equal(actual, expected)
        errors[name] = (0.0 if same else INFINITY, 0.0)
    run.report("hidden tokens", errors)

    arguments = calls["chunk_fwd_o"]
    assert arguments[0] is not None
    assert arguments[5] is not None
    unaligned = torch.empty(arguments[0].numel() + 1, dtype=BF16, device=run.device)[1:].view(arguments[0].shape)
    unaligned.copy_(arguments[0])
    o = run.empty(*arguments[5].shape, dtype=BF16)
    run.library.run("chunk_fwd_o", shape, [unaligned, *arguments[1:5], o, arguments[6]])
    run.report("unaligned q", {"o": (error(o, arguments[5].double()), 1e-2)})

    arguments = list(calls["chunk_gated_delta_rule_bwd_dhu"])
    expected = arguments[9]
    assert expected is not None
    assert arguments[6] is not None
    arguments[6] = arguments[9] = arguments[6].clone()
    run.library.run("chunk_gated_delta_rule_bwd_dhu", shape, arguments)
    assert arguments[9] is not None
    run.report("dv2 in place of dv", {"dv2": (0.0 if torch.equal(arguments[9], expected) else INFINITY, 0.0)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--emulated", action="store_true", help="a part of the checks, on the emulator")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
    parser.add_argument("--sanitizer", action="store_true", help="the few checks that compute-sanitizer runs over")
    parser.add_argument("--as-it-comes", action="store_true", help="do not fill memory first: for initcheck")
    arguments = parser.parse_args()
    device = "cpu" if arguments.emulated else "cuda"
    run = Runner(Library(arguments.library, device, "sm90", filled=not arguments.as_it_comes), arguments.only)
    if arguments.sanitizer:
        sanitizer_checks(run)
    elif arguments.emulated:
        emulated(run)
        gates(run, 100)
        hidden_tokens(run)
    elif not arguments.no_checks:
        on_device(run)
        gates(run, 300)
        hidden_tokens(run)
        repeats(run)
    print(f"{run.count - len(run.failures)} of {run.count} checks passed", flush=True)
    for failure in run.failures:
        print("failed:", failure, flush=True)
    if not (arguments.emulated or arguments.sanitizer or arguments.no_timing):
        rows = timings(run)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if run.failures or (run.count == 0 and not arguments.no_checks) else 0


if __name__ == "__main__":
    sys.exit(main())
