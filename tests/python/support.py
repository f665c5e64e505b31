"""What the tests share: random inputs as CASES has them, runs with gradients, the float64 oracle, tolerances."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cula.gdn import _native, chunk_gated_delta_rule, library_info, plan, reference_gated_delta_rule, stages


def _backends() -> list[str]:
    if not torch.cuda.is_available() or "cuda" not in library_info().backends:
        return ["cpu"]
    chosen = plan(1, 64, 1, 1, 128, 128, dtype=torch.bfloat16, device="cuda").backend
    return ["cpu", "cuda"] if chosen == "cuda" else ["cpu", "cuda", chosen]


# What this build has and this machine can run.
BACKENDS = _backends()


def backend_instead_of_auto(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the library that would let it choose a backend name this one."""

    def naming(function: Any) -> Any:
        # The backend is the last argument but one of every function (see _native).
        return lambda *arguments: function(*arguments[:-2], name if arguments[-2] == "auto" else arguments[-2],
                                           arguments[-1])  # fmt: skip

    for entry in ("forward", "backward", "recurrent_forward"):
        monkeypatch.setattr(_native, entry, naming(getattr(_native, entry)))
    for stage in vars(stages).values():
        if isinstance(stage, stages._Stage):
            monkeypatch.setattr(stage, "run", naming(stage.run))


# Relative L2 error of outputs and states against float64; gradients may have twice as much, and those of the gate's
# parameters, sums over all tokens that partly cancel, 2.5 times that (the ratio of FLA's own tolerances).
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}

# Of 16 bits and more; float64 has tests of its own.
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

_FACTORS = {"o": 1, "final_state": 1, "dA_log": 5, "ddt_bias": 5}

