"""Cases 5, 9, 10, 18 and 34: initial and final states, and runs that go on from one.

For the others see test_cases_gates.
"""

from __future__ import annotations

import pytest
import torch
from support import (
    V_FIRST,
    assert_accurate,
    assert_identical,
    make_inputs,
    oracle,
    output_gradients,
    parametrize,
    relative_error,
    run,
)

from cula.gdn import chunk_gated_delta_rule


@pytest.mark.parametrize("tokens", [63, 500, 1000])
def test_case_05_final_state_of_a_partial_chunk(tokens, device):
    inputs = make_inputs(1, tokens, 2, 2, 128, 128, device=device)
    assert_accurate(run(inputs), oracle(inputs))


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


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 128), (64, 64)])
@pytest.mark.parametrize("state", [False, True])
def test_case_34_state_layouts(key_dim, value_dim, state, device):
    inputs = make_inputs(1, 100, 1, 2, key_dim, value_dim, device=device, state=state)
    do, dht = output_gradients(inputs, {})
    expected = run(inputs, gradients=(do, dht))
    turned = {n: x.transpose(-1, -2).contiguous() if n == "initial_state" else x for n, x in inputs.items()}
    results = run(turned, gradients=(do, dht.transpose(-1, -2).contiguous()), **V_FIRST)
    assert_identical({n: x.transpose(-1, -2) if n.endswith("_state") else x for n, x in results.items()}, expected)
