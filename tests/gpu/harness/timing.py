"""Times the operator row by row, with the error of each row against float64 on a sampled key head."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from harness.chunked import chunked
from harness.library import Shape
from harness.reference import error
from harness.runner import Runner

Tensor = torch.Tensor


@dataclasses.dataclass
class Row:
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    sequences: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.heads}/{self.value_heads} {self.key_dim}x{self.value_dim} {self.sequences}x{self.tokens}"


ROWS = [
    Row(16, 32, 128, 128, 1, 32768),
    Row(16, 32, 128, 128, 4, 8192),
    Row(16, 32, 128, 128, 8, 4096),
    Row(16, 32, 128, 128, 1, 8192),
    Row(8, 8, 64, 64, 1, 32768),
    Row(8, 8, 64, 64, 4, 8192),
    Row(6, 6, 256, 512, 1, 8192),
    Row(6, 6, 256, 512, 4, 8192),
    Row(16, 64, 128, 128, 1, 32768),
    Row(2, 8, 128, 128, 1, 8192),
]
SHORT = Row(16, 32, 128, 128, 1, 64)

Inputs = dict[str, Tensor]


def row_inputs(row: Row) -> Inputs:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*dims: int) -> Tensor:
        return torch.randn(*dims, device="cuda", generator=generator)

    B, T, H, HV, K, V = row.sequences, row.tokens, row.heads, row.value_heads, row.key_dim, row.value_dim
    normalize = torch.nn.functional.normalize
    return {
        "q": normalize(normal(B, T, H, K), dim=-1).bfloat16(),
        "k": normalize(normal(B, T, H, K), dim=-1).bfloat16(),
        "v": normal(B, T, HV, V).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(B, T, HV)) / 16,
        "beta": normal(B, T, HV).sigmoid(),
        "h0": normal(B, HV, K, V),
        "do": normal(B, T, HV, V).bfloat16(),
        "dht": normal(B, HV, K, V) / 8,
    }


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median over graph replays of one call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def sampled_errors(row: Row, t: Inputs, results: Inputs) -> dict[str, float]:
    """Of the first sequence's first key head and its value heads."""
    group = row.value_heads // row.heads
    exact: Inputs = {}
    for name, x in t.items():
        heads = 1 if name in ("q", "k") else group
        part = x[0, :heads] if name in ("h0", "dht") else x[0, :, :heads]
        exact[name] = part.double().requires_grad_(name not in ("do", "dht"))
    q, k = (exact[name].expand(-1, group, -1) for name in ("q", "k"))
    o, ht = chunked(q, k, exact["v"], exact["g"], exact["beta"], exact["h0"], row.key_dim**-0.5)
    names = ("q", "k", "v", "g", "beta", "h0")
    loss = (o * exact["do"]).sum() + (ht * exact["dht"]).sum()
    gradients = torch.autograd.grad(loss, [exact[name] for name in names])
    errors = {"o": error(results["o"][0, :, :group], o), "ht": error(results["ht"][0, :group], ht)}
    for name, gradient in zip(names, gradients, strict=True):
        actual = results[f"d{name}"]
        heads = 1 if name in ("q", "k") else group
        errors[f"d{name}"] = error(actual[0, :heads] if name == "h0" else actual[0, :, :heads], gradient)
    return errors


@dataclasses.dataclass
class Calls:
    """One row's calls on buffers of its own."""

    forward: Callable[[], None]
    backward: Callable[[], None]
    results: Inputs
    backward_mib: float  # that backward allocates: workspace and gradients


def make_calls(run: Runner, row: Row, plan: int, t: Inputs) -> Calls:
    shape = Shape(
        torch.bfloat16, B=row.sequences, T=row.tokens, H=row.heads, HV=row.value_heads, K=row.key_dim, V=row.value_dim
    )
    saved = run.saved(shape)
    results = {"o": torch.empty_like(t["v"]), "ht": torch.empty_like(t["h0"])}
    base = [t[name] for name in ("q", "k", "v", "g", "beta")]
    forward = run.library.prepared(
        "forward", plan, [*base, None, None, t["h0"], results["o"], results["ht"], *saved, None], kind=1
    )
    before = torch.cuda.memory_allocated()
    gradients = [torch.empty_like(x) for x in base]
    dh0 = torch.empty_like(t["h0"])
    results |= {f"d{name}": x for name, x in zip(("q", "k", "v", "g", "beta"), gradients, strict=True)}
    results["dh0"] = dh0
    backward = run.library.prepared(
        "backward",
        plan,
        [*base, None, None, t["h0"], t["do"], t["dht"], *saved, None, *gradients, None, None, dh0],
        kind=2,
    )
    return Calls(forward, backward, results, (torch.cuda.memory_allocated() - before) / 2**20)


def by_kernel(call: Callable[[], object]) -> list[tuple[str, float]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [(e.key, e.device_time_total / 1e3) for e in profile.key_averages() if e.device_time_total > 0]


def timings(run: Runner, kernels: bool, rows: list[Row] | None = None) -> list[dict[str, object]]:
    """Two records a row, in the form of the results page."""
    records: list[dict[str, object]] = []
    for row in rows or ROWS:
        t = row_inputs(row)
        plan = run.library.plan(
            Shape(torch.bfloat16, B=row.sequences, T=row.tokens, H=row.heads, HV=row.value_heads, K=row.key_dim,
                  V=row.value_dim)
        )  # fmt: skip
        calls = make_calls(run, row, plan, t)
        forward_ms, backward_ms = milliseconds(calls.forward), milliseconds(calls.backward)
        errors = sampled_errors(row, t, calls.results)
        workspace_mib = run.library.lib.cula_workspace(plan, 1) / 2**20
        print(
            f"time {row.name}: forward {forward_ms:.3f}, backward {backward_ms:.3f} ms, forward's workspace "
            f"{workspace_mib:.0f} MiB, allocated by backward {calls.backward_mib:.0f} MiB, errors "
            + " ".join(f"{name}={value:.1e}" for name, value in errors.items()),
            flush=True,
        )
        for direction, ms, mib, names in (
            ("forward", forward_ms, workspace_mib, ("o", "ht")),
            ("backward", backward_ms, calls.backward_mib, ("dq", "dk", "dv", "dg", "dbeta", "dh0")),
        ):
            records.append({
                "direction": direction, "heads": f"{row.heads}/{row.value_heads}",
                "dims": f"{row.key_dim}/{row.value_dim}", "lengths": f"{row.sequences}x{row.tokens}",
                "ours_ms": round(ms, 4), "peers_ms": {}, "peak_mib": round(mib, 1),
                "error": {name: errors[name] for name in names},
            })  # fmt: skip
        if kernels:
            for name, ms in by_kernel(calls.forward) + by_kernel(calls.backward):
                print(f"     {ms:8.3f} ms {name[:110]}", flush=True)
        run.library.lib.cula_free_plan(plan)
        del t, calls
        torch.cuda.empty_cache()
    return records


def host_cost(run: Runner) -> float:
    """Microseconds of one short forward call through the C++ interface, calls back to back."""
    t = row_inputs(SHORT)
    plan = run.library.plan(Shape(torch.bfloat16, T=SHORT.tokens, H=SHORT.heads, HV=SHORT.value_heads, K=128, V=128))
    calls = make_calls(run, SHORT, plan, t)
    for _ in range(10):
        calls.forward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        calls.forward()
    cost = (time.perf_counter() - start) / 500 * 1e6
    torch.cuda.synchronize()
    run.library.lib.cula_free_plan(plan)
    return cost
