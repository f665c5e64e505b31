"""Checks context parallelism on one GPU, with simulated ranks, and times what it adds.

    python run_cp.py --library build/libcula_gdn_test.so [--only NAME] [--no-timing | --no-checks] [--fla]
    python run_cp.py --library build/libemulated.so --emulated     the kernels' checks, on the CPU

--fla needs flash-linear-attention 0.6.0 and Triton: its times in the same run (fla_group.py checks groups of both). The
checks of ranks need the Python package of the same build. Prints one line a check and ends with a status other than 0
if any failed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import context_parallel, page
from harness.chunked import chunked
from harness.library import Library, ScheduleOptions, Shape, Tensor
from harness.reference import INFINITY, error
from harness.runner import Runner
from harness.timing import milliseconds

Tensors = dict[str, Tensor]
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")


def make_stream(tokens: int, heads: int, value_heads: int, gate_scale: float, seed: int = 0, dim: int = 128) -> Tensors:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*dims: int) -> Tensor:
        return torch.randn(*dims, device="cuda", generator=generator)

    normalize = torch.nn.functional.normalize
    return {
        "q": normalize(normal(1, tokens, heads, dim), dim=-1).bfloat16(),
        "k": normalize(normal(1, tokens, heads, dim), dim=-1).bfloat16(),
        "v": normal(1, tokens, value_heads, dim).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(1, tokens, value_heads)) * gate_scale,
        "beta": normal(1, tokens, value_heads).sigmoid(),
        "do": normal(1, tokens, value_heads, dim).bfloat16(),
    }


# Simulated ranks ----------------------------------------------------------------------------------------------------


def one_rank(t: Tensors, cu_seqlens: Tensor, **flags: Any) -> Tensors:
    from cula.gdn import chunk_gated_delta_rule

    leaves = {name: x.clone().requires_grad_() for name, x in t.items() if name != "do"}
    o, _ = chunk_gated_delta_rule(**leaves, cu_seqlens=cu_seqlens, **flags)
    found = torch.autograd.grad(o, list(leaves.values()), t["do"])
    return {"o": o.detach(), **{f"d{name}": x for name, x in zip(leaves, found, strict=True)}}


def in_float64(t: Tensors, lengths: list[int]) -> Tensors:
    """Of one key head for every value head."""
    exact = {name: x[0].double().requires_grad_(name != "do") for name, x in t.items()}
    HV, K, V = t["v"].shape[2], t["k"].shape[3], t["v"].shape[3]
    wide = {name: exact[name].repeat_interleave(HV // t["k"].shape[2], 1) for name in ("q", "k")}
    outputs, begin = [], 0
    for length in lengths:
        rows = slice(begin, begin + length)
        zero = torch.zeros(HV, K, V, dtype=torch.float64, device=t["v"].device)
        tokens = [x[rows] for x in (wide["q"], wide["k"], exact["v"], exact["g"], exact["beta"])]
        outputs.append(chunked(*tokens, zero, K**-0.5)[0])
        begin += length
    o = torch.cat(outputs)
    names = ("q", "k", "v", "g", "beta")
    found = torch.autograd.grad((o * exact["do"]).sum(), [exact[name] for name in names])
    return {"o": o[None], **{f"d{name}": x[None] for name, x in zip(names, found, strict=True)}}


def simulated(t: Tensors, cu_seqlens: Tensor, ranks: int, layout: str, **flags: Any) -> Tensors:
    from cula.gdn.simulation import simulate, simulated_ranks

    inputs = {**{name: x for name, x in t.items() if name != "do"}, "cu_seqlens": cu_seqlens}
    return simulate(inputs, simulated_ranks(cu_seqlens, ranks, layout), gradients=(t["do"], None), **flags)


def ranks_equal_one(run: Runner) -> list[dict[str, Any]]:
    """2 to 64 ranks against one, and both against float64: the ranks' error is at most 1.5 times that of one."""
    records = []
    for ranks, lengths, layout, heads, gate_scale in (
        (2, [3000, 4000, 3240], "contiguous", (2, 4), 1 / 16),
        (4, [7000, 3240], "contiguous", (4, 4), 1 / 1024),
        (8, [32768], "contiguous", (1, 2), 1 / 16),
        (8, [32768], "contiguous", (1, 2), 1 / 1024),
        (8, [32768], "zigzag", (1, 2), 1 / 1024),
        (64, [4096], "contiguous", (1, 2), 1 / 1024),
        (16, [1000, 30, 1, 7161], "zigzag", (1, 2), 1 / 256),
    ):
        total = sum(lengths)
        name = f"ranks {ranks} {layout} {'+'.join(map(str, lengths))} gates * 1/{round(1 / gate_scale)}"
        if not run.wanted(name):
            continue
        try:
            t = make_stream(total, *heads, gate_scale)
            ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
            together = simulated(t, ends, ranks, layout)
            again = simulated(t, ends, ranks, layout)
            alone, exact = one_rank(t, ends), in_float64(t, lengths)
            errors: dict[str, tuple[float, float]] = {}
            figures = {}
            for key in ("o", *GRADIENTS):
                mine, theirs = error(together[key], exact[key]), error(alone[key], exact[key])
                errors[key] = mine, 1.5 * theirs
                figures[key] = {"ranks": mine, "one_rank": theirs}
            same = all(torch.equal(together[key], again[key]) for key in together)
            errors["repeat"] = (0.0 if same else INFINITY), 0.0
            run.report(name, errors)
            records.append(
                {"ranks": ranks, "lengths": lengths, "layout": layout, "gates": gate_scale, "errors": figures}
            )
        except Exception as exception:
            run.fail(name, exception)
    return records


