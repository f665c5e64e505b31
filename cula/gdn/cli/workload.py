"""Inputs, implementations and clocks that the commands and the benchmarks share."""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cula.gdn import chunk_gated_delta_rule, library_info
from cula.gdn.cli.info import package_version

Operator = Callable[..., tuple[Tensor, Tensor | None]]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens} H{self.heads}/{self.value_heads} {self.key_dim}x{self.value_dim}"


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """Unit queries and keys, normal values, gates logsigmoid(normal), beta in (0, 1). The same on every device."""
    generator = torch.Generator().manual_seed(seed)
    s = shape
    statistics = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=statistics)

    inputs = {
        "q": F.normalize(normal(s.batch, s.tokens, s.heads, s.key_dim), dim=-1).to(dtype),
        "k": F.normalize(normal(s.batch, s.tokens, s.heads, s.key_dim), dim=-1).to(dtype),
        "v": normal(s.batch, s.tokens, s.value_heads, s.value_dim).to(dtype),
        "g": F.logsigmoid(normal(s.batch, s.tokens, s.value_heads)),
        "beta": torch.rand((s.batch, s.tokens, s.value_heads), generator=generator, dtype=statistics),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


@dataclass(frozen=True)
class Implementation:
    name: str
    version: str
    operator: Operator


def transformers_fallback() -> Operator:
    """The pure-torch chunk implementation of transformers' Qwen3-Next, which it uses where FLA is absent.

    transformers wraps it in a dispatcher that may take another package's kernel; the function itself is wanted here.

    Raises:
        ImportError: transformers is not installed, or is a version without this function.
    """
    from transformers.models.qwen3_next import modeling_qwen3_next

    function = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)
    if function.__module__ != modeling_qwen3_next.__name__:
        raise ImportError(f"transformers' torch_chunk_gated_delta_rule is {function.__module__}'s")
    return function  # type: ignore[no-any-return]


def flash_linear_attention() -> Operator:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_operator

    return fla_operator  # type: ignore[no-any-return]


def peers(device: torch.device) -> tuple[list[Implementation], list[str]]:
    """Other implementations that are installed and run on the device, and why the others are left out."""
    found: list[Implementation] = []
    absent: list[str] = []
    candidates: list[tuple[str, str, Callable[[], Operator], bool]] = [
        ("transformers", "transformers", transformers_fallback, True),
        ("FLA", "flash-linear-attention", flash_linear_attention, device.type == "cuda"),
    ]
    for name, package, load, runs_here in candidates:
        if not runs_here:
            absent.append(f"{name}: does not run on {device.type}")
            continue
        try:
            found.append(Implementation(name, package_version(package) or "unknown version", load()))
        except ImportError as error:
            absent.append(f"{name}: {error}")
    return found, absent


def ours(backend: str | None = None) -> Implementation:
    def operator(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(*args, backend=backend, **kwargs)

    return Implementation("cula.gdn", library_info().version, operator)


def forward_call(operator: Operator, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return operator(*inputs.values())

    return call


def training_call(operator: Operator, inputs: dict[str, Tensor]) -> Callable[[], Any]:
    """Forward, and backward to every input."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs.values()]
    grad_output = torch.randn(inputs["v"].shape, generator=torch.Generator().manual_seed(1))
    grad_output = grad_output.to(inputs["v"])

    def call() -> Any:
        o, _ = operator(*leaves)
        return torch.autograd.grad(o, leaves, grad_output)

    return call


CALLS = {"forward": forward_call, "forward+backward": training_call}


def seconds(call: Callable[[], Any], device: torch.device, repeats: int, warmups: int = 1) -> Iterator[float]:
    """Time of each repeat, after the warm-ups."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warmups):
        call()
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        yield time.perf_counter() - start


def relative_error(value: Tensor, exact: Tensor) -> float:
    """L2 norm of the difference over that of the exact value; the plain norm where the exact value is zero."""
    value, exact = value.detach().double().cpu(), exact.detach().double().cpu()
    norm = float(exact.norm())
    error = float((value - exact).norm())
    return error / norm if norm > 0 else error


def positive(text: str) -> int:
    """An argparse type."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return value


MAX_THREADS = 1024


def threads_option(text: str) -> int:
    """An argparse type: a number of CPU threads that a process can have."""
    threads = positive(text)
    if threads > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_THREADS}, got {threads}")
    return threads


def backend_error(backend: str, device: torch.device) -> str | None:
    """What is wrong with computing on this device by that backend, if anything."""
    allowed = ("auto", "cpu") if device.type == "cpu" else ("auto", *(b for b in library_info().backends if b != "cpu"))
    if backend in allowed:
        return None
    return f"--backend: expected {' or '.join(allowed)} with tensors on {device}, got {backend}"


def output_error(results: Path | None, plot: Path | None) -> str | None:
    """What is wrong with the files that a command is to write, if anything: found before the work is done."""
    for path in (results, plot):
        if path is not None and not path.resolve().parent.is_dir():
            return f"{path}: its folder does not exist"
    if plot is None:
        return None
    try:
        import matplotlib.backend_bases
    except ImportError:
        return "--plot needs matplotlib: pip install 'cula-gdn[plot]'"
    formats = matplotlib.backend_bases.FigureCanvasBase.get_supported_filetypes()
    if plot.suffix.removeprefix(".").lower() not in formats:
        return f"--plot: expected a file name that ends in one of {', '.join(formats)}, got {plot}"
    return None


def device_option(text: str) -> torch.device:
    """An argparse type: 'auto', 'cpu', 'cuda' or 'cuda:1'."""
    if text == "auto":
        usable = torch.cuda.is_available() and "cuda" in library_info().backends
        return torch.device("cuda" if usable else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected auto, cpu or cuda[:N], got {text!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected auto, cpu or cuda[:N], got {text!r}")
    if device.type == "cuda":
        if "cuda" not in library_info().backends:
            raise argparse.ArgumentTypeError(f"{text}: this build has the cpu backend only")
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise argparse.ArgumentTypeError(f"{text}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device
