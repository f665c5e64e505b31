"""The token recurrence for decoding."""

import pytest
import torch
from support import (
    ALL_FLAGS,
    FLAGS,
    GATE,
    SIGMOID,
    TOLERANCES,
    V_FIRST,
    assert_accurate,
    assert_identical,
    make_inputs,
    oracle,
    parametrize,
    relative_error,
    run,
)

from cula.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, fused_recurrent_gdn

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def decode(inputs, **options):
    return run(inputs, fused_recurrent_gated_delta_rule, **options)


def check(inputs, **options):
    results = decode(inputs, **options)
    expected = oracle(inputs, **options)
    assert_accurate(results, expected)
    # The state never passes through a 16-bit number.
    state_tolerance = TOLERANCES[torch.float64 if inputs["q"].dtype == torch.float64 else torch.float32]
    assert relative_error(results["final_state"], expected["final_state"]) <= state_tolerance
    return results


def test_alias():
    assert fused_recurrent_gdn is fused_recurrent_gated_delta_rule


@parametrize(dtype=DTYPES)
@parametrize(flags={"plain": {}, **FLAGS, "all": ALL_FLAGS})
def test_flags(flags, dtype, device):
    check(make_inputs(2, 9, 2, 4, 60, 100, dtype=dtype, device=device, flags=flags), **flags)


@pytest.mark.parametrize("tokens", [0, 1, 2, 64, 130])
def test_lengths(tokens, device):
    check(make_inputs(3, tokens, 1, 2, 32, 16, device=device))


@parametrize(lengths=[[1, 0, 5, 1], [1] * 30, [0]])
def test_packed_sequences(lengths, device):
    check(make_inputs(lengths=lengths, H=2, HV=4, K=16, V=24, device=device))


@pytest.mark.parametrize("state", [False, True])
def test_without_gate_beta_or_state(state, device):
    inputs = make_inputs(2, 7, 1, 3, 16, 8, device=device, state=state, g=None, beta=None)
    results = decode(inputs)
    ones = torch.ones(2, 7, 3, device=device)
    assert_identical(results, decode({**inputs, "beta": ones}))
    assert_identical(results, decode({**inputs, "beta": ones, "g": torch.zeros_like(ones)}))
    assert_accurate(results, oracle({**inputs, "beta": ones}))


@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_06_prefill_then_steps_is_one_run(dtype, device):
    inputs = make_inputs(2, 5, 2, 4, 64, 64, dtype=dtype, device=device)
    whole = run(inputs)
    first = run({n: x[:, :4] if n != "initial_state" else x for n, x in inputs.items()})
    rest = {n: x[:, 4:] for n, x in inputs.items() if n != "initial_state"}
    rest["initial_state"] = first["final_state"]
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3
    for step in (run(rest), decode(rest)):
        assert relative_error(step["o"], whole["o"][:, 4:]) <= tolerance
        assert relative_error(step["final_state"], whole["final_state"]) <= tolerance


def test_hundred_steps_are_one_run(device):
    inputs = make_inputs(1, 100, 1, 2, 32, 32, device=device, flags=ALL_FLAGS)
    state, outputs = inputs["initial_state"], []
    for t in range(100):
        token = {n: x[:, t : t + 1] if n in ("q", "k", "v", "g", "beta") else x for n, x in inputs.items()}
        results = decode({**token, "initial_state": state}, **ALL_FLAGS)
        outputs.append(results["o"])
        state = results["final_state"]
    whole = decode(inputs, **ALL_FLAGS)
    assert torch.equal(torch.cat(outputs, dim=1), whole["o"])
    assert torch.equal(state, whole["final_state"])


def test_strided_inputs(device):
    inputs = make_inputs(2, 6, 2, 2, 16, 16, device=device)
    expected = decode(inputs)
    buffer = torch.stack([inputs[n] for n in "qkv"], dim=2)
    inputs |= {"q": buffer[:, :, 0], "k": buffer[:, :, 1], "v": buffer[:, :, 2]}
    inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_identical(decode(inputs), expected)


