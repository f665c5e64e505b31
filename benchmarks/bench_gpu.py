"""The operator on a GPU beside its peers, in one process: time, peak memory, error, host cost of a short call.

    python benchmarks/bench_gpu.py --rows forward|backward|training|general [--backend NAME]
                                   [--peers fla flashqla flashinfer] [--json FILE] [--page FILE.md] [--limit SECONDS]

Times are medians of CUDA graph replays (events where a call can not be captured), bf16, with initial and final state.
Training rows are forward plus backward through the public operator: with norms, and with norms, gates and sigmoids.
Peers that are not installed are left out by name; rows that the limit cuts off are named too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_FLASH_QLA", "0")  # FLA's own kernels, not those it would borrow

import torch
import torch.nn.functional as F
from gpu_peers import LOADERS, Inputs, Peer, load, results

from cula.gdn import chunk_gated_delta_rule, plan, reference_gated_delta_rule
from cula.gdn.autograd import NUM_DIFFERENTIABLE
from cula.gdn.cli.info import describe

MIB = 2**20
SHORT_LENGTHS = (64, 512)
# Forward plus backward of a layer: norms in the operator, and all that it takes.
TRAINING = ("training, norms", "training, all flags")


@dataclass(frozen=True)
class Row:
    direction: str
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    lengths: tuple[int, ...]

    def named(self) -> dict[str, str]:
        same = len(set(self.lengths)) == 1
        lengths = f"{len(self.lengths)}x{self.lengths[0]}" if same else "+".join(map(str, self.lengths))
        return {
            "direction": self.direction,
            "heads": f"{self.heads}/{self.value_heads}",
            "dims": f"{self.key_dim}/{self.value_dim}",
            "lengths": lengths,
        }


def rows_of(table: str) -> Iterator[Row]:
    if table in ("forward", "backward"):
        forward = {(16, 64): ["1x32768", "4x8192", "1x8192", "1x2048"], (16, 32): ["1x32768", "4x8192", "1x4096"],
                   (2, 8): ["1x32768", "8x1024", "1x8192", "1x2048"]}  # fmt: skip
        lengths = [f"{n}x{total // n}" for total in (8192, 32768) for n in (1, 2, 4, 8)]
        backward = {(16, 32): ["1x32768", "1x8192", "8x4096"], (2, 4): lengths, (4, 8): lengths, (8, 16): lengths}
        for heads, texts in (forward if table == "forward" else backward).items():
            for text in texts:
                count, length = map(int, text.split("x"))
                yield Row(table, *heads, 128, 128, (length,) * count)
        return
    if table == "training":
        for count, length in ((1, 8192), (4, 8192), (1, 32768)):
            for direction in TRAINING:
                yield Row(direction, 16, 32, 128, 128, (length,) * count)
        return
    for heads, dims in (((16, 32), (128, 128)), ((8, 8), (64, 64)), ((6, 6), (256, 512))):
        for lengths in ((32768,), (8192,) * 4):
            for direction in ("forward", "backward"):
                yield Row(direction, *heads, *dims, lengths)


def make_inputs(row: Row, device: str) -> Inputs:
    """Unit q and k, normal v, states and gradients, g = logsigmoid(normal) / 16, beta in (0, 1)."""
    generator = torch.Generator(device).manual_seed(0)
    T, N, H, HV, K, V = (sum(row.lengths), len(row.lengths), row.heads, row.value_heads, row.key_dim, row.value_dim)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    offsets = torch.tensor([0, *row.lengths]).cumsum(0).to(torch.int32)
    x: Inputs = {
        "q": F.normalize(normal(1, T, H, K), dim=-1).bfloat16(),
        "k": F.normalize(normal(1, T, H, K), dim=-1).bfloat16(),
        "v": normal(1, T, HV, V).bfloat16(),
        "g": F.logsigmoid(normal(1, T, HV)) / 16,
        "beta": normal(1, T, HV).sigmoid(),
        "h0": normal(N, HV, K, V),
        "do": normal(1, T, HV, V).bfloat16(),
        "dht": normal(N, HV, K, V) / 8,
        "cu_seqlens": offsets.to(device),
        "cu_seqlens_cpu": offsets,
        "scale": K**-0.5,
    }
    if row.direction in TRAINING:
        x |= {"q": normal(1, T, H, K).bfloat16(), "k": normal(1, T, H, K).bfloat16()}
        x["options"] = {"use_qk_l2norm_in_kernel": True}
    if row.direction == "training, all flags":
        x |= {"g": normal(1, T, HV).bfloat16(), "beta": normal(1, T, HV).bfloat16()}
        x |= {"A_log": normal(HV), "dt_bias": normal(HV) - 4}
        x["options"] |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return x


def ours(backend: str) -> Peer:
    def operands(x: Inputs) -> tuple[Any, ...]:
        return (x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, x["h0"], x["cu_seqlens"], x["cu_seqlens_cpu"])

    def options(x: Inputs) -> tuple[Any, ...]:
        return (x["scale"], 64, *(False,) * 6, backend)

    def forward(x: Inputs) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return chunk_gated_delta_rule(
                    x["q"], x["k"], x["v"], x["g"], x["beta"], scale=x["scale"], initial_state=x["h0"],
                    output_final_state=True, cu_seqlens=x["cu_seqlens"], cu_seqlens_cpu=x["cu_seqlens_cpu"],
                    backend=backend,
                )  # fmt: skip

        return call

    def backward(x: Inputs) -> Callable[[], Any]:
        library = torch.ops.cula_gdn
        saved = library.chunk_forward(*operands(x), None, True, True, *options(x))[2:]
        wanted = [True] * NUM_DIFFERENTIABLE
        call = lambda: library.chunk_backward(x["do"], x["dht"], *operands(x), *saved, wanted, *options(x))  # noqa: E731
        return lambda: (lambda d: (*d[:3], d[4], d[3], d[7]))(call())

    def operator(*operands: Any, **options: Any) -> Any:
        return chunk_gated_delta_rule(*operands, **options, backend=backend)

    return Peer("ours", describe()["version"], forward, backward, operator, takes_gate=True)


def training_call(peer: Peer, x: Inputs) -> Callable[[], Any]:
    """Forward and backward through autograd."""
    assert peer.operator is not None
    names = ["q", "k", "v", "g", "beta", "h0", *(name for name in ("A_log", "dt_bias") if name in x)]
    leaf = {name: x[name].clone().requires_grad_() for name in names}
    gate = {name: leaf[name] for name in names[6:]}
    options = x.get("options", {})

    def call() -> Any:
        o, state = peer.operator(
            leaf["q"], leaf["k"], leaf["v"], leaf["g"], leaf["beta"], scale=x["scale"], initial_state=leaf["h0"],
            output_final_state=True, cu_seqlens=x["cu_seqlens"], cu_seqlens_cpu=x["cu_seqlens_cpu"], **gate, **options,
        )  # fmt: skip
        return torch.autograd.grad([o, state], list(leaf.values()), [x["do"], x["dht"]])

    return call


class _Nothing(torch.autograd.Function):
    """The operator's differentiable inputs and results, and no work between: what torch takes of such a call."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[2]), torch.empty_like(inputs[5])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(ctx.saved_tensors)


