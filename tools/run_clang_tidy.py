"""Runs clang-tidy over the project's C++ files, several at a time.

python tools/run_clang_tidy.py --build BUILD [--changed-since COMMIT] [--jobs N]
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = {".h", ".hpp", ".cuh"}


def compiled_files(build: Path) -> list[Path]:
    """C++ files of this project in the compilation database, each once though some are compiled several times."""
    database = json.loads((build / "compile_commands.json").read_text())
    files = {(Path(entry["directory"]) / entry["file"]).resolve() for entry in database}
    ours = [f for f in files if f.suffix == ".cpp" and f.is_relative_to(ROOT)]
    return sorted(f for f in ours if f.relative_to(ROOT).parts[0] not in ("third_party", "build"))


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
    options = parser.parse_args()

    files = compiled_files(options.build)
    if options.changed_since:
        changed = changed_files(options.changed_since)
        if not any(path.suffix in HEADERS for path in changed):
            files = [path for path in files if path in changed]

    def check(path: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
        command = ["clang-tidy", "--quiet", "-p", str(options.build), str(path)]
        return path, subprocess.run(command, capture_output=True, text=True)

    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for path, result in pool.map(check, files):
            if result.returncode != 0:
                failed += 1
                print(f"== {path.relative_to(ROOT)}\n{result.stdout}{result.stderr}", flush=True)
    print(f"clang-tidy: {len(files)} files, {failed} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
