"""Uses an installed cula.gdn: every module imports from the folder named, and the operator computes right.

    python tools/check_installed.py --expect-in SITE_PACKAGES

Run it outside the source tree, so that the package can only come from where it was installed.
"""

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

import torch

import cula.gdn


def modules() -> list[str]:
    walked = (module.name for module in pkgutil.walk_packages(cula.gdn.__path__, prefix="cula.gdn."))
    # The compiled library lies among the modules and looks like one, but is not Python's to import.
    return ["cula.gdn", *(name for name in walked if name != "cula.gdn.libcula_gdn_ffi")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expect-in", type=Path, required=True)
    folder = parser.parse_args().expect_in.resolve()

    names = modules()
    for name in names:
        file = importlib.import_module(name).__file__
        if file is None or not Path(file).resolve().is_relative_to(folder):
            print(f"{name} comes from {file}, not from {folder}", file=sys.stderr)
            return 1

    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 65, 2, 32), dim=-1).unbind()
    v = torch.randn(1, 65, 4, 32, requires_grad=True)
    g, beta = -torch.rand(1, 65, 4), torch.rand(1, 65, 4)
    results = []
    for operator in (cula.gdn.chunk_gated_delta_rule, cula.gdn.reference_gated_delta_rule):
        o, _ = operator(q, k, v, g, beta)
        (dv,) = torch.autograd.grad(o.double().square().sum(), v)
        results.append((o.double(), dv.double()))
    for ours, exact in zip(*results, strict=True):
        error = ((ours - exact).norm() / exact.norm()).item()
        if not error < 2e-5:
            print(f"the operator's relative error is {error:.1e}", file=sys.stderr)
            return 1
    print(f"{len(names)} modules from {folder}; forward and backward agree with the reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