L2NORM = {"use_qk_l2norm_in_kernel": True}
GATE = {"use_gate_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
NEGATIVE = {**SIGMOID, "allow_neg_eigval": True}
V_FIRST = {"state_v_first": True}
ALL_FLAGS = {**L2NORM, **GATE, **NEGATIVE, **V_FIRST}
FLAGS = {"l2norm": L2NORM, "gate": GATE, "sigmoid": SIGMOID, "negative": NEGATIVE, "v_first": V_FIRST}
FLAG_PAIRS = {"+".join(names): {**FLAGS[names[0]], **FLAGS[names[1]]} for names in itertools.combinations(FLAGS, 2)}

Tensors = dict[str, Tensor]

# Only the library's own speed and schedule depend on these.
_NOT_FOR_REFERENCE = ("chunk_size", "backend", "batch_invariant", "cu_seqlens_cpu", "chunk_indices")


def offsets(lengths: list[int] | tuple[int, ...], dtype: torch.dtype = torch.int64, device: str = "cpu") -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def unit(*shape: int, generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1)


def heads_of(tensors: Tensors, heads: slice, sequences: slice = slice(None)) -> Tensors:
    """Inputs or results of some value heads alone (of as many key heads)."""
    tokens = ("q", "k", "v", "g", "beta", "o", "dq", "dk", "dv", "dg", "dbeta")
    states = ("initial_state", "final_state", "dinitial_state")
    parameters = ("A_log", "dt_bias", "dA_log", "ddt_bias")
    return {
        n: x[:, :, heads] if n in tokens else x[sequences, heads] if n in states else x[heads] if n in parameters else x
        for n, x in tensors.items()
    }


def make_inputs(
    B: int = 1,
    T: int = 130,
    H: int = 2,
    HV: int | None = None,
    K: int = 64,
    V: int = 64,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    lengths: list[int] | None = None,
    state: bool = True,
    flags: dict[str, Any] | None = None,
    **replace: Tensor | None,
) -> Tensors:
    """Inputs by name. With `flags`, g is raw and beta a logit as they ask; `replace` overrides tensors (None: absent).

    With lengths, the sequences are packed and T is at least their sum.
    """
    flags = flags or {}
    HV = HV or H
    N = B
    if lengths is not None:
        N, T = len(lengths), max(T if T != 130 else 0, sum(lengths))
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    inputs: dict[str, Tensor | None] = {
        "q": unit(B, T, H, K, generator=random).to(dtype),
        "k": unit(B, T, H, K, generator=random).to(dtype),
        "v": normal(B, T, HV, V).to(dtype),
        "g": F.logsigmoid(normal(B, T, HV)),
        "beta": torch.rand(B, T, HV, generator=random),
    }
    if flags.get("use_qk_l2norm_in_kernel"):
        inputs |= {"q": normal(B, T, H, K).to(dtype), "k": normal(B, T, H, K).to(dtype)}
    if flags.get("use_beta_sigmoid_in_kernel"):
        inputs["beta"] = normal(B, T, HV)
    if flags.get("use_gate_in_kernel"):
        inputs |= {
            "g": normal(B, T, HV),
            "A_log": torch.rand(HV, generator=random).mul(4).log(),
            "dt_bias": normal(HV),
        }
    if state:
        inputs["initial_state"] = normal(N, HV, *((V, K) if flags.get("state_v_first") else (K, V)))
    if dtype == torch.float64:
        inputs = {name: None if x is None else x.double() for name, x in inputs.items()}
    inputs |= replace
    present = {name: x.to(device) for name, x in inputs.items() if x is not None}
    if lengths is not None:
        present["cu_seqlens"] = offsets(lengths, device=device)
    return present


def output_gradients(inputs: Tensors, options: dict[str, Any], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random do and dht, the former in the dtype of q."""
    random = torch.Generator().manual_seed(seed)
    q, v = inputs["q"], inputs["v"]
    N = inputs["cu_seqlens"].numel() - 1 if "cu_seqlens" in inputs else q.shape[0]
    inner = (v.shape[3], q.shape[3]) if options.get("state_v_first") else (q.shape[3], v.shape[3])
    do = torch.randn(v.shape, generator=random).to(v)
    dht = torch.randn(N, v.shape[2], *inner, generator=random).to(q.device)
    return do, dht.double() if q.dtype == torch.float64 else dht


def run(
    inputs: Tensors,
    function: Any = chunk_gated_delta_rule,
    *,
    gradients: tuple[Tensor | None, Tensor | None] | None = None,
    **options: Any,
) -> Tensors:
    """o, final_state and, given the gradients of these two, the gradient `d<name>` of every differentiable input.

    `inputs` are left as they are (each a leaf of its own here, strides and all).
    """
    options.setdefault("output_final_state", True)
    leaves = {name: x.detach() for name, x in inputs.items()}
    wanted = [name for name, x in leaves.items() if x.is_floating_point()] if gradients is not None else []
    for name in wanted:
        leaves[name].requires_grad_()
    with torch.set_grad_enabled(gradients is not None):
        o, final_state = function(**{"g": None, **leaves}, **options)
    results = {"o": o.detach()}
    if final_state is not None:
        results["final_state"] = final_state.detach()
    if gradients is not None:
        pairs = [
            (x, d.to(x.dtype))
            for x, d in zip((o, final_state), gradients, strict=True)
            if x is not None and d is not None and x.requires_grad
        ]
        found = torch.autograd.grad(
            [x for x, _ in pairs],
            [leaves[name] for name in wanted],
            [d for _, d in pairs],
            materialize_grads=True,
        )
        results |= {f"d{name}": d for name, d in zip(wanted, found, strict=True)}
    return results


def oracle(
    inputs: Tensors, *, gradients: Any = None, function: Any = reference_gated_delta_rule, **options: Any
) -> Tensors:
    """The same as `run`, in float64 from the values of the inputs as they are."""
    exact = {name: x.detach().double() if x.is_floating_point() else x for name, x in inputs.items()}
    for name in _NOT_FOR_REFERENCE:
        options.pop(name, None)
        exact.pop(name, None)
    return run(exact, function, gradients=gradients, **options)


def relative_error(x: Tensor, expected: Tensor) -> float:
    """L2 norm of the difference over that of the expected value; 0 for tensors without elements."""
    x, expected = x.double().cpu(), expected.double().cpu()
    assert x.shape == expected.shape
    difference, norm = (x - expected).norm().item(), expected.norm().item()
    return difference / norm if norm > 0 else difference


def assert_accurate(
    results: Tensors, expected: Tensors, tolerance: float | None = None, factors: dict[str, float] | None = None
) -> None:
    """Every expected result is there, finite, and within tolerance (see TOLERANCES; `factors` for single ones)."""
    if tolerance is None:
        tolerance = TOLERANCES[results["o"].dtype]
    assert set(results) == set(expected)
    errors = {}
    for name, x in results.items():
        assert torch.isfinite(x).all(), f"{name} is not finite"
        limit = tolerance * {**_FACTORS, **(factors or {})}.get(name, 2)
        error = relative_error(x, expected[name])
        if x.dtype == torch.float16 or results["o"].dtype == torch.float16:
            # Where fp16 has no normal numbers left: what FLA's tests let pass at once.
            difference = (x.double().cpu() - expected[name].double().cpu()).abs()
            if difference.numel() and difference.max() <= 1e-6:
                continue
        if not error <= limit:
            errors[name] = (error, limit)
    assert not errors, f"relative errors above their limits: {errors}"


def assert_identical(results: Tensors, expected: Tensors) -> None:
    """The same bits (or NaN in the same places)."""
    assert set(results) == set(expected)
    for name, x in results.items():
        assert x.dtype == expected[name].dtype, name
        assert torch.equal(x.nan_to_num(nan=12345.0), expected[name].nan_to_num(nan=12345.0)), f"{name} differs"


def check(inputs: Tensors, tolerance: float | None = None, factors: Any = None, **options: Any) -> Tensors:
    """Runs the operator with all its gradients and compares with the oracle; returns the operator's results."""
    gradients = output_gradients(inputs, options)
    results = run(inputs, gradients=gradients, **options)
    assert_accurate(results, oracle(inputs, gradients=gradients, **options), tolerance, factors)
    return results


def parametrize(**values: Any) -> pytest.MarkDecorator:
    """One parameter by name: a list, or a dict whose keys are the test ids."""
    ((name, choices),) = values.items()
    if isinstance(choices, dict):
        return pytest.mark.parametrize(name, list(choices.values()), ids=list(choices))
    return pytest.mark.parametrize(name, choices, ids=lambda x: str(x).removeprefix("torch."))
