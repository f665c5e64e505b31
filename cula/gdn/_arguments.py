"""What the public functions do with their arguments before the operator sees them."""

from __future__ import annotations

import functools
import numbers
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor


def refuse_keywords(function: str, kwargs: dict[str, Any]) -> None:
    """Refuses what a call's signature does not have."""
    if "head_first" in kwargs:
        raise DeprecationWarning("head_first: removed; tensors are [B, T, H, ...] with the tokens first")
    if kwargs:
        raise TypeError(f"{function}() got an unexpected keyword argument '{next(iter(kwargs))}'")


def resolve_state_layout(function: str, state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """Honours the deprecated spellings in `kwargs` and refuses the rest; returns `state_v_first`."""
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(
                "transpose_state_layout: the deprecated name of state_v_first can not be given together with it"
            )
        warnings.warn(
            "transpose_state_layout is deprecated; its name is now state_v_first", DeprecationWarning, stacklevel=3
        )
        state_v_first = kwargs.pop("transpose_state_layout")
    refuse_keywords(function, kwargs)
    return state_v_first


_P = ParamSpec("_P")
_R = TypeVar("_R")

# Tensors of indices; every other one holds floating-point numbers.
_INDEX_TENSORS = ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "chunk_offsets")

_NUMBERS = (numbers.Real, torch.SymFloat, torch.SymInt)

_KIND_NAMES: dict[type, str] = {
    Tensor: "a tensor", type(None): "None", numbers.Real: "a number", int: "an int", bool: "True or False",
}  # fmt: skip


def _accepted(hint: Any) -> tuple[type, ...]:
    """What isinstance takes for an annotation; nothing for one that says nothing."""
    if hint is Any or hint is type(None):
        return ()
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(numbers.Real if kind is float else kind for kind in kinds)


def checked_types(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refuses arguments that are not of their annotated types, or are tensors of numbers of the wrong kind, by name."""
    hints = {name: hint for name, hint in typing.get_type_hints(function).items() if name not in ("kwargs", "return")}
    accepted = {name: kinds for name, hint in hints.items() if (kinds := _accepted(hint))}
    names = tuple(hints)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kinds = accepted.get(name)
            if kinds is None:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                wanted = " or ".join(_KIND_NAMES.get(kind, kind.__name__) for kind in kinds)
                raise TypeError(f"{name}: expected {wanted}, got {type(value).__name__}")
            if isinstance(value, Tensor):
                _check_stage_tensor(name, value)
            elif isinstance(value, int):
                check_bits(name, value)
        return function(*args, **kwargs)

    return checked


def _check_stage_tensor(name: str, x: Tensor) -> None:
    if x.is_meta:
        raise ValueError(f"{name}: expected a tensor with values, got a meta tensor")
    refuse_other_layouts(**{name: x})
    if name in _INDEX_TENSORS and x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    if name not in _INDEX_TENSORS and not x.is_floating_point():
        raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {x.dtype}")


def check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def check_bits(name: str, x: int) -> None:
    """The library takes integers of 64 bits, and refuses larger ones without their name."""
    if not -(2**63) <= x < 2**63:
        raise ValueError(f"{name}: expected a number of 64 bits, got {x}")


def check_chunk_size(chunk_size: int) -> None:
    """Here for the calls that allocate A, of which it is a dimension; C++ checks it for the others."""
    if not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size: expected an int, got {type(chunk_size).__name__}")
    if chunk_size not in (16, 32, 64):
        raise ValueError(f"chunk_size: expected 16, 32 or 64, got {chunk_size}")


def check_options(scale: Any, backend: Any, **flags: Any) -> None:
    """Types that torch's schemas would refuse without naming the argument as its user knows it."""
    if scale is not None and type(scale) is not float and (isinstance(scale, bool) or not isinstance(scale, _NUMBERS)):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")
    if isinstance(scale, int):
        check_bits("scale", scale)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: expected a string or None, got {type(backend).__name__}")
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise TypeError(f"{name}: expected True or False, got {type(flag).__name__}")


def check_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, use_gate_in_kernel: bool) -> None:
    """What must hold before outputs can be allocated, and what only Python can see; C++ checks the rest."""
    check_tensor("q", q)
    check_tensor("k", k)
    check_tensor("v", v)
    check_tensor("beta", beta)
    if q.dim() != 4:
        raise ValueError(f"q: expected shape [B, T, H, K], got {list(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"v: expected shape [B, T, HV, V], got {list(v.shape)}")
    if g is None and use_gate_in_kernel:
        raise ValueError("g: expected the raw gate with use_gate_in_kernel=True, got None")


def check_others(q: Tensor, **others: Tensor | None) -> None:
    """All operands but q: each a tensor or None, and none of them meta unless q is.

    One meta tensor makes torch compute shapes alone, for a call whose other tensors hold values.
    """
    for name, x in others.items():
        if x is None:
            continue
        check_tensor(name, x)
        if x.is_meta != q.is_meta:
            raise ValueError(f"{name}: expected a tensor on {q.device} as q, got one on {x.device}")


def refuse_other_layouts(**tensors: Any) -> None:
    """Tensors whose values do not lie in memory by strides, which torch refuses later without their names."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or (x.layout == torch.strided and not x.is_nested and not x.is_quantized):
            continue
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)
        raise ValueError(f"{name}: expected a dense tensor, got a {kind} one")


def explain_failure(function: str, **tensors: Any) -> None:
    """Of a call that torch refused: says why, if it is for what it can not know of the call; returns otherwise."""
    refuse_other_layouts(**tensors)
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(f"{function}: torch.jit.trace can not record it; use torch.compile or torch.export")


def refuse_transforms(function: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{function}: torch.func's transforms (grad, vjp, vmap and others) do not exist; use autograd's backward"
        )


def refuse_tangents(function: str, *inputs: Tensor | None) -> None:
    """Forward-mode derivatives would be dropped without a word: torch's operators pass none on by themselves."""
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level < 0:
        return
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    if any(x is not None and unpack(x).tangent is not None for x in inputs):
        raise NotImplementedError(f"{function}: forward-mode derivatives (torch.func.jvp, dual tensors) do not exist")


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype where autocast is on; as torch's own rule has it, float64 is left alone."""
    # Not torch.amp.is_autocast_available, which compilers before torch 2.12 can not look into.
    device_type = "cuda" if q.is_cuda else "cpu" if q.is_cpu else None
    if device_type is None or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    cast = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v)]
    return cast[0], cast[1], cast[2]


def zero_gate(v: Tensor) -> Tensor:
    """No decay: [B, T, HV] zeros that take no memory."""
    return v.new_zeros((), dtype=torch.float32).expand(v.shape[:3])


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of states and row statistics: float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state_v_first: bool) -> tuple[int, ...]:
    """[N, HV, K, V], or [N, HV, V, K] with state_v_first."""
    sequences = q.shape[0] if cu_seqlens is None else max(cu_seqlens.numel() - 1, 0)
    inner = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return (sequences, v.shape[2], *inner)
