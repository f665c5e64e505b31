"""`cula-gdn check`: the operator on this machine against the float64 token recurrence, row by row."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from cula.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, reference_gated_delta_rule
from cula.gdn.cli.terminal import make_console
from cula.gdn.cli.workload import (
    DTYPES,
    Shape,
    backend_error,
    device_option,
    dtype_name,
    make_inputs,
    relative_error,
)

# Relative L2 error of outputs and states; gradients may have twice as much.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 3e-3, "bfloat16": 1e-2}

L2NORM = {"use_qk_l2norm_in_kernel": True}
GATE = {"use_gate_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
NEGATIVE = {**SIGMOID, "allow_neg_eigval": True}
V_FIRST = {"state_v_first": True}


DEFAULT_SHAPE = Shape(2, 130, 2, 4, 64, 64)


@dataclass(frozen=True)
class Case:
    title: str
    shape: Shape = DEFAULT_SHAPE
    flags: dict[str, bool] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None  # packed sequences
    states: bool = True  # initial state given, final state wanted
    gate: str = "ordinary"  # or "strong", "reset"
    options: dict[str, Any] = field(default_factory=dict)
    decode: bool = False
    strided: bool = False
    quick: bool = False  # part of the quick table


def cases() -> list[Case]:
    packed = Shape(1, 200, 2, 4, 64, 64)
    lengths = [
        Case(f"length {tokens}", Shape(1, tokens, 1, 2, 64, 64), quick=tokens in (0, 65))
        for tokens in (0, 1, 63, 64, 65)
    ]
    return [
        Case("plain", states=False, quick=True),
        Case("initial and final state"),
        Case("l2norm in kernel", flags=L2NORM),
        Case("gate in kernel", flags=GATE),
        Case("beta sigmoid in kernel", flags=SIGMOID),
        Case("negative eigenvalues", flags=NEGATIVE),
        Case("state [V, K]", flags=V_FIRST),
        Case("all flags", flags=L2NORM | GATE | NEGATIVE | V_FIRST, quick=True),
        *lengths,
        Case("packed, two empty", packed, lengths=(0, 37, 64, 0, 91), quick=True),
        Case("packed, padding at the end", packed, lengths=(130, 30)),
        Case("packed, all flags", packed, lengths=(65, 135), flags=L2NORM | GATE | NEGATIVE | V_FIRST),
        Case("3 value heads a key head", Shape(1, 100, 2, 6, 32, 64)),
        Case("K=60, V=100", Shape(1, 75, 2, 2, 60, 100)),
        Case("K=256, V=512", Shape(1, 70, 1, 1, 256, 512)),
        Case("chunks of 16", options={"chunk_size": 16}),
        Case("chunks of 32", options={"chunk_size": 32}),
        Case("strong decay", gate="strong", quick=True),
        Case("hard reset (gate -inf)", gate="reset"),
        Case("strided inputs", strided=True),
        Case("recurrent decode step", Shape(2, 5, 2, 4, 64, 64), decode=True, quick=True),
    ]


def build_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Differentiable inputs by name, and the other arguments."""
    s = case.shape
    generator = torch.Generator().manual_seed(7)
    inputs = make_inputs(s, dtype, torch.device("cpu"))
    statistics = inputs["g"].dtype

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=statistics)

    if case.flags.get("use_qk_l2norm_in_kernel"):
        inputs["q"], inputs["k"] = 3 * inputs["q"], 3 * inputs["k"]
    if case.flags.get("use_gate_in_kernel"):
        inputs["g"] = normal(s.batch, s.tokens, s.value_heads)
        inputs["A_log"], inputs["dt_bias"] = 0.5 * normal(s.value_heads), normal(s.value_heads)
    if case.flags.get("use_beta_sigmoid_in_kernel"):
        inputs["beta"] = normal(s.batch, s.tokens, s.value_heads)
    if case.gate == "strong":
        inputs["g"] = 8 * inputs["g"] - 5
    if case.gate == "reset":
        inputs["g"][:, s.tokens // 3, 0] = -torch.inf
    if case.states:
        sequences = s.batch if case.lengths is None else len(case.lengths)
        v_first = case.flags.get("state_v_first", False)
        state = (s.value_dim, s.key_dim) if v_first else (s.key_dim, s.value_dim)
        inputs["initial_state"] = normal(sequences, s.value_heads, *state)
    if case.strided:
        inputs = {name: spread(tensor) for name, tensor in inputs.items()}

    others: dict[str, Any] = {"output_final_state": case.states, **case.flags}
    if case.lengths is not None:
        others["cu_seqlens"] = torch.tensor([0, *case.lengths]).cumsum(0).to(device)
    return {name: tensor.to(device) for name, tensor in inputs.items()}, others


def spread(tensor: Tensor) -> Tensor:
    """The same values in every second element of a larger buffer."""
    buffer = tensor.new_full((*tensor.shape, 2), torch.nan)
    buffer[..., 0] = tensor
    return buffer[..., 0]


def run_operator(
    operator: Any, inputs: dict[str, Tensor], others: dict[str, Any], backward: bool, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs, and with `backward` the gradients of every input for fixed gradients of the outputs.

    Those are rounded to `dtype`, so that a run in float64 gets the same ones.
    """
    leaves = {name: tensor.detach().requires_grad_(backward) for name, tensor in inputs.items()}
    o, final_state = operator(**leaves, **others)
    outputs = {"o": o} if final_state is None else {"o": o, "final_state": final_state}
    results = {name: tensor.detach() for name, tensor in outputs.items()}
    if backward:
        generator = torch.Generator().manual_seed(11)
        weights = [torch.randn(t.shape, generator=generator).to(dtype).to(t) for t in outputs.values()]
        gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), weights)
        results.update({"d" + name: gradient for name, gradient in zip(leaves, gradients, strict=True)})
    return results


@dataclass(frozen=True)
class Outcome:
    title: str
    dtype: str
    output_error: float
    gradient_error: float | None
    worst: str  # the tensor nearest to its limit, or furthest beyond it
    tolerance: float
    passed: bool
    message: str = ""


def check_case(case: Case, dtype: torch.dtype, device: torch.device, backend: str | None) -> Outcome:
    tolerance = TOLERANCES[dtype_name(dtype)]
    try:
        inputs, others = build_inputs(case, dtype, device)
        operator = fused_recurrent_gated_delta_rule if case.decode else chunk_gated_delta_rule
        own_options = {**others, **case.options, "backend": backend}
        ours = run_operator(operator, inputs, own_options, not case.decode, dtype)
        widened = {name: tensor.double() for name, tensor in inputs.items()}
        exact = run_operator(reference_gated_delta_rule, widened, others, not case.decode, dtype)
    except Exception as error:  # a row that can not run is a failed row, and the others still say something
        return Outcome(case.title, dtype_name(dtype), float("nan"), None, "", tolerance, False, f"{error!r}")
    errors = {name: relative_error(ours[name], exact[name]) for name in exact}
    limits = {name: tolerance if name in ("o", "final_state") else 2 * tolerance for name in errors}
    worst = max(errors, key=lambda name: errors[name] / limits[name] if errors[name] == errors[name] else float("inf"))
    gradients = [errors[name] for name in errors if name not in ("o", "final_state")]
    return Outcome(
        title=case.title,
        dtype=dtype_name(dtype),
        output_error=max(errors[name] for name in ("o", "final_state") if name in errors),
        gradient_error=max(gradients) if gradients else None,
        worst=worst,
        tolerance=tolerance,
        # not (a > b) would accept NaN
        passed=all(errors[name] <= limits[name] for name in errors),
    )


def outcomes(dtypes: list[torch.dtype], device: torch.device, backend: str | None, quick: bool) -> Iterator[Outcome]:
    table = [(case, dtype) for dtype in dtypes for case in cases() if case.quick or not quick]
    for case, dtype in tqdm(table, desc="checking", unit="row", leave=False):
        yield check_case(case, dtype, device, backend)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check",
        help="compare the operator on this machine with the float64 recurrence",
        description="Compares outputs, states and all gradients with the float64 token recurrence on the same inputs. "
        "Exit status 1 if any row fails.",
    )
    parser.add_argument("--device", type=device_option, default="auto", help="auto, cpu or cuda[:N] (default: auto)")
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=tuple(DTYPES), nargs="+", help="default: all four")
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if message := backend_error(options.backend, options.device):
        print(f"cula-gdn check: error: {message}", file=sys.stderr)
        return 2
    names = options.dtype or list(DTYPES)
    backend = None if options.backend == "auto" else options.backend
    rows = list(outcomes([DTYPES[name] for name in names], options.device, backend, options.quick))
    failed = sum(not row.passed for row in rows)
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=2))
        return 1 if failed else 0
    console = make_console()
    table = Table(title=f"cula-gdn check on {options.device}: relative L2 error against float64", title_justify="left")
    for heading in ("case", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("outputs", "gradients"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("nearest", ""):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        gradient = "-" if row.gradient_error is None else f"{row.gradient_error:.1e}"
        verdict = "[green]pass[/green]" if row.passed else "[bold red]FAIL[/bold red]"
        table.add_row(row.title, row.dtype, f"{row.output_error:.1e}", gradient, row.worst, verdict)
    console.print(table)
    limits = ", ".join(f"{name} {TOLERANCES[name]:.0e}" for name in names)
    console.print(f"limits: {limits}; gradients twice that")
    for row in rows:
        if row.message:
            console.print(f"{row.title} ({row.dtype}): {row.message}", markup=False, highlight=False)
    console.print(f"{len(rows) - failed} passed, {failed} failed", highlight=False)
    return 1 if failed else 0
