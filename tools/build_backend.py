"""The build backend: scikit-build-core, with the CUTLASS headers as a build requirement where Hopper code is compiled.

GPU code is compiled when nvcc is found, as CMake decides for CULA_CUDA=AUTO. Set CULA_CUDA=OFF in the environment (or
-Ccmake.define.CULA_CUDA=OFF) for a package without it.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from scikit_build_core import build as _backend
from scikit_build_core.build import (  # noqa: F401  (hooks that pip looks up here)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

_CUTLASS = "nvidia-cutlass==4.2.0.0"


def _compiles_hopper_code(config_settings: dict[str, Any] | None) -> bool:
    wanted = (config_settings or {}).get("cmake.define.CULA_CUDA") or os.environ.get("CULA_CUDA", "AUTO")
    if wanted == "OFF" or not any(Path("csrc/gdn/sm90").rglob("*.cu")):
        return False
    return wanted == "ON" or bool(os.environ.get("CUDACXX") or shutil.which("nvcc"))


def _with_cutlass(requires: list[str], config_settings: dict[str, Any] | None) -> list[str]:
    return [*requires, _CUTLASS] if _compiles_hopper_code(config_settings) else requires


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _with_cutlass(_backend.get_requires_for_build_wheel(config_settings), config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _with_cutlass(_backend.get_requires_for_build_editable(config_settings), config_settings)