def flags_and_types(run: Runner) -> None:
    """Every flag, states in and out and their gradients, in each type: four ranks as one."""
    from cula.gdn import chunk_gated_delta_rule
    from cula.gdn.simulation import simulate, simulated_ranks

    flags = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True, "state_v_first": True,
    }  # fmt: skip
    for dtype, limit in ((torch.bfloat16, 2e-2), (torch.float16, 6e-3), (torch.float32, 2e-5)):
        for K, V in ((128, 128), (60, 100)):
            name = f"ranks 4 all flags {str(dtype).removeprefix('torch.')} {K}x{V}"
            if not run.wanted(name):
                continue
            try:
                generator = torch.Generator(device="cuda").manual_seed(0)

                def normal(*dims: int, generator: torch.Generator = generator) -> Tensor:
                    return torch.randn(*dims, device="cuda", generator=generator)

                lengths = [300, 80, 420]
                ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
                inputs = {
                    "q": normal(1, 800, 2, K).to(dtype), "k": normal(1, 800, 2, K).to(dtype),
                    "v": normal(1, 800, 4, V).to(dtype), "g": normal(1, 800, 4) - 4, "beta": normal(1, 800, 4),
                    "A_log": normal(4) - 2, "dt_bias": normal(4), "initial_state": normal(3, 4, V, K),
                }  # fmt: skip
                do, dht = normal(1, 800, 4, V).to(dtype), normal(3, 4, V, K)
                found = simulate(
                    {**inputs, "cu_seqlens": ends}, simulated_ranks(ends, 4), gradients=(do, dht),
                    output_final_state=True, **flags,
                )  # fmt: skip
                leaves = {key: x.clone().requires_grad_() for key, x in inputs.items()}
                o, ht = chunk_gated_delta_rule(**leaves, cu_seqlens=ends, output_final_state=True, **flags)
                gradients = torch.autograd.grad([o, ht], list(leaves.values()), [do, dht])
                expected = {"o": o, "final_state": ht}
                expected |= {f"d{key}": x for key, x in zip(leaves, gradients, strict=True)}
                run.report(name, {key: (error(found[key], x), limit) for key, x in expected.items()})
            except Exception as exception:
                run.fail(name, exception)


def group_of_one(run: Runner) -> None:
    """A process group of NCCL: one rank, since one GPU is all that this runs on."""
    if not run.wanted("nccl"):
        return
    import torch.distributed as dist

    from cula.gdn import chunk_gated_delta_rule
    from cula.gdn.cp import build_cp_context

    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
            try:
                t = make_stream(2000, 2, 4, 1 / 16)
                ends = torch.tensor([0, 700, 2000], device="cuda")
                expected = one_rank(t, ends)
                context = build_cp_context(ends, dist.group.WORLD)
                leaves = {name: x.clone().requires_grad_() for name, x in t.items() if name != "do"}
                o, _ = chunk_gated_delta_rule(**leaves, cp_context=context)
                found = torch.autograd.grad(o, list(leaves.values()), t["do"])
                results = {"o": o, **{f"d{name}": x for name, x in zip(leaves, found, strict=True)}}
                run.report("nccl, a group of one", {key: (error(x, expected[key]), 0.0) for key, x in results.items()})
            finally:
                dist.destroy_process_group()
    except Exception as exception:
        run.fail("nccl, a group of one", exception)


