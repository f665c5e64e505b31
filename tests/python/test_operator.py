"""The operator, forward and backward, against the float64 recurrence: flags, lengths, sizes, dtypes, layouts."""

from types import SimpleNamespace

import pytest
import torch
from support import (
    ALL_FLAGS,
    FLAG_PAIRS,
    FLAGS,
    GATE,
    L2NORM,
    V_FIRST,
    assert_identical,
    check,
    make_inputs,
    offsets,
    output_gradients,
    parametrize,
    run,
)

from cula.gdn import (
    chunk_gated_delta_rule,
    chunk_gdn,
    prepare_chunk_indices,
    reference_gated_delta_rule,
    stages,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def test_alias():
    assert chunk_gdn is chunk_gated_delta_rule


@parametrize(dtype=DTYPES)
@parametrize(flags={"plain": {}, **FLAGS, "all": ALL_FLAGS})
def test_flags(flags, dtype, device):
    check(make_inputs(2, 130, 2, 4, 32, 48, dtype=dtype, device=device, flags=flags), **flags)


def test_negated_by_a_mark(device):
    """torch keeps the imaginary part of a conjugate as its memory was, with a mark that its sign is another."""

    def marked(x):
        y = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert y.is_neg()
        return y

    inputs = make_inputs(2, 70, 1, 2, 16, 24, device=device)
    do, dht = output_gradients(inputs, {})
    expected = run(inputs, gradients=(do, dht))
    leaves = {name: marked(x).detach().requires_grad_() for name, x in inputs.items()}
    o, state = chunk_gated_delta_rule(**leaves, output_final_state=True)
    gradients = torch.autograd.grad([o, state], list(leaves.values()), [marked(do), marked(dht)])
    actual = {"o": o, "final_state": state, **{"d" + n: x for n, x in zip(leaves, gradients, strict=True)}}
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, msg=name)
    with torch.no_grad():
        assert torch.equal(chunk_gated_delta_rule(**leaves)[0], o)
    reference, _ = reference_gated_delta_rule(**{name: marked(x) for name, x in inputs.items()})
    torch.testing.assert_close(reference.float(), o.detach(), rtol=1e-4, atol=1e-5)
    g = inputs["g"]
    assert torch.equal(stages.chunk_local_cumsum(marked(g), 64), stages.chunk_local_cumsum(g, 64))


def test_lengths_of_a_context_negated_by_a_mark():
    inputs = make_inputs(1, 70, 1, 2, 16, 24, state=False)
    lengths = torch.tensor([0, 30, 70])
    context = SimpleNamespace(cu_seqlens=torch._neg_view(-lengths), cu_seqlens_cpu=None, group=None)
    o, _ = chunk_gated_delta_rule(**inputs, cp_context=context)
    assert torch.equal(o, chunk_gated_delta_rule(**inputs, cu_seqlens=lengths)[0])


@parametrize(flags={**FLAG_PAIRS, "all": ALL_FLAGS})
def test_case_42_pairs_of_flags(flags, device):
    check(make_inputs(1, 130, 1, 2, 32, 24, device=device, flags=flags), **flags)


@parametrize(flags={"plain": {}, "all": ALL_FLAGS})
def test_float64(flags):
    check(make_inputs(2, 130, 2, 4, 20, 12, dtype=torch.float64, flags=flags), **flags)


