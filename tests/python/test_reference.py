"""The float64 reference against the recurrence in plain torch and autograd, and against finite differences."""

import pytest
import torch
from naive import naive_gated_delta_rule
from support import (
    ALL_FLAGS,
    FLAG_PAIRS,
    FLAGS,
    GATE,
    assert_accurate,
    make_inputs,
    oracle,
    output_gradients,
    parametrize,
    run,
)

from cula.gdn import reference_gated_delta_rule


def compare(inputs, **options):
    gradients = output_gradients(inputs, options)
    expected = oracle(inputs, function=naive_gated_delta_rule, gradients=gradients, **options)
    assert_accurate(oracle(inputs, gradients=gradients, **options), expected, 1e-12)


@parametrize(flags={"plain": {}, **FLAGS, **FLAG_PAIRS, "all": ALL_FLAGS})
def test_flags(flags):
    compare(make_inputs(2, 13, 2, 4, 5, 3, flags=flags), **flags)


@parametrize(lengths=[[7, 0, 1, 11], [0, 0], [0], [16, 9]])
@parametrize(flags={"plain": {}, "all": ALL_FLAGS})
def test_packed_sequences(lengths, flags):
    compare(make_inputs(1, 25, 2, 6, 4, 6, lengths=lengths, flags=flags), **flags)


@pytest.mark.parametrize("tokens", [0, 1, 2, 70])
def test_lengths(tokens):
    compare(make_inputs(2, tokens, 1, 3, 6, 4))


def test_without_gate_without_state_without_bias():
    compare(make_inputs(1, 9, 1, 2, 4, 4, state=False, g=None), output_final_state=False)
    inputs = make_inputs(1, 9, 1, 2, 4, 4, flags=GATE)
    del inputs["dt_bias"]
    compare(inputs, **GATE)


def test_scale_and_reset():
    inputs = make_inputs(1, 20, 1, 2, 4, 4)
    inputs["g"][0, 7, 0] = -torch.inf
    compare(inputs, scale=0.3)


def test_only_one_of_the_outputs_has_a_gradient():
    inputs = make_inputs(1, 9, 1, 2, 4, 4)
    do, dht = output_gradients(inputs, {})
    for gradients in ((do, None), (None, dht)):
        expected = oracle(inputs, function=naive_gated_delta_rule, gradients=gradients)
        assert_accurate(oracle(inputs, gradients=gradients), expected, 1e-12)


def test_finite_differences():
    inputs = make_inputs(1, 6, 1, 2, 3, 2, dtype=torch.float64, flags=ALL_FLAGS)
    leaves = [x.requires_grad_() for x in inputs.values()]
    function = lambda *xs: reference_gated_delta_rule(  # noqa: E731
        **dict(zip(inputs, xs, strict=True)), output_final_state=True, **ALL_FLAGS
    )
    assert torch.autograd.gradcheck(function, leaves)


@parametrize(dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_results_are_float64_and_gradients_have_the_dtype_of_their_input(dtype):
    inputs = make_inputs(1, 9, 1, 2, 4, 4, dtype=dtype, flags=GATE)
    results = run(inputs, reference_gated_delta_rule, gradients=output_gradients(inputs, {}), **GATE)
    assert results["o"].dtype == results["final_state"].dtype == torch.float64
    assert {n: x.dtype for n, x in results.items() if n.startswith("d")} == {
        f"d{n}": x.dtype for n, x in inputs.items()
    }


def test_its_gradient_can_not_be_differentiated():
    inputs = make_inputs(1, 3, 1, 1, 2, 2)
    q = inputs.pop("q").requires_grad_()
    o, _ = reference_gated_delta_rule(q, **inputs)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()
