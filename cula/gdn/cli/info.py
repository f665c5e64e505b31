"""`cula-gdn info`: version, backends, devices and how this copy was built."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from cula.gdn import _build, library_info
from cula.gdn.cli.terminal import make_console


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("info", help="version, backends, devices and build of this installation")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Everything that `info` prints, and that benchmark pages are stamped with."""
    library = library_info()
    devices = [f"cpu: {processor_name()}, {library.hardware_threads} hardware threads"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            f"cuda:{index}: {properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    packages = ("torch", "apache-tvm-ffi", "transformers", "flash-linear-attention")
    return {
        "version": library.version,
        "commit": _build.COMMIT,
        "backends": list(library.backends),
        "cpu_isa": library.cpu_isa,
        "devices": devices,
        "build": f"{_build.COMPILER}, {_build.BUILD_TYPE}; CPU: {_build.INSTRUCTION_SETS}; GPU: {_build.CUDA}",
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": {name: version for name in packages if (version := package_version(name)) is not None},
    }


def run(options: argparse.Namespace) -> int:
    facts = describe()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    table = Table(title="cula-gdn", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if isinstance(value, dict):
            value = [f"{key} {entry}" for key, entry in value.items()]
        table.add_row(name.replace("_", " "), "\n".join(value) if isinstance(value, list) else str(value))
    make_console().print(table)
    return 0
