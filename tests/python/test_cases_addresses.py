"""Cases 29, 30, 35 and 37: strides, alignment, and tensors of more than 2^31 elements.

For the others see test_cases_gates.
"""

from __future__ import annotations

import pytest
import torch
from support import (
    assert_accurate,
    assert_identical,
    make_inputs,
    oracle,
    output_gradients,
    parametrize,
    run,
)


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
