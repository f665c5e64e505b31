"""The CPU backend's figures, as ratios within one run, written as JSON and as a page.

    python benchmarks/bench_cpu.py [--json FILE] [--page FILE.md] [--figure FILE.svg] [--quick]

Forward and backward against transformers' torch fallback (time; peak memory, each in a process of its own), two threads
against one, time a token over the sequence length, forward against this machine's own fp32 matrix multiplication, and
errors against float64. Nothing else should run on the machine meanwhile.

The process keeps the memory that it frees: glibc's malloc gives large blocks back, and a call then times the kernel
clearing new pages (PyTorch's tuning guide recommends an allocator that keeps them). Threads and lengths are measured
in a process that gives memory back, too, and the page shows both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cula.gdn import reference_gated_delta_rule
from cula.gdn.cli.info import describe, processor_name
from cula.gdn.cli.workload import (
    DTYPES,
    Operator,
    Shape,
    forward_call,
    make_inputs,
    ours,
    relative_error,
    seconds,
    training_call,
    transformers_fallback,
)

CPU = torch.device("cpu")
KEEP_FREED_MEMORY = {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={2**32}:glibc.malloc.trim_threshold={2**33}"}
SHAPE = Shape(batch=1, tokens=4096, heads=4, value_heads=8, key_dim=128, value_dim=128)
CHUNK = 64
NAMES = ("float32", "bfloat16")
OPERATORS: dict[str, Callable[[], Operator]] = {
    "cula.gdn": lambda: ours().operator,
    "transformers": transformers_fallback,
}


def with_tokens(tokens: int) -> Shape:
    return Shape(**{**vars(SHAPE), "tokens": tokens})


def interleaved_medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median time of each call. The calls take turns, so that a slow spell of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] += seconds(call, CPU, repeats=1, warmups=0)
    return {name: statistics.median(values) for name, values in times.items()}


def default_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in KEEP_FREED_MEMORY}


# ---- peak memory ----------------------------------------------------------------------------------------------------


def memory_status(field: str) -> int:
    """Bytes, from Linux' account of this process. (getrusage's ru_maxrss starts at the parent's peak.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def report_peak_memory(operator: str, dtype: str, tokens: int) -> None:
    """Run in a child process: prints how far one forward and backward pass raises the peak of resident memory."""
    function = OPERATORS[operator]()
    training_call(function, make_inputs(with_tokens(CHUNK), DTYPES[dtype], CPU))()  # libraries, threads
    call = training_call(function, make_inputs(with_tokens(tokens), DTYPES[dtype], CPU))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again, at what is resident now
    before = memory_status("VmRSS")
    call()
    print(memory_status("VmHWM") - before)


def peak_memory(operator: str, dtype: str, tokens: int) -> int:
    command = [sys.executable, __file__, "--peak-memory-of", operator, dtype, str(tokens)]
    # As users run it: what is asked of the system, not what an allocator sets aside.
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=default_environment()).stdout
    return int(output.split()[-1])


# ---- the measurements -----------------------------------------------------------------------------------------------


def measure_peer(rounds: int, tokens: int) -> dict[str, Any]:
    results = {}
    for dtype in NAMES:
        inputs = make_inputs(with_tokens(tokens), DTYPES[dtype], CPU)
        times = interleaved_medians({name: training_call(load(), inputs) for name, load in OPERATORS.items()}, rounds)
        memory = {name: peak_memory(name, dtype, tokens) for name in OPERATORS}
        results[dtype] = {
            "seconds": times,
            "peak_bytes": memory,
            "time_ratio": times["transformers"] / times["cula.gdn"],
            "memory_ratio": memory["cula.gdn"] / memory["transformers"],
        }
    return results


def measure_threads(rounds: int, tokens: int) -> dict[str, Any]:
    """Forward and backward with one thread and with two."""
    inputs = make_inputs(with_tokens(tokens), torch.float32, CPU)
    run = training_call(ours().operator, inputs)

    def on(threads: int) -> Callable[[], Any]:
        def call() -> Any:
            torch.set_num_threads(threads)
            return run()

        return call

    before = torch.get_num_threads()
    times = interleaved_medians({"1": on(1), "2": on(2)}, rounds)
    torch.set_num_threads(before)
    return {"seconds": times, "speedup": times["1"] / times["2"]}


