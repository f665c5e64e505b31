"""The cases behind public fault reports on Gated DeltaNet kernels, each under its number.

Cases 1 to 4, 12 to 14, 17 and 23: strong, infinite, zero and raw gates.

Cases that stand elsewhere: 6 test_recurrent, 17 (error) 26 27 32 36 (error) 51 61 test_errors, 42 test_operator,
45 54 56 test_autograd, 48 test_compile, 61 62 test_packaging. Those of context parallelism (22, 33, 49
to 53) stand in test_cp and test_cp_context; those of GPUs (46, 47, 57 to 60, 63) and of device memory checks need other
means.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from naive import naive_gated_delta_rule
from support import (
    DTYPES,
    GATE,
    TOLERANCES,
    assert_accurate,
    assert_identical,
    check,
    heads_of,
    make_inputs,
    oracle,
    output_gradients,
    parametrize,
    relative_error,
    run,
)

from cula.gdn import chunk_gated_delta_rule, reference_gated_delta_rule, stages


@parametrize(dtype=DTYPES)
@pytest.mark.parametrize("tokens", [64, 70])
@pytest.mark.parametrize("gate", [-2.0, -20.0, -200.0, -1e4])
def test_case_01_factored_gate_exponent_overflows(gate, tokens, dtype, device):
    inputs = make_inputs(1, tokens, 1, 1, 64, 64, dtype=dtype, device=device, state=False)
    inputs["g"] = torch.full_like(inputs["g"], gate)
    gradients = output_gradients(inputs, {})
    results = run(inputs, gradients=gradients)
    assert all(torch.isfinite(x).all() for x in results.values())
    expected = oracle(inputs, gradients=gradients)
    small = ("dg",) if gate <= -20 else ()
    assert_accurate(
        {n: x for n, x in results.items() if n not in small}, {n: x for n, x in expected.items() if n not in small}
    )
    if gate <= -20:
        q, k, v, beta = (inputs[n].double() for n in ("q", "k", "v", "beta"))
        alone = 64**-0.5 * beta[..., None] * (q * k).sum(-1, keepdim=True) * v
        assert relative_error(results["o"], alone) <= TOLERANCES[dtype]
        assert results["dg"].abs().max() < (1e-6 if gate == -20 else 1e-30)
    if gate == -1e4:
        assert not results["dg"].any()


@parametrize(dtype=DTYPES)
def test_case_02_gate_of_minus_infinity(dtype, device):
    inputs = make_inputs(1, 100, 2, 4, 64, 64, dtype=dtype, device=device)
    inputs["g"] = -torch.rand(1, 100, 4, device=device)
    gradients = output_gradients(inputs, {})
    before = run(inputs, gradients=gradients)
    inputs["g"][0, 37, 1] = -torch.inf
    results = run(inputs, gradients=gradients)
    assert_accurate(results, oracle(inputs, gradients=gradients))
    assert results["dg"][0, 37, 1] == 0
    others = [0, 2, 3]
    for name in ("o", "dv", "dg", "dbeta"):
        assert torch.equal(results[name][:, :, others], before[name][:, :, others]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(results[name][:, others], before[name][:, others]), name
    # Two separate runs: [0, 37) from the given state, [37, 100) from none.
    head = {n: x[:, :, 1:2] for n, x in inputs.items() if n in ("v", "g", "beta")}
    head |= {n: inputs[n][:, :, :1] for n in ("q", "k")}
    first = run({n: x[:, :37] for n, x in head.items()} | {"initial_state": inputs["initial_state"][:, 1:2]})
    rest = {n: x[:, 37:].clone() for n, x in head.items()}
    rest["g"][0, 0] = 0
    second = run(rest)
    assert relative_error(results["o"][:, :37, 1:2], first["o"]) <= TOLERANCES[dtype]
    assert relative_error(results["o"][:, 37:, 1:2], second["o"]) <= TOLERANCES[dtype]
    assert relative_error(results["final_state"][:, 1:2], second["final_state"]) <= TOLERANCES[dtype]


@pytest.mark.parametrize("lowest", [-1e3, -1e12, torch.finfo(torch.float32).min, float("-inf")])
def test_case_02_gates_too_low_to_leave_anything(lowest, device):
    """Masks are written as the lowest number of a type; the gates behind one must keep their digits."""
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(1, 64, 1, 32), dim=-1) for _ in range(2))
    v, beta = torch.randn(1, 64, 1, 32), torch.rand(1, 64, 1)
    g = F.logsigmoid(torch.randn(1, 64, 1))
    g[0, 5] = float("-inf")
    q, k, v, g, beta = (x.to(device) for x in (q, k, v, g, beta))
    expected, expected_state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    g[0, 5] = lowest
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert torch.equal(o, expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_case_03_gate_zero_for_some_or_all_tokens(share, device):
    inputs = make_inputs(2, 1000, 3, 3, 64, 64, dtype=torch.float16, device=device)
    inputs["g"][torch.rand(2, 1000, 3) < share] = 0
    check(inputs)


def test_case_03_one_repeated_key(device):
    key = F.normalize(torch.randn(64), dim=0).expand(1, 130, 1, 64).to(device)
    v = torch.randn(1, 130, 1, 64, device=device)
    ones = torch.ones(1, 130, 1, device=device)
    results = run({"q": key, "k": key, "v": v, "g": 0 * ones, "beta": ones})
    assert relative_error(results["o"], 64**-0.5 * v) <= 1e-5
    assert relative_error(results["final_state"][0, 0], torch.outer(key[0, 0, 0], v[0, -1, 0])) <= 1e-5


@pytest.mark.parametrize("tokens", [75, 128])
def test_case_04_tail_chunk_at_strong_decay(tokens, device):
    inputs = make_inputs(2, tokens, 4, 4, 64, 64, dtype=torch.float16, device=device)
    inputs["g"] *= 100
    check(inputs, scale=1.0)


def test_case_12_exp_A_log_overflows_while_softplus_underflows(device):
    inputs = make_inputs(1, 64, 2, 2, 64, 64, device=device, flags=GATE)
    inputs["A_log"][0], inputs["dt_bias"][0] = 100, 0
    inputs["g"][:, :, 0] = -200
    gradients = output_gradients(inputs, GATE)
    results = run(inputs, gradients=gradients, **GATE)
    assert all(torch.isfinite(x).all() for x in results.values())
    one = slice(0, 1)
    zero_gate = run(
        {n: x for n, x in heads_of(inputs | {"g": 0 * inputs["g"]}, one).items() if n not in ("A_log", "dt_bias")}
    )
    assert relative_error(results["o"][:, :, one], zero_gate["o"]) <= 1e-6
    second = run(heads_of(inputs, slice(1, 2)), gradients=(gradients[0][:, :, 1:], gradients[1][:, 1:]), **GATE)
    assert_identical(heads_of(results, slice(1, 2)), second)


@pytest.mark.parametrize(
    ("A_log", "raw", "bias", "log_decay", "slope"), [(0, 60, 40, -100, -1), (2.77, 60, 40, -1595.86, -15.96)]
)
def test_case_13_softplus_of_a_large_input(A_log, raw, bias, log_decay, slope, device):

    g = torch.full((1, 3, 1), float(raw), device=device)
    parameters = [torch.tensor([float(x)], device=device) for x in (A_log, bias)]
    assert torch.allclose(stages.gdn_gate_fwd(g, *parameters), torch.full_like(g, log_decay), rtol=1e-5)
    dyg = torch.randn(1, 3, 1, device=device)
    dg, dA_log, ddt_bias = stages.gdn_gate_bwd(g, *parameters, dyg)
    assert torch.allclose(dg, slope * dyg, rtol=1e-3)
    assert torch.allclose(dA_log, (log_decay * dyg).sum(), rtol=1e-4)
    assert torch.allclose(ddt_bias, dg.sum())
    inputs = make_inputs(1, 70, 1, 1, 16, 16, device=device, flags=GATE)
    inputs |= {"g": g[:, :1].expand(1, 70, 1), "A_log": parameters[0], "dt_bias": parameters[1]}
    results = run(inputs, gradients=output_gradients(inputs, GATE), **GATE)
    assert all(torch.isfinite(x).all() for x in results.values())


@parametrize(gate=["raw", "constant"])
@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_14_gate_gradient_at_strong_decay(gate, dtype, device):
    flags = GATE if gate == "raw" else {}
    inputs = make_inputs(1, 128, 2, 2, 128, 128, dtype=dtype, device=device, flags=flags)
    if gate == "raw":
        inputs["A_log"] = torch.tensor([6.0, 15.0], device=device).log()
        inputs["dt_bias"] = torch.ones(2, device=device)
    else:
        inputs["g"] = torch.full_like(inputs["g"], -5)
    gradients = output_gradients(inputs, flags)
    results = run(inputs, gradients=gradients, **flags)
    expected = oracle(inputs, gradients=gradients, **flags)
    errors = {n: relative_error(results[n], expected[n]) for n in results}
    for name in ("dg", "dA_log", "ddt_bias"):
        if name in errors:
            limit = 4 * errors["dv"] if dtype == torch.bfloat16 else 2e-5
            assert errors[name] <= limit < 2e-2, errors


@parametrize(dtype={"float32": torch.float32, "float64": torch.float64})
@pytest.mark.parametrize("gate", [-15.0, -20.0, -30.0])
def test_case_14_gate_gradient_where_all_but_neighbours_vanish(gate, dtype, device):
    inputs = make_inputs(1, 20, 1, 1, 32, 32, dtype=dtype, device=device)
    inputs["g"] = torch.full_like(inputs["g"], gate)
    gradients = output_gradients(inputs, {})
    found, expected = run(inputs, gradients=gradients), oracle(inputs, gradients=gradients)
    assert relative_error(found["dg"], expected["dg"]) < (1e-10 if dtype == torch.float64 else 2e-5)


def test_case_17_no_gate(device):
    inputs = make_inputs(1, 130, 1, 2, 32, 32, device=device)
    gradients = output_gradients(inputs, {})
    expected = run(inputs | {"g": torch.zeros_like(inputs["g"])}, gradients=gradients)
    del inputs["g"], expected["dg"]
    assert_identical(run(inputs, gradients=gradients), expected)


@pytest.mark.parametrize(("tokens", "value_dim"), [(2048, 128), (2048, 256), (17000, 128)])
def test_case_23_full_length_with_realistic_gates(tokens, value_dim, device):
    inputs = make_inputs(1, tokens, 1, 1, 128, value_dim, dtype=torch.bfloat16, device=device, flags=GATE, state=False)
    inputs["A_log"] = torch.tensor([7.0], device=device).log()
    step = torch.exp(torch.rand(1) * torch.log(torch.tensor(100.0))) * 1e-3
    inputs["dt_bias"] = (step + torch.log(-torch.expm1(-step))).to(device)
    inputs["g"] = (5 * inputs["g"]).bfloat16()
    check(inputs, **GATE)


def test_the_reference_itself_on_a_case():
    inputs = make_inputs(1, 100, 1, 2, 16, 16)
    inputs["g"][0, 37, 1] = -torch.inf
    gradients = output_gradients(inputs, {})
    expected = oracle(inputs, function=naive_gated_delta_rule, gradients=gradients)
    assert_accurate(oracle(inputs, function=reference_gated_delta_rule, gradients=gradients), expected, 1e-12)
