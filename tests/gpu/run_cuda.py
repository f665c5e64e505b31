"""Checks the cuda backend against float64 on a GPU, or on the emulator, and times it.

    python run_cuda.py --library build/libcula_gdn_test.so                 every check, then timings
    python run_cuda.py --library build/libemulated.so --emulated [--only NAME]   small checks, on the CPU

Prints one line a check and ends with a status other than 0 if any failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import page, pools
from harness.checks import (
    against_baseline,
    batch_invariance,
    bits,
    guarded,
    large_checks,
    sanitizer_checks,
    small_checks,
)
from harness.library import Library
from harness.runner import Runner
from harness.timing import host_cost, timings

# A fault or a hang costs the group it happens in and no other: each runs in a process of its own.
GROUPS = [
    "stages bf16",
    "stages fp16",
    "stages fp32",
    "op bf16",
    "op fp16",
    "op fp32",
    "errors at most",
    "bits",
    "pool",
    "checkpoints",
    "masks",
]
GROUP_LIMIT_S = 100


def isolated(arguments: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--library", arguments.library]
    command += ["--forward-only"] * arguments.forward_only + ["--small"] * arguments.small
    groups = [[*command, "--no-timing", "--only", name] for name in GROUPS]
    scratch = tempfile.TemporaryDirectory()
    figures = Path(scratch.name) / "figures.json"
    if arguments.no_checks:
        groups = []
    if not arguments.no_timing:
        kernels = ["--kernels"] if arguments.kernels else []
        groups.append([*command, "--no-checks", "--figures", str(figures), *kernels])
    bad = 0
    for group in groups:
        try:
            status = subprocess.run(group, timeout=GROUP_LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            status = -1
        if status != 0:
            bad += 1
            print(f"FAIL group {group[4:]}: {'timed out' if status == -1 else f'status {status}'}", flush=True)
    verdict = f"{len(groups) - bad} of {len(groups)} groups passed"
    print(verdict, flush=True)
    if arguments.results and figures.exists():
        measured = json.loads(figures.read_text())
        checks = arguments.checks or verdict
        page.write(Path(arguments.results), arguments.commit, measured["rows"], checks, measured["host_us"])
    return int(bad != 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="time by kernel")
    parser.add_argument("--small", action="store_true", help="the small checks alone")
    parser.add_argument("--sanitizer", action="store_true", help="the few checks that compute-sanitizer runs over")
    parser.add_argument("--isolated", action="store_true", help="groups of checks in processes of their own")
    parser.add_argument("--figures", help="file for the timings as JSON")
    parser.add_argument("--results", help="with --isolated: folder for the results page")
    parser.add_argument("--checks", help="what the page says of them, where they ran apart")
    parser.add_argument("--commit", default="unknown", help="that the library was built from")
    parser.add_argument("--as-it-comes", action="store_true", help="do not fill memory first: for initcheck")
    arguments = parser.parse_args()
    if arguments.isolated:
        alone = [
            name for name in ("only", "emulated", "sanitizer", "figures", "as_it_comes") if getattr(arguments, name)
        ]
        if alone:
            parser.error(f"--{alone[0].replace('_', '-')}: not with --isolated")
        return isolated(arguments)
    if arguments.results:
        parser.error("--results: only with --isolated")
    device = "cpu" if arguments.emulated else "cuda"
    run = Runner(Library(arguments.library, device, filled=not arguments.as_it_comes), arguments.only)
    start = time.time()
    backward = not arguments.forward_only
    if arguments.sanitizer:
        run.reference_device = "cpu"
        sanitizer_checks(run)
    elif not arguments.no_checks:
        small_checks(run, backward)
        pools.small(run)
        pools.general(run)
        if backward and not arguments.emulated and not arguments.small:
            large_checks(run)
            guarded(run, "errors at most FLA's", against_baseline)
            guarded(run, "bits", bits)
            guarded(run, "alone", batch_invariance)
            guarded(run, "pools: replay", pools.replay)
    print(f"{run.count - len(run.failures)} of {run.count} checks passed in {time.time() - start:.0f} s", flush=True)
    for failure in run.failures:
        print("failed:", failure, flush=True)
    if not (arguments.emulated or arguments.no_timing or arguments.sanitizer):
        torch.cuda.empty_cache()
        rows = timings(run, arguments.kernels)
        cost = host_cost(run)
        print(f"host: {cost:.0f} us a forward call of 64 tokens", flush=True)
        if arguments.figures:
            Path(arguments.figures).write_text(json.dumps({"rows": rows, "host_us": cost}))
    return 1 if run.failures or (run.count == 0 and not arguments.no_checks) else 0


if __name__ == "__main__":
    sys.exit(main())