def empty_training_call(x: Inputs) -> Callable[[], Any]:
    leaves = [x[name].clone().requires_grad_() for name in ("q", "k", "v", "g", "beta", "h0")]
    return lambda: torch.autograd.grad(_Nothing.apply(*leaves), leaves, [x["do"], x["dht"]])


def call_of(peer: Peer, row: Row, x: Inputs) -> Callable[[], Any] | None:
    """What is timed; None where the peer has no such operation."""
    if row.direction == "forward":
        return peer.forward(x)
    if row.direction == "backward":
        return peer.backward and peer.backward(x)
    takes = peer.operator is not None and (peer.takes_gate or "A_log" not in x)
    return training_call(peer, x) if takes else None


# ---- clocks ---------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any], budget: float = 60.0) -> float:
    """Median time of one call, as a graph replay where it can be captured."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    replay = call
    try:
        with torch.cuda.stream(stream):
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call()
        replay = graph.replay
    except RuntimeError:
        pass
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 8 or (sum(times) < budget and len(times) < 100):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def peak_mib(call: Callable[[], Any]) -> float:
    """What one call allocates at its peak, its results included."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def eager_microseconds(call: Callable[[], Any], repeats: int = 300) -> float:
    """Wall time of one call, back to back."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


# ---- measurements ---------------------------------------------------------------------------------------------------


def measure_row(row: Row, mine: Peer, peers: list[Peer], notes: list[str]) -> dict[str, Any]:
    x = make_inputs(row, "cuda")
    times: dict[str, float | None] = dict.fromkeys(LOADERS)
    memory: dict[str, float] = {}
    for peer in (mine, *peers):
        try:
            call = call_of(peer, row, x)
            if call is None:
                continue
            times[peer.name] = milliseconds(call)
            memory[peer.name] = peak_mib(call)
        except Exception as error:  # a peer's refusal is a result too
            if peer is mine:
                raise
            notes.append(f"{peer.name}, {row.named()}: {type(error).__name__}: {str(error)[:160]}")
    backend = plan(
        1, sum(row.lengths), row.heads, row.value_heads, row.key_dim, row.value_dim, device="cuda",
        cu_seqlens=x["cu_seqlens_cpu"],
    ).backend  # fmt: skip
    return {
        **row.named(),
        "ours_ms": times.pop("ours"),
        "peers_ms": times,
        "peak_mib": memory.pop("ours"),
        "peers_peak_mib": memory,
        "default_backend": backend,
    }


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.double().cpu() - exact).norm() / exact.norm()).item()


def measure_errors(key_dim: int, value_dim: int, mine: Peer, peers: list[Peer], tokens: int) -> dict[str, Any]:
    """Relative L2 errors against the float64 recurrence on the same inputs."""
    x = make_inputs(Row("forward", 2, 4, key_dim, value_dim, (tokens,)), "cuda")
    names = ["q", "k", "v", "beta", "g", "h0"]
    q, k, v, beta, g, h0 = leaves = [x[name].double().cpu().requires_grad_() for name in names]
    o, state = reference_gated_delta_rule(q, k, v, g, beta, scale=x["scale"], initial_state=h0, output_final_state=True)
    assert state is not None
    gradients = torch.autograd.grad([o, state], leaves, [x["do"].double().cpu(), x["dht"].double().cpu()])
    exact = {"o": o.detach(), "final_state": state.detach()}
    exact |= {"d" + name: gradient for name, gradient in zip(names, gradients, strict=True)}
    errors: dict[str, Any] = {}
    for peer in (mine, *peers):
        found: dict[str, torch.Tensor] = {}
        for direction, make in (("forward", peer.forward), ("backward", peer.backward)):
            if make is None:
                continue
            returned = make(x)()
            named = {"o": returned[0], "final_state": returned[1]} if peer is mine and direction == "forward" else None
            found |= named or results(direction, returned, peer.name)
        errors[peer.name] = {name: relative_error(value, exact[name]) for name, value in found.items()}
    return errors


def measure_short_calls(mine: Peer, peers: list[Peer]) -> dict[str, Any]:
    """Eager microseconds a call, 16/32 heads, one sequence; forward plus backward through autograd, too, beside what
    torch takes of that for a function that does nothing."""
    found: dict[str, Any] = {}
    for tokens in SHORT_LENGTHS:
        x = make_inputs(Row("forward", 16, 32, 128, 128, (tokens,)), "cuda")
        times = {peer.name: eager_microseconds(peer.forward(x)) for peer in (mine, *peers)}
        trained = {peer.name: training_call(peer, x) for peer in (mine, *peers) if peer.operator is not None}
        for name, call in {**trained, "nothing": empty_training_call(x)}.items():
            times[f"{name}, forward + backward"] = eager_microseconds(call)
            with torch.autograd.set_multithreading_enabled(False):
                times[f"{name}, the same on one thread"] = eager_microseconds(call)
        found[str(tokens)] = times
    return found


# ---- reports --------------------------------------------------------------------------------------------------------


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [headings, ["---"] * len(headings), *rows])


def number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def page(found: dict[str, Any]) -> str:
    names = [name for name in LOADERS if any(row["peers_ms"][name] for row in found["rows"])]
    headings = ["direction", "heads", "K/V", "lengths", "ours, ms", *names, "fastest peer / ours", "peak MiB",
                *(f"{name}, MiB" for name in names)]  # fmt: skip
    rows = []
    for row in found["rows"]:
        best = min((t for t in row["peers_ms"].values() if t), default=None)
        rows.append([
            row["direction"], row["heads"], row["dims"], row["lengths"], number(row["ours_ms"]),
            *(number(row["peers_ms"][name]) for name in names), number(best and best / row["ours_ms"], ".2f"),
            number(row["peak_mib"], ".0f"), *(number(row["peers_peak_mib"].get(name), ".0f") for name in names),
        ])  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = [
        f"{found['gpu']}, driver {found['driver']}, CUDA {found['cuda']}; commit {found['commit']}, "
        f"backend {found['backend']}; {versions}.\n\n"
        "bf16, initial and final state; medians of CUDA graph replays in one process, peak memory of one call with its "
        "results.",
        markdown(headings, rows),
    ]
    for dims, errors in found["errors"].items():
        columns = list(errors["ours"])
        parts += [
            f"Relative L2 error against the float64 recurrence, K/V = {dims}, 2/4 heads, T = {found['error_tokens']}:",
            markdown(["", *columns], [[n, *(number(e.get(c), ".2e") for c in columns)] for n, e in errors.items()]),
        ]
    if found["short_calls_us"]:
        columns = list(next(iter(found["short_calls_us"].values())))
        parts += [
            "Eager time of a call, 16/32 heads, one sequence with initial and final state, back to back, microseconds:",
            markdown(["T", *columns], [[t, *(number(row.get(c), ".0f") for c in columns)]
                                       for t, row in found["short_calls_us"].items()]),
        ]  # fmt: skip
    if found["notes"]:
        parts.append("\n".join(f"- {note}" for note in found["notes"]))
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=("forward", "backward", "training", "general"), nargs="+", required=True)
    parser.add_argument("--backend", choices=("auto", "cuda", "sm90"), default="auto")
    parser.add_argument("--peers", choices=tuple(LOADERS), nargs="*", default=list(LOADERS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE.md")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="start no row after this time")
    parser.add_argument("--error-tokens", type=int, default=1024)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu.py: error: PyTorch sees no CUDA device", file=sys.stderr)
        return 2

    started = time.monotonic()
    mine = ours(options.backend)
    peers, notes = load(options.peers)
    about = describe()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "commit": about["commit"],
        "backend": options.backend,
        "versions": {"cula-gdn": about["version"], "torch": torch.__version__} | {p.name: p.version for p in peers},
        "rows": [],
        "errors": {},
        "error_tokens": options.error_tokens,
        "short_calls_us": {},
        "notes": notes,
    }

    def write() -> None:
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        if options.page:
            options.page.write_text(page(found))

    # Rows first: they are what a limit should leave.
    for row in (row for table in options.rows for row in rows_of(table)):
        if time.monotonic() - started > options.limit:
            notes.append(f"not reached within the limit: {row.named()}")
            continue
        result = measure_row(row, mine, peers, notes)
        found["rows"].append(result)
        print(json.dumps(result), flush=True)
        write()
    found["short_calls_us"] = measure_short_calls(mine, peers)
    write()
    for dims in dict.fromkeys(row["dims"] for row in found["rows"]):
        key_dim, value_dim = map(int, dims.split("/"))
        errors = measure_errors(key_dim, value_dim, mine, peers, options.error_tokens)
        found["errors"][dims] = errors
        for row in found["rows"]:
            if row["dims"] != dims:
                continue
            both, forward = row["direction"] in TRAINING, row["direction"] == "forward"
            row["error"] = {n: e for n, e in errors["ours"].items() if both or (n in ("o", "final_state")) == forward}
        write()
    write()
    print(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
