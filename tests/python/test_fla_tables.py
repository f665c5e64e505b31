"""The shapes and tolerances of flash-linear-attention's own tests of this operator, against the float64 recurrence.

Error: RMS of the difference over RMS of the expected value, as there. Rows whose name has `long` take a second or more.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import GATE, L2NORM, NEGATIVE, SIGMOID, V_FIRST, oracle, parametrize, relative_error, run

OUTPUTS = {"o": 0.005, "final_state": 0.005}
CHUNK = {**OUTPUTS, "dq": 0.008, "dk": 0.008, "dv": 0.008, "dbeta": 0.02, "dg": 0.02, "dinitial_state": 0.008}
CHUNK_SIZES = {**OUTPUTS, "dq": 0.005, "dk": 0.005, "dv": 0.005, "dbeta": 0.01, "dg": 0.01, "dinitial_state": 0.005}
BETA_SIGMOID = {**CHUNK, "dg": 0.008}
VARLEN = {**OUTPUTS, "dq": 0.007, "dk": 0.008, "dv": 0.007, "dbeta": 0.015, "dg": 0.015, "dinitial_state": 0.007}
GATED = {**CHUNK, "dA_log": 0.02, "ddt_bias": 0.02}


def assert_ratios(results, expected, limits):
    assert set(results) == set(expected)
    errors = {n: relative_error(x, expected[n]) for n, x in results.items()}
    assert all(torch.isfinite(x).all() for x in results.values())
    too_large = {
        n: (e, limits[n]) for n, e in errors.items() if not e < limits[n] and not small(results[n], expected[n])
    }
    assert not too_large


def small(x, expected):
    return (x.double().cpu() - expected.double().cpu()).abs().max() <= 1e-6


def chunk_inputs(B, T, H, HV, D, device, *, norm=1.0, mask=0.0, l2norm=False, dtype=torch.float16):
    """test_chunk's: positive q, k and v, strong positive correlations between keys, gates of logsigmoid / norm."""
    q, k = (torch.rand(B, T, H, D) for _ in range(2))
    if not l2norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g = F.logsigmoid(torch.rand(B, T, HV)) / norm * (torch.rand(B, T, HV) > mask)
    inputs = {
        "q": q.to(dtype), "k": k.to(dtype), "v": torch.rand(B, T, HV, D).to(dtype), "g": g,
        "beta": torch.rand(B, T, HV).sigmoid(), "initial_state": torch.zeros(B, HV, D, D),
    }  # fmt: skip
    return {n: x.to(device) for n, x in inputs.items()}


def random_gradients(inputs, states):
    do = torch.randn(inputs["v"].shape).to(inputs["v"])
    return do, torch.randn(states, inputs["v"].shape[2], inputs["k"].shape[3], inputs["v"].shape[3]).to(do.device)


@pytest.mark.parametrize(
    ("B", "T", "H", "HV", "D", "scale", "norm", "mask", "l2norm"),
    [
        pytest.param(4, 1024, 4, 4, 128, 0.1, 1, 1.0, False, id="long-no-decay"),
        pytest.param(2, 75, 4, 4, 64, 1, 0.01, 0, False, id="strong-decay"),
        pytest.param(2, 500, 3, 3, 60, 1, 1, 0, False, id="60"),
        pytest.param(2, 1000, 3, 3, 64, 0.1, 1, 0.5, False, id="half-decay"),
        pytest.param(3, 1024, 4, 4, 100, 1, 0.1, 0, False, id="long-100"),
        pytest.param(4, 1024, 4, 4, 128, 0.1, 1, 0, True, id="long-l2norm"),
        pytest.param(2, 1500, 4, 4, 128, 0.1, 10, 0, False, id="long-weak-decay"),
        pytest.param(4, 2048, 8, 8, 64, 0.1, 1, 0, False, id="long-2048"),
        pytest.param(2, 256, 2, 4, 64, 1, 1, 0, False, id="gva-2"),
        pytest.param(2, 512, 2, 8, 64, 1, 0.1, 0, True, id="gva-4"),
        pytest.param(2, 1024, 4, 8, 128, 0.1, 1, 0, False, id="long-gva"),
    ],
)
def test_chunk(B, T, H, HV, D, scale, norm, mask, l2norm, device):
    inputs = chunk_inputs(B, T, H, HV, D, device, norm=norm, mask=mask, l2norm=l2norm)
    options = {"scale": scale, **(L2NORM if l2norm else {})}
    gradients = random_gradients(inputs, B)
    results = run(inputs, gradients=gradients, **options)
    assert_ratios(results, oracle(inputs, gradients=gradients, **options), CHUNK)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_with_chunk_size(chunk_size, device):
    inputs = chunk_inputs(1, 64, 2, 4, 32, device, dtype=torch.float32)
    gradients = random_gradients(inputs, 1)
    results = run(inputs, gradients=gradients, scale=0.1, chunk_size=chunk_size)
    assert_ratios(results, oracle(inputs, gradients=gradients, scale=0.1), CHUNK_SIZES)


