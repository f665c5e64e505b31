"""`cula-gdn bench`: time of the operator on this machine, beside the other implementations that are installed."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm

from cula.gdn.cli.info import describe
from cula.gdn.cli.terminal import make_console
from cula.gdn.cli.workload import (
    CALLS,
    DTYPES,
    Implementation,
    Shape,
    backend_error,
    device_option,
    make_inputs,
    ours,
    output_error,
    peers,
    positive,
    seconds,
    threads_option,
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="time the operator on this machine",
        description="Times the operator for every combination of the listed sizes and dtypes, beside the other "
        "implementations that are installed (transformers' torch fallback; FLA on a GPU).",
    )
    parser.add_argument("--batch", type=positive, nargs="+", default=[1], metavar="B")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[4096], metavar="T")
    parser.add_argument("--heads", type=positive, default=4, metavar="H", help="query/key heads (default: 4)")
    parser.add_argument("--value-heads", type=positive, default=8, metavar="HV", help="a multiple of H (default: 8)")
    parser.add_argument("--key-dim", type=positive, default=128, metavar="K")
    parser.add_argument("--value-dim", type=positive, default=128, metavar="V")
    parser.add_argument("--dtype", choices=tuple(DTYPES), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--mode", choices=tuple(CALLS), nargs="+", default=list(CALLS))
    parser.add_argument("--device", type=device_option, default="auto", help="auto, cpu or cuda[:N] (default: auto)")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--threads", type=threads_option, help="CPU threads of every implementation (default: PyTorch's)"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="timed calls; the median counts (default: 5)")
    parser.add_argument("--no-peers", action="store_true", help="time cula.gdn alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, with what they were measured on")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the results; needs matplotlib")
    parser.set_defaults(run=run)


def fail(message: str) -> int:
    print(f"cula-gdn bench: error: {message}", file=sys.stderr)
    return 2


def measure(
    options: argparse.Namespace, shapes: list[Shape], implementations: list[Implementation]
) -> list[dict[str, Any]]:
    """One row for every combination. Peers of a combination are timed next to each other, so that ratios are fair."""
    combinations = list(itertools.product(shapes, options.dtype, options.mode, implementations))
    rows = []
    with tqdm(combinations, desc="timing", unit="row", leave=False) as bar:
        for shape, dtype, mode, implementation in bar:
            bar.set_postfix_str(f"{implementation.name}, {shape}, {dtype}, {mode}")
            inputs = make_inputs(shape, DTYPES[dtype], options.device)
            call = CALLS[mode](implementation.operator, inputs)
            times = list(seconds(call, options.device, options.repeats))
            median = statistics.median(times)
            rows.append(
                {
                    "implementation": implementation.name,
                    "version": implementation.version,
                    **vars(shape),
                    "dtype": dtype,
                    "mode": mode,
                    "seconds_median": median,
                    "seconds_min": min(times),
                    "repeats": options.repeats,
                    "tokens_per_second": shape.batch * shape.tokens / median,
                }
            )
    return rows


def print_table(rows: list[dict[str, Any]], device: torch.device) -> None:
    first = rows[0]
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    title = (
        f"cula-gdn bench on {device}{threads}: H={first['heads']}, HV={first['value_heads']}, K={first['key_dim']}, "
        f"V={first['value_dim']}, median of {first['repeats']}"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("B x T", "dtype", "mode", "implementation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "us/token", "times ours"):
        table.add_column(heading, justify="right", no_wrap=True)
    own: dict[Any, float] = {}
    for row in rows:
        key = (f"{row['batch']} x {row['tokens']}", row["dtype"], row["mode"])
        median = row["seconds_median"]
        own.setdefault(key, median)  # cula.gdn comes first
        per_token = median * 1e6 / (row["batch"] * row["tokens"])
        cells = (row["implementation"], f"{median * 1e3:.2f}", f"{per_token:.3f}", f"{median / own[key]:.2f}")
        table.add_row(*key, *cells)
    make_console().print(table)


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Time a token over the number of tokens, one panel for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, panels = plt.subplots(1, len(modes), figsize=(6 * len(modes), 4.5), squeeze=False, layout="constrained")
    for panel, mode in zip(panels[0], modes, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["mode"] == mode:
                tokens = row["batch"] * row["tokens"]
                label = f"{row['implementation']}, {row['dtype']}"
                lines.setdefault(label, []).append((tokens, row["seconds_median"] * 1e6 / tokens))
        for label, points in lines.items():
            style = "-o" if label.startswith("cula.gdn") else "--s"
            panel.plot(*zip(*sorted(points), strict=True), style, label=label)
        lengths = sorted({tokens for points in lines.values() for tokens, _ in points})
        times = [time for points in lines.values() for _, time in points]
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [str(tokens) for tokens in lengths])
        panel.set(xlabel="tokens", ylabel="microseconds a token", title=mode)
        if max(times) > 20 * min(times):
            panel.set_yscale("log")
        else:
            panel.set_ylim(0, None)
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(options: argparse.Namespace) -> int:
    if options.value_heads % options.heads != 0:
        return fail(f"--value-heads: expected a multiple of --heads {options.heads}, got {options.value_heads}")
    if message := output_error(options.json, options.plot):
        return fail(message)
    if message := backend_error(options.backend, options.device):
        return fail(message)
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    shapes = [
        Shape(batch, tokens, options.heads, options.value_heads, options.key_dim, options.value_dim)
        for batch, tokens in itertools.product(options.batch, options.tokens)
    ]
    implementations = [ours(None if options.backend == "auto" else options.backend)]
    absent: list[str] = []
    if not options.no_peers:
        others, absent = peers(options.device)
        implementations += others
    try:
        rows = measure(options, shapes, implementations)
    except (ValueError, TypeError, AssertionError) as error:  # the library's own words for sizes it does not take
        return fail(str(error))
    print_table(rows, options.device)
    for reason in absent:
        print(f"not compared: {reason}")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=2) + "\n")
    if options.plot is not None:
        draw(rows, options.plot, f"Gated delta rule on {options.device}, K={options.key_dim}, V={options.value_dim}")
    return 0
