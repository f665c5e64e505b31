"""Random problems against the float64 recurrence, and laws that hold for any problem."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import FLAGS, assert_accurate, assert_identical, make_inputs, oracle, output_gradients, run

from cula.gdn import fused_recurrent_gated_delta_rule

# Deterministic, so that a failure in CI is a failure here.
example_limits = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def problems(draw):
    """Arguments of make_inputs, and options."""
    names = draw(st.sets(st.sampled_from(sorted(FLAGS))))
    flags = {flag: True for name in names for flag in FLAGS[name]}
    heads = draw(st.integers(1, 3))
    sizes = {
        "H": heads,
        "HV": heads * draw(st.integers(1, 4)),
        # A short vector's direction is nearly all there is to it: what l2norm leaves of its gradient cancels.
        "K": draw(st.integers(8 if "l2norm" in names else 1, 40)),
        "V": draw(st.integers(1, 40)),
        "seed": draw(st.integers(0, 2**16)),
        "state": draw(st.booleans()),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])),
    }
    if draw(st.booleans()):
        sizes["lengths"] = draw(st.lists(st.integers(0, 90), min_size=1, max_size=5))
    else:
        sizes |= {"B": draw(st.integers(1, 3)), "T": draw(st.integers(0, 150))}
    options = {
        "chunk_size": draw(st.sampled_from([16, 32, 64])),
        "scale": draw(st.sampled_from([None, 0.0, 0.3, -1.5])),
        "output_final_state": draw(st.booleans()),
    }
    return sizes, flags, options, draw(st.sampled_from(["ordinary", "strong", "resets"]))


def inputs_of(problem):
    sizes, flags, _, gate = problem
    inputs = make_inputs(**sizes, flags=flags)
    if not flags.get("use_gate_in_kernel"):
        if gate == "strong":
            inputs["g"] *= 30
        elif gate == "resets":
            random = torch.Generator().manual_seed(sizes["seed"])
            inputs["g"][torch.rand(inputs["g"].shape, generator=random) < 0.05] = -torch.inf
    return inputs


@given(problems())
@example_limits
def test_operator_and_gradients_are_those_of_the_recurrence(problem):
    sizes, flags, options, _ = problem
    inputs = inputs_of(problem)
    gradients = output_gradients(inputs, flags)
    results = run(inputs, gradients=gradients, **options, **flags)
    expected = oracle(inputs, gradients=gradients, **options, **flags)
    # The gradients of the gate's parameters are sums over all tokens, which may cancel to any extent.
    factors = {"dA_log": 200, "ddt_bias": 200}
    if sizes["dtype"] != torch.bfloat16:
        factors["dg"] = 20
    assert_accurate(results, expected, factors=factors)


@given(problems())
@example_limits
def test_decoding_is_the_recurrence(problem):
    _, flags, options, _ = problem
    inputs = inputs_of(problem)
    options = {n: x for n, x in options.items() if n != "chunk_size"}
    found = run(inputs, fused_recurrent_gated_delta_rule, **options, **flags)
    assert_accurate(found, oracle(inputs, **options, **flags))


@given(problems())
@example_limits
def test_gradients_are_wanted_or_not_with_the_same_outputs(problem):
    _, flags, options, _ = problem
    inputs = inputs_of(problem)
    with_gradients = run(inputs, gradients=output_gradients(inputs, flags), **options, **flags)
    alone = run(inputs, **options, **flags)
    assert_identical({n: with_gradients[n] for n in alone}, alone)


@given(problems(), st.permutations(range(4)))
@example_limits
def test_sequences_do_not_know_each_other(problem, order):
    sizes, flags, options, _ = problem
    lengths = [*sizes.get("lengths", []), 7, 0, 65, 20][:4]
    problem = ({**{n: x for n, x in sizes.items() if n not in ("B", "T")}, "lengths": lengths}, *problem[1:])
    inputs = inputs_of(problem)
    bounds = inputs["cu_seqlens"].tolist()
    tokens = torch.cat([torch.arange(bounds[n], bounds[n + 1]) for n in order])
    gradients = do, dht = output_gradients(inputs, flags)
    moved = {
        n: x[:, tokens] if n in ("q", "k", "v", "g", "beta") else x[list(order)] if n == "initial_state" else x
        for n, x in inputs.items()
    }
    moved["cu_seqlens"] = torch.tensor([0, *(lengths[n] for n in order)]).cumsum(0)
    options = {**options, **flags}
    expected = run(inputs, gradients=gradients, **options)
    found = run(moved, gradients=(do[:, tokens], dht[list(order)]), **options)
    for name in ("dA_log", "ddt_bias"):  # sums over the sequences, in another order
        expected.pop(name, None)
        found.pop(name, None)
    assert_identical(found, {n: x[list(order)] if n.endswith("_state") else x[:, tokens] for n, x in expected.items()})
