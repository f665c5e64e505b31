"""Context parallelism over real GPUs, a process and a GPU for each rank, through NCCL.

    python run_nccl.py [--ranks 2] [--json PATH]
    python run_nccl.py --device cpu --ranks 2 --tokens 512

Rows of FLA's own test of context parallelism for this number of ranks, in bfloat16: outputs and gradients of each rank
against the operator without context parallelism on the whole stream, within FLA's tolerance, and against float64, with
at most 1.5 times the error of the whole stream's. Then how much of the gathers runs under other kernels, and the time
of forward and backward over all ranks against one. Then, where flash-linear-attention is there, groups of both:
some ranks run its operator with its own summaries, exchange and merges, the others ours, all with FLA's contexts.
Prints one line a check; ends with a status other than 0 if any failed.

On the CPU the ranks are processes through gloo. Needs the installed package (or CULA_GDN_LIBRARY). On Hopper FLA
refuses its own gradient of q, k, w and g with some versions of Triton, so the stages of its operator, other than
context parallelism's, are ours unless --fla-stages is given.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import page
from run_cp import in_float64
from torch import Tensor

LIMIT = 0.003  # FLA's, of every result
FLOAT64_LIMIT = 1.5  # of an error, in errors of the whole stream's
Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    lengths: tuple[int, ...]
    H: int = 4
    HV: int = 4
    dim: int = 128
    v_first: bool = False
    layout: str = "contiguous"


# FLA's rows, by number of ranks; ours beside them: the layout in two parts, and the heads of a layer.
ROWS = {
    2: (
        Row("sequence_cut", (3000, 4000, 3240), dim=64),
        Row("boundary_aligned", (5120, 5120)),
        Row("many_short_sequences", (1000, 1500, 2000, 2500, 1240, 1000, 1000)),
        Row("gqa_sequence_cut", (3000, 4000, 3240), H=2, dim=64),
        Row("gqa_single_sequence", (10240,), H=2, HV=8, dim=64),
        Row("state_v_first", (3000, 4000, 3240), v_first=True),
        Row("zigzag", (3000, 4000, 3240), layout="zigzag"),
        Row("heads of a layer", (10240,), H=16, HV=32),
    ),
    4: (
        Row("complex", (7000, 3240)),
        Row("single_sequence", (10240,)),
        Row("state_v_first", (10240,), v_first=True),
        Row("zigzag", (7000, 3240), layout="zigzag"),
        Row("heads of a layer", (10240,), H=16, HV=32),
    ),
    8: (Row("single_sequence", (65536,)), Row("zigzag", (65536,), layout="zigzag")),
}


def make_stream(row: Row, device: str, scale: float = 1.0) -> Tensors:
    total = sum(row.lengths)
    random = torch.Generator(device).manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, device=device, generator=random)  # noqa: E731
    t = {
        "q": F.normalize(normal(1, total, row.H, row.dim), dim=-1),
        "k": F.normalize(normal(1, total, row.H, row.dim), dim=-1),
        "v": normal(1, total, row.HV, row.dim),
        "g": F.logsigmoid(normal(1, total, row.HV)) * scale,
        "do": normal(1, total, row.HV, row.dim),
    }
    return {name: x.bfloat16() for name, x in t.items()} | {"beta": normal(1, total, row.HV).sigmoid()}


def forward_and_backward(function: Any, t: Tensors, **options: Any) -> Tensors:
    leaves = {name: t[name].detach().clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    o, _ = function(**leaves, **options)
    found = torch.autograd.grad(o, list(leaves.values()), t["do"])
    return {"o": o.detach()} | {f"d{name}": x for name, x in zip(leaves, found, strict=True)}


def error(found: Tensor, expected: Tensor) -> float:
    """FLA's measure."""
    difference = (found.double() - expected.double()).square().mean().sqrt()
    return float(difference / (expected.double().square().mean().sqrt() + 1e-8))


