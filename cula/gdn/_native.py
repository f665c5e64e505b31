"""The compiled library, loaded once, as plain functions on tensors.

Each function takes its tensors (`None` for an absent one) and then the options that all of them share: offsets on the
host and on the device, chunk table, scale, chunk size, the six flags, backend name and number of threads. Argument
checks, and the exceptions that they raise, are those of the C++ interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

_LIBRARY_NAME = "libcula_gdn_ffi.so"


def _load() -> Any:
    override = os.environ.get("CULA_GDN_LIBRARY")
    path = Path(override) if override else Path(__file__).with_name(_LIBRARY_NAME)
    if not path.is_file():
        source = "CULA_GDN_LIBRARY names" if override else "cula.gdn needs"
        raise ImportError(
            f"{source} the compiled library {path}, which does not exist; build and install the package with "
            "`pip install .` in its source tree"
        )
    # The other kinds that the library raises are known to tvm_ffi already.
    tvm_ffi.register_error("NotImplementedError", NotImplementedError)
    return tvm_ffi.load_module(str(path))


_module = _load()


def function(name: str) -> Callable[..., Any]:
    """The function of that name in the compiled library: for tensors that went through torch's dispatcher."""
    return _module.get_function(name)  # type: ignore[no-any-return]


def direct_function(name: str) -> Callable[..., Any]:
    """The same for tensors as users have them: torch keeps some negated ones (`z.conj().imag`) with a mark alone."""
    native = _module.get_function(name)

    def resolved(x: Any) -> Any:
        return x.resolve_neg() if isinstance(x, torch.Tensor) and x.is_neg() else x

    return lambda *arguments: native(*map(resolved, arguments))


forward = function("forward")
backward = function("backward")
recurrent_forward = function("recurrent_forward")
serve_forward = function("serve_forward")
serve_recurrent_forward = function("serve_recurrent_forward")
reference_forward = direct_function("reference_forward")
reference_backward = direct_function("reference_backward")
cp_prepare = direct_function("cp_prepare")
cp_advance = direct_function("cp_advance")
cp_summarize = direct_function("cp_summarize")
cp_summarize_adjoint = direct_function("cp_summarize_adjoint")
cp_merge = direct_function("cp_merge")
cp_backward = direct_function("backward")
plan_info = function("plan_info")
library_info = function("library_info")

# Threads of the CPU backend: torch's own setting, so that one knob serves the whole program.
num_threads = torch.get_num_threads
