"""Verifies that the CPU kernels of one instruction set can not stand in for another's.

The kernels are compiled once per instruction set. A weak symbol (inline function, template instance) that is defined
under one name in several of these builds is kept once by the linker, from an arbitrary one: a machine without AVX-512
could then run an AVX-512 body. So every weak definition of a build beyond the baseline must carry the name of its
instruction set, which is the name of the namespace around the kernels.

    python tools/check_isa_symbols.py BUILD_FOLDER
"""

import re
import subprocess
import sys
from pathlib import Path

# Defined weak by every object with exception tables, as a pointer that is the same everywhere.
HARMLESS = {"DW.ref.__gxx_personality_v0"}
WEAK_DEFINITIONS = "WVu"


def weak_definitions(object_file: Path) -> list[str]:
    listing = subprocess.run(
        ["nm", "--format=posix", "--defined-only", str(object_file)], check=True, capture_output=True, text=True
    ).stdout
    rows = (line.split() for line in listing.splitlines())
    return [row[0] for row in rows if len(row) >= 2 and row[1] in WEAK_DEFINITIONS]


def demangled(names: list[str]) -> list[str]:
    return subprocess.run(
        ["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True
    ).stdout.splitlines()


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    build = Path(sys.argv[1])
    checked = 0
    offences = 0
    for folder in sorted(build.rglob("cula_gdn_kernels_*.dir")):
        match = re.fullmatch(r"cula_gdn_kernels_(\w+)\.dir", folder.name)
        assert match is not None
        isa = match.group(1)
        if isa == "generic":  # compiled with the flags of everything else
            continue
        mark = f"{len(isa)}{isa}"  # a namespace component, as the C++ ABI mangles it
        for object_file in sorted(folder.rglob("*.o")):
            checked += 1
            bad = [name for name in weak_definitions(object_file) if mark not in name and name not in HARMLESS]
            offences += len(bad)
            for name in demangled(bad):
                print(f"{object_file.relative_to(build)}: weak symbol outside namespace {isa}: {name}")
    if checked == 0:
        print(f"no kernel objects below {build}: was it built with the CPU kernels, on x86-64?", file=sys.stderr)
        return 2
    print(f"instruction-set symbols: {checked} objects, {offences} offending symbols")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
