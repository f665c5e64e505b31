"""Runs clang-tidy over the project's C++ files, several at a time.

python tools/run_clang_tidy.py --build BUILD [--changed-since COMMIT] [--jobs N]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = {".h", ".hpp", ".cuh"}
# The compilation database is GCC's; clang must not mind its warning options, and lacks one of its builtins.
EXTRA_ARGUMENTS = [
    "--extra-arg=-Wno-unknown-warning-option",
    "--extra-arg=-Wno-unused-parameter",  # GCC checks that, and knows the macros of tvm-ffi
    f"--extra-arg=-include{ROOT / 'tools' / 'clang_tidy_shim.h'}",
]


def compilation_database(build: Path) -> dict[Path, dict[str, str]]:
    """The project's own C++ files and how they are compiled. The CPU kernels are compiled once per instruction set, and
    clang-tidy would read each of those: the last entry, the largest instruction set, stands for all."""
    entries = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = (Path(entry["directory"]) / entry["file"]).resolve()
        ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("third_party", "build")
        if ours and path.suffix == ".cpp":
            entries[path] = entry
    return entries


def changed_files(base: str) -> list[Path]:
    diff = subprocess.run(
        ["git", "diff", "--name-only", "--diff-filter=d", base], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in diff.stdout.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True, help="build folder with compile_commands.json")
    parser.add_argument("--changed-since", metavar="COMMIT", help="only files changed since; all if a header changed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--times", action="store_true", help="print how long each file took")
    options = parser.parse_args()

    database = compilation_database(options.build)
    files = sorted(database)
    if options.changed_since:
        changed = changed_files(options.changed_since)
        if not any(path.suffix in HEADERS for path in changed):
            files = [path for path in files if path in changed]

    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        (Path(folder) / "compile_commands.json").write_text(json.dumps(list(database.values())))

        def check(path: Path) -> tuple[Path, float, subprocess.CompletedProcess[str]]:
            command = ["clang-tidy", "--quiet", "-p", folder, *EXTRA_ARGUMENTS, str(path)]
            start = time.monotonic()
            result = subprocess.run(command, capture_output=True, text=True)
            return path, time.monotonic() - start, result

        for path, seconds, result in pool.map(check, files):
            if options.times:
                print(f"{seconds:6.1f} s  {path.relative_to(ROOT)}", flush=True)
            if result.returncode != 0:
                failed += 1
                print(f"== {path.relative_to(ROOT)}\n{result.stdout}{result.stderr}", flush=True)
    print(f"clang-tidy: {len(files)} files, {failed} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
