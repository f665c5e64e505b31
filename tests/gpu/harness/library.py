"""The library under test, through the C entry of entry.cpp and DLPack structures made by hand."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable

import torch

Tensor = torch.Tensor


class DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


BACKENDS = ("cuda", "sm90", "auto")  # as entry.cpp numbers them


class CProblem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "T", "H", "HV", "K", "V", "C")),
        ("offsets", ctypes.POINTER(ctypes.c_int64)),
        ("num_offsets", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("window_bytes", ctypes.c_int64),
        ("shortest_segment", ctypes.c_int64),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        *((name, ctypes.c_uint8) for name in ("l2norm", "gate", "sigmoid", "neg_eigval", "v_first")),
        ("batch_invariant", ctypes.c_uint8),
        ("sequences_whole", ctypes.c_uint8),
        ("backend", ctypes.c_uint8),
    ]


DTYPES = {
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
}


def view(tensor: Tensor | None) -> DLTensor | None:
    """A DLPack view whose device is CUDA, also for the emulator."""
    if tensor is None:
        return None
    n = tensor.dim()
    code, bits = DTYPES[tensor.dtype]
    return DLTensor(
        tensor.data_ptr(),
        DLDevice(2, tensor.device.index or 0),
        n,
        DLDataType(code, bits, 1),
        (ctypes.c_int64 * n)(*tensor.shape),
        (ctypes.c_int64 * n)(*tensor.stride()),
        0,
    )


@dataclasses.dataclass
class Shape:
    """What a plan is made of."""

    dtype: torch.dtype = torch.bfloat16
    B: int = 1
    T: int = 64
    H: int = 1
    HV: int = 1
    K: int = 64
    V: int = 64
    C: int = 64
    offsets: list[int] | None = None
    scale: float = 0.0
    l2norm: bool = False
    gate: bool = False
    sigmoid: bool = False
    neg_eigval: bool = False
    v_first: bool = False
    batch_invariant: bool = False

    @property
    def N(self) -> int:
        return self.B if self.offsets is None else len(self.offsets) - 1

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """(row of the batch, begin, end) of each sequence."""
        if self.offsets is None:
            return [(b, 0, self.T) for b in range(self.B)]
        return [(0, a, b) for a, b in itertools.pairwise(self.offsets)]

    @property
    def chunks(self) -> list[tuple[int, int, int, int, int]]:
        """(sequence, row of the batch, index among its row's chunks, begin, end)."""
        result = []
        count = dict.fromkeys(range(self.B), 0)
        for n, (b, begin, end) in enumerate(self.ranges):
            for at in range(begin, end, self.C):
                result.append((n, b, count[b], at, min(at + self.C, end)))
                count[b] += 1
        return result

    @property
    def NT(self) -> int:
        return len(self.chunks) // self.B

    @property
    def multiplier(self) -> float:
        return self.scale or self.K**-0.5

    def state(self, *dims: int) -> tuple[int, ...]:
        return (*dims, self.V, self.K) if self.v_first else (*dims, self.K, self.V)


@dataclasses.dataclass(frozen=True)
class ScheduleOptions:
    """What a plan's schedules are asked for; 0: as built."""

    sequences_whole: bool = False
    window_bytes: int = 0  # of the sm90 backward
    shortest_segment: int = 0  # chunks, likewise


class LibraryError(RuntimeError):
    pass


class Library:
    """The compiled library.

    `filled`: memory that a call is to write is filled with NaN before it, and guarded behind its end. Tools that look
    for reads of memory that nobody wrote must have it as it comes instead.
    """

    def __init__(self, path: str, device: str, backend: str = "cuda", filled: bool = True) -> None:
        self.lib = ctypes.CDLL(path)
        self.backend = backend
        self.schedules = ScheduleOptions()  # of the plans made from here on
        self.lib.cula_plan.restype = ctypes.c_void_p
        self.lib.cula_free_plan.argtypes = [ctypes.c_void_p]
        self.lib.cula_workspace.restype = ctypes.c_int64
        self.lib.cula_workspace.argtypes = [ctypes.c_void_p, ctypes.c_int]
        for of_tensors in (self.lib.cula_forward_workspace, self.lib.cula_backward_workspace):
            of_tensors.restype = ctypes.c_int64
            of_tensors.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.device = device
        self.filled = filled
        self.error = ctypes.create_string_buffer(1000)

    def plan(self, shape: Shape) -> int:
        code, bits = DTYPES[shape.dtype]
        offsets = None if shape.offsets is None else (ctypes.c_int64 * len(shape.offsets))(*shape.offsets)
        problem = CProblem(
            *(shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V, shape.C),
            *(offsets, len(shape.offsets or []), shape.scale),
            *(self.schedules.window_bytes, self.schedules.shortest_segment, code, bits),
            *(shape.l2norm, shape.gate, shape.sigmoid, shape.neg_eigval, shape.v_first, shape.batch_invariant),
            *(self.schedules.sequences_whole, BACKENDS.index(self.backend)),
        )
        plan = self.lib.cula_plan(ctypes.byref(problem), 0, self.error, ctypes.c_size_t(1000))
        if not plan:
            raise LibraryError(self.error.value.decode())
        return plan

    def describe(self, shape: Shape) -> str:
        plan = self.plan(shape)
        text = ctypes.create_string_buffer(2000)
        self.lib.cula_describe(ctypes.c_void_p(plan), text, ctypes.c_size_t(2000))
        self.lib.cula_free_plan(plan)
        return text.value.decode()

    def prepared(
        self,
        name: str,
        plan: int,
        tensors: list[Tensor | None],
        scalars: tuple[float, ...] = (),
        kind: int | None = None,
    ) -> Callable[[], None]:
        """A function that makes the call; its workspace is filled, and guarded behind its end."""
        views = [view(tensor) for tensor in tensors]
        pointers = (ctypes.POINTER(DLTensor) * 32)()
        for i, item in enumerate(views):
            if item is not None:
                pointers[i] = ctypes.pointer(item)
        size = 0
        if kind in (0, 1):
            size = self.lib.cula_forward_workspace(plan, pointers)
        elif kind == 2:
            size = self.lib.cula_backward_workspace(plan, pointers)
        elif kind is not None:
            size = self.lib.cula_workspace(plan, kind)
        workspace = torch.empty(size + (64 if self.filled else 0), dtype=torch.uint8, device=self.device)
        if self.filled:
            workspace.fill_(255)
        numbers = (ctypes.c_double * 4)(*scalars)

        def call() -> None:
            stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
            status = self.lib.cula_call(
                name.encode(), ctypes.c_void_p(plan), pointers, numbers, ctypes.c_void_p(workspace.data_ptr()),
                ctypes.c_int64(size), ctypes.c_void_p(stream), self.error, ctypes.c_size_t(1000),
            )  # fmt: skip
            if status != 0:
                raise LibraryError(f"{name}: {self.error.value.decode()}")

        def check_guard() -> None:
            if not bool((workspace[size:] == 255).all()):
                raise LibraryError(f"{name}: wrote behind its workspace")

        call.keep = (views, tensors, workspace)  # type: ignore[attr-defined]
        call.check_guard = check_guard  # type: ignore[attr-defined]
        return call

    def run(self, name: str, shape: Shape, tensors: list[Tensor | None], scalars: tuple[float, ...] = (),
            kind: int | None = None) -> None:  # fmt: skip
        plan = self.plan(shape)
        try:
            call = self.prepared(name, plan, tensors, scalars, kind)
            call()
            call.check_guard()  # type: ignore[attr-defined]
        finally:
            self.lib.cula_free_plan(plan)
