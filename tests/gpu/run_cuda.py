"""Checks the cuda backend against float64 on a GPU, or on the emulator, and times it.

    python run_cuda.py --library build/libcula_gdn_test.so                 every check, then timings
    python run_cuda.py --library libemulated.so --emulated [--only NAME]   small checks, on the CPU

Prints one line a check and ends with a status other than 0 if any failed.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch

Tensor = torch.Tensor
INFINITY = float("inf")


# ---- The library ---------------------------------------------------------------------------------------------------


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


class CProblem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "T", "H", "HV", "K", "V", "C")),
        ("offsets", ctypes.POINTER(ctypes.c_int64)),
        ("num_offsets", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        *((name, ctypes.c_uint8) for name in ("l2norm", "gate", "sigmoid", "neg_eigval", "v_first")),
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


class LibraryError(RuntimeError):
    pass


class Library:
    def __init__(self, path: str, device: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.lib.cula_plan.restype = ctypes.c_void_p
        self.lib.cula_free_plan.argtypes = [ctypes.c_void_p]
        self.lib.cula_workspace.restype = ctypes.c_int64
        self.lib.cula_workspace.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.device = device
        self.error = ctypes.create_string_buffer(1000)

    def plan(self, shape: Shape) -> int:
        code, bits = DTYPES[shape.dtype]
        offsets = None if shape.offsets is None else (ctypes.c_int64 * len(shape.offsets))(*shape.offsets)
        problem = CProblem(
            *(shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V, shape.C),
            *(offsets, len(shape.offsets or []), shape.scale, code, bits),
            *(shape.l2norm, shape.gate, shape.sigmoid, shape.neg_eigval, shape.v_first),
        )
        plan = self.lib.cula_plan(ctypes.byref(problem), 0, self.error, ctypes.c_size_t(1000))
        if not plan:
            raise LibraryError(self.error.value.decode())
        return plan

    def prepared(
        self,
        name: str,
        plan: int,
        tensors: list[Tensor | None],
        scalars: tuple[float, ...] = (),
        kind: int | None = None,
    ) -> Callable[[], None]:
        """A function that makes the call; its workspace is poisoned behind its end."""
        views = [view(tensor) for tensor in tensors]
        pointers = (ctypes.POINTER(DLTensor) * 32)()
        for i, item in enumerate(views):
            if item is not None:
                pointers[i] = ctypes.pointer(item)
        size = 0 if kind is None else self.lib.cula_workspace(plan, kind)
        workspace = torch.full((size + 64,), 255, dtype=torch.uint8, device=self.device)
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


# ---- Reference -----------------------------------------------------------------------------------------------------


def effective(shape: Shape, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float64 q, k, v, log decay and beta behind every flag, differentiable."""
    q, k = t["q"], t["k"]
    if shape.l2norm:
        q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + 1e-6)
        k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g, beta = t["g"], t["beta"]
    if shape.gate:
        z = g + t.get("dt_bias", 0.0)
        g = -torch.exp(t["A_log"]) * (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())))
    if shape.sigmoid:
        beta = torch.sigmoid(beta) * (2.0 if shape.neg_eigval else 1.0)
    group = shape.HV // shape.H
    return {"q": q.repeat_interleave(group, 2), "k": k.repeat_interleave(group, 2), "v": t["v"], "g": g, "beta": beta}