@pytest.mark.parametrize("tokens", [0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_lengths(tokens, chunk_size, device):
    check(make_inputs(2, tokens, 1, 2, 16, 24, device=device), chunk_size=chunk_size)


@parametrize(flags={"plain": {}, "all": ALL_FLAGS})
@parametrize(lengths=[[15], [0], [0, 37, 0, 0, 64, 1, 65, 0], [1] * 20, [63, 64, 65], [130, 0]])
def test_packed_sequences(lengths, flags, device):
    check(make_inputs(lengths=lengths, H=1, HV=3, K=16, V=24, device=device, flags=flags), **flags)


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_packed_sequences_in_smaller_chunks(chunk_size, device):
    check(make_inputs(lengths=[17, 0, 100, 33], H=1, HV=2, K=16, V=16, device=device), chunk_size=chunk_size)


@parametrize(dtype=DTYPES)
def test_tokens_behind_the_last_offset_give_zeros(dtype, device):
    inputs = make_inputs(T=150, lengths=[70, 20], H=1, HV=2, K=16, V=16, dtype=dtype, device=device)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][:, 90:] = torch.nan  # never read
    gradients = output_gradients(inputs, {})
    results = run(inputs, gradients=gradients)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not results[name][:, 90:].any(), name
        results[name] = results[name][:, :90]
    shorter = {n: x[:, :90] if x.dim() >= 3 and n != "initial_state" else x for n, x in inputs.items()}
    assert_identical(results, run(shorter, gradients=(gradients[0][:, :90], gradients[1])))


@pytest.mark.parametrize(("heads", "value_heads"), [(1, 1), (1, 5), (2, 2), (3, 6), (2, 8)])
def test_head_counts(heads, value_heads, device):
    check(make_inputs(1, 70, heads, value_heads, 16, 8, device=device))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 7])
def test_scale_of_the_output(scale, device):
    results = check(make_inputs(1, 70, 1, 1, 16, 16, device=device), scale=scale)
    unscaled = run(make_inputs(1, 70, 1, 1, 16, 16, device=device))
    assert torch.equal(results["final_state"], unscaled["final_state"])  # it never touches the state


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("output_final_state", [False, True])
def test_states_in_and_out(state, output_final_state, device):
    results = check(
        make_inputs(1, 100, 1, 2, 16, 24, state=state, device=device), output_final_state=output_final_state
    )
    assert ("final_state" in results) == output_final_state
    assert ("dinitial_state" in results) == state


@parametrize(dtype=DTYPES)
@parametrize(parameters=DTYPES)
def test_every_argument_has_a_dtype_of_its_own(dtype, parameters, device):
    inputs = make_inputs(1, 70, 1, 2, 16, 16, dtype=dtype, device=device, flags=GATE)
    for name in ("g", "beta", "A_log", "dt_bias", "initial_state"):
        inputs[name] = inputs[name].to(parameters)
    results = check(inputs, max(1e-5, 1.1 * torch.finfo(parameters).eps, {torch.float32: 0}.get(dtype, 1e-2)), **GATE)
    assert results["final_state"].dtype == torch.float32
    assert {n: x.dtype for n, x in results.items() if n[0] == "d"} == {f"d{n}": x.dtype for n, x in inputs.items()}


def test_per_head_parameters_of_any_shape(device):
    inputs = make_inputs(1, 70, 2, 4, 16, 16, device=device, flags=GATE)
    gradients = output_gradients(inputs, {})
    expected = run(inputs, gradients=gradients, **GATE)
    inputs["A_log"], inputs["dt_bias"] = inputs["A_log"].view(2, 2), inputs["dt_bias"].view(4, 1, 1)
    results = run(inputs, gradients=gradients, **GATE)
    assert results["dA_log"].shape == (2, 2)
    assert results["ddt_bias"].shape == (4, 1, 1)
    results["dA_log"], results["ddt_bias"] = results["dA_log"].view(4), results["ddt_bias"].view(4)
    assert_identical(results, expected)


def test_state_layout_is_a_pure_change_of_layout(device):
    inputs = make_inputs(2, 100, 1, 2, 24, 16, device=device, flags=L2NORM)
    do, dht = output_gradients(inputs, {})
    expected = run(inputs, gradients=(do, dht), **L2NORM)
    inputs["initial_state"] = inputs["initial_state"].transpose(-1, -2)
    results = run(inputs, gradients=(do, dht.transpose(-1, -2)), **L2NORM, **V_FIRST)
    for name in ("final_state", "dinitial_state"):
        results[name] = results[name].transpose(-1, -2)
    assert_identical(results, expected)


