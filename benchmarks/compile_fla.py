"""Compiles what flash-linear-attention's autotuner will try for the rows of bench_gpu.py, in many processes at once.

    python benchmarks/compile_fla.py --rows general [--jobs 14]

Triton compiles one configuration of a kernel after the other and times each, minutes for every number of heads. Here
each process compiles its share of every kernel's configurations into Triton's cache on disk and times none; the
benchmark then tunes as always, from the cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def keep_share(index: int, count: int) -> None:
    """Leaves an autotuner every count-th configuration, and runs instead of timing."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def run_once(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
        call()
        return [0.0, 0.0, 0.0]

    def initialize(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        original(self, fn, arg_names, configs[index % len(configs) :: count], *args, **kwargs)
        self._do_bench = run_once

    Autotuner.__init__ = initialize


def compile_share(tables: list[str], index: int, count: int) -> None:
    keep_share(index, count)
    from bench_gpu import Row, make_inputs, rows_of
    from gpu_peers import LOADERS

    peer = LOADERS["fla"]()
    assert peer.backward is not None
    rows = (row for table in tables for row in rows_of(table))
    for heads, value_heads, key_dim, value_dim in dict.fromkeys(
        (row.heads, row.value_heads, row.key_dim, row.value_dim) for row in rows
    ):
        x = make_inputs(Row("forward", heads, value_heads, key_dim, value_dim, (256,)), "cuda")
        peer.forward(x)()
        try:
            peer.backward(x)()
        except RuntimeError as error:  # FLA refuses one kernel on Hopper where tilelang is missing
            print(f"backward of {heads}/{value_heads}: {error}"[:200], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=("forward", "backward", "general"), nargs="+", required=True)
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        compile_share(options.rows, options.share, options.jobs)
        return 0
    start = time.monotonic()
    shares = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--jobs", str(options.jobs), "--share", str(share)])
        for share in range(options.jobs)
    ]
    failed = sum(share.wait() != 0 for share in shares)
    print(f"{options.jobs - failed} of {options.jobs} shares compiled in {time.monotonic() - start:.0f} s", flush=True)
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
