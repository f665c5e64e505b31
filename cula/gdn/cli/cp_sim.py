"""`cula-gdn cp-sim`: context parallelism of any number of ranks on this machine, checked, with a model of its time."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from cula.gdn import _native, chunk_gated_delta_rule
from cula.gdn.autograd_cp import BackwardPass, ForwardPass
from cula.gdn.cli.check import TOLERANCES
from cula.gdn.cli.info import describe
from cula.gdn.cli.terminal import make_console
from cula.gdn.cli.workload import (
    DTYPES,
    Shape,
    make_inputs,
    output_error,
    positive,
    relative_error,
    seconds,
    training_call,
)
from cula.gdn.cp import LAYOUTS
from cula.gdn.simulation import SimulatedRank, simulate, simulated_ranks

CPU = torch.device("cpu")
MODEL_RANKS = [2**i for i in range(1, 11)]
MODEL_TOKENS = [2**i for i in range(15, 25)]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cp-sim",
        help="simulate ranks of context parallelism on this machine",
        description="Runs the ranks of a group one after another on the CPU, compares outputs and all gradients with "
        "one rank and with float64, and models what the exchange costs. Exit status 1 if the comparison fails.",
    )
    parser.add_argument("--ranks", type=positive, default=4, metavar="W")
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=[700, 1200, 148], metavar="T", help="tokens of each sequence"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    parser.add_argument("--rank-lengths", type=int, nargs="+", metavar="T", help="tokens on each rank, if uneven")
    parser.add_argument("--heads", type=positive, default=2, metavar="H", help="query/key heads (default: 2)")
    parser.add_argument("--value-heads", type=positive, default=4, metavar="HV", help="a multiple of H (default: 4)")
    parser.add_argument("--key-dim", type=positive, default=64, metavar="K")
    parser.add_argument("--value-dim", type=positive, default=64, metavar="V")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument(
        "--links", type=positive_number, nargs="+", default=[25.0, 50.0, 400.0], metavar="GB/S",
        help="speeds of a rank's link for the model (default: 25 50 400)",
    )  # fmt: skip
    parser.add_argument(
        "--latency-us", type=positive_number, default=10.0, metavar="US", help="of one step of the exchange"
    )
    parser.add_argument(
        "--tokens-per-second", type=positive_number, metavar="N",
        help="forward and backward of one rank without context parallelism; default: as measured here",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write partition, comparison and model")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the model; needs matplotlib")
    parser.set_defaults(run=run)


def positive_number(text: str) -> float:
    """An argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def fail(message: str) -> int:
    print(f"cula-gdn cp-sim: error: {message}", file=sys.stderr)
    return 2


# Partition and comparison -------------------------------------------------------------------------------------------


def payload_bytes(shape: Shape, dtype: torch.dtype, layout: str) -> int:
    """What a rank sends in each direction: the state map of each of its parts."""
    element = 8 if dtype == torch.float64 else 4
    parts = 2 if layout == "zigzag" else 1
    return parts * shape.value_heads * shape.key_dim * (shape.value_dim + shape.key_dim) * element


def partition_rows(ranks: list[SimulatedRank]) -> list[dict[str, Any]]:
    rows = []
    for index, rank in enumerate(ranks):
        parts = rank.partition.parts
        rows.append(
            {
                "rank": index,
                "tokens": len(rank.tokens),
                "offsets": rank.partition.offsets,
                "sequences": list(rank.context.sequence_ids or ()),
                "pre": [part.pre for part in parts],
                "post": [part.post for part in parts],
                "sends_forward": any(part.hands_on for part in parts),
                "sends_backward": any(part.receives for part in parts),
            }
        )
    return rows


