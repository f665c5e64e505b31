"""Reads a build log with ptxas -v output and fails on what makes a GPU kernel slow without a word.

Spilled registers, local memory, and wgmma instructions that ptxas serialised (warnings C75xx). With --arch, spills and
local memory fail in code for that architecture alone (sm_90 means sm_90a too); in code for others they are listed.

    cmake --build BUILD 2>&1 | tee LOG;  python tools/check_ptxas.py LOG [--arch sm_90]
"""

import argparse
import re
import sys
from pathlib import Path

KERNEL = re.compile(r"(?:Compiling entry function|Function properties for) '?([\w$.]+)'?(?: for '(\w+)')?")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALISED = re.compile(r"C75\d\d|wgmma.*serializ", re.IGNORECASE)
SERIALISED_ARCH = "wgmma"  # the line does not say for which one; only sm_90a has the instruction


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--arch", help="spills fail in code for this architecture alone, such as sm_90")
    arguments = parser.parse_args()
    kernels = 0
    faults: list[tuple[str, str]] = []  # architecture, what
    kernel = arch = "?"
    for line in arguments.log.read_text(errors="replace").splitlines():
        if SERIALISED.search(line):
            faults.append((SERIALISED_ARCH, line.strip()))
        named = KERNEL.search(line)
        if named:
            kernel = named.group(1)
            arch = named.group(2) or arch
        frame = FRAME.search(line)
        if frame:
            kernels += 1
            stack, stores, loads = map(int, frame.groups())
            if stack or stores or loads:
                faults.append((arch, f"{kernel}: stack frame {stack} B, spill stores {stores} B, loads {loads} B"))
    for where, fault in faults:
        print(f"ptxas ({where}):", fault)
    if kernels == 0:
        print("no ptxas report in the log: was GPU code compiled in this build, with -Xptxas=-v?", file=sys.stderr)
        return 2
    wanted = arguments.arch or ""
    failing = [fault for where, fault in faults if where == SERIALISED_ARCH or where.startswith(wanted)]
    print(f"ptxas: {kernels} kernel builds, {len(faults)} faults, {len(failing)} of them fail the check")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