# FLA ----------------------------------------------------------------------------------------------------------------


def fla_operands(t: Tensors) -> Tensors:
    """What flash-linear-attention's summaries start from, by this library's stages."""
    from cula.gdn import stages

    gamma = stages.chunk_local_cumsum(t["g"], 64, scale=stages.RCP_LN2)
    w, u, _ = stages.chunk_gated_delta_rule_fwd_intra(t["k"], t["v"], gamma, t["beta"])
    dv = stages.chunk_bwd_dv_local(t["q"], t["k"], t["do"], gamma, scale=t["k"].shape[3] ** -0.5)
    return {"gamma": gamma, "w": w, "u": u, "dv": dv}


def keep_few_configurations() -> None:
    """Of FLA's summaries those of 2 and 3 stages, of its merge 4 warps and 2 stages."""
    from fla.ops.cp import chunk_bwd, chunk_fwd, chunk_merge

    for kernel, stages, warps in (
        (chunk_fwd.chunk_cp_fwd_kernel_h, (2, 3), (2, 4)),
        (chunk_bwd.chunk_cp_bwd_kernel_dh, (2, 3), (2, 4)),
        (chunk_merge.chunk_cp_fwd_bwd_kernel_merge, (2,), (4,)),
    ):
        tuner = kernel
        while not hasattr(tuner, "configs"):
            tuner = tuner.fn
        tuner.configs = [x for x in tuner.configs if x.num_stages in stages and x.num_warps in warps]


# Timing -------------------------------------------------------------------------------------------------------------


def saved_tensors(shape: Shape) -> list[Tensor | None]:
    return [None] * 4 + [torch.empty(1, shape.T, shape.HV, shape.C, dtype=shape.dtype, device="cuda")]


def summary_calls(run: Runner, plan: int, shape: Shape, t: Tensors, saved: list[Tensor | None]) -> dict[str, Any]:
    """Calls that make a rank's two payloads, M known in the second."""
    HV, K, V = shape.HV, shape.K, shape.V
    index = torch.tensor([0], dtype=torch.int64)
    forward, backward = (torch.empty(1, HV, K, V + K, device="cuda") for _ in range(2))
    gates = [t["g"], t["beta"], None, None]
    return {
        "forward": forward,
        "backward": backward,
        "summarize": run.library.prepared(
            "cp_summarize", plan, [t["k"], t["v"], *gates, None, None, saved[4], index, forward, None], kind=5
        ),
        "summarize_adjoint": run.library.prepared(
            "cp_summarize_adjoint", plan,
            [t["q"], t["k"], *gates, None, None, saved[4], t["do"], None, forward[..., V:], index, backward, None],
            kind=6,
        ),
    }  # fmt: skip


def our_times(run: Runner, shape: Shape, t: Tensors, ranks: int) -> dict[str, float]:
    HV, K, V = shape.HV, shape.K, shape.V
    saved = saved_tensors(shape)
    plan = run.library.plan(shape)
    operands = [t[x] for x in ("q", "k", "v", "g", "beta")]
    o, state = torch.empty_like(t["v"]), torch.zeros(1, HV, K, V, device="cuda")
    entering = torch.randn(1, HV, K, V, device="cuda")
    gradients = [torch.empty_like(x) for x in operands]
    forward = [*operands, None, None, entering, o, None, *saved, None]
    backward = [*operands, None, None, entering, t["do"], entering, *saved, None, *gradients, None, None, None]
    entries = torch.randn(ranks, HV, K, V + K, device="cuda") / 8
    calls: dict[str, Callable[[], None]] = {
        "forward": run.library.prepared("forward", plan, forward, kind=1),
        "backward": run.library.prepared("backward", plan, backward, kind=2),
        "prepare": run.library.prepared("cp_prepare", plan, forward, kind=3),
        "advance": run.library.prepared("cp_advance", plan, forward, kind=4),
        "merge": run.library.prepared(
            "cp_merge", plan, [entries, torch.arange(ranks - 1), state[0]], kind=7
        ),
        **{name: x for name, x in summary_calls(run, plan, shape, t, saved).items() if callable(x)},
    }  # fmt: skip
    calls["forward"]()
    result = {name: milliseconds(call, 10) for name, call in calls.items()}
    run.library.lib.cula_free_plan(plan)
    return result