@pytest.mark.parametrize(
    ("B", "T", "H", "HV", "D", "scale", "l2norm", "negative"),
    [
        (2, 500, 4, 4, 64, 1, False, False),
        (3, 1024, 4, 4, 128, 0.1, True, True),
        (2, 1024, 4, 8, 128, 0.1, False, True),
        (4, 2048, 8, 8, 64, 0.1, True, False),
    ],
)
def test_chunk_beta_sigmoid_in_kernel(B, T, H, HV, D, scale, l2norm, negative, device):
    inputs = chunk_inputs(B, T, H, HV, D, device, l2norm=l2norm)
    inputs["beta"] = torch.randn(B, T, HV, device=device)
    options = {"scale": scale, **(L2NORM if l2norm else {})}
    gradients = random_gradients(inputs, B)
    results = run(inputs, gradients=gradients, **options, **(NEGATIVE if negative else SIGMOID))

    def outside(beta, **others):
        return run_operator(beta=beta.sigmoid() * (2 if negative else 1), **others)

    assert_ratios(results, run(inputs, outside, gradients=gradients, **options), BETA_SIGMOID)


def run_operator(**arguments):
    from cula.gdn import chunk_gated_delta_rule

    return chunk_gated_delta_rule(**arguments)


@pytest.mark.parametrize(
    ("B", "T", "H", "D", "scale"),
    [(1, 63, 1, 64, 1), (2, 500, 3, 60, 1), (3, 1024, 4, 128, 0.1), (4, 2048, 8, 64, 0.1)],
)
def test_chunk_state_v_first(B, T, H, D, scale, device):
    inputs = chunk_inputs(B, T, H, H, D, device)
    inputs["beta"] = inputs["beta"].half()
    inputs["initial_state"] = torch.randn(B, H, D, D, device=device)
    do, dht = random_gradients(inputs, B)
    turned = inputs | {"initial_state": inputs["initial_state"].transpose(-1, -2).contiguous()}
    results = run(turned, gradients=(do, dht.transpose(-1, -2).contiguous()), scale=scale, **V_FIRST)
    for name in ("final_state", "dinitial_state"):
        results[name] = results[name].transpose(-1, -2)
    expected = run(inputs, gradients=(do, dht), scale=scale)
    assert_ratios(results, expected, dict.fromkeys(expected, 1e-4))


def varlen_inputs(H, HV, D, ends, device, *, mask=0.0):
    T, N = ends[-1], len(ends) - 1
    normal = lambda *shape: torch.randn(*shape).half()  # noqa: E731
    inputs = {
        "q": normal(1, T, H, D), "k": F.normalize(torch.randn(1, T, H, D), dim=-1).half(), "v": normal(1, T, HV, D),
        "g": (F.logsigmoid(torch.rand(1, T, HV)) * (torch.rand(1, T, HV) > mask)).half(),
        "beta": torch.rand(1, T, HV).sigmoid(), "initial_state": normal(N, HV, D, D),
        "cu_seqlens": torch.tensor(ends),
    }  # fmt: skip
    return {n: x.to(device) for n, x in inputs.items()}


VARLEN_ROWS = [
    (4, 4, 60, 0, [0, 15]),
    (4, 4, 64, 0, [0, 256, 500, 1000]),
    (4, 4, 64, 0.5, [0, 256, 500, 1000]),
    (4, 4, 100, 0, [0, 15, 100, 300, 1200, 2000]),
    (2, 4, 64, 0, [0, 256, 500, 1000]),
    (2, 8, 64, 0, [0, 256, 500, 1000]),
]


