"""The cases behind public fault reports on Gated DeltaNet kernels, each under its number.

Cases that stand elsewhere: 6 test_recurrent, 17 (error) 26 27 32 36 (error) 51 61 test_errors, 42 test_operator,
45 54 56 test_autograd, 48 test_compile, 61 62 test_packaging. Those of context parallelism (22, 33, 49
to 53) stand in test_cp and test_cp_context; those of GPUs (46, 47, 57 to 60, 63) and of device memory checks need other
means.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from naive import naive_gated_delta_rule
from support import (
    FLAGS,
    GATE,
    L2NORM,
    SIGMOID,
    TOLERANCES,
    V_FIRST,
    assert_accurate,
    assert_identical,
    check,
    make_inputs,
    offsets,
    oracle,
    output_gradients,
    parametrize,
    relative_error,
    run,
)

from cula.gdn import chunk_gated_delta_rule, plan, reference_gated_delta_rule, stages

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def heads_of(tensors, heads, sequences=slice(None)):
    """Inputs or results of some value heads alone (of as many key heads)."""
    tokens = ("q", "k", "v", "g", "beta", "o", "dq", "dk", "dv", "dg", "dbeta")
    states = ("initial_state", "final_state", "dinitial_state")
    parameters = ("A_log", "dt_bias", "dA_log", "ddt_bias")
    return {
        n: x[:, :, heads] if n in tokens else x[sequences, heads] if n in states else x[heads] if n in parameters else x
        for n, x in tensors.items()
    }


# Numerics -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("tokens", [63, 500, 1000])
def test_case_05_final_state_of_a_partial_chunk(tokens, device):
    inputs = make_inputs(1, tokens, 2, 2, 128, 128, device=device)
    assert_accurate(run(inputs), oracle(inputs))


def test_case_07_gate_in_bfloat16(device):
    inputs = make_inputs(1, 128, 2, 2, 128, 128, dtype=torch.bfloat16, device=device)
    inputs["g"] = torch.full((1, 128, 2), -0.03, dtype=torch.bfloat16, device=device)
    gradients = output_gradients(inputs, {})
    results = run(inputs, gradients=gradients)
    assert results["dg"].dtype == torch.bfloat16
    wide = run(inputs | {"g": inputs["g"].float()}, gradients=gradients)
    wide["dg"] = wide["dg"].bfloat16()
    assert_identical(results, wide)


@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_08_beta_in_float32_is_not_rounded(dtype, device):
    inputs = make_inputs(1, 2048, 1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    inputs["g"] = torch.full_like(inputs["g"], -1e-3)
    inputs["beta"] = torch.full_like(inputs["beta"], 0.3011)
    results = check(inputs)
    assert results["dbeta"].dtype == torch.float32
    errors = []
    for tokens in (128, 2048):
        shorter = {n: x if n == "initial_state" else x[:, :tokens] for n, x in inputs.items()}
        errors.append(relative_error(run(shorter)["final_state"], oracle(shorter)["final_state"]))
    assert errors[1] <= 2 * errors[0]
    inputs["beta"] = torch.randn_like(inputs["beta"]).to(dtype)
    assert check(inputs, **SIGMOID)["dbeta"].dtype == dtype


def test_case_09_large_state_with_float16(device):
    zeros = torch.zeros(1, 64, 1, 64, dtype=torch.float16, device=device)
    inputs = {
        "q": zeros, "k": zeros, "v": zeros,
        "g": torch.full((1, 64, 1), -4 / 64, device=device),
        "beta": torch.ones(1, 64, 1, device=device),
        "initial_state": torch.full((1, 1, 64, 64), 65536.0, device=device),
    }  # fmt: skip
    results = run(inputs)
    assert not results["o"].any()
    assert relative_error(results["final_state"], torch.full((1, 1, 64, 64), 1200.33)) <= 1e-5
    inputs["q"] = torch.ones_like(zeros)
    assert relative_error(run(inputs)["final_state"], results["final_state"]) == 0


def test_case_10_initial_state_in_bfloat16(device):
    inputs = make_inputs(1, 130, 2, 2, 64, 64, dtype=torch.bfloat16, device=device)
    inputs["initial_state"] = inputs["initial_state"].bfloat16()
    gradients = output_gradients(inputs, {})
    results = run(inputs, gradients=gradients)
    wide = run(inputs | {"initial_state": inputs["initial_state"].float()}, gradients=gradients)
    wide["dinitial_state"] = wide["dinitial_state"].bfloat16()
    assert results["final_state"].dtype == torch.float32
    assert_identical(results, wide)
    assert_accurate(results, oracle(inputs, gradients=gradients))


def test_case_11_keys_without_unit_norm(device):
    inputs = make_inputs(1, 64, 2, 2, 64, 64, device=device, state=False)
    alone = run(heads_of(inputs, slice(1, 2)))
    inputs["k"][:, :, 0] = torch.randn(1, 64, 64, device=device)
    inputs["beta"][:, :, 0], inputs["g"][:, :, 0] = 1, 0
    assert_identical(heads_of(run(inputs), slice(1, 2)), alone)
    inputs = make_inputs(1, 64, 1, 1, 64, 64, device=device)
    inputs["k"] *= 1.5**0.5
    check(inputs)


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
    from cula.gdn import stages

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


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("tokens", [64, 128, 256])
def test_case_15_dk_and_dbeta_for_every_chunk_size(tokens, size, chunk_size, device):
    inputs = make_inputs(1, tokens, 1, 1, size, size, dtype=torch.float16, device=device)
    inputs["g"] *= 0
    check(inputs, 3e-3, chunk_size=chunk_size)


@pytest.mark.parametrize("size", [64, 100])
@pytest.mark.parametrize("batch", [1, 3])
def test_case_16_dbeta_and_dg_of_positive_inputs(batch, size, device):
    inputs = make_inputs(batch, 1024, 4, 4, size, size, dtype=torch.float16, device=device, state=False)
    for name in "qkv":
        inputs[name] = torch.rand_like(inputs[name].float()).half()
    inputs["k"] = F.normalize(inputs["k"].float(), dim=-1).half()
    inputs["g"] *= 10
    gradients = output_gradients(inputs, {})
    results, expected = run(inputs, gradients=gradients), oracle(inputs, gradients=gradients)
    for name in ("dbeta", "dg"):
        assert relative_error(results[name], expected[name]) <= 2e-2


def test_case_17_no_gate(device):
    inputs = make_inputs(1, 130, 1, 2, 32, 32, device=device)
    gradients = output_gradients(inputs, {})
    expected = run(inputs | {"g": torch.zeros_like(inputs["g"])}, gradients=gradients)
    del inputs["g"], expected["dg"]
    assert_identical(run(inputs, gradients=gradients), expected)


@pytest.mark.parametrize("split", [1, 63, 64, 65, 256, 511])
@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_18_split_runs(split, dtype, device):
    inputs = make_inputs(1, 512, 2, 4, 64, 64, dtype=dtype, device=device)
    gradients = output_gradients(inputs, {})
    whole = run(inputs, gradients=gradients)

    def in_two(output_final_state, initial_state, **tokens):
        first, state = chunk_gated_delta_rule(
            **{n: x[:, :split] for n, x in tokens.items()}, initial_state=initial_state, output_final_state=True
        )
        second, state = chunk_gated_delta_rule(
            **{n: x[:, split:] for n, x in tokens.items()}, initial_state=state, output_final_state=True
        )
        return torch.cat([first, second], dim=1), state

    parts = run(inputs, in_two, gradients=gradients)
    assert_accurate(parts, whole)
    if split % 64 == 0:
        assert torch.equal(parts["o"], whole["o"])
        assert torch.equal(parts["final_state"], whole["final_state"])


@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_19_a_poisoned_sequence_stays_alone(dtype, device):
    inputs = make_inputs(lengths=[50, 80, 70], H=2, HV=4, K=32, V=32, dtype=dtype, device=device)
    gradients = output_gradients(inputs, {})
    clean = run(inputs, gradients=gradients)
    inputs["initial_state"][1] = torch.nan
    results = run(inputs, gradients=gradients)
    rows = torch.cat([torch.arange(50), torch.arange(130, 200)])
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(results[name][:, rows], clean[name][:, rows]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(results[name][[0, 2]], clean[name][[0, 2]]), name
    assert results["o"][:, 50:130].isnan().all()


@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_19_a_poisoned_head_stays_alone(dtype, device):
    inputs = make_inputs(1, 130, 4, 4, 32, 32, dtype=dtype, device=device)
    gradients = output_gradients(inputs, {})
    clean = run(inputs, gradients=gradients)
    inputs["v"][:, :, 2] = torch.nan
    others = [0, 1, 3]
    results = run(inputs, gradients=gradients)
    assert_identical(heads_of(results, others), heads_of(clean, others))
    assert results["o"][:, :, 2].isnan().all()


@parametrize(dtype=DTYPES)
def test_case_20_zero_rows_with_l2norm(dtype, device):
    inputs = make_inputs(1, 70, 1, 2, 16, 16, dtype=dtype, device=device, flags=L2NORM)
    inputs["q"][:, :10], inputs["k"][:, :10] = 0, 0
    results = check(inputs, **L2NORM)
    assert not results["o"][:, :10].any()


@parametrize(dtype=[torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [1e-2, 1.0, 300.0])
def test_case_21_l2norm_is_done_in_float32(norm, dtype, device):
    inputs = make_inputs(1, 130, 1, 2, 64, 64, dtype=dtype, device=device)
    for name in "qk":
        inputs[name] = (F.normalize(torch.randn(1, 130, 1, 64), dim=-1) * norm).to(dtype).to(device)
    results = run(inputs, **L2NORM)
    assert results["o"].dtype == dtype
    outside = {
        n: (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(dtype) if n in "qk" else x
        for n, x in inputs.items()
    }
    assert_accurate(results, run(outside), torch.finfo(dtype).eps)


@pytest.mark.parametrize(("tokens", "value_dim"), [(2048, 128), (2048, 256), (17000, 128)])
def test_case_23_full_length_with_realistic_gates(tokens, value_dim, device):
    inputs = make_inputs(1, tokens, 1, 1, 128, value_dim, dtype=torch.bfloat16, device=device, flags=GATE, state=False)
    inputs["A_log"] = torch.tensor([7.0], device=device).log()
    step = torch.exp(torch.rand(1) * torch.log(torch.tensor(100.0))) * 1e-3
    inputs["dt_bias"] = (step + torch.log(-torch.expm1(-step))).to(device)
    inputs["g"] = (5 * inputs["g"]).bfloat16()
    check(inputs, **GATE)


# Indexing -----------------------------------------------------------------------------------------------------------


@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_24_packed_documents_do_not_leak(dtype, device):
    inputs = make_inputs(lengths=[37, 51, 40], H=2, HV=4, K=32, V=32, dtype=dtype, device=device)
    gradients = output_gradients(inputs, {})
    packed = run(inputs, gradients=gradients)
    for n, (begin, end) in enumerate([(0, 37), (37, 88), (88, 128)]):
        one = {
            name: x[n : n + 1] if name == "initial_state" else x[:, begin:end]
            for name, x in inputs.items()
            if name != "cu_seqlens"
        }
        alone = run(one, gradients=(gradients[0][:, begin:end], gradients[1][n : n + 1]))
        document = {name: x[n : n + 1] if name.endswith("_state") else x[:, begin:end] for name, x in packed.items()}
        assert_accurate(document, alone, 1e-6)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, :37] = -torch.rand_like(inputs[name][:, :37])
    inputs["initial_state"][0] = 3
    other = run(inputs, gradients=gradients)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(other[name][:, 37:], packed[name][:, 37:]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(other[name][1:], packed[name][1:]), name


@parametrize(flags={"plain": {}, **FLAGS})
def test_case_25_no_tokens(flags, device):
    for inputs in (
        make_inputs(lengths=[0], H=1, HV=2, K=8, V=8, device=device, flags=flags),
        make_inputs(2, 0, 1, 2, 8, 8, device=device, flags=flags),
    ):
        gradients = output_gradients(inputs, flags)
        results = run(inputs, gradients=gradients, **flags)
        assert results["o"].shape == inputs["v"].shape
        assert torch.equal(results["final_state"], inputs["initial_state"])
        assert torch.equal(results["dinitial_state"], gradients[1])
        for name in ("q", "k", "v", "g", "beta"):
            assert results[f"d{name}"].shape == inputs[name].shape
        assert all(not results[n].any() for n in ("dA_log", "ddt_bias") if n in results)


def test_case_28_more_than_65535_sequences_and_heads(device):
    lengths = [16] * 2050
    inputs = make_inputs(lengths=lengths, H=32, HV=32, K=16, V=16, dtype=torch.bfloat16, device=device)
    gradients = output_gradients(inputs, {})
    whole = run(inputs, gradients=gradients)
    for part in (slice(0, 1025), slice(1025, 2050)):
        rows = slice(16 * part.start, 16 * part.stop)
        half = {n: x[part] if n == "initial_state" else x[:, rows] for n, x in inputs.items() if n != "cu_seqlens"}
        half["cu_seqlens"] = offsets([16] * 1025, device=device)
        expected = run(half, gradients=(gradients[0][:, rows], gradients[1][part]))
        assert_identical({n: x[part] if n.endswith("_state") else x[:, rows] for n, x in whole.items()}, expected)


def spread(x: torch.Tensor, dim: int, room: int = 2**31 + 2**20) -> torch.Tensor:
    """x with its elements along one dimension so far apart that the last lies behind 2^31 elements.

    The memory between them is never touched, so it is only address space.
    """
    step = room // max(x.shape[dim] - 1, 1)
    try:
        buffer = torch.empty(room + x.numel(), dtype=x.dtype, device=x.device)
    except RuntimeError:
        pytest.skip("not enough address space")
    inner = torch.empty(x.select(dim, 0).shape).stride()
    strides = [*inner[:dim], step, *inner[dim:]]
    far = buffer.as_strided(x.shape, strides)
    far.copy_(x)
    return far


@parametrize(name=["q", "k", "v", "g", "beta"])
def test_case_29_offsets_past_2_to_the_31_along_tokens(name, device):
    inputs = make_inputs(1, 130, 1, 2, 16, 16, dtype=torch.bfloat16, device=device)
    inputs |= {n: inputs[n].bfloat16() for n in ("g", "beta")}
    gradients = output_gradients(inputs, {})
    expected = run(inputs, gradients=gradients)
    assert_identical(run(inputs | {name: spread(inputs[name], 1)}, gradients=gradients), expected)


def test_case_29_offsets_past_2_to_the_31_along_batch_heads_and_gradients(device):
    inputs = make_inputs(3, 70, 2, 4, 16, 16, dtype=torch.bfloat16, device=device)
    do, dht = output_gradients(inputs, {})
    expected = run(inputs, gradients=(do, dht))
    assert_identical(run(inputs | {"q": spread(inputs["q"], 0)}, gradients=(do, dht)), expected)
    assert_identical(run(inputs | {"v": spread(inputs["v"], 2)}, gradients=(do, dht)), expected)
    assert_identical(run(inputs, gradients=(spread(do, 1), dht)), expected)
    dht = dht.bfloat16()
    assert_identical(run(inputs, gradients=(do, spread(dht, 0))), run(inputs, gradients=(do, dht)))


def test_case_30_state_pool_past_2_to_the_31(device):
    inputs = make_inputs(lengths=[1] * 5, H=1, HV=2, K=16, V=16, device=device)
    inputs["initial_state"] = torch.zeros(5, 2, 16, 16, dtype=torch.bfloat16, device=device)
    inputs["initial_state"][-1] = torch.randn(2, 16, 16)
    gradients = output_gradients(inputs, {})
    expected = run(inputs, gradients=gradients)
    far = inputs | {"initial_state": spread(inputs["initial_state"], 0)}
    assert_identical(run(far, gradients=gradients), expected)
    assert_accurate(run(inputs), oracle(inputs))


@parametrize(dtype=[torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "value_heads"), [(2, 6), (2, 16), (1, 3)])
def test_case_31_grouped_value_heads(heads, value_heads, dtype, device):
    inputs = make_inputs(lengths=[256, 244, 500], H=heads, HV=value_heads, K=16, V=16, dtype=dtype, device=device)
    gradients = output_gradients(inputs, {})
    results = run(inputs, gradients=gradients)
    group = value_heads // heads
    repeated = inputs | {n: inputs[n].repeat_interleave(group, dim=2) for n in "qk"}
    expected = run(repeated, gradients=gradients)
    for name in set(results) - {"dq", "dk"}:
        assert relative_error(results[name], expected[name]) <= torch.finfo(dtype).eps, name
    exact = oracle(inputs, gradients=gradients)
    for name in ("dq", "dk"):
        summed = expected[name].float().unflatten(2, (heads, group)).sum(3)
        assert relative_error(results[name], summed) <= 2 * TOLERANCES[dtype]
        # Rounded once: no worse than the sum of the separately rounded parts.
        assert relative_error(results[name], exact[name]) <= 1.1 * relative_error(summed.to(dtype), exact[name])


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 128), (64, 64)])
@pytest.mark.parametrize("state", [False, True])
def test_case_34_state_layouts(key_dim, value_dim, state, device):
    inputs = make_inputs(1, 100, 1, 2, key_dim, value_dim, device=device, state=state)
    do, dht = output_gradients(inputs, {})
    expected = run(inputs, gradients=(do, dht))
    turned = {n: x.transpose(-1, -2).contiguous() if n == "initial_state" else x for n, x in inputs.items()}
    results = run(turned, gradients=(do, dht.transpose(-1, -2).contiguous()), **V_FIRST)
    assert_identical({n: x.transpose(-1, -2) if n.endswith("_state") else x for n, x in results.items()}, expected)


@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_35_strided_inputs(dtype, device):
    inputs = make_inputs(2, 100, 2, 2, 32, 32, dtype=dtype, device=device)
    do, dht = output_gradients(inputs, {})
    buffer = torch.stack([inputs[n] for n in "qkv"], dim=2)
    columns = torch.stack([inputs["g"], inputs["beta"]], dim=3).flatten(2)
    views = inputs | {
        "q": buffer[:, :, 0], "k": buffer[:, :, 1], "v": buffer[:, :, 2],
        "g": columns[:, :, ::2], "beta": columns[:, :, 1::2],
        "initial_state": inputs["initial_state"].transpose(-1, -2).contiguous().transpose(-1, -2),
    }  # fmt: skip
    strided_do = do.transpose(1, 3).contiguous().transpose(1, 3)
    strided_dht = dht.transpose(0, 1).contiguous().transpose(0, 1)
    assert_identical(run(views, gradients=(strided_do, strided_dht)), run(inputs, gradients=(do, dht)))
    broadcast = do[:1, :1].expand(2, 100, -1, -1)
    assert_identical(run(views, gradients=(broadcast, None)), run(inputs, gradients=(broadcast.contiguous(), None)))


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [*((d, d) for d in (8, 16, 60, 64, 96, 100, 128, 192, 256)), (64, 128), (128, 256), (192, 96), (1, 1), (3, 7)],
)
@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_36_head_sizes(key_dim, value_dim, dtype, device):
    check(make_inputs(1, 75, 1, 2, key_dim, value_dim, dtype=dtype, device=device))


# Memory -------------------------------------------------------------------------------------------------------------


@parametrize(lengths={"batch": None, "packed": [1, 1, 63, 1, 63]})
def test_case_37_misaligned_inputs(lengths, device, backend):
    inputs = make_inputs(
        2 if lengths is None else 1, 130, 2, 2, 64, 64, dtype=torch.bfloat16, device=device, lengths=lengths
    )
    gradients = output_gradients(inputs, {})
    expected = run(inputs, gradients=gradients)
    shifted = dict(inputs)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        x = inputs[name]
        buffer = torch.full((x.numel() + 2,), torch.nan, dtype=x.dtype, device=device)
        shifted[name] = buffer[1:-1].view(x.shape).copy_(x)
    results = run(shifted, gradients=gradients)
    if backend == "sm90":  # whose copy engine needs aligned rows: other kernels take these
        assert_accurate(results, oracle(inputs, gradients=gradients))
    else:
        assert_identical(results, expected)
    assert_accurate(expected, oracle(inputs, gradients=gradients))


def test_case_38_many_short_sequences(device, backend):
    lengths = [(16, 32, 64)[n % 3] for n in range(127)]
    inputs = make_inputs(lengths=lengths, H=6, K=128, V=128, dtype=torch.bfloat16, device=device)
    assert inputs["q"].shape[1] == 4720
    gradients = output_gradients(inputs, {})
    packed = run(inputs, gradients=gradients)
    bounds = inputs.pop("cu_seqlens").tolist()
    for n in (0, 1, 2, 62, 125, 126):
        begin, end = bounds[n], bounds[n + 1]
        one = {name: x[n : n + 1] if name == "initial_state" else x[:, begin:end] for name, x in inputs.items()}
        alone = run(one, gradients=(gradients[0][:, begin:end], gradients[1][n : n + 1]))
        part = {name: x[n : n + 1] if name.endswith("_state") else x[:, begin:end] for name, x in packed.items()}
        if backend == "cpu":
            assert_identical(part, alone)
        else:  # how a GPU's blocks are cut, and so the order of sums, depends on how many sequences there are
            assert_accurate(part, alone)


@pytest.mark.parametrize("tokens", [80, 129])
def test_case_38_fixed_lengths(tokens, device):
    check(make_inputs(2, tokens, 2, 2, 128, 128, dtype=torch.bfloat16, device=device))


def test_case_39_calls_share_nothing(device):
    first, second = (make_inputs(1, 100, 1, 2, 16, 16, device=device, seed=seed) for seed in (0, 1))
    before = {n: x.clone() for n, x in first.items()}
    gradients = output_gradients(first, {})
    kept = run(first, gradients=gradients)
    copies = {n: x.clone() for n, x in kept.items()}
    run(second, gradients=gradients)
    assert_identical(kept, copies)
    assert_identical(first, before)
    packed = make_inputs(lengths=[30, 70], H=1, K=16, V=16, device=device)
    before = {n: x.clone() for n, x in packed.items()}
    run(packed, gradients=output_gradients(packed, {}))
    assert_identical(packed, before)


def test_case_40_large_heads(device):
    inputs = make_inputs(1, 1024, 6, 6, 256, 512, dtype=torch.bfloat16, device=device)
    do, dht = output_gradients(inputs, {})
    results = run(inputs, gradients=(do, dht))
    head = slice(5, 6)
    expected = oracle(heads_of(inputs, head), gradients=(do[:, :, head], dht[:, head]))
    assert_accurate(heads_of(results, head), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak size as Linux counts it")
def test_case_41_memory_does_not_grow():
    inputs = make_inputs(1, 1024, 2, 4, 64, 64, dtype=torch.bfloat16)
    gradients = output_gradients(inputs, {})
    run(inputs, gradients=gradients)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        run(inputs, gradients=gradients)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    sizes = plan(1, 1024, 2, 4, 64, 64)
    assert grown < 2 * (sizes.forward_workspace_bytes + sizes.backward_workspace_bytes) + 2**23


# API ----------------------------------------------------------------------------------------------------------------

DTYPE_SEQUENCE = """
import hashlib, json, sys, torch
sys.path.insert(0, sys.argv[1])
from support import GATE, make_inputs, output_gradients, run