def fla_times(t: Tensors, ranks: int) -> dict[str, float]:
    from fla.ops.cp.chunk_bwd import chunk_cp_bwd_dh
    from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h
    from fla.ops.cp.chunk_merge import chunk_cp_merge

    _, T, HV, V = t["v"].shape
    K = t["k"].shape[3]
    x = fla_operands(t)
    ends = torch.tensor([0, T], device="cuda", dtype=torch.int32)
    hm, dhm, h = (torch.zeros(HV, K, n, device="cuda") for n in (V + K, V + K, V))
    gathered = torch.randn(ranks, HV, K, V + K, device="cuda") / 8
    calls = {
        "summarize": lambda: chunk_cp_fwd_h(
            k=t["k"], w=x["w"], u=x["u"], hm=hm, g=x["gamma"], cu_seqlens=ends
        ),
        "summarize_adjoint": lambda: chunk_cp_bwd_dh(
            q=t["q"], k=t["k"], w=x["w"], do=t["do"], dv=x["dv"], dhm=dhm, g=x["gamma"], scale=K**-0.5, cu_seqlens=ends
        ),
        "merge": lambda: chunk_cp_merge(h=h, ag_hm=gathered, num_ranks=ranks - 1, rank=ranks - 1),
    }  # fmt: skip
    return {name: milliseconds(call, 10) for name, call in calls.items()}


def timings(run: Runner, with_fla: bool, ranks: int = 8) -> list[dict[str, Any]]:
    """One rank in the middle of a chain, in milliseconds; merges of all other ranks' entries."""
    rows: list[dict[str, Any]] = []
    for T in (8192, 32768, 131072):
        for gate_scale in (1 / 16, 1 / 1024):
            shape = Shape(torch.bfloat16, T=T, H=16, HV=32, K=128, V=128)
            t = make_stream(T, 16, 32, gate_scale)
            ours = our_times(run, shape, t, ranks)
            added = ours["summarize"] + ours["summarize_adjoint"] + 2 * ours["merge"]
            halves = ours["prepare"] + ours["advance"] - ours["forward"]
            plain = ours["forward"] + ours["backward"]
            row: dict[str, Any] = {
                "heads": "16/32", "dims": "128/128", "tokens": T, "gates": gate_scale, "ranks": ranks,
                "ours_ms": {name: round(x, 4) for name, x in ours.items()}, "fla_ms": {},
                "added_share": round((added + halves) / plain, 4),
            }  # fmt: skip
            text = (
                f"{added:.3f} ms in summaries and merges, {halves:.3f} by halves, {(added + halves) / plain:.0%} on top"
            )
            if with_fla:
                fla = fla_times(t, ranks)
                row["fla_ms"] = {name: round(x, 4) for name, x in fla.items()}
                theirs = fla["summarize"] + fla["summarize_adjoint"] + 2 * fla["merge"]
                row["of_fla"] = round(added / theirs, 4)
                text += f"; FLA {theirs:.3f}: {added / theirs:.2f} of it"
            print(f"time 16/32 1x{T} gates * 1/{round(1 / gate_scale)}: {text}", flush=True)
            print(f"     {row['ours_ms']} {row['fla_ms']}", flush=True)
            rows.append(row)
            del t
            torch.cuda.empty_cache()
    return rows


# heads, value heads, sequences, tokens of each
SPLIT = [
    (16, 32, 1, 32768),
    (16, 64, 1, 32768),
    (2, 8, 1, 32768),
    (1, 2, 1, 65536),
    (16, 32, 1, 8192),
    (2, 8, 1, 8192),
    (2, 8, 1, 2048),
    (8, 16, 1, 4096),
    (2, 8, 4, 8192),
    (16, 32, 4, 8192),
]