def compare(ranks: list[SimulatedRank], inputs: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Errors against float64 of all ranks together and of one rank, by result."""
    random = torch.Generator().manual_seed(1)
    do = torch.randn(inputs["v"].shape, generator=random).to(inputs["v"])

    def one_rank(operands: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: x.detach().requires_grad_() if x.is_floating_point() else x for name, x in operands.items()}
        o, _ = chunk_gated_delta_rule(**leaves)  # type: ignore[arg-type]
        names = [name for name, x in leaves.items() if x.requires_grad]
        found = torch.autograd.grad(o, [leaves[name] for name in names], do.to(o.dtype))
        return {"o": o.detach(), **{f"d{name}": x for name, x in zip(names, found, strict=True)}}

    together = simulate(inputs, ranks, gradients=(do, None))
    alone = one_rank(inputs)
    exact = one_rank({name: x.double() if x.is_floating_point() else x for name, x in inputs.items()})
    return {
        name: {
            "ranks": relative_error(together[name], exact[name]),
            "one_rank": relative_error(alone[name], exact[name]),
        }
        for name in exact
    }


def passes(name: str, errors: dict[str, float], dtype: str) -> bool:
    """At most 1.5 times the error of one rank, or within what the dtype's accuracy allows anyway."""
    limit = TOLERANCES[dtype] if name == "o" else 2 * TOLERANCES[dtype]
    return errors["ranks"] <= max(limit, 1.5 * errors["one_rank"])


# Model --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Seconds of forward and backward together on the slowest rank, which is behind all others of one long sequence.

    In zigzag that is any rank: the entries before its front and those before its back are 2 W - 1 together.
    """

    token: float  # of a token without context parallelism
    added: float  # of a token, by the summaries of both directions
    merge: float  # of one entry in a merge
    payload: int  # bytes a rank sends in a direction
    latency: float  # of one step of the ring
    parts: int  # that a rank holds: 2 in zigzag

    def compute(self, tokens: int, ranks: int) -> float:
        return tokens / ranks * (self.token + self.added)

    def exchange(self, ranks: int, link: float) -> float:
        """Both directions, none of it hidden: a ring of ranks - 1 steps, and a merge for each entry of other slots."""
        return 2 * ((ranks - 1) * (self.latency + self.payload / link) + (self.parts * ranks - 1) * self.merge)

    def seconds(self, tokens: int, ranks: int, link: float) -> float:
        if ranks == 1:
            return tokens * self.token
        return self.compute(tokens, ranks) + self.exchange(ranks, link)

    def efficiency(self, tokens: int, ranks: int, link: float) -> float:
        return self.seconds(tokens, 1, link) / (ranks * self.seconds(tokens, ranks, link))


def best_seconds(call: Callable[[], Any]) -> float:
    return min(seconds(call, CPU, repeats=7))


def measure(shape: Shape, dtype: torch.dtype, options: argparse.Namespace) -> Model:
    """On this machine, with a rank in the middle of a chain of three, which sends in both directions."""
    tokens = 2048
    local = Shape(1, tokens, shape.heads, shape.value_heads, shape.key_dim, shape.value_dim)
    inputs = make_inputs(local, dtype, CPU)
    plain = best_seconds(training_call(chunk_gated_delta_rule, inputs))
    middle = simulated_ranks(torch.tensor([0, 3 * tokens]), 3)[1]
    operands = (*inputs.values(), None, None, None)
    call_options = (None, 64, *(False,) * 6, "auto")
    do = torch.ones_like(inputs["v"])

    def rank() -> None:
        forward = ForwardPass(middle.partition, operands, None, False, call_options)
        forward.run_independent()
        forward.receive(forward.payload.repeat(3, 1, 1, 1))
        forward.finish()
        backward = BackwardPass(
            middle.partition, operands, forward.saved, forward.merged, forward.transitions(), do, None,
            (True,) * 5 + (False,) * 3, call_options,
        )  # fmt: skip
        backward.run_independent()
        backward.receive(backward.payload.repeat(3, 1, 1, 1))
        backward.finish()

    HV, K, V = shape.value_heads, shape.key_dim, shape.value_dim
    entries = 0.01 * torch.ones(9, HV, K, V + K)
    state = torch.empty(HV, K, V)

    def merge() -> None:
        _native.cp_merge(
            entries, list(range(9)), state, HV, K, V, None, None, None, *call_options, _native.num_threads()
        )  # fmt: skip

    added = max(best_seconds(rank) - plain, 0.0) / plain
    token = plain / tokens if options.tokens_per_second is None else 1 / options.tokens_per_second
    # A faster device does everything faster in proportion.
    speed = token / (plain / tokens)
    return Model(
        token=token,
        added=added * token,
        merge=speed * best_seconds(merge) / 9,
        payload=payload_bytes(shape, dtype, options.layout),
        latency=options.latency_us * 1e-6,
        parts=2 if options.layout == "zigzag" else 1,
    )


def model_rows(model: Model, links: list[float]) -> list[dict[str, Any]]:
    return [
        {
            "link_gb_per_second": link,
            "ranks": ranks,
            "tokens": tokens,
            "seconds": model.seconds(tokens, ranks, link * 1e9),
            "exchange_seconds": model.exchange(ranks, link * 1e9),
            "efficiency": model.efficiency(tokens, ranks, link * 1e9),
        }
        for link, ranks, tokens in itertools.product(links, MODEL_RANKS, MODEL_TOKENS)
    ]


def short(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}k"


# Output -------------------------------------------------------------------------------------------------------------


def print_partition(rows: list[dict[str, Any]], sent: int, layout: str) -> None:
    title = f"{len(rows)} ranks, {layout}; each sends {sent:,} bytes in each direction"
    table = Table(title=title, title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("tokens", justify="right")
    for heading in ("local offsets", "sequences", "ranks before", "ranks behind", "sends"):
        table.add_column(heading)
    for row in rows:
        sends = [word for word, key in (("forward", "sends_forward"), ("backward", "sends_backward")) if row[key]]
        listed = [" ".join(map(str, row[key])) for key in ("offsets", "sequences", "pre", "post")]
        table.add_row(str(row["rank"]), str(row["tokens"]), *listed, ", ".join(sends) or "zeros")
    make_console().print(table)


def print_comparison(errors: dict[str, dict[str, float]], dtype: str) -> bool:
    table = Table(title=f"relative L2 error against float64, {dtype}", title_justify="left")
    for heading in ("result", "all ranks", "one rank", ""):
        table.add_column(heading)
    good = True
    for name, error in errors.items():
        passed = passes(name, error, dtype)
        good = good and passed
        verdict = "[green]pass[/green]" if passed else "[bold red]FAIL[/bold red]"
        table.add_row(name, f"{error['ranks']:.1e}", f"{error['one_rank']:.1e}", verdict)
    make_console().print(table)
    return good


def print_model(model: Model, links: list[float], tokens: int) -> None:
    console = make_console()
    console.print(
        f"model: {model.token * 1e6:.3g} us a token forward and backward, {model.added / model.token:.0%} more with "
        f"context parallelism, {model.merge * 1e6:.3g} us an entry merged",
        highlight=False,
    )
    for title, ranks_and_tokens in (
        (f"one sequence of {short(tokens)} tokens", [(ranks, tokens) for ranks in MODEL_RANKS]),
        ("64 ranks", [(64, n) for n in MODEL_TOKENS]),
    ):
        table = Table(title=f"{title}: seconds (efficiency)", title_justify="left")
        table.add_column("ranks", justify="right")
        table.add_column("tokens", justify="right")
        for link in links:
            table.add_column(f"{link:g} GB/s", justify="right")
        for ranks, n in ranks_and_tokens:
            cells = [
                f"{model.seconds(n, ranks, x * 1e9):.3g} ({model.efficiency(n, ranks, x * 1e9):.0%})" for x in links
            ]
            table.add_row(str(ranks), short(n), *cells)
        console.print(table)


def draw(model: Model, links: list[float], tokens: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_ranks, by_tokens) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for link in links:
        label = f"{link:g} GB/s"
        by_ranks.plot(MODEL_RANKS, [model.seconds(tokens, n, link * 1e9) for n in MODEL_RANKS], "-o", label=label)
        by_tokens.plot(MODEL_TOKENS, [model.efficiency(n, 64, link * 1e9) for n in MODEL_TOKENS], "-o", label=label)
    ideal = [tokens * model.token / n for n in MODEL_RANKS]
    by_ranks.plot(MODEL_RANKS, ideal, "--", color="grey", label="one rank's time shared out")
    by_ranks.set_yscale("log")
    by_ranks.set(
        xlabel="ranks", ylabel="seconds, forward and backward", title=f"one sequence of {short(tokens)} tokens"
    )
    by_tokens.set(xlabel="tokens", ylabel="one rank's time / (ranks x time)", title="64 ranks", ylim=(0, 1))
    for panel, values in ((by_ranks, MODEL_RANKS), (by_tokens, MODEL_TOKENS)):
        panel.set_xscale("log", base=2)
        panel.set_xticks(values, [str(n) if panel is by_ranks else short(n) for n in values])
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(options: argparse.Namespace) -> int:
    if options.value_heads % options.heads != 0:
        return fail(f"--value-heads: expected a multiple of --heads {options.heads}, got {options.value_heads}")
    if message := output_error(options.json, options.plot):
        return fail(message)
    dtype = DTYPES[options.dtype]
    total = sum(options.lengths)
    shape = Shape(1, total, options.heads, options.value_heads, options.key_dim, options.value_dim)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(options.lengths)])
    try:
        ranks = simulated_ranks(cu_seqlens, options.ranks, options.layout, options.rank_lengths)
        inputs = {**make_inputs(shape, dtype, CPU), "cu_seqlens": cu_seqlens}
        with tqdm(total=2, desc="simulating", unit="step", leave=False) as bar:
            errors = compare(ranks, inputs)
            bar.update()
            model = measure(shape, dtype, options)
            bar.update()
    except (ValueError, TypeError, AssertionError) as error:  # the library's own words for what it does not take
        return fail(str(error))
    rows = partition_rows(ranks)
    longest = 2**20
    print_partition(rows, model.payload, options.layout)
    good = print_comparison(errors, options.dtype)
    print_model(model, options.links, longest)
    if options.json is not None:
        results = {
            "machine": describe(),
            "layout": options.layout,
            "payload_bytes": model.payload,
            "partition": rows,
            "errors": errors,
            "passed": good,
            "model": {**vars(model), "rows": model_rows(model, options.links)},
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.plot is not None:
        draw(model, options.links, longest, options.plot)
    return 0 if good else 1