def recurrence(shape: Shape, t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """o and the final state of the token recurrence."""
    x = effective(shape, t)
    outputs = torch.zeros_like(x["v"])
    states = []
    for n, (b, begin, end) in enumerate(shape.ranges):
        s = torch.zeros(shape.HV, shape.K, shape.V, dtype=torch.float64, device=x["v"].device)
        if "h0" in t:
            s = t["h0"][n].transpose(-1, -2) if shape.v_first else t["h0"][n]
        rows = []
        for i in range(begin, end):
            decay = torch.exp(x["g"][b, i])
            s = torch.where((decay == 0)[:, None, None], torch.zeros_like(s), s * decay[:, None, None])
            k = x["k"][b, i]
            r = x["beta"][b, i][:, None] * (x["v"][b, i] - torch.einsum("hkv,hk->hv", s, k))
            s = s + k[:, :, None] * r[:, None, :]
            rows.append(torch.einsum("hkv,hk->hv", s, x["q"][b, i]) * shape.multiplier)
        if rows:
            index = torch.arange(begin, end, device=outputs.device)
            outputs = outputs.index_put((torch.tensor(b, device=outputs.device), index), torch.stack(rows))
        states.append(s.transpose(-1, -2) if shape.v_first else s)
    return outputs, torch.stack(states) if states else torch.zeros(0)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error; infinite if one is finite where the other is not, 0 for two zeros."""
    actual = actual.detach().double().cpu()
    expected = expected.detach().double().cpu()
    if actual.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(actual).all()):
        return INFINITY
    difference = float((actual - expected).norm())
    if difference <= 1e-9 * math.sqrt(actual.numel()):
        return 0.0
    return difference / max(float(expected.norm()), 1e-30)


# ---- Checks --------------------------------------------------------------------------------------------------------

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}


@dataclasses.dataclass
class Options:
    """How the inputs of an operator check are made."""

    initial_state: bool = True
    final_state: bool = True
    gate_scale: float = 1.0  # of logsigmoid(normal)
    gate_dtype: torch.dtype = torch.float32
    beta_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    resets: tuple[int, ...] = ()  # tokens whose gate is -inf in head 0
    constant_gate: float | None = None
    strided: bool = False  # q, k, v as slices of one buffer, g and beta of another
    expanded_do: bool = False
    unaligned: bool = False
    dt_bias: bool = True


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def make_inputs(shape: Shape, options: Options, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator)

    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    if not shape.l2norm:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    t = {"q": q.to(shape.dtype), "k": k.to(shape.dtype), "v": v.to(shape.dtype)}
    if shape.gate:
        t["g"] = normal(B, T, HV).to(options.gate_dtype)
        t["A_log"] = (normal(HV) * 0.5).float()
        if options.dt_bias:
            t["dt_bias"] = normal(HV).float()
    else:
        g = torch.nn.functional.logsigmoid(normal(B, T, HV)) * options.gate_scale
        if options.constant_gate is not None:
            g = torch.full_like(g, options.constant_gate)
        for token in options.resets:
            g[:, token, 0] = -INFINITY
        t["g"] = g.to(options.gate_dtype)
    t["beta"] = (normal(B, T, HV) if shape.sigmoid else torch.rand(B, T, HV, generator=generator)).to(
        options.beta_dtype
    )
    if options.initial_state:
        t["h0"] = normal(*shape.state(shape.N, HV)).to(options.state_dtype)
    t["do"] = normal(B, T, HV, V).to(shape.dtype)
    if options.expanded_do:
        t["do"] = normal(1, 1, HV, 1).to(shape.dtype).expand(B, T, HV, V)
    if options.final_state:
        t["dht"] = normal(*shape.state(shape.N, HV))
    if options.strided and K == V and H == HV:
        buffer = torch.stack([t["q"], t["k"], t["v"]], dim=2).contiguous()
        t["q"], t["k"], t["v"] = buffer.unbind(2)
        pair = torch.cat([t["g"].float(), t["beta"].float()], dim=-1)
        t["g"], t["beta"] = pair[..., :HV], pair[..., HV:]
    if options.unaligned:
        for name in ("q", "k", "v"):
            buffer = torch.zeros(t[name].numel() + 1, dtype=t[name].dtype)
            buffer[1:] = t[name].flatten()
            t[name] = buffer[1:].view(t[name].shape)
    return t


def to_device(t: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """Keeps strides and storage offsets."""
    if device == "cpu":
        return t
    moved: dict[int, Tensor] = {}
    result = {}
    for name, x in t.items():
        storage = x.untyped_storage()
        if storage.data_ptr() not in moved:
            flat = torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.element_size(),))
            moved[storage.data_ptr()] = flat.to(device)
        result[name] = moved[storage.data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset())
    return result


class Runner:
    def __init__(self, library: Library, only: str, verbose: bool) -> None:
        self.library = library
        self.device = library.device
        self.only = only
        self.verbose = verbose
        self.failures: list[str] = []
        self.count = 0

    def wanted(self, name: str) -> bool:
        return self.only in name

    def report(self, name: str, errors: dict[str, tuple[float, float]]) -> None:
        """errors: what -> (error, tolerance)."""
        self.count += 1
        bad = [what for what, (value, limit) in errors.items() if not value <= limit]
        if bad:
            self.failures.append(f"{name}: {', '.join(bad)}")
        text = " ".join(f"{what}={value:.1e}{'!' if what in bad else ''}" for what, (value, _) in errors.items())
        print(f"{'FAIL' if bad else 'ok  '} {name:<44} {text}", flush=True)

    def fail(self, name: str, exception: Exception) -> None:
        self.count += 1
        text = str(exception).splitlines()[0] if str(exception) else type(exception).__name__
        self.failures.append(f"{name}: {text}")
        print(f"FAIL {name:<44} {text}", flush=True)
        if "CUDA error" in text:  # nothing after a fault of the device tells anything
            sys.exit(2)

    def empty(self, *dims: int, dtype: torch.dtype) -> Tensor:
        """NaN everywhere, so that what is not written shows."""
        return torch.full(dims, float("nan"), dtype=dtype, device=self.device)

    def saved(self, shape: Shape) -> list[Tensor | None]:
        B, T, H = shape.B, shape.T, shape.H
        norm: list[Tensor | None] = [None] * 4
        if shape.l2norm:
            norm = [self.empty(B, T, H, shape.K, dtype=shape.dtype), self.empty(B, T, H, dtype=torch.float32)]
            norm += [self.empty(B, T, H, shape.K, dtype=shape.dtype), self.empty(B, T, H, dtype=torch.float32)]
        return [*norm, self.empty(B, T, shape.HV, shape.C, dtype=shape.dtype)]

    def cu_seqlens(self, shape: Shape, wide: bool = False) -> Tensor | None:
        if shape.offsets is None:
            return None
        return torch.tensor(shape.offsets, dtype=torch.int64 if wide else torch.int32, device=self.device)

    # -- the operator

    def forward(self, shape: Shape, options: Options, t: dict[str, Tensor], name: str = "forward",
                saved: list[Tensor | None] | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        o = self.empty(shape.B, shape.T, shape.HV, shape.V, dtype=shape.dtype)
        ht = self.empty(*shape.state(shape.N, shape.HV), dtype=torch.float32) if options.final_state else None
        get = t.get
        arguments = [
            get("q"),
            get("k"),
            get("v"),
            get("g"),
            get("beta"),
            get("A_log"),
            get("dt_bias"),
            get("h0"),
            o,
            ht,
        ]
        arguments += saved or [None] * 5
        arguments += [self.cu_seqlens(shape, wide=saved is None)]
        kind = None if name == "recurrent_forward" else int(saved is not None)
        self.library.run(name, shape, arguments, kind=kind)
        return o, ht

    def backward(self, shape: Shape, options: Options, t: dict[str, Tensor], saved: list[Tensor | None]
                 ) -> dict[str, Tensor]:  # fmt: skip
        get = t.get
        out = {name: torch.full_like(t[name], float("nan"), memory_format=torch.contiguous_format)
               for name in ("q", "k", "v", "g", "beta")}  # fmt: skip
        if shape.gate:
            out["A_log"] = torch.full_like(t["A_log"], float("nan"))
            if "dt_bias" in t:
                out["dt_bias"] = torch.full_like(t["dt_bias"], float("nan"))
        if "h0" in t:
            out["h0"] = torch.full_like(t["h0"], float("nan"))
        q, k = (None, None) if shape.l2norm else (get("q"), get("k"))
        arguments = [q, k, get("v"), get("g"), get("beta"), get("A_log"), get("dt_bias"), get("h0"), get("do")]
        arguments += [get("dht"), *saved, self.cu_seqlens(shape)]
        arguments += [out.get(name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")]
        self.library.run("backward", shape, arguments, kind=2)
        return out

    def operator(self, name: str, shape: Shape, options: Options | None = None, backward: bool = True,
                 factor: float = 1.0) -> None:  # fmt: skip
        if not self.wanted(name):
            return
        options = options or Options()
        t = to_device(make_inputs(shape, options), self.device)
        tolerance = TOLERANCE[shape.dtype] * factor
        try:
            exact = {key: x.double().requires_grad_(key not in ("do", "dht")) for key, x in t.items()}
            expected_o, expected_ht = recurrence(shape, exact)
            errors: dict[str, tuple[float, float]] = {}
            o, ht = self.forward(shape, options, t)
            errors["o"] = error(o, expected_o), tolerance
            if ht is not None:
                errors["ht"] = error(ht, expected_ht), tolerance
            decoded, decoded_state = self.forward(shape, options, t, "recurrent_forward")
            # Rounding of o alone stands between the recurrence and exact arithmetic.
            errors["decode"] = (
                error(decoded, expected_o),
                min(tolerance, 4e-3) if shape.dtype != torch.float32 else 2e-6,
            )
            if decoded_state is not None:
                errors["decode_ht"] = error(decoded_state, expected_ht), 1e-5
            if backward:
                saved = self.saved(shape)
                again, _ = self.forward(shape, options, t, saved=saved)
                same = torch.equal(torch.nan_to_num(again), torch.nan_to_num(o))
                errors["saving"] = (0.0 if same else INFINITY), 0.0
                loss = (expected_o * exact["do"]).sum()
                if "dht" in exact:
                    loss = loss + (expected_ht * exact["dht"]).sum()
                names = [key for key in exact if key not in ("do", "dht")]
                gradients = torch.autograd.grad(loss, [exact[key] for key in names], allow_unused=True)
                actual = self.backward(shape, options, t, saved)
                for key, gradient in zip(names, gradients, strict=True):
                    expected = torch.zeros_like(exact[key]) if gradient is None else torch.nan_to_num(gradient, nan=0.0)
                    errors[f"d{key}"] = error(actual[key], expected), 2 * tolerance
                repeated = self.backward(shape, options, t, saved)
                same = all(
                    torch.equal(torch.nan_to_num(actual[key]), torch.nan_to_num(repeated[key])) for key in actual
                )
                errors["repeat"] = (0.0 if same else INFINITY), 0.0
            self.report(name, errors)
        except Exception as exception:
            self.fail(name, exception)

    # -- the stages

    def stages(self, name: str, shape: Shape, with_gate: bool = True, backward: bool = True,
               resets: tuple[int, ...] = ()) -> None:  # fmt: skip
        if not self.wanted(name):
            return
        try:
            self.report(name, dict(self.stage_errors(shape, with_gate, backward, resets)))
        except Exception as exception:
            self.fail(name, exception)

    def stage_errors(self, shape: Shape, with_gate: bool, backward: bool, resets: tuple[int, ...]
                     ) -> Iterator[tuple[str, tuple[float, float]]]:  # fmt: skip
        x = shape.dtype
        tolerance = TOLERANCE[x]
        B, T, H, HV, K, V, C = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V, shape.C
        t = to_device(make_inputs(shape, Options(resets=resets)), self.device)
        seqlens = self.cu_seqlens(shape)
        like: dict[str, tuple[int, ...]] = {
            "hv": (B, T, HV),
            "k": (B, T, H, K),
            "wk": (B, T, HV, K),
            "v": (B, T, HV, V),
        }

        def new(kind: str, dtype: torch.dtype = x) -> Tensor:
            return self.empty(*like[kind], dtype=dtype)

        run = self.library.run

        # Preparation
        y, rstd = new("k"), self.empty(B, T, H, dtype=torch.float32)
        run("l2norm_fwd", shape, [t["k"] * 3, y, rstd])
        raw = (t["k"] * 3).double()
        exact_rstd = 1 / torch.sqrt(raw.square().sum(-1) + 1e-6)
        yield "l2norm", (max(error(y, raw * exact_rstd[..., None]), error(rstd, exact_rstd)), tolerance)
        dx = new("k")
        run("l2norm_bwd", shape, [y, rstd, t["q"], dx])
        yd, dy = y.double(), t["q"].double()
        expected = rstd.double()[..., None] * (dy - yd * (yd * dy).sum(-1, keepdim=True))
        yield "l2norm_bwd", (error(dx, expected), tolerance)
        logits, sigma = torch.randn(B, T, HV, device=self.device), new("hv", torch.float32)
        run("fused_beta_sigmoid_fwd", shape, [logits, sigma], (2.0,))
        yield "sigmoid", (error(sigma, 2 * torch.sigmoid(logits.double())), 1e-6)
        dlogits = new("hv", torch.float32)
        run("fused_beta_sigmoid_bwd", shape, [logits, t["beta"], dlogits], (2.0,))
        s = torch.sigmoid(logits.double())
        yield "sigmoid_bwd", (error(dlogits, 2 * s * (1 - s) * t["beta"].double()), 2e-6)

        def cumsum(g: Tensor, reverse: bool) -> Tensor:
            out = torch.zeros_like(g, dtype=torch.float64)
            for _, b, _, begin, end in shape.chunks:
                rows = g[b, begin:end].double()
                if reverse:
                    out[b, begin:end] = rows.flip(0).cumsum(0).flip(0)
                    continue
                total = torch.zeros_like(rows[0])
                for i in range(end - begin):
                    total = torch.where(rows[i] == -INFINITY, torch.zeros_like(total), total + rows[i])
                    out[b, begin + i] = torch.where(rows[i] == -INFINITY, rows[i], total)
            return out

        gamma = new("hv", torch.float32)
        run("chunk_local_cumsum", shape, [t["g"], gamma, seqlens], (1 / math.log(2), 0.0))
        exact_gamma = cumsum(t["g"], False) / math.log(2)
        both = torch.isinf(gamma) == torch.isinf(exact_gamma)
        if not bool(both.all()):
            yield "cumsum_resets", (INFINITY, 0.0)
        hide = {"neginf": 0.0, "nan": float("nan")}
        yield "cumsum", (error(torch.nan_to_num(gamma, **hide), torch.nan_to_num(exact_gamma, **hide)), 1e-6)
        reverse = new("hv", torch.float32)
        finite = torch.nan_to_num(t["g"], neginf=0.0)
        run("chunk_local_cumsum", shape, [finite, reverse, seqlens], (1.0, 1.0))
        yield "reverse", (error(reverse, cumsum(finite, True)), 1e-6)

        a_log, bias = torch.randn(HV, device=self.device), torch.randn(HV, device=self.device)
        z = logits.double() + bias.double()
        softplus = z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))
        gate = -torch.exp(a_log.double()) * softplus
        out = new("hv", torch.float32)
        run("gdn_gate_fwd", shape, [logits, a_log, bias, out])
        yield "gate", (error(out, gate), 1e-6)
        run("gdn_gate_chunk_cumsum", shape, [logits, a_log, bias, out, seqlens], (1.0,))
        yield "gate_cumsum", (error(out, cumsum(gate, False)), 1e-6)
        dg, da, db = new("hv", torch.float32), torch.empty_like(a_log), torch.empty_like(bias)
        run("gdn_gate_bwd", shape, [logits, a_log, bias, t["beta"], dg, da, db])
        exact_dg = -torch.exp(a_log.double()) * torch.sigmoid(z) * t["beta"].double()
        exact_da = (gate * t["beta"].double()).sum((0, 1))
        worst = max(error(dg, exact_dg), error(da, exact_da), error(db, exact_dg.sum((0, 1))))
        yield "gate_bwd", (worst, 2e-6)

        # Forward, each stage from rounded inputs of its own
        group = HV // H
        q, k = t["q"].double().repeat_interleave(group, 2), t["k"].double().repeat_interleave(group, 2)
        v, beta = t["v"].double(), t["beta"].double()
        gates = gamma if with_gate else None
        g2 = gamma.double() if with_gate else torch.zeros(B, T, HV, dtype=torch.float64, device=self.device)

        def factors(b: int, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """Of one chunk, [HV, ..]: E, decay from the start, to the end, of the whole chunk."""
            rows = g2[b, begin:end].transpose(0, 1)
            reset = rows == -INFINITY
            segment = reset.long().cumsum(-1)
            values = torch.where(reset, torch.zeros_like(rows), rows)
            n = end - begin
            lower = torch.ones(n, n, dtype=torch.bool, device=rows.device).tril()
            kept = (segment[:, :, None] == segment[:, None, :]) & lower
            difference = torch.where(
                kept, values[:, :, None] - values[:, None, :], torch.full((), -INFINITY).double().to(rows.device)
            )
            decay = torch.where(segment == 0, torch.exp2(values), torch.zeros_like(values))
            to_end = torch.where(
                segment == segment[:, -1:], torch.exp2(values[:, -1:] - values), torch.zeros_like(values)
            )
            return torch.exp2(difference), decay, to_end, decay[:, -1]

        def heads(x: Tensor, b: int, begin: int, end: int) -> Tensor:
            return x[b, begin:end].transpose(0, 1)

        def put(out: Tensor, b: int, begin: int, value: Tensor) -> None:
            value = value.transpose(0, 1)
            out[b, begin : begin + value.shape[0], :, : value.shape[2]] = value

        def zeros(kind: str) -> Tensor:
            return torch.zeros(like[kind], dtype=torch.float64, device=self.device)

        L, A = self.empty(B, T, HV, C, dtype=torch.float32), self.empty(B, T, HV, C, dtype=x)
        exact_L = torch.zeros(B, T, HV, C, dtype=torch.float64, device=self.device)
        exact_A = exact_L.clone()
        for _, b, _, begin, end in shape.chunks:
            E = factors(b, begin, end)[0]
            kc = heads(k, b, begin, end)
            lower = (heads(beta[..., None], b, begin, end) * (kc @ kc.transpose(-1, -2)) * E).tril(-1)
            put(exact_L, b, begin, lower)
            put(exact_A, b, begin, torch.linalg.inv(torch.eye(end - begin, device=lower.device).double() + lower))
        run("chunk_scaled_dot_kkt_fwd", shape, [t["k"], gates, t["beta"], L, seqlens])
        yield "kkt", (error(L, exact_L), 1e-5)
        A32 = torch.empty_like(L)
        run("solve_tril", shape, [L, A32, seqlens])
        yield "solve", (error(A32, exact_A), 1e-5)
        w, u = new("wk"), new("v")
        run("chunk_gated_delta_rule_fwd_intra", shape, [t["k"], t["v"], gates, t["beta"], w, u, A, seqlens])
        yield "intra_A", (error(A, exact_A), tolerance)
        exact_w, exact_u = zeros("wk"), zeros("v")
        for _, b, _, begin, end in shape.chunks:
            a = heads(A.double(), b, begin, end)[..., : end - begin]
            decay = factors(b, begin, end)[1]
            bc = heads(beta[..., None], b, begin, end)
            put(exact_u, b, begin, a @ (bc * heads(v, b, begin, end)))
            put(exact_w, b, begin, a @ (bc * decay[..., None] * heads(k, b, begin, end)))
        yield "intra_wu", (max(error(w, exact_w), error(u, exact_u)), tolerance)
        w2, u2 = new("wk"), new("v")
        run("recompute_w_u_fwd", shape, [t["k"], t["v"], t["beta"], A, gates, w2, u2, seqlens])
        yield "recompute", (0.0 if torch.equal(w, w2) and torch.equal(u, u2) else INFINITY, 0.0)

        def state(s: Tensor) -> Tensor:
            return s.transpose(-1, -2) if shape.v_first else s

        NT = shape.NT
        h, v_new = self.empty(*shape.state(B, NT, HV), dtype=x), new("v")
        ht = self.empty(*shape.state(shape.N, HV), dtype=torch.float32)
        run("chunk_gated_delta_rule_fwd_h", shape, [t["k"], w, u, gates, t["h0"], h, v_new, ht, seqlens])
        exact_h, exact_v_new = torch.zeros_like(h, dtype=torch.float64), zeros("v")
        S = state(t["h0"].double()).clone()
        for n, b, index, begin, end in shape.chunks:
            _, _, to_end, whole = factors(b, begin, end)
            exact_h[b, index] = state(S[n])
            y = heads(u.double(), b, begin, end) - heads(w.double(), b, begin, end) @ S[n]
            put(exact_v_new, b, begin, y)
            S[n] = whole[:, None, None] * S[n] + heads(k, b, begin, end).transpose(-1, -2) @ (to_end[..., None] * y)
        yield "h", (error(h, exact_h), tolerance)
        yield "v_new", (error(v_new, exact_v_new), tolerance)
        yield "final", (error(ht, state(S)), tolerance)
        o = new("v")
        run("chunk_fwd_o", shape, [t["q"], t["k"], v_new, h, gates, o, seqlens])
        exact_o = zeros("v")
        for _, b, index, begin, end in shape.chunks:
            E, decay, _, _ = factors(b, begin, end)
            qc, kc, yc = heads(q, b, begin, end), heads(k, b, begin, end), heads(v_new.double(), b, begin, end)
            value = decay[..., None] * (qc @ state(h.double()[b, index])) + (qc @ kc.transpose(-1, -2) * E) @ yc
            put(exact_o, b, begin, shape.multiplier * value)
        yield "o", (error(o, exact_o), tolerance)
        if not backward:
            return

        # Backward
        do = t["do"]
        dv = new("v")
        run("chunk_bwd_dv_local", shape, [t["q"], t["k"], gates, do, dv, seqlens])
        exact_dv = zeros("v")
        for _, b, _, begin, end in shape.chunks:
            E = factors(b, begin, end)[0]
            p = shape.multiplier * (heads(q, b, begin, end) @ heads(k, b, begin, end).transpose(-1, -2)) * E
            put(exact_dv, b, begin, p.transpose(-1, -2) @ heads(do.double(), b, begin, end))
        yield "dv_local", (error(dv, exact_dv), tolerance)
        dh, dh0, dv2 = torch.full_like(h, float("nan")), torch.full_like(ht, float("nan")), new("v")
        run("chunk_gated_delta_rule_bwd_dhu", shape,
            [t["q"], t["k"], w, gates, t["dht"], do, dv, dh, dh0, dv2, seqlens])  # fmt: skip
        exact_dh, exact_dv2 = torch.zeros_like(exact_h), zeros("v")
        D = state(t["dht"].double()).clone()
        for n, b, index, begin, end in reversed(shape.chunks):
            _, decay, to_end, whole = factors(b, begin, end)
            exact_dh[b, index] = state(D[n])
            X = to_end[..., None] * (heads(k, b, begin, end) @ D[n]) + heads(dv.double(), b, begin, end)
            put(exact_dv2, b, begin, X)
            gq = shape.multiplier * decay[..., None] * heads(q, b, begin, end)
            D[n] = (whole[:, None, None] * D[n] + gq.transpose(-1, -2) @ heads(do.double(), b, begin, end)
                    - heads(w.double(), b, begin, end).transpose(-1, -2) @ X)  # fmt: skip
        yield "dh", (error(dh, exact_dh), tolerance)
        yield "dv2", (error(dv2, exact_dv2), tolerance)
        yield "dh0", (error(dh0, state(D)), tolerance)

        dq, dk, dw, dg = new("k"), new("k"), new("wk"), new("hv", torch.float32)
        run("chunk_bwd_dqkwg", shape, [t["q"], t["k"], v_new, w, gates, h, dv2, do, dh, dq, dk, dw,
                                       dg if with_gate else None, seqlens])  # fmt: skip
        exact_dq, exact_dk, exact_dw, exact_dg = zeros("wk"), zeros("wk"), zeros("wk"), zeros("hv")
        for _, b, index, begin, end in shape.chunks:
            E, decay, to_end, whole = factors(b, begin, end)
            qc, kc, y = heads(q, b, begin, end), heads(k, b, begin, end), heads(v_new.double(), b, begin, end)
            Sc, Dc = state(h.double()[b, index]), state(dh.double()[b, index])
            doc, Xc = heads(do.double(), b, begin, end), heads(dv2.double(), b, begin, end)
            dS = shape.multiplier * (doc @ y.transpose(-1, -2)) * E
            dq_c = shape.multiplier * decay[..., None] * (doc @ Sc.transpose(-1, -2)) + dS @ kc
            dk_in = to_end[..., None] * (y @ Dc.transpose(-1, -2))
            dk_c = dk_in + dS.transpose(-1, -2) @ qc
            put(exact_dq, b, begin, dq_c)
            put(exact_dk, b, begin, dk_c)
            put(exact_dw, b, begin, -Xc @ Sc.transpose(-1, -2))
            dg_c = (dq_c * qc).sum(-1) - (dk_c * kc).sum(-1)
            dg_c[:, -1] += whole * (Sc * Dc).sum((-1, -2)) + (dk_in * kc).sum((-1, -2))
            exact_dg[b, begin:end] = dg_c.transpose(0, 1)

        def grouped(z: Tensor) -> Tensor:
            return z.view(B, T, H, group, K).sum(3)

        yield "dq", (error(dq, grouped(exact_dq)), tolerance)
        yield "dk1", (error(dk, grouped(exact_dk)), tolerance)
        yield "dw", (error(dw, exact_dw), tolerance)
        if with_gate:
            yield "dg1", (error(dg, exact_dg), 2 * tolerance)

        dk, dvv, db, dg = new("k"), new("v"), new("hv", torch.float32), new("hv", torch.float32)
        run("prepare_wy_repr_bwd", shape, [t["k"], t["v"], t["beta"], gates, A, dw, dv2, dk, dvv, db,
                                           dg if with_gate else None, seqlens])  # fmt: skip
        exact_dk, exact_dv, exact_db, exact_dg = zeros("wk"), zeros("v"), zeros("hv"), zeros("hv")
        for _, b, _, begin, end in shape.chunks:
            E, decay, _, _ = factors(b, begin, end)
            a = heads(A.double(), b, begin, end)[..., : end - begin]
            kc, vc, bc = heads(k, b, begin, end), heads(v, b, begin, end), heads(beta[..., None], b, begin, end)
            dwc, Xc = heads(dw.double(), b, begin, end), heads(dv2.double(), b, begin, end)
            zw, zu = a.transpose(-1, -2) @ dwc, a.transpose(-1, -2) @ Xc
            dA = (dwc @ (bc * decay[..., None] * kc).transpose(-1, -2) + Xc @ (bc * vc).transpose(-1, -2)).tril(-1)
            dP = -(a.transpose(-1, -2) @ dA @ a.transpose(-1, -2)).tril(-1) * E
            M = bc * (kc @ kc.transpose(-1, -2))
            put(exact_dk, b, begin, bc * decay[..., None] * zw + bc * (dP @ kc) + dP.transpose(-1, -2) @ (bc * kc))
            put(exact_dv, b, begin, bc * zu)
            db_c = decay * (zw * kc).sum(-1) + (zu * vc).sum(-1) + ((dP @ kc) * kc).sum(-1)
            dg_c = (zw * bc * decay[..., None] * kc).sum(-1) + (dP * M).sum(-1) - (dP * M).sum(-2)
            exact_db[b, begin:end] = db_c.transpose(0, 1)
            exact_dg[b, begin:end] = dg_c.transpose(0, 1)
        yield "dk2", (error(dk, grouped(exact_dk)), 2 * tolerance)
        yield "dv", (error(dvv, exact_dv), tolerance)
        yield "db", (error(db, exact_db), 2 * tolerance)
        if with_gate:
            yield "dg2", (error(dg, exact_dg), 2 * tolerance)


# ---- What is run ---------------------------------------------------------------------------------------------------

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def small_checks(run: Runner, backward: bool) -> None:
    """Every dtype, flag, and kind of shape; small enough for the emulator."""
    for dtype in (FP32, BF16, FP16):
        d = NAMES[dtype]
        run.stages(f"stages {d}", Shape(dtype, T=75, H=1, HV=2), backward=backward)
        run.stages(
            f"stages {d} K96 V40", Shape(dtype, B=2, T=67, H=1, HV=1, K=96, V=40, v_first=True), backward=backward
        )
        run.stages(
            f"stages {d} packed resets",
            Shape(dtype, T=140, offsets=[0, 37, 37, 130]),
            resets=(3, 4, 90),
            backward=backward,
        )
        run.operator(f"op {d}", Shape(dtype, T=130, H=1, HV=2), backward=backward)
        run.operator(f"op {d} K128 V128", Shape(dtype, T=70, K=128, V=128), backward=backward)
        run.operator(f"op {d} K256 V40", Shape(dtype, T=70, K=256, V=40), backward=backward)
        run.operator(
            f"op {d} all flags packed",
            Shape(dtype, T=150, H=1, HV=3, K=60, V=100, offsets=[0, 1, 64, 64, 140], l2norm=True, gate=True,
                  sigmoid=True, neg_eigval=True, v_first=True),
            backward=backward, factor=1.5,
        )  # fmt: skip
        run.operator(f"op {d} resets", Shape(dtype, T=100, H=1, HV=2), Options(resets=(37, 38, 64)), backward=backward)
    run.stages("stages bf16 no gate C32", Shape(BF16, T=75, C=32), with_gate=False, backward=backward)
    run.stages("stages fp32 K200", Shape(FP32, T=66, K=200, V=24), backward=backward)
    run.operator("op bf16 C16", Shape(BF16, T=75, C=16), backward=backward)
    run.operator(
        "op bf16 no states", Shape(BF16, T=66), Options(initial_state=False, final_state=False), backward=backward
    )
    run.operator("op bf16 strided", Shape(BF16, B=2, T=66, H=2, HV=2), Options(strided=True), backward=backward)
    run.operator(
        "op bf16 unaligned, expanded do",
        Shape(BF16, T=66, K=24, V=17),
        Options(unaligned=True, expanded_do=True),
        backward=backward,
    )
    run.operator(
        "op bf16 all bf16",
        Shape(BF16, T=66),
        Options(gate_dtype=BF16, beta_dtype=BF16, state_dtype=BF16),
        backward=backward,
    )
    for gate in (-2.0, -20.0, -200.0, -1e4):
        run.operator(f"op fp32 gate {gate:g}", Shape(FP32, T=70), Options(constant_gate=gate), backward=backward)
    run.operator("op fp32 strong gates", Shape(FP32, T=128), Options(gate_scale=100.0), backward=backward)
    run.operator("op bf16 no tokens", Shape(BF16, T=0), backward=backward)
    run.operator("op bf16 one token", Shape(BF16, T=1, H=1, HV=2), backward=backward)


def large_checks(run: Runner) -> None:
    """More shapes, for a GPU."""
    for dtype in (BF16, FP16, FP32):
        d = NAMES[dtype]
        for K, V in ((128, 128), (64, 64), (256, 512), (100, 60), (192, 96), (8, 256)):
            run.operator(f"op {d} {K}x{V}", Shape(dtype, B=2, T=300, H=2, HV=4, K=K, V=V))
        run.operator(f"op {d} many heads", Shape(dtype, B=2, T=130, H=16, HV=64, K=128, V=128))
        run.operator(
            f"op {d} packed", Shape(dtype, T=600, H=2, HV=6, K=128, V=128, offsets=[0, 15, 100, 300, 300, 595])
        )
        run.operator(f"op {d} layer", Shape(dtype, B=1, T=260, H=2, HV=4, K=256, V=512, l2norm=True, gate=True,
                                            sigmoid=True, v_first=True))  # fmt: skip
    many = [16 * i for i in range(301)]
    run.operator("op bf16 300 documents", Shape(BF16, T=many[-1], H=4, HV=4, K=32, V=32, offsets=many))


# Relative L2 errors of FLA 0.6.0 at the shape of `against_baseline`, on an H200.
BASELINE = {"o": 3.97e-3, "ht": 3.71e-3, "dq": 4.31e-3, "dk": 5.71e-3, "dv": 3.64e-3, "dbeta": 4.10e-3, "dg": 4.29e-3,
            "dh0": 2.31e-3}  # fmt: skip


def against_baseline(run: Runner) -> None:
    """Errors at or below the baseline's own, tensor by tensor."""
    shape = Shape(BF16, T=1024, H=2, HV=4, K=128, V=128)
    options = Options(gate_scale=1 / 16)
    t = to_device(make_inputs(shape, options), run.device)
    exact = {key: x.double().requires_grad_(key not in ("do", "dht")) for key, x in t.items()}
    o, ht = recurrence(shape, exact)
    names = ["q", "k", "v", "g", "beta", "h0"]
    gradients = torch.autograd.grad((o * exact["do"]).sum() + (ht * exact["dht"]).sum(), [exact[x] for x in names])
    saved = run.saved(shape)
    actual_o, actual_ht = run.forward(shape, options, t, saved=saved)
    actual = run.backward(shape, options, t, saved)
    assert actual_ht is not None
    errors = {"o": error(actual_o, o), "ht": error(actual_ht, ht)}
    errors |= {f"d{name}": error(actual[name], gradient) for name, gradient in zip(names, gradients, strict=True)}
    run.report("errors at most FLA's", {name: (value, BASELINE[name]) for name, value in errors.items()})


def bits(run: Runner) -> None:
    """The same bits every time, whatever runs beside; replay of a captured graph follows cu_seqlens."""
    shape = Shape(BF16, T=700, H=4, HV=8, K=128, V=128, offsets=[0, 60, 128, 700])
    t = to_device(make_inputs(shape, Options()), run.device)
    saved = run.saved(shape)
    first = run.forward(shape, Options(), t, saved=saved)
    gradients = run.backward(shape, Options(), t, saved)
    bad = 0
    for _ in range(50):
        again = run.forward(shape, Options(), t, saved=saved)
        bad += not all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        repeated = run.backward(shape, Options(), t, saved)
        bad += not all(torch.equal(gradients[key], repeated[key]) for key in gradients)
    run.report("bits: 50 repeats", {"different": (float(bad), 0.0)})

    seqlens = torch.tensor(shape.offsets, dtype=torch.int32, device=run.device)
    o, ht = torch.empty_like(first[0]), torch.empty_like(first[1])
    arguments = [*(t[name] for name in ("q", "k", "v", "g", "beta")), None, None, t["h0"], o, ht, *saved, seqlens]
    plan = run.library.plan(shape)
    call = run.library.prepared("forward", plan, arguments, kind=1)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    other = dataclasses.replace(shape, offsets=[0, 100, 128, 700])
    expected = run.forward(other, Options(), t)
    seqlens.copy_(torch.tensor(other.offsets, dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    same = torch.equal(o, expected[0]) and torch.equal(ht, expected[1])
    run.report("graph: replay follows cu_seqlens", {"different": (0.0 if same else INFINITY, 0.0)})


def guarded(run: Runner, name: str, check: Callable[[Runner], None]) -> None:
    if not run.wanted(name):
        return
    try:
        check(run)
    except Exception as exception:
        run.fail(name, exception)


# ---- Timing --------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], None], repeats: int = 10) -> float:
    """Median over graph replays of one call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


# (heads, K/V, batch x tokens) -> FLA 0.6.0's forward and backward on an H200, ms; 0 where not measured.
TIMED = [
    (16, 32, 128, 128, 1, 32768, 1.953, 6.267),
    (16, 32, 128, 128, 4, 8192, 1.981, 0),
    (16, 32, 128, 128, 8, 4096, 0, 6.311),
    (16, 32, 128, 128, 1, 8192, 0, 1.561),
    (16, 64, 128, 128, 1, 32768, 3.468, 0),
    (2, 8, 128, 128, 1, 8192, 0.242, 0),
    (8, 8, 64, 64, 1, 32768, 0, 0),
    (8, 8, 64, 64, 4, 8192, 0, 0),
    (6, 6, 256, 512, 1, 8192, 0, 0),
    (6, 6, 256, 512, 4, 8192, 0, 0),
    (16, 32, 128, 128, 1, 64, 0, 0),
]


def timings(run: Runner, backward: bool, kernels: bool) -> None:
    for H, HV, K, V, B, T, fla_forward, fla_backward in TIMED:
        shape = Shape(BF16, B=B, T=T, H=H, HV=HV, K=K, V=V)
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*dims: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*dims, device="cuda", generator=generator, dtype=torch.float32)

        q = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).to(BF16)
        k = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).to(BF16)
        v, do = normal(B, T, HV, V).to(BF16), normal(B, T, HV, V).to(BF16)
        g, beta = torch.nn.functional.logsigmoid(normal(B, T, HV)) / 16, torch.rand(B, T, HV, device="cuda")
        h0, dht, ht = normal(B, HV, K, V), normal(B, HV, K, V), normal(B, HV, K, V)
        saved, o = run.saved(shape), torch.empty_like(v)
        plan = run.library.plan(shape)
        forward = run.library.prepared("forward", plan, [q, k, v, g, beta, None, None, h0, o, ht, *saved, None], kind=1)
        line = f"time {H}/{HV} {K}x{V} {B}x{T}: forward {milliseconds(forward):.3f}"
        line += f" (FLA {fla_forward})" if fla_forward else ""
        if backward:
            out = [torch.empty_like(x) for x in (q, k, v, g, beta)]
            arguments = [
                q,
                k,
                v,
                g,
                beta,
                None,
                None,
                h0,
                do,
                dht,
                *saved,
                None,
                *out,
                None,
                None,
                torch.empty_like(h0),
            ]
            call = run.library.prepared("backward", plan, arguments, kind=2)
            line += f", backward {milliseconds(call):.3f}" + (f" (FLA {fla_backward})" if fla_backward else "")
            line += f", workspace {run.library.lib.cula_workspace(plan, 1) / 2**20:.0f}"
            line += f"/{run.library.lib.cula_workspace(plan, 2) / 2**20:.0f} MiB"
            line += f", peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
        start = time.perf_counter()
        for _ in range(200):
            forward()
        host = (time.perf_counter() - start) / 200
        torch.cuda.synchronize()
        print(line + (f", host {host * 1e6:.0f} us a forward call" if T <= 64 else ""), flush=True)
        if kernels:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                forward()
                if backward:
                    call()
                torch.cuda.synchronize()
            for event in profile.key_averages():
                print(f"     {event.device_time_total / 1e3:8.3f} ms {event.key[:100]}", flush=True)
        run.library.lib.cula_free_plan(plan)
        del q, k, v, do, g, beta, h0, dht, ht, saved, o, forward
        if backward:
            del out, arguments, call
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def isolated(arguments: argparse.Namespace) -> int:
    """A fault or a hang costs the group it happens in and no other."""
    command = [sys.executable, __file__, "--library", arguments.library]
    checks = ["stages bf16", "stages fp16", "stages fp32", "op bf16", "op fp16", "op fp32", "errors at most", "bits"]
    groups = [[*command, "--no-timing", "--only", name] for name in checks]
    if not arguments.no_timing:
        groups.append([*command, "--no-checks", *(["--kernels"] if arguments.kernels else [])])
    bad = 0
    for group in groups:
        try:
            status = subprocess.run(group, timeout=100).returncode
        except subprocess.TimeoutExpired:
            status = -1
        if status != 0:
            bad += 1
            print(f"FAIL group {group[3:]}: {'timed out' if status == -1 else f'status {status}'}", flush=True)
    print(f"{len(groups) - bad} of {len(groups)} groups passed", flush=True)
    return int(bad != 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--no-timing", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="time by kernel")
    parser.add_argument("--small", action="store_true", help="the small checks alone")
    parser.add_argument("--isolated", action="store_true", help="groups of checks in processes of their own")
    arguments = parser.parse_args()
    if arguments.isolated:
        return isolated(arguments)
    library = Library(arguments.library, "cpu" if arguments.emulated else "cuda")
    run = Runner(library, arguments.only, verbose=True)
    start = time.time()
    backward = not arguments.forward_only
    if not arguments.no_checks:
        small_checks(run, backward)
        if backward and not arguments.emulated and not arguments.small:
            large_checks(run)
            guarded(run, "errors at most FLA's", against_baseline)
            guarded(run, "bits", bits)
    print(f"{run.count - len(run.failures)} of {run.count} checks passed in {time.time() - start:.0f} s", flush=True)
    for failure in run.failures:
        print("failed:", failure, flush=True)
    if not arguments.emulated and not arguments.no_timing:
        timings(run, backward, arguments.kernels)
    return 1 if run.failures or (run.count == 0 and not arguments.no_checks) else 0


if __name__ == "__main__":
    sys.exit(main())
