"""The command `cula-gdn`: what this installation is (info), whether it computes right (check), how fast
(bench), and what context parallelism makes of it (cp-sim)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cula.gdn import library_info
from cula.gdn.cli import bench, check, cp_sim, info

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cula-gdn", description="The Gated DeltaNet operator: information, checks, timing."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {library_info().version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (info, check, bench, cp_sim):
        module.add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status: 0 good, 1 a check failed, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))
