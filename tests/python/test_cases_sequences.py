"""Cases 19, 24, 25, 28, 31, 36, 38 to 41, 55 and 57: packed sequences, sizes, and calls one after the other.

For the others see test_cases_gates.
"""

from __future__ import annotations

import resource
import sys

import pytest
import torch
from support import (
    FLAGS,
    TOLERANCES,
    assert_accurate,
    assert_identical,
    check,
    heads_of,
    make_inputs,
    offsets,
    oracle,
    output_gradients,
    parametrize,
    relative_error,
    run,
)

from cula.gdn import plan


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


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [*((d, d) for d in (8, 16, 60, 64, 96, 100, 128, 192, 256)), (64, 128), (128, 256), (192, 96), (1, 1), (3, 7)],
)
@parametrize(dtype=[torch.float32, torch.bfloat16])
def test_case_36_head_sizes(key_dim, value_dim, dtype, device):
    check(make_inputs(1, 75, 1, 2, key_dim, value_dim, dtype=dtype, device=device))


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