def measure_lengths(rounds: int, lengths: list[int]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for mode, make in (("forward", forward_call), ("forward+backward", training_call)):
        calls = {
            str(tokens): make(ours().operator, make_inputs(with_tokens(tokens), torch.float32, CPU))
            for tokens in lengths
        }
        times = interleaved_medians(calls, rounds)
        microseconds = {tokens: 1e6 * value / int(tokens) for tokens, value in times.items()}
        results[mode] = {
            "us_per_token": microseconds,
            "spread": max(microseconds.values()) / min(microseconds.values()) - 1,
        }
    return results


def measure_scaling(rounds: int, tokens: int, lengths: list[int]) -> dict[str, Any]:
    # Short calls are the noisier ones.
    return {"threads": measure_threads(3 * rounds, tokens), "lengths": measure_lengths(max(2, rounds - 2), lengths)}


def measure_scaling_by_default(*arguments: Any) -> dict[str, Any]:
    """The same in a process whose allocator gives freed memory back."""
    command = [sys.executable, __file__, "--scaling", json.dumps(arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=default_environment()).stdout
    return dict(json.loads(output))


def forward_matrix_flops(shape: Shape) -> float:
    """Matrix products of the chunked forward pass; the inverse of the triangular matrix is not counted.

    A chunk and value head: K S, Q S and the state update (2 C K V each), A W and P V' (2 C C V each); a chunk and key
    head: Q K^T and K K^T (2 C C K each). Products with triangular matrices count in full.
    """
    chunks = shape.batch * -(-shape.tokens // CHUNK)
    value_head = 6 * CHUNK * shape.key_dim * shape.value_dim + 4 * CHUNK * CHUNK * shape.value_dim
    key_head = 4 * CHUNK * CHUNK * shape.key_dim
    return float(chunks * (shape.value_heads * value_head + shape.heads * key_head))


def measure_gemm(rounds: int, tokens: int) -> dict[str, Any]:
    """Rate of the forward pass on its matrix work, beside fp32 torch.mm with the same threads."""
    size = 2048
    a, b = torch.randn(size, size), torch.randn(size, size)
    shape = with_tokens(tokens)
    calls: dict[str, Callable[[], Any]] = {"torch.mm fp32": lambda: torch.mm(a, b)}
    for dtype in NAMES:
        calls[f"forward {dtype}"] = forward_call(ours().operator, make_inputs(shape, DTYPES[dtype], CPU))
    times = interleaved_medians(calls, rounds)
    rates = {name: (forward_matrix_flops(shape) if name.startswith("forward") else 2 * size**3) / value / 1e9
             for name, value in times.items()}  # fmt: skip
    return {"gflops": rates, "fraction": {d: rates[f"forward {d}"] / rates["torch.mm fp32"] for d in NAMES}}


def measure_errors(tokens: int) -> dict[str, Any]:
    """Relative L2 errors against the float64 recurrence on the same (rounded) inputs."""
    results = {}
    for dtype in NAMES:
        inputs = make_inputs(with_tokens(tokens), DTYPES[dtype], CPU)

        def outputs(operator: Operator, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
            o, state = operator(*leaves.values(), output_final_state=True)
            assert state is not None
            grad_output = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(o.dtype)
            gradients = torch.autograd.grad(o, list(leaves.values()), grad_output)
            return {"o": o, "final_state": state} | {"d" + n: g for n, g in zip(leaves, gradients, strict=True)}

        mine = outputs(ours().operator, inputs)
        exact = outputs(reference_gated_delta_rule, {name: value.double() for name, value in inputs.items()})
        results[dtype] = {name: relative_error(mine[name], exact[name]) for name in exact}
    return results


# ---- reports --------------------------------------------------------------------------------------------------------


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [headings, ["---"] * len(headings), *rows]]
    return "\n".join(lines)


def page(results: dict[str, Any]) -> str:
    machine = results["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    mib = 2**20
    peer = table(
        ["dtype", "cula.gdn", "transformers", "times faster", "peak memory", "transformers", "of its memory"],
        [
            [
                dtype, f"{row['seconds']['cula.gdn'] * 1e3:.0f} ms", f"{row['seconds']['transformers'] * 1e3:.0f} ms",
                f"{row['time_ratio']:.1f}", f"{row['peak_bytes']['cula.gdn'] / mib:.0f} MiB",
                f"{row['peak_bytes']['transformers'] / mib:.0f} MiB", f"{row['memory_ratio']:.2f}",
            ]
            for dtype, row in results["peer"].items()
        ],
    )  # fmt: skip
    modes = {
        f"{mode}{suffix}": row
        for scaling, suffix in (("scaling", ""), ("scaling_by_default", ", memory given back"))
        for mode, row in results[scaling]["lengths"].items()
    }
    lengths = table(
        ["tokens", *modes],
        [[t, *(f"{row['us_per_token'][t]:.2f}" for row in modes.values())] for t in modes["forward"]["us_per_token"]]
        + [["largest over smallest", *(f"+{100 * row['spread']:.0f}%" for row in modes.values())]],
    )
    rates = table(["", "GFLOP/s"], [[name, f"{rate:.0f}"] for name, rate in results["gemm"]["gflops"].items()])
    names = list(results["errors"]["float32"])
    errors = table(["dtype", *names], [[d, *(f"{row[n]:.1e}" for n in names)] for d, row in results["errors"].items()])
    fractions = ", ".join(f"{100 * value:.0f}% ({dtype})" for dtype, value in results["gemm"]["fraction"].items())
    threads, default_threads = (results[scaling]["threads"] for scaling in ("scaling", "scaling_by_default"))
    return f"""# CPU backend, measured

Written by `make bench` (benchmarks/bench_cpu.py). Ratios within one run count; absolute times belong to this machine.

- Processor: {machine["processor"]}; kernels for {machine["cpu_isa"]}; {machine["torch_threads"]} threads
- Versions: cula-gdn {machine["version"]} (commit {machine["commit"]}), {packages}, Python {machine["python"]}
- Built with {machine["build"]}
- The process keeps the memory that it frees (`GLIBC_TUNABLES={KEEP_FREED_MEMORY["GLIBC_TUNABLES"]}`), except where \
"memory given back" is said and for peak memory
- Shape unless said otherwise: B={SHAPE.batch}, T={results["tokens"]}, H={SHAPE.heads}, HV={SHAPE.value_heads}, \
K={SHAPE.key_dim}, V={SHAPE.value_dim}; unit keys and queries, gates logsigmoid(normal), beta uniform

## Forward and backward, against transformers' torch fallback

`torch_chunk_gated_delta_rule` of transformers' Qwen3-Next model, the same threads, calls taking turns, medians.
Peak memory: how far one pass raises the process's peak of resident memory, each in a process of its own.

{peer}

## Threads

Forward and backward, fp32: {threads["seconds"]["1"] * 1e3:.0f} ms with one thread, \
{threads["seconds"]["2"] * 1e3:.0f} ms with two, {threads["speedup"]:.2f} times faster \
({default_threads["speedup"]:.2f} times, memory given back).

## Time a token over the length, fp32, microseconds

{lengths}

## Forward on its matrix work

Dense products only (see `forward_matrix_flops`), without the triangular inverse, gates and conversions, which the time
does contain. The forward pass reaches {fractions} of the fp32 rate of `torch.mm` on 2048 x 2048 matrices.

{rates}

## Relative L2 error against the float64 recurrence, T={results["error_tokens"]}

{errors}
"""


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "cula", "font.size": 10})  # the same file for the same numbers
    import matplotlib.pyplot as plt

    figure, (bars, lines) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    colours = {"cula.gdn": "tab:blue", "transformers": "tab:gray"}
    for i, (name, colour) in enumerate(colours.items()):
        heights = [row["seconds"][name] * 1e3 for row in results["peer"].values()]
        drawn = bars.bar([x + (i - 0.5) * 0.38 for x in range(len(heights))], heights, 0.36, color=colour,
                         label="cula.gdn" if name == "cula.gdn" else "transformers, torch fallback")  # fmt: skip
        bars.bar_label(drawn, fmt="%.0f ms", padding=2)
    bars.set_xticks(range(len(results["peer"])), list(results["peer"]))
    bars.set(ylabel="milliseconds", title=f"Forward + backward, {results['tokens']} tokens")
    bars.margins(y=0.15)
    bars.legend()
    for mode, row in results["scaling"]["lengths"].items():
        lines.plot([int(t) for t in row["us_per_token"]], list(row["us_per_token"].values()), "-o", label=mode)
    ticks = [int(t) for t in results["scaling"]["lengths"]["forward"]["us_per_token"]]
    lines.set_xscale("log", base=2)
    lines.set_xticks(ticks, [f"{t // 1024}k" for t in ticks])
    lines.set(ylim=(0, None), xlabel="tokens", ylabel="microseconds a token", title="Linear in the length (fp32)")
    lines.grid(alpha=0.3)
    lines.legend()
    figure.suptitle(
        f"H={SHAPE.heads}, HV={SHAPE.value_heads}, K=V=128, {results['machine']['torch_threads']} CPU threads"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE.md")
    parser.add_argument("--figure", type=Path, metavar="FILE.svg")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, not how fast")
    parser.add_argument("--peak-memory-of", nargs=3, metavar=("OPERATOR", "DTYPE", "TOKENS"), help=argparse.SUPPRESS)
    parser.add_argument("--scaling", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scaling:
        print(json.dumps(measure_scaling(*options.scaling)))
        return 0
    if options.peak_memory_of:
        operator, dtype, tokens = options.peak_memory_of
        report_peak_memory(operator, dtype, int(tokens))
        return 0

    if any(os.environ.get(name) != value for name, value in KEEP_FREED_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_FREED_MEMORY)  # read when glibc starts

    tokens, rounds = (512, 2) if options.quick else (SHAPE.tokens, 7)
    error_tokens = 128 if options.quick else 512
    lengths = [1024, 2048] if options.quick else [1024, 2048, 4096, 8192, 16384, 32768]
    results: dict[str, Any] = {
        "machine": {**describe(), "processor": processor_name()},
        "tokens": tokens,
        "error_tokens": error_tokens,
        "errors": measure_errors(error_tokens),
        "gemm": measure_gemm(rounds, tokens),
        "scaling": measure_scaling(rounds, tokens, lengths),
        "scaling_by_default": measure_scaling_by_default(rounds, tokens, lengths),
        "peer": measure_peer(rounds, tokens),
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    text = page(results)
    print(text)
    if options.page:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(text)
    if options.figure:
        draw(results, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
