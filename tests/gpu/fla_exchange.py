"""Exchanges the stages of the operator with those of flash-linear-attention (FLA), on a GPU.

    python fla_exchange.py [--backend cuda] [--dtype bfloat16] [--only STAGE]
    TRITON_INTERPRET=1 python fla_exchange.py --device cpu --backend cpu --dtype float16

FLA runs forward and backward once, and every stage that it calls is recorded: what goes in and what comes out. Then
  - each stage of ours gets what FLA's got, and its results must be FLA's;
  - FLA runs forward and backward again with that one stage replaced by ours, and the whole results must stay.
Both within FLA's own tolerances. Prints one line a comparison; ends with a status other than 0 if any failed.

Without a GPU, Triton's interpreter runs FLA's kernels, in minutes; its products of bfloat16 are wrong.

Needs flash-linear-attention 0.6.0 and the installed package (or CULA_GDN_LIBRARY); on Hopper with Triton 3.4 to 3.7.0
also tilelang, without which FLA refuses its own gradient of q, k, w and g.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("FLA_FLASH_QLA", "0")  # FLA's own kernels, not the whole operator of another package

import torch
import torch.nn.functional as F

from cula.gdn import stages

Tensor = torch.Tensor
Results = dict[str, Tensor]
Function = Callable[..., Any]

# Name in fla.ops.gated_delta_rule.chunk -> (ours, names of the results, limit of their error). Limits as in FLA's
# tests of single stages and of the gate.
STAGES: dict[str, tuple[Function, tuple[str, ...], float]] = {
    "l2norm_fwd": (stages.l2norm_fwd, ("y", "rstd"), 0.005),
    "fused_beta_sigmoid": (stages.fused_beta_sigmoid_fwd, ("beta",), 1e-4),
    "chunk_local_cumsum": (stages.chunk_local_cumsum, ("g",), 1e-4),
    "gdn_gate_chunk_cumsum": (stages.gdn_gate_chunk_cumsum, ("g",), 1e-4),
    "chunk_gated_delta_rule_fwd_intra": (stages.chunk_gated_delta_rule_fwd_intra, ("w", "u", "A"), 0.005),
    "recompute_w_u_fwd": (stages.recompute_w_u_fwd, ("w", "u"), 0.005),
    "chunk_gated_delta_rule_fwd_h": (stages.chunk_gated_delta_rule_fwd_h, ("h", "v_new", "final_state"), 0.005),
    "chunk_fwd_o": (stages.chunk_fwd_o, ("o",), 0.005),
    "chunk_bwd_dv_local": (stages.chunk_bwd_dv_local, ("dv",), 0.005),
    "chunk_gated_delta_rule_bwd_dhu": (stages.chunk_gated_delta_rule_bwd_dhu, ("dh", "dh0", "dv2"), 0.006),
    "chunk_bwd_dqkwg": (stages.chunk_bwd_dqkwg, ("dq", "dk", "dw", "dg"), 0.006),
    "prepare_wy_repr_bwd": (stages.prepare_wy_repr_bwd, ("dk", "dv", "db", "dg"), 0.006),
    "gdn_gate_bwd": (stages.gdn_gate_bwd, ("dg", "dA_log", "ddt_bias"), 1e-4),
    "l2norm_bwd": (stages.l2norm_bwd, ("dx",), 0.005),
    "fused_beta_sigmoid_bwd": (stages.fused_beta_sigmoid_bwd, ("dx",), 0.005),
}

# What the Hopper backend has kernels of its own for; it refuses the gates' types and sizes.
HOPPER = (
    "chunk_gated_delta_rule_fwd_intra", "recompute_w_u_fwd", "chunk_gated_delta_rule_fwd_h", "chunk_fwd_o",
    "chunk_bwd_dv_local", "chunk_gated_delta_rule_bwd_dhu", "chunk_bwd_dqkwg", "prepare_wy_repr_bwd",
)  # fmt: skip

# Of a whole run, by FLA's tests of the operator.
WHOLE = {"o": 0.005, "final_state": 0.005, "db": 0.02, "dg": 0.02, "dA_log": 0.02, "ddt_bias": 0.02}
WHOLE_OTHERS = 0.008

FLAGS = {
    "plain": {},
    "flags": {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    },
}  # fmt: skip


def one_configuration() -> None:
    """Lets Triton compile one configuration of each of FLA's kernels rather than time them all.

    Which one does not matter for what is computed; timing takes minutes.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    @functools.wraps(original)
    def initialize(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        usual = [config for config in configs if config.num_warps == 4 and config.num_stages in (2, 3)]
        original(self, fn, arg_names, (usual or configs)[:1], *args, **kwargs)

    Autotuner.__init__ = initialize


class Index(int):
    """A loop's index as FLA's kernels use it; Triton's interpreter gives plain numbers."""

    def to(self, dtype: Any) -> int:
        return int(self)


def interpreted() -> None:
    from fla.ops.common import chunk_delta_h

    chunk_delta_h.range = lambda *bounds: map(Index, range(*map(int, bounds)))


def make_inputs(dtype: torch.dtype, flags: dict[str, Any], lengths: list[int] | None, device: str) -> dict[str, Any]:
    H, HV, K, V = 2, 4, 64, 64
    B, T = (2, 150) if lengths is None else (1, sum(lengths))
    N = B if lengths is None else len(lengths)
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    inputs: dict[str, Any] = {
        "q": F.normalize(normal(B, T, H, K), dim=-1).to(dtype),
        "k": F.normalize(normal(B, T, H, K), dim=-1).to(dtype),
        "v": normal(B, T, HV, V).to(dtype),
        "g": F.logsigmoid(normal(B, T, HV)),
        "beta": normal(B, T, HV).sigmoid(),
        "initial_state": normal(N, HV, K, V),
        "do": normal(B, T, HV, V).to(dtype),
        "dht": normal(N, HV, K, V),
    }
    if flags:
        inputs |= {"g": normal(B, T, HV), "beta": normal(B, T, HV), "A_log": normal(HV), "dt_bias": normal(HV)}
    inputs = {name: x.to(device) for name, x in inputs.items()}
    if lengths is not None:
        inputs["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0)
    return inputs


def run_whole(function: Function, inputs: dict[str, Any], flags: dict[str, Any]) -> Results:
    """Outputs and gradients by name."""
    do, dht = inputs["do"], inputs["dht"]
    arguments = {name: x.detach() for name, x in inputs.items() if name not in ("do", "dht")}
    leaves = [name for name, x in arguments.items() if x.is_floating_point()]
    for name in leaves:
        arguments[name].requires_grad_()
    o, final_state = function(**arguments, **flags, output_final_state=True)
    gradients = torch.autograd.grad([o, final_state], [arguments[name] for name in leaves], [do, dht])
    short = {"beta": "db", "initial_state": "dh0"}
    results = {short.get(name, f"d{name}"): x for name, x in zip(leaves, gradients, strict=True)}
    return {"o": o.detach(), "final_state": final_state.detach()} | results


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(copied(x) for x in value)
    return value


class Recorder:
    """Stands in for FLA's stages and keeps the arguments and results of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = []

    def of(self, name: str, function: Function) -> Function:
        signature = inspect.signature(inspect.unwrap(function))

        def record(*args: Any, **kwargs: Any) -> Any:
            arguments = {key: copied(x) for key, x in signature.bind(*args, **kwargs).arguments.items()}
            results = function(*args, **kwargs)
            self.calls.append((name, arguments, copied(results if isinstance(results, tuple) else (results,))))
            return results

        return record


@contextlib.contextmanager
def replaced(module: Any, functions: dict[str, Function]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """FLA's own measure: the root mean square of the difference over that of the reference; 0 within 1e-6 anywhere."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    difference = ours.double() - theirs.double()
    if not bool(torch.isfinite(difference).all()):
        return float("inf")
    if difference.abs().max().item() <= 1e-6:
        return 0.0
    return (difference.square().mean().sqrt() / (theirs.double().square().mean().sqrt() + 1e-8)).item()


class Report:
    def __init__(self) -> None:
        self.failures: list[str] = []
        self.count = 0

    def __call__(self, name: str, errors: dict[str, tuple[float, float]]) -> None:
        self.count += 1
        bad = [what for what, (value, limit) in errors.items() if not value < limit]
        if bad or not errors:
            self.failures.append(name)
        text = " ".join(f"{what}={value:.1e}{'!' if what in bad else ''}" for what, (value, _) in errors.items())
        print(f"{'FAIL' if bad or not errors else 'ok  '} {name:<58} {text}", flush=True)

    def attempt(self, name: str, compare: Callable[..., dict[str, tuple[float, float]]], *arguments: Any) -> None:
        try:
            self(name, compare(*arguments))
        except Exception as exception:
            print(f"     {type(exception).__name__}: {exception}"[:300])
            self(name, {})


def compare_stage(
    stage: tuple[Function, tuple[str, ...], float], backend: str, arguments: dict[str, Any], expected: tuple[Any, ...]
) -> dict[str, tuple[float, float]]:
    ours, names, limit = stage
    results = ours(**arguments, backend=backend)
    results = results if isinstance(results, tuple) else (results,)
    errors = {}
    for name, x, reference in zip(names, results, expected, strict=True):
        if (x is None) != (reference is None):
            errors[name] = float("inf"), limit
        elif x is not None:
            errors[name] = distance(x, reference), limit
    return errors


def compare_whole(
    function: Function, inputs: dict[str, Any], flags: dict[str, Any], expected: Results
) -> dict[str, tuple[float, float]]:
    results = run_whole(function, inputs, flags)
    return {name: (distance(x, expected[name]), WHOLE.get(name, WHOLE_OTHERS)) for name, x in results.items()}


def wanted(name: str, only: str, backend: str) -> bool:
    return only in name and (backend != "sm90" or name in HOPPER)


def exchange(
    report: Report, title: str, inputs: dict[str, Any], flags: dict[str, Any], only: str, backend: str
) -> None:
    from fla.ops.gated_delta_rule import chunk

    recorder = Recorder()
    with replaced(chunk, {name: recorder.of(name, getattr(chunk, name)) for name in STAGES}):
        start = time.monotonic()
        expected = run_whole(chunk.chunk_gated_delta_rule, inputs, flags)
        print(f"{title}: FLA's forward and backward in {time.monotonic() - start:.0f} s, compiled", flush=True)
    for name, arguments, results in recorder.calls:
        if wanted(name, only, backend):
            report.attempt(f"{title} {name}", compare_stage, STAGES[name], backend, arguments, results)
    for name in dict.fromkeys(name for name, *_ in recorder.calls):
        if wanted(name, only, backend):
            title_of_run = f"{title} whole with our {name}"
            with replaced(chunk, {name: functools.partial(STAGES[name][0], backend=backend)}):
                report.attempt(title_of_run, compare_whole, chunk.chunk_gated_delta_rule, inputs, flags, expected)
    triangular(report, title, recorder, only, backend)


def triangular(report: Report, title: str, recorder: Recorder, only: str, backend: str) -> None:
    """The two stages that FLA runs for chunks of 16 and 32 alone, and the gate by itself."""
    from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
    from fla.ops.gated_delta_rule.gate import gdn_gate_fwd
    from fla.ops.utils.solve_tril import solve_tril

    for name, arguments, _ in recorder.calls:
        if name == "chunk_gated_delta_rule_fwd_intra":
            kkt = {key: arguments[key] for key in ("k", "g", "beta", "cu_seqlens", "chunk_indices")}
            L = chunk_scaled_dot_kkt_fwd(**kkt, chunk_size=64)
            tril = {"A": L, "cu_seqlens": kkt["cu_seqlens"], "chunk_indices": kkt["chunk_indices"]}
            parts = [
                ("chunk_scaled_dot_kkt_fwd", stages.chunk_scaled_dot_kkt_fwd, kkt | {"chunk_size": 64}, L),
                ("solve_tril", stages.solve_tril, tril, solve_tril(**tril)),
            ]
        elif name == "gdn_gate_chunk_cumsum":
            gate = {key: arguments[key] for key in ("g", "A_log", "dt_bias")}
            parts = [("gdn_gate_fwd", stages.gdn_gate_fwd, gate, gdn_gate_fwd(**gate))]
        else:
            continue
        for part, ours, given, expected in parts:
            if wanted(part, only, backend):
                report.attempt(f"{title} {part}", compare_stage, (ours, ("out",), 0.005), backend, given, (expected,))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", help="of our stages: cuda, sm90 (its own alone) or auto")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--only", default="", help="stages whose name contains this")
    parser.add_argument(
        "--kinds", nargs="+", choices=tuple(FLAGS), default=list(FLAGS), help="runs, with and without flags"
    )
    parser.add_argument("--dense", action="store_true", help="a batch of equal lengths too (FLA compiles again)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.device == "cpu" and (os.environ.get("TRITON_INTERPRET") != "1" or arguments.dtype == "bfloat16"):
        parser.error("--device cpu: needs TRITON_INTERPRET=1 and --dtype float16")
    if arguments.device == "cuda":
        one_configuration()
    else:
        interpreted()
    report = Report()
    shapes = {"packed": [17, 0, 64, 70] if arguments.device == "cpu" else [0, 17, 64, 130, 0, 89]} | (
        {"dense": None} if arguments.dense else {}
    )
    for shape, lengths in shapes.items():
        for kind in arguments.kinds:
            flags = FLAGS[kind]
            inputs = make_inputs(getattr(torch, arguments.dtype), flags, lengths, arguments.device)
            title = f"{arguments.dtype} {shape} {kind}"
            exchange(report, title, inputs, flags, arguments.only, arguments.backend)
    print(f"{report.count - len(report.failures)} of {report.count} comparisons within FLA's tolerances")
    for failure in report.failures:
        print("failed:", failure)
    return int(bool(report.failures) or report.count == 0)


if __name__ == "__main__":
    sys.exit(main())
