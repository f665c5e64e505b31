"""Reads a build log with ptxas -v output and fails on what makes a GPU kernel slow without a word.

Spilled registers, local memory, and wgmma instructions that ptxas serialised (warnings C75xx).

    cmake --build BUILD 2>&1 | tee LOG;  python tools/check_ptxas.py LOG
"""

import re
import sys
from pathlib import Path

KERNEL = re.compile(r"(?:Compiling entry function|Function properties for) '?([\w$.]+)'?(?: for '(\w+)')?")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALISED = re.compile(r"C75\d\d|wgmma.*serializ", re.IGNORECASE)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    kernels = 0
    faults: list[str] = []
    kernel = arch = "?"
    for line in Path(sys.argv[1]).read_text(errors="replace").splitlines():
        if SERIALISED.search(line):
            faults.append(line.strip())
        named = KERNEL.search(line)
        if named:
            kernel = named.group(1)
            arch = named.group(2) or arch
        frame = FRAME.search(line)
        if frame:
            kernels += 1
            stack, stores, loads = map(int, frame.groups())
            if stack or stores or loads:
                faults.append(f"{kernel} ({arch}): stack frame {stack} B, spill stores {stores} B, loads {loads} B")
    for fault in faults:
        print("ptxas:", fault)
    if kernels == 0:
        print("no ptxas report in the log: was GPU code compiled in this build, with -Xptxas=-v?", file=sys.stderr)
        return 2
    print(f"ptxas: {kernels} kernel builds, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