def test_inputs_are_not_modified(device):
    inputs = make_inputs(2, 6, 2, 2, 16, 16, device=device)
    before = {n: x.clone() for n, x in inputs.items()}
    decode(inputs)
    assert_identical(inputs, before)


def test_state_is_returned_only_if_wanted(device):
    inputs = make_inputs(1, 3, 1, 1, 8, 8, device=device)
    assert fused_recurrent_gated_delta_rule(**inputs)[1] is None


def test_backward_is_not_implemented(device):
    inputs = make_inputs(1, 3, 1, 1, 8, 8, device=device)
    inputs["q"].requires_grad_()
    o, _ = fused_recurrent_gated_delta_rule(**inputs)
    with pytest.raises(NotImplementedError, match="fused_recurrent_gated_delta_rule: has no backward"):
        o.sum().backward()


@parametrize(name=["gk", "gv"])
def test_channel_gates_are_refused_by_name(name):
    inputs = make_inputs(1, 3, 1, 1, 8, 8)
    with pytest.raises(ValueError, match=f"^{name}: expected None"):
        fused_recurrent_gated_delta_rule(**inputs, **{name: torch.zeros(1, 3, 1, 8)})


def test_missing_parts_are_named():
    inputs = make_inputs(1, 3, 1, 1, 8, 8)
    with pytest.raises(ValueError, match=r"^A_log: .*use_gate_in_kernel"):
        fused_recurrent_gated_delta_rule(**inputs, **GATE)
    with pytest.raises(ValueError, match=r"^g: .*use_gate_in_kernel"):
        fused_recurrent_gated_delta_rule(**{**inputs, "g": None}, **GATE, A_log=torch.zeros(1))
    with pytest.raises(ValueError, match=r"^beta: .*logits"):
        fused_recurrent_gated_delta_rule(**{**inputs, "beta": None}, **SIGMOID)
    with pytest.raises(ValueError, match=r"^cu_seqlens_cpu: "):
        fused_recurrent_gated_delta_rule(**inputs, cu_seqlens_cpu=torch.tensor([0, 3]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_size'"):
        fused_recurrent_gated_delta_rule(**inputs, chunk_size=64)
    with pytest.raises(DeprecationWarning, match="head_first"):
        fused_recurrent_gated_delta_rule(**inputs, head_first=False)


def test_deprecated_name_of_state_v_first():
    inputs = make_inputs(1, 4, 1, 1, 8, 16, flags=V_FIRST)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        results = decode(inputs, transpose_state_layout=True)
    assert_identical(results, decode(inputs, **V_FIRST))
    with pytest.raises(ValueError, match="transpose_state_layout"):
        decode(inputs, transpose_state_layout=True, **V_FIRST)


@parametrize(dtype=DTYPES)
@parametrize(lengths=[[1, 1, 1], [3, 0, 70, 1]])
def test_batch_invariance(lengths, dtype, device):
    inputs = make_inputs(lengths=lengths, H=1, HV=2, K=96, V=40, dtype=dtype, device=device, flags=ALL_FLAGS)
    together = decode(inputs, **ALL_FLAGS)
    begin = 0
    for n, length in enumerate(lengths):
        tokens = slice(begin, begin + length)
        own = {name: x[:, tokens] for name, x in inputs.items() if x.dim() > 2}
        own |= {name: inputs[name] for name in ("A_log", "dt_bias")}
        own["initial_state"] = inputs["initial_state"][n : n + 1]
        expected = {"o": together["o"][:, tokens], "final_state": together["final_state"][n : n + 1]}
        assert_identical(decode(own, **ALL_FLAGS), expected)
        begin += length


def test_autocast_is_that_of_the_chunked_operator():
    inputs = make_inputs(1, 4, 1, 1, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = fused_recurrent_gated_delta_rule(**inputs, output_final_state=True)
        chunked, _ = chunk_gated_delta_rule(**inputs)
    assert o.dtype == chunked.dtype == torch.bfloat16
    assert state.dtype == torch.float32
