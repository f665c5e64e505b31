"""The operators under torch.library, torch.compile and torch.export."""

import pytest
import torch
from support import ALL_FLAGS, GATE, L2NORM, assert_identical, make_inputs, offsets, output_gradients, parametrize, run
from torch._dynamo.testing import CompileCounterWithBackend

from cula.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

ops = torch.ops.cula_gdn


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operator_arguments(inputs, flags):
    """Inputs and options in the order of the operators' schemas."""
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
    options = [
        name in flags
        for name in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
                     "state_v_first", "batch_invariant")
    ]  # fmt: skip
    return [inputs.get(name) for name in names] + [None], [None, 64, *options, "auto"]


SETTINGS = {
    "plain": ({}, None),
    "gate": (GATE, None),
    "all": (ALL_FLAGS, None),
    "packed": (L2NORM, [30, 0, 41]),
    "batch_invariant": ({"batch_invariant": True}, [30, 0, 41]),
}


@parametrize(setting=SETTINGS)
@pytest.mark.parametrize("saves", [False, True])
def test_opcheck_forward(setting, saves, device):
    flags, lengths = setting
    tensors = make_inputs(1, 71, 1, 2, 16, 8, device=device, flags=flags, lengths=lengths)
    inputs, options = operator_arguments(tensors, flags)
    inputs = [x.requires_grad_(saves) if x is not None and x.is_floating_point() else x for x in inputs]
    torch.library.opcheck(ops.chunk_forward.default, (*inputs, None, True, saves, *options))
    torch.library.opcheck(ops.chunk_forward.default, (*inputs, None, False, saves, *options))


@parametrize(setting=SETTINGS)
def test_opcheck_backward(setting, device):
    flags, lengths = setting
    tensors = make_inputs(1, 71, 1, 2, 16, 8, device=device, flags=flags, lengths=lengths)
    inputs, options = operator_arguments(tensors, flags)
    _, _, *saved = ops.chunk_forward(*inputs, None, False, True, *options)
    if saved[1] is not None:
        inputs[:2] = None, None
    do, dht = output_gradients(tensors, flags)
    some = [True, False, True, False, True, "A_log" in tensors, False, True]
    for gradients, wanted in (((do, dht), [x is not None for x in [0, 0, *inputs[2:8]]]), ((None, dht), some)):
        torch.library.opcheck(ops.chunk_backward.default, (*gradients, *inputs, *saved, wanted, *options))


@parametrize(setting=SETTINGS)
def test_opcheck_recurrent(setting, device):
    flags, lengths = setting
    inputs, options = operator_arguments(
        make_inputs(1, 71, 1, 2, 16, 8, device=device, flags=flags, lengths=lengths), flags
    )
    for output_final_state in (False, True):
        torch.library.opcheck(ops.recurrent_forward.default, (*inputs, output_final_state, *options))


class Block(torch.nn.Module):
    """The operator between ordinary torch code."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.tensor([0.1, 0.3]))

    def forward(self, q, k, v, g, beta, initial_state=None, cu_seqlens=None):
        o, final_state = chunk_gated_delta_rule(
            q.sin(), k.cos(), v, g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=self.A_log,
        )  # fmt: skip
        return o * 2 + 1, final_state


def check_compiled(compiled, block, inputs):
    gradients = output_gradients(inputs, {})
    expected = run(inputs, lambda output_final_state, **x: block(**x), gradients=gradients)
    found = run(inputs, lambda output_final_state, **x: compiled(**x), gradients=gradients)
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert torch.allclose(found[name], x, rtol=1e-5, atol=1e-6), name


@parametrize(compiler=["aot_eager", "inductor"])
def test_case_48_changing_lengths(compiler, device):
    block = Block().to(device)
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for tokens in (64, 65, 130, 500):
        check_compiled(compiled, block, make_inputs(2, tokens, 1, 2, 16, 8, device=device))
    assert counter.frame_count <= 2


def test_case_48_changing_packed_lengths(device):
    block = Block().to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for lengths in ([30, 40], [64, 1, 0, 65], [10] * 7, [99, 3]):
        check_compiled(compiled, block, make_inputs(lengths=lengths, H=1, HV=2, K=16, V=8, device=device))
    assert counter.frame_count <= 2


def test_case_48_fixed_and_packed_lengths_with_dynamic_shapes(device):
    block = Block().to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (64, 65, 130, 500):
        check_compiled(compiled, block, make_inputs(2, tokens, 1, 2, 16, 8, device=device))
    # As many sequences as heads would make torch take the two numbers for one (its duck sizing).
    for lengths in ([30, 40, 7], [64, 1, 0, 65, 9]):
        check_compiled(compiled, block, make_inputs(lengths=lengths, H=1, HV=2, K=16, V=8, device=device))
    assert counter.frame_count <= 2


def test_compiled_inference_and_decoding(device):
    inputs = make_inputs(2, 20, 1, 2, 16, 8, device=device)
    with torch.no_grad():
        for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
            compiled = torch.compile(
                lambda function=function, **x: function(**x, output_final_state=True),
                fullgraph=True,
                backend="aot_eager",
            )
            o, final_state = compiled(**inputs)
            assert_identical({"o": o, "final_state": final_state}, run(inputs, function))


def test_compiled_under_autocast():
    inputs = make_inputs(2, 70, 1, 2, 16, 8)
    step = lambda **x: chunk_gated_delta_rule(**x, output_final_state=True)  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    gradients = output_gradients(inputs, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(inputs, lambda output_final_state, **x: compiled(**x), gradients=gradients)
        assert_identical(found, run(inputs, gradients=gradients))
    assert found["o"].dtype == torch.bfloat16


def test_an_error_in_compiled_code_is_the_same_error():
    inputs = make_inputs(1, 20, 1, 2, 16, 8)
    inputs["beta"] = inputs["beta"][:, :19]
    compiled = torch.compile(lambda **x: chunk_gated_delta_rule(**x)[0], fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"^beta: expected shape"):
        compiled(**inputs)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_length(strict):
    block = Block().eval()
    example = make_inputs(2, 70, 1, 2, 16, 8)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    by_tokens = {n: {1: tokens} if n != "initial_state" else None for n in example}
    with torch.no_grad():
        program = torch.export.export(block, (), kwargs=example, dynamic_shapes=by_tokens, strict=strict)
        calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
        assert calls.count(ops.chunk_forward.default) == 1
        for length in (2, 130):
            inputs = make_inputs(2, length, 1, 2, 16, 8)
            assert all(map(torch.equal, program.module()(**inputs), block(**inputs)))


def test_fake_tensors_have_the_right_sizes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        q = mode.from_tensor(torch.empty(1, 50, 2, 16, dtype=torch.bfloat16))
        v = mode.from_tensor(torch.empty(1, 50, 4, 8, dtype=torch.bfloat16)).requires_grad_()
        g = mode.from_tensor(torch.empty(1, 50, 4))
        cu_seqlens = mode.from_tensor(offsets([20, 0, 30]))
        o, final_state = chunk_gated_delta_rule(
            q, q, v, g, g, output_final_state=True, state_v_first=True, cu_seqlens=cu_seqlens
        )
    assert (o.shape, o.dtype) == ((1, 50, 4, 8), torch.bfloat16)
    assert (final_state.shape, final_state.dtype) == ((3, 4, 8, 16), torch.float32)