@pytest.mark.parametrize(("H", "HV", "D", "mask", "ends"), VARLEN_ROWS)
def test_chunk_varlen(H, HV, D, mask, ends, device):
    inputs = varlen_inputs(H, HV, D, ends, device, mask=mask)
    gradients = random_gradients(inputs, len(ends) - 1)
    results = run(inputs, gradients=gradients)
    assert_ratios(results, oracle(inputs, gradients=gradients), VARLEN)


@pytest.mark.parametrize(("H", "HV", "D", "mask", "ends"), VARLEN_ROWS[:3])
def test_chunk_varlen_prefill(H, HV, D, mask, ends, device):
    inputs = varlen_inputs(H, HV, D, ends, device, mask=mask)
    with torch.inference_mode():
        results = run(inputs)
    assert_ratios(results, oracle(inputs), OUTPUTS)


def gated(inputs, bias, device):
    HV = inputs["v"].shape[2]
    inputs |= {"g": torch.randn(inputs["g"].shape, device=device), "A_log": torch.randn(HV, device=device)}
    return inputs | ({"dt_bias": torch.randn(HV, device=device)} if bias else {})


@pytest.mark.parametrize(
    ("B", "T", "H", "HV", "D", "scale", "bias", "l2norm"),
    [
        (2, 75, 4, 4, 64, 1, True, True),
        (2, 500, 3, 3, 60, 1, False, False),
        (2, 1000, 3, 3, 64, 0.1, True, False),
        pytest.param(3, 1024, 4, 4, 100, 1, True, True, id="long-100"),
        pytest.param(4, 1024, 4, 4, 128, 0.1, False, True, id="long-128"),
        pytest.param(4, 2048, 8, 8, 64, 0.1, True, False, id="long-2048"),
        (2, 256, 2, 4, 64, 1, True, True),
        (2, 512, 1, 4, 64, 0.1, False, True),
        (2, 512, 2, 8, 64, 1, True, True),
        pytest.param(2, 1024, 4, 8, 128, 0.1, True, True, id="long-gva"),
    ],
)
def test_chunk_gate_in_kernel(B, T, H, HV, D, scale, bias, l2norm, device):
    inputs = gated(chunk_inputs(B, T, H, HV, D, device, l2norm=l2norm), bias, device)
    options = {"scale": scale, **GATE, **(L2NORM if l2norm else {})}
    gradients = random_gradients(inputs, B)
    results = run(inputs, gradients=gradients, **options)
    assert_ratios(results, oracle(inputs, gradients=gradients, **options), GATED)


@pytest.mark.parametrize(
    ("H", "D", "bias", "ends"),
    [
        (4, 60, True, [0, 15]),
        (4, 64, False, [0, 256, 500, 1000]),
        (4, 64, True, [0, 256, 500, 1000]),
        (4, 100, True, [0, 15, 100, 300, 1200, 2000]),
    ],
)
def test_chunk_gate_in_kernel_varlen(H, D, bias, ends, device):
    inputs = gated(varlen_inputs(H, H, D, ends, device), bias, device)
    gradients = random_gradients(inputs, len(ends) - 1)
    results = run(inputs, gradients=gradients, **GATE, **L2NORM)
    assert_ratios(results, oracle(inputs, gradients=gradients, **GATE, **L2NORM), GATED)


@parametrize(dtype=[torch.float32, torch.float16, torch.bfloat16])
def test_gate(dtype, device):
    from cula.gdn import stages

    g = torch.randn(2, 300, 4, device=device).to(dtype)
    A_log, bias = torch.randn(4, device=device), torch.randn(4, device=device)
    leaves = [x.double().requires_grad_() for x in (g, A_log, bias)]
    expected = -leaves[1].exp() * F.softplus(leaves[0] + leaves[2], threshold=1e9)
    found = stages.gdn_gate_fwd(g, A_log, bias)
    dyg = torch.randn_like(found)
    expected_gradients = torch.autograd.grad(expected, leaves, dyg.double())
    gradients = stages.gdn_gate_bwd(g, A_log, bias, dyg)
    assert relative_error(found, expected.detach()) < 1e-4
    limits = [max(1e-4, torch.finfo(dtype).eps), 1e-4, 1e-4]
    for x, y, limit in zip(gradients, expected_gradients, limits, strict=True):
        assert relative_error(x, y) < limit
