"""Runs checks of the operator and of its stages, and keeps count."""

from __future__ import annotations

import sys

import torch

from harness.library import Library, Shape
from harness.reference import INFINITY, TOLERANCE, Options, error, make_inputs, recurrence, to_device
from harness.stages import stage_errors

Tensor = torch.Tensor


class Runner:
    def __init__(self, library: Library, only: str) -> None:
        self.library = library
        self.device = library.device
        self.reference_device = library.device
        self.only = only
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
        x = torch.empty(dims, dtype=dtype, device=self.device)
        return x.fill_(float("nan")) if self.library.filled else x

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(*x.shape, dtype=x.dtype)

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

    def forward_arguments(
        self, shape: Shape, options: Options, t: dict[str, Tensor], saved: list[Tensor | None] | None
    ) -> tuple[list[Tensor | None], Tensor, Tensor | None]:
        """What entry.cpp takes, and the two outputs among it."""
        o = self.empty(shape.B, shape.T, shape.HV, shape.V, dtype=shape.dtype)
        ht = self.empty(*shape.state(shape.N, shape.HV), dtype=torch.float32) if options.final_state else None
        arguments = [t.get(name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")]
        return [*arguments, o, ht, *(saved or [None] * 5), self.cu_seqlens(shape, wide=saved is None)], o, ht

    def forward(self, shape: Shape, options: Options, t: dict[str, Tensor], name: str = "forward",
                saved: list[Tensor | None] | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        arguments, o, ht = self.forward_arguments(shape, options, t, saved)
        kind = None if name == "recurrent_forward" else int(saved is not None)
        self.library.run(name, shape, arguments, kind=kind)
        return o, ht

    def backward_arguments(
        self, shape: Shape, t: dict[str, Tensor], saved: list[Tensor | None], wanted: tuple[str, ...] | None = None
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """What entry.cpp takes, and the gradients among it by input; those in `wanted` alone, if it is given."""
        order = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")
        out = {name: self.empty_like(t[name]) for name in order if name in t and (wanted is None or name in wanted)}
        inputs = [None if shape.l2norm and name in ("q", "k") else t.get(name) for name in order]
        inputs += [t.get("do"), t.get("dht"), *saved, self.cu_seqlens(shape)]
        return [*inputs, *(out.get(name) for name in order)], out

    def backward(self, shape: Shape, options: Options, t: dict[str, Tensor], saved: list[Tensor | None],
                 wanted: tuple[str, ...] | None = None) -> dict[str, Tensor]:  # fmt: skip
        arguments, out = self.backward_arguments(shape, t, saved, wanted)
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
            exact = {
                key: x.to(self.reference_device).double().requires_grad_(key not in ("do", "dht"))
                for key, x in t.items()
            }
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

    def unwanted(self, name: str, shape: Shape) -> None:
        """Each gradient alone: as it is together with the others, whichever of them are not wanted."""
        if not self.wanted(name):
            return
        options = Options()
        t = to_device(make_inputs(shape, options), self.device)
        try:
            saved = self.saved(shape)
            self.forward(shape, options, t, saved=saved)
            together = self.backward(shape, options, t, saved)
            errors = {}
            for key, gradient in together.items():
                alone = self.backward(shape, options, t, saved, (key,))[key]
                errors[f"d{key}"] = (0.0 if torch.equal(alone, gradient) else INFINITY), 0.0
            self.report(name, errors)
        except Exception as exception:
            self.fail(name, exception)

    # -- the stages

    def stages(self, name: str, shape: Shape, with_gate: bool = True, backward: bool = True,
               resets: tuple[int, ...] = (), options: Options | None = None) -> None:  # fmt: skip
        if not self.wanted(name):
            return
        options = options or Options(resets=resets)
        try:
            self.report(name, dict(stage_errors(self, shape, with_gate, backward, options)))
        except Exception as exception:
            self.fail(name, exception)