@parametrize(dtype=[torch.int32, torch.int64])
def test_offsets_may_be_int32_or_int64_strided_or_given_twice(dtype):
    inputs = make_inputs(lengths=[30, 0, 70], H=1, K=16, V=16)
    expected = run(inputs)
    lengths = offsets([30, 0, 70], dtype)
    inputs["cu_seqlens"] = torch.stack([lengths, -lengths], dim=1)[:, 0]
    assert_identical(run(inputs), expected)
    assert_identical(run(inputs, cu_seqlens_cpu=lengths.clone()), expected)
    for chunk_size in (16, 64):
        expected = run(inputs, chunk_size=chunk_size)
        indices = prepare_chunk_indices(lengths, chunk_size)
        assert_identical(run(inputs, chunk_indices=indices, chunk_size=chunk_size), expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_the_number_of_threads(threads, dtype):
    inputs = make_inputs(lengths=[100, 1, 0, 80], H=2, HV=4, K=32, V=150, dtype=dtype, flags=ALL_FLAGS)
    gradients = output_gradients(inputs, ALL_FLAGS)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run(inputs, gradients=gradients, **ALL_FLAGS)
        torch.set_num_threads(threads)
        for _ in range(3):
            assert_identical(run(inputs, gradients=gradients, **ALL_FLAGS), expected)
    finally:
        torch.set_num_threads(before)


# Tokens by sequence: several are cut where there are few heads, by themselves or beside others, at other places.
NEIGHBOURS = [130, 0, 2100, 64, 1, 1000]


def sequence_of(results, n, begin, end):
    """What is sequence n's of the results of a packed call; not the sums over all sequences."""
    per_sequence = ("final_state", "dinitial_state")
    return {
        name: x[n : n + 1] if name in per_sequence else x[:, begin:end]
        for name, x in results.items()
        if name not in ("dA_log", "ddt_bias")
    }


@parametrize(dtype=[torch.float32, torch.bfloat16])
@parametrize(flags={"plain": {}, "all": ALL_FLAGS})
@pytest.mark.parametrize("heads", [1, 4])
def test_batch_invariance_of_packed_sequences(heads, flags, dtype, device):
    """A sequence alone, and wherever it lies among others."""
    options = {**flags, "batch_invariant": True}
    inputs = make_inputs(lengths=NEIGHBOURS, H=1, HV=heads, K=64, V=64, dtype=dtype, device=device, flags=flags)
    do, dht = output_gradients(inputs, flags)
    together = run(inputs, gradients=(do, dht), **options)
    begin = 0
    for n, length in enumerate(NEIGHBOURS):
        end = begin + length
        own = {
            name: x[n : n + 1] if name == "initial_state" else x if name in ("A_log", "dt_bias") else x[:, begin:end]
            for name, x in inputs.items()
            if name != "cu_seqlens"
        }
        alone = run(own, gradients=(do[:, begin:end], dht[n : n + 1]), **options)
        assert_identical(sequence_of(alone, 0, 0, length), sequence_of(together, n, begin, end))
        begin = end


@parametrize(dtype=[torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 130, 2100])
def test_batch_invariance_of_rows(tokens, dtype, device):
    inputs = make_inputs(3, tokens, 1, 2, 64, 64, dtype=dtype, device=device)
    do, dht = output_gradients(inputs, {})
    together = run(inputs, gradients=(do, dht), batch_invariant=True)
    for b in range(3):
        own = {name: x[b : b + 1] for name, x in inputs.items()}
        alone = run(own, gradients=(do[b : b + 1], dht[b : b + 1]), batch_invariant=True)
        assert_identical(alone, {name: x[b : b + 1] for name, x in together.items()})


@parametrize(flags={"plain": {}, "all": ALL_FLAGS})
def test_batch_invariant_results_are_accurate(flags, device):
    inputs = make_inputs(lengths=[700, 0, 90], H=1, HV=2, K=64, V=64, dtype=torch.bfloat16, device=device, flags=flags)
    check(inputs, **flags, batch_invariant=True)


def test_backend_may_be_named():
    inputs = make_inputs(1, 70, 1, 1, 16, 16)
    assert_identical(run(inputs, backend="cpu"), run(inputs))


def test_deprecated_name_of_state_v_first():
    inputs = make_inputs(1, 20, 1, 1, 8, 16, flags=V_FIRST)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        results = run(inputs, transpose_state_layout=True)
    assert_identical(results, run(inputs, **V_FIRST))
