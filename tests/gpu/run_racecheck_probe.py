"""Which hand-overs between threads compute-sanitizer's racecheck follows: what its reports of the kernels are worth.

    python run_racecheck_probe.py --probe build/racecheck_probe [--sanitizer compute-sanitizer] [--logs FOLDER]

Runs every variant of racecheck_probe.cu under the tool, and prints one line a way to hand over, with the hazards of
the correct kernel and of each that lacks a wait or a barrier:

    followed       none of the correct kernel, some of every faulty one
    not followed   some of the correct kernel: what is reported of such a hand-over says nothing
    unseen         none of the correct kernel nor of a faulty one: silence about such a hand-over says nothing

Ends with a status other than 0 if a correct kernel gave a wrong result, if the tool failed, or if __syncthreads, whose
hazards are beyond doubt, is not followed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import pathlib
import re
import subprocess
import sys

LIMIT_S = 60
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
CORRECT = "correct"


@dataclasses.dataclass(frozen=True)
class Variant:
    number: str
    name: str
    fault: str  # or CORRECT


@dataclasses.dataclass(frozen=True)
class Outcome:
    hazards: int | None  # None: the tool did not finish
    right: bool


def run_variant(args: argparse.Namespace, variant: Variant) -> Outcome:
    tool = [args.sanitizer, "--tool", "racecheck", "--racecheck-report", "all", *args.option]
    text = subprocess.run(
        # timeout ends what the tool has started, too.
        ["timeout", "--kill-after=5", str(LIMIT_S), *tool, args.probe, variant.number],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout
    if args.logs:
        (args.logs / f"{variant.number}.log").write_text(text)
    summary = SUMMARY.search(text)
    return Outcome(int(summary[1]) if summary else None, "values: right" in text)


def verdict(outcomes: dict[str, Outcome]) -> str:
    if any(outcome.hazards is None for outcome in outcomes.values()):
        return "the tool failed"
    if outcomes[CORRECT].hazards:
        return "not followed"
    faulty = [outcome for fault, outcome in outcomes.items() if fault != CORRECT]
    return "followed" if all(outcome.hazards for outcome in faulty) else "unseen"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", type=pathlib.Path, required=True)
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--option", action="append", default=[], help="one more of the tool, as --option=--name=value")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--logs", type=pathlib.Path, help="folder for what the tool wrote")
    args = parser.parse_args()
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)

    listed = subprocess.run([args.probe], stdout=subprocess.PIPE, text=True, check=True).stdout
    variants = [Variant(*line.split("\t")) for line in listed.splitlines()]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(lambda variant: run_variant(args, variant), variants))
    ways: dict[str, dict[str, Outcome]] = collections.defaultdict(dict)
    for variant, outcome in zip(variants, outcomes, strict=True):
        ways[variant.name][variant.fault] = outcome

    failed = False
    for name, way in ways.items():
        result = verdict(way)
        if not way[CORRECT].right:
            result = "wrong result"
        # The latter are what CULA_RACECHECK relies on.
        sure = "__syncthreads" in name or name.startswith("5 stores, mbarrier all lanes")
        failed |= result in ("wrong result", "the tool failed") or (sure and result != "followed")
        counts = ", ".join(f"{fault} {outcome.hazards}" for fault, outcome in way.items())
        print(f"{result:15} {name:60} {counts}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
