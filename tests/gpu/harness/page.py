"""The results page and its figures as JSON."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from pathlib import Path

import torch

Record = dict[str, object]


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(folder: Path, commit: str, records: list[Record], checks: str, host_us: float) -> None:
    """<gpu>-cuda.json and .md: figures of this run and no others."""
    gpu = torch.cuda.get_device_name(0)
    path = folder / f"{re.sub('[^a-z0-9]+', '-', gpu.lower().removeprefix('nvidia '))}-cuda.json"
    stamp = {
        "gpu": gpu,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "commit": commit,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stamp | {"rows": records}, indent=1) + "\n")
    lines = [
        f"# The general CUDA backend on an {gpu}",
        "",
        f"Driver {stamp['driver']}, CUDA {stamp['cuda']}, torch {torch.__version__}, GPU code of commit {commit}.",
        "bf16, initial and final state, milliseconds, medians of graph replays. Written by `make test-gpu`.",
        "",
        f"Checks: {checks}. A forward call of 64 tokens (16/32 heads) costs the host {host_us:.0f} µs through the C++ "
        "interface.",
        "",
        "MiB: forward's workspace, and what backward allocates (workspace and gradients). Errors: relative L2 against",
        "float64, of the first sequence's first key head and its value heads.",
        "",
        "| direction | heads | K/V | lengths | ms | MiB | errors |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in records:
        ours = record["ours_ms"]
        assert isinstance(ours, float)
        assert isinstance(record["error"], dict)
        errors = ", ".join(f"{name} {value:.1e}" for name, value in record["error"].items())
        cells = [
            *(str(record[name]) for name in ("direction", "heads", "dims", "lengths")),
            f"{ours:.3f}",
            f"{record['peak_mib']:.0f}",
            errors,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