def splitting(run: Runner) -> list[dict[str, Any]]:
    """Calls with the segments that the plan chooses against calls of whole sequences."""
    rows: list[dict[str, Any]] = []
    for H, HV, B, T in SPLIT:
        shape = Shape(torch.bfloat16, B=B, T=T, H=H, HV=HV, K=128, V=128)
        for gate_scale in (1 / 16, 1 / 1024):
            t = {name: x.view(B, T, *x.shape[2:]) for name, x in make_stream(B * T, H, HV, gate_scale).items()}
            for backend in ("auto", "cuda"):
                run.library.backend = backend
                described = run.library.describe(shape)
                if "segments of" not in described:
                    continue
                times: dict[str, dict[str, float]] = {}
                for how in ("chosen", "whole"):
                    run.library.schedules = ScheduleOptions(sequences_whole=how == "whole")
                    plan = run.library.plan(shape)
                    saved = run.saved(shape)
                    operands = [t[x] for x in ("q", "k", "v", "g", "beta")]
                    state, o = torch.zeros(B, HV, 128, 128, device="cuda"), torch.empty_like(t["v"])
                    gradients = [torch.empty_like(x) for x in operands]
                    forward = run.library.prepared(
                        "forward", plan, [*operands, None, None, state, o, None, *saved, None], kind=1
                    )
                    backward = run.library.prepared(
                        "backward", plan,
                        [*operands, None, None, state, t["do"], None, *saved, None, *gradients, None, None, None],
                        kind=2,
                    )  # fmt: skip
                    times[how] = {"forward": milliseconds(forward, 10), "backward": milliseconds(backward, 10)}
                    run.library.lib.cula_free_plan(plan)
                run.library.schedules = ScheduleOptions()
                ratios = {name: times["chosen"][name] / times["whole"][name] for name in ("forward", "backward")}
                rows.append({
                    "heads": f"{H}/{HV}", "lengths": f"{B}x{T}", "gates": gate_scale, "backend": backend, "ms": times,
                })  # fmt: skip
                text = ", ".join(
                    f"{name} {times['chosen'][name]:.3f} against {times['whole'][name]:.3f} ms ({x:.2f})"
                    for name, x in ratios.items()
                )
                print(f"split {H}/{HV} {B}x{T} gates * 1/{round(1 / gate_scale)} {backend}: {text}", flush=True)
            del t
            torch.cuda.empty_cache()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--emulated", action="store_true", help="checks of the kernels on the emulator")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--fla", action="store_true", help="flash-linear-attention beside; without the splitting rows")
    parser.add_argument(
        "--few-configurations", action="store_true", help="let FLA's autotuner choose among fewer: each costs seconds"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    if arguments.fla and arguments.few_configurations:
        keep_few_configurations()
    run = Runner(Library(arguments.library, "cpu" if arguments.emulated else "cuda", "cuda"), arguments.only)
    start = time.time()
    result: dict[str, Any] = {}

    def write() -> None:
        """What is known so far, since a later part may not end."""
        if arguments.json is None:
            return
        stamp = {
            "gpu": torch.cuda.get_device_name(0), "driver": page.driver_version(), "cuda": torch.version.cuda,
            "commit": arguments.commit, "versions": {"torch": torch.__version__},
            "few_configurations_of_fla": arguments.few_configurations,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(stamp | result, indent=1) + "\n")

    if arguments.emulated:
        for backend, dtypes in (("cuda", (torch.bfloat16, torch.float32)), ("auto", (torch.bfloat16, torch.float16))):
            print(f"---- backend {backend}", flush=True)
            run.library.backend = backend
            context_parallel.small(run, dtypes)
    elif not arguments.no_checks:
        sixteen_bits = (torch.bfloat16, torch.float16)
        for backend, dtypes in (("cuda", (*sixteen_bits, torch.float32)), ("auto", sixteen_bits)):
            print(f"---- backend {backend}", flush=True)
            run.library.backend = backend
            context_parallel.small(run, dtypes)
            context_parallel.large(run, dtypes)
        result["accuracy"] = ranks_equal_one(run)
        flags_and_types(run)
        group_of_one(run)
    result["checks"] = f"{run.count - len(run.failures)} of {run.count}"
    print(f"{result['checks']} checks passed in {time.time() - start:.0f} s", flush=True)
    for failure in run.failures:
        print("failed:", failure, flush=True)
    if not (arguments.no_timing or arguments.emulated):
        run.library.backend = "auto"
        result["rows"] = timings(run, arguments.fla)
        write()
        if not arguments.fla:
            result["splitting"] = splitting(run)
            write()
    return 1 if run.failures or (run.count == 0 and not arguments.no_checks) else 0


if __name__ == "__main__":
    sys.exit(main())