class Ranks:
    """What one rank does; rank 0 speaks for all."""

    def __init__(self, rank: int, count: int, device: str) -> None:
        self.rank, self.count, self.device = rank, count, device
        self.failures = 0
        self.records: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def report(self, name: str, errors: dict[str, float], limit: float = LIMIT) -> None:
        """The worst of all ranks."""
        names = list(errors)
        worst = torch.tensor([errors[x] if errors[x] == errors[x] else float("inf") for x in names], device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        found = dict(zip(names, worst.tolist(), strict=True))
        bad = any(x > limit for x in found.values())
        self.failures += bad
        self.records.append({"name": name, "limit": limit, "found": found})
        self.say(f"{'FAIL' if bad else 'ok  '} {name:<46} " + " ".join(f"{x}={y:.2g}" for x, y in found.items()))

    def tokens(self, row: Row, total: int) -> Tensor:
        from cula.gdn.simulation import rank_tokens

        return rank_tokens(total, self.count, self.rank, layout=row.layout).to(self.device)

    def share(self, row: Row, t: Tensors) -> Tensors:
        tokens = self.tokens(row, t["q"].shape[1])
        return {name: x[:, tokens].contiguous() for name, x in t.items()}

    def check(self, row: Row, fla_ranks: tuple[int, ...] = (), fla: Any = None) -> None:
        from cula.gdn import chunk_gated_delta_rule
        from cula.gdn.cp import build_cp_context

        t = make_stream(row, self.device)
        ends = torch.tensor([0, *row.lengths], device=self.device).cumsum(0)
        options = {"state_v_first": True} if row.v_first else {}
        expected = forward_and_backward(chunk_gated_delta_rule, t, cu_seqlens=ends, **options)
        here = self.share(row, t)
        function = fla.operator if self.rank in fla_ranks else chunk_gated_delta_rule
        build = fla.build_cp_context if fla_ranks else build_cp_context
        context = build(ends, dist.group.WORLD, layout=row.layout)
        found = forward_and_backward(function, here, cp_context=context, **options)
        tokens = self.tokens(row, t["q"].shape[1])
        name = f"{self.count} ranks, {row.name}"
        if fla_ranks:
            name += f", FLA on {'+'.join(map(str, fla_ranks))}"
        self.report(name, {key: error(x, expected[key][:, tokens]) for key, x in found.items()})
        if fla_ranks:
            return
        exact = {key: x.detach() for key, x in in_float64(t, list(row.lengths)).items()}
        ratios = {
            key: error(x, exact[key][:, tokens]) / max(error(expected[key], exact[key]), 1e-12)
            for key, x in found.items()
        }
        self.report(f"{name}, in errors of one rank", ratios, FLOAT64_LIMIT)

    def overlap(self, row: Row) -> None:
        """Which part of the gathers' time other kernels run in."""
        from cula.gdn import chunk_gated_delta_rule
        from cula.gdn.cp import build_cp_context

        here = self.share(row, make_stream(row, self.device))
        ends = torch.tensor([0, *row.lengths], device=self.device).cumsum(0)
        context = build_cp_context(ends, dist.group.WORLD)
        for _ in range(3):
            forward_and_backward(chunk_gated_delta_rule, here, cp_context=context)
        torch.cuda.synchronize()
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            forward_and_backward(chunk_gated_delta_rule, here, cp_context=context)
            torch.cuda.synchronize()
        kernels = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        gathers = [(start, end) for name, start, end in kernels if "nccl" in name.lower() and "AllGather" in name]
        others = sorted((start, end) for name, start, end in kernels if "nccl" not in name.lower())
        total = sum(end - start for start, end in gathers)
        under, behind = 0.0, 0.0
        for start, end in others:
            for first, last in gathers:
                under += max(min(end, last) - max(start, first, behind), 0.0)
            behind = max(behind, end)
        values = torch.tensor([float(len(gathers)), total, under], device=self.device)
        dist.all_reduce(values, dist.ReduceOp.SUM)
        count, total, under = values.tolist()
        self.records.append({"gathers of": row.name, "count": count, "us": total, "us_under_kernels": under})
        self.say(f"gathers of {row.name}: {count:.0f} on all ranks, {total:.0f} us, {under:.0f} of them under kernels")

    def times(self, tokens: int, heads: tuple[int, int], repeats: int = 10) -> None:
        """Forward and backward of a stream on one GPU, and on all with its tokens shared out."""
        from cula.gdn import chunk_gated_delta_rule
        from cula.gdn.cp import build_cp_context

        for scale in (1 / 16, 1 / 1024):
            row = Row("time", (tokens,), *heads)
            t = make_stream(row, self.device, scale)
            ends = torch.tensor([0, tokens], device=self.device)
            here = self.share(row, t)
            context = build_cp_context(ends, dist.group.WORLD)
            times = {}
            for name, inputs, options in (
                ("one", t, {"cu_seqlens": ends}), ("rank without", here, {}), ("all", here, {"cp_context": context}),
            ):  # fmt: skip
                leaves = [inputs[x].detach().requires_grad_() for x in ("q", "k", "v", "g", "beta")]

                def step(leaves: list[Tensor] = leaves, inputs: Tensors = inputs, options: Any = options) -> None:
                    o, _ = chunk_gated_delta_rule(*leaves, **options)
                    torch.autograd.grad(o, leaves, inputs["do"])

                for _ in range(3):
                    step()
                torch.cuda.synchronize()
                dist.barrier()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(repeats):
                    step()
                end.record()
                torch.cuda.synchronize()
                slowest = torch.tensor([start.elapsed_time(end) / repeats], device=self.device)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[name] = float(slowest)
            self.records.append({"tokens": tokens, "heads": heads, "gates": scale, "ms": times})
            self.say(
                f"time {heads[0]}/{heads[1]} 1x{tokens} gates * 1/{round(1 / scale)}: one GPU {times['one']:.3f} ms, "
                f"{self.count} GPUs {times['all']:.3f}, a rank's tokens without context parallelism "
                f"{times['rank without']:.3f}"
            )


class Fla:
    """FLA's operator, with stages of ours unless `own_stages`, and always with ours of the one that it refuses."""

    def __init__(self, own_stages: bool) -> None:
        from fla_exchange import STAGES, one_configuration, replaced

        one_configuration()  # before FLA's kernels are made
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk, chunk_gated_delta_rule

        self.build_cp_context = build_cp_context
        kept = [] if own_stages else list(STAGES)
        ours = {name: STAGES[name][0] for name in kept or ("chunk_bwd_dqkwg",) if hasattr(chunk, name)}

        self.operator = chunk_gated_delta_rule
        self.stages = contextlib.ExitStack()  # kept, or the stages would be put back
        self.stages.enter_context(replaced(chunk, ours))


def serve(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    device = "cpu"
    if arguments.device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    count = arguments.ranks
    options = {"device_id": torch.device(device)} if arguments.device == "cuda" else {}
    dist.init_process_group(
        "nccl" if arguments.device == "cuda" else "gloo", init_method=f"file://{folder}/group", rank=rank,
        world_size=count, **options,
    )  # fmt: skip
    ranks = Ranks(rank, count, device)
    start = time.time()
    rows = ROWS.get(count, (Row("single_sequence", (5120 * count,)), Row("zigzag", (5120 * count,), layout="zigzag")))
    rows = tuple(dataclasses.replace(row, lengths=shortened(row, arguments.tokens, count)) for row in rows)

    def write() -> None:
        """What is known so far, since a later part may not end: FLA's kernels are compiled in the last one."""
        ranks.say(f"[{time.time() - start:.0f} s]")
        if rank != 0 or arguments.json is None:
            return
        stamp = {
            "gpu": torch.cuda.get_device_name(0) if arguments.device == "cuda" else "none", "ranks": count,
            "driver": page.driver_version(), "torch": torch.__version__, "commit": arguments.commit,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(stamp | {"records": ranks.records}, indent=1) + "\n")

    for row in rows:
        ranks.check(row)
    write()
    if arguments.device == "cuda" and not arguments.no_timing:
        for row in (rows[0], rows[-1]):
            ranks.overlap(row)
        for tokens in (16384, 65536, 262144):
            ranks.times(tokens * count // 2, (16, 32))
        write()
    if importlib.util.find_spec("fla") is None or arguments.device == "cpu":
        ranks.say("skipped: groups of both libraries, which need a GPU and flash-linear-attention")
    elif count > 1:
        fla = Fla(arguments.fla_stages)
        for row in (rows[-1], rows[0]):
            for who in ((0,), (1,)):
                ranks.check(row, who, fla)
            write()
    ranks.say(f"{ranks.failures} failed")
    dist.barrier()
    dist.destroy_process_group()
    if ranks.failures:
        sys.exit(1)


def shortened(row: Row, tokens: int, ranks: int) -> tuple[int, ...]:
    """The lengths of a row with about as many tokens, still a multiple of what the layouts need."""
    if tokens == 0:
        return row.lengths
    total = sum(row.lengths)
    lengths = [max(x * tokens // total, 1) for x in row.lengths]
    lengths[-1] += -sum(lengths) % (2 * ranks)
    return tuple(lengths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="as many as there are GPUs, if it is not given")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=0, help="of a stream, instead of the rows' own")
    parser.add_argument("--fla-stages", action="store_true", help="with FLA's own stages where it has them")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.ranks = arguments.ranks or torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(serve, (arguments, folder), arguments.ranks)
        except torch.multiprocessing.ProcessRaisedException as exception:
            print(exception, flush=True)
            return 1
        except torch.multiprocessing.ProcessExitedException:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