def digest(dtype, gate, parameters, offsets):
    inputs = make_inputs(lengths=[40, 30], H=1, HV=2, K=16, V=16, dtype=getattr(torch, dtype), flags=GATE)
    inputs["g"] = inputs["g"].to(getattr(torch, gate))
    inputs |= {n: inputs[n].to(getattr(torch, parameters)) for n in ("A_log", "dt_bias")}
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to(getattr(torch, offsets))
    results = run(inputs, gradients=output_gradients(inputs, GATE), **GATE)
    return hashlib.sha256(b"".join(x.float().numpy().tobytes() for x in results.values())).hexdigest()

print(json.dumps([digest(*setting) for setting in json.loads(sys.argv[2])]))
"""


def test_case_43_dtypes_one_after_the_other_in_one_process(tmp_path):
    settings = [
        ["float16", "float32", "float32", "int32"],
        ["float16", "bfloat16", "float32", "int32"],
        ["bfloat16", "float32", "bfloat16", "int64"],
        ["float32", "float32", "float32", "int64"],
        ["float16", "float32", "float32", "int32"],
    ]

    def in_fresh_process(settings):
        command = [sys.executable, "-c", DTYPE_SEQUENCE, str(__file__).rsplit("/", 1)[0], json.dumps(settings)]
        # From elsewhere: what is to be tested is the installed package, not a source tree in this folder.
        result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
        return json.loads(result.stdout)

    forward, backward = in_fresh_process(settings), in_fresh_process(settings[::-1])
    assert forward == backward[::-1]
    assert forward[0] == forward[-1]
    assert len(set(forward)) == len(settings) - 1


def test_case_44_float32_inputs(device):
    inputs = make_inputs(1, 130, 2, 2, 128, 128, device=device)
    check(inputs)


def test_case_45_gate_and_beta_of_other_dtypes(device):
    inputs = make_inputs(1, 130, 2, 2, 32, 32, dtype=torch.bfloat16, device=device)
    inputs["beta"] = inputs["beta"].bfloat16()
    results = check(inputs)
    assert (results["dg"].dtype, results["dbeta"].dtype) == (torch.float32, torch.bfloat16)


def test_case_55_long_tail_of_packed_sequences(device):
    lengths = [1238, 1199, 1240, 1216, 1187, 1203, 519]
    inputs = make_inputs(lengths=lengths, H=2, K=128, V=128, dtype=torch.bfloat16, device=device)
    inputs["initial_state"] *= 0
    first = run(inputs)
    for _ in range(5):
        assert_identical(run(inputs), first)
    assert_accurate(heads_of(first, slice(1, 2)), oracle(heads_of(inputs, slice(1, 2))))


@pytest.mark.parametrize("tokens", [128, 267, 1900, 3920])
def test_case_57_backward_of_middle_lengths(tokens, device):
    check(make_inputs(1, tokens, 1, 1, 128, 128, dtype=torch.bfloat16, device=device))


def test_case_57_backward_of_a_long_sequence(device):
    inputs = make_inputs(1, 32760, 1, 1, 128, 128, dtype=torch.bfloat16, device=device, state=False)
    gradients = output_gradients(inputs, {})
    exact = {n: x.float() for n, x in inputs.items()}
    assert_accurate(run(inputs, gradients=gradients), run(exact, gradients=gradients, chunk_size=32), 1e-2)


def test_the_reference_itself_on_a_case():
    inputs = make_inputs(1, 100, 1, 2, 16, 16)
    inputs["g"][0, 37, 1] = -torch.inf
    gradients = output_gradients(inputs, {})
    expected = oracle(inputs, function=naive_gated_delta_rule, gradients=gradients)
    assert_accurate(oracle(inputs, function=reference_gated_delta_rule, gradients=gradients), expected, 1e-12)


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


def test_case_21_norm_whose_square_passes_float32(device):
    x = torch.randn(1, 4, 2, 8, device=device) * 1e25
    y, _ = stages.l2norm_fwd(x)
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(1, 4, 2, device=device))
