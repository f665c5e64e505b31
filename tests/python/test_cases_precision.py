"""Cases 7, 8, 11, 15, 16, 20, 21 and 43 to 45: types of operands, precision, normalisation and chunk sizes.

For the others see test_cases_gates.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support import (
    DTYPES,
    L2NORM,
    SIGMOID,
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

from cula.gdn import stages


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


def test_case_11_keys_without_unit_norm(device):
    inputs = make_inputs(1, 64, 2, 2, 64, 64, device=device, state=False)
    alone = run(heads_of(inputs, slice(1, 2)))
    inputs["k"][:, :, 0] = torch.randn(1, 64, 64, device=device)
    inputs["beta"][:, :, 0], inputs["g"][:, :, 0] = 1, 0
    assert_identical(heads_of(run(inputs), slice(1, 2)), alone)
    inputs = make_inputs(1, 64, 1, 1, 64, 64, device=device)
    inputs["k"] *= 1.5**0.5
    check(inputs)


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


def test_case_21_norm_whose_square_passes_float32(device):
    x = torch.randn(1, 4, 2, 8, device=device) * 1e25
    y, _ = stages.l2norm_fwd(x)
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(1, 4, 2, device=device))


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
