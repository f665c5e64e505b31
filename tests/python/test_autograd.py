"""The operator inside torch's autograd: gradients, saved tensors, checkpointing, autocast, transforms, processes."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading

import pytest
import torch
from support import (
    ALL_FLAGS,
    FLAGS,
    GATE,
    L2NORM,
    NEGATIVE,
    V_FIRST,
    assert_accurate,
    assert_identical,
    make_inputs,
    oracle,
    output_gradients,
    parametrize,
    run,
)
from torch.utils.checkpoint import checkpoint
from workers import report_training_step, training_step

import cula.gdn
from cula.gdn import chunk_gated_delta_rule


def leaves_of(inputs, *names):
    """The inputs with those of these names (all if none) requiring a gradient."""
    wanted = names or [n for n, x in inputs.items() if x.is_floating_point()]
    return {n: x.detach().requires_grad_(n in wanted) for n, x in inputs.items()}


def loss_of(o, final_state):
    return o.float().square().sum() + (0 if final_state is None else final_state.sin().sum())


# Gradients ----------------------------------------------------------------------------------------------------------


@parametrize(flags={"plain": {}, **FLAGS, "all": ALL_FLAGS})
def test_gradcheck(flags):
    inputs = leaves_of(make_inputs(1, 20, 1, 2, 4, 3, dtype=torch.float64, flags=flags))
    function = lambda *xs: chunk_gated_delta_rule(  # noqa: E731
        **dict(zip(inputs, xs, strict=True)), output_final_state=True, chunk_size=16, **flags
    )
    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode=True)


def test_gradcheck_packed():
    inputs = leaves_of(make_inputs(lengths=[17, 0, 5], H=1, HV=2, K=3, V=4, dtype=torch.float64))
    cu_seqlens = inputs.pop("cu_seqlens")
    function = lambda *xs: chunk_gated_delta_rule(  # noqa: E731
        **dict(zip(inputs, xs, strict=True)), output_final_state=True, chunk_size=16, cu_seqlens=cu_seqlens
    )
    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode=True)


@parametrize(name=["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
@parametrize(flags={"gate": GATE, "all": ALL_FLAGS})
def test_one_gradient_at_a_time_is_the_same(name, flags, device):
    inputs = make_inputs(1, 70, 1, 2, 16, 8, device=device, flags=flags)
    do, dht = output_gradients(inputs, flags)
    expected = run(inputs, gradients=(do, dht), **flags)
    leaves = leaves_of(inputs, name)
    outputs = chunk_gated_delta_rule(**leaves, output_final_state=True, **flags)
    torch.autograd.backward(outputs, (do, dht))
    assert torch.equal(leaves[name].grad, expected[f"d{name}"])
    assert all(x.grad is None for n, x in leaves.items() if n != name)


def test_only_one_output_used(device):
    inputs = make_inputs(1, 70, 1, 2, 16, 8, device=device)
    do, dht = output_gradients(inputs, {})
    zero_do, zero_dht = torch.zeros_like(do), torch.zeros_like(dht)
    assert_identical(run(inputs, gradients=(do, None)), run(inputs, gradients=(do, zero_dht)))
    assert_identical(run(inputs, gradients=(None, dht)), run(inputs, gradients=(zero_do, dht)))


def test_unused_outputs_cost_nothing_and_break_nothing(device):
    inputs = leaves_of(make_inputs(1, 9, 1, 1, 4, 4, device=device))
    o, final_state = chunk_gated_delta_rule(**inputs, output_final_state=True)
    (inputs["q"].sum() + 0 * o.detach().sum()).backward()
    assert torch.equal(inputs["q"].grad, torch.ones_like(inputs["q"]))
    assert final_state.requires_grad


def test_two_uses_of_one_graph(device):
    inputs = leaves_of(make_inputs(1, 70, 1, 2, 16, 8, device=device, flags=L2NORM))
    loss = loss_of(*chunk_gated_delta_rule(**inputs, output_final_state=True, **L2NORM))
    first = torch.autograd.grad(loss, inputs.values(), retain_graph=True)
    second = torch.autograd.grad(loss, inputs.values())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs.values())


def test_gradients_accumulate_over_two_calls(device):
    inputs = leaves_of(make_inputs(1, 70, 1, 2, 16, 8, device=device))
    for _ in range(2):
        loss_of(*chunk_gated_delta_rule(**inputs)).backward()
    once = leaves_of(inputs)
    loss_of(*chunk_gated_delta_rule(**once)).backward()
    assert all(torch.equal(inputs[n].grad, 2 * once[n].grad) for n in inputs if n != "initial_state")


def test_gradient_of_a_gradient_is_refused(device):
    inputs = leaves_of(make_inputs(1, 9, 1, 1, 4, 4, device=device))
    (dq,) = torch.autograd.grad(loss_of(*chunk_gated_delta_rule(**inputs)), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="can not be differentiated again"):
        torch.autograd.grad(dq.sum(), inputs["q"])


def test_an_input_changed_before_backward_is_noticed(device):
    inputs = leaves_of(make_inputs(1, 9, 1, 1, 4, 4, device=device), "q")
    loss = loss_of(*chunk_gated_delta_rule(**inputs))
    inputs["v"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_operator_called_without_saving_has_no_gradient():
    inputs = make_inputs(1, 9, 1, 1, 4, 4)
    arguments = [inputs[n] for n in ("q", "k", "v", "g", "beta")]
    arguments[0].requires_grad_()
    o, *_ = torch.ops.cula_gdn.chunk_forward(
        *arguments, None, None, None, None, None, None, False, False, None, 64, *(False,) * 6, "auto"
    )
    with pytest.raises(RuntimeError, match="save_for_backward=False"):
        o.sum().backward()


# What is saved ------------------------------------------------------------------------------------------------------


def saved_storages(inputs, **options) -> dict[int, tuple[int, torch.Tensor]]:
    """Bytes and tensor of everything saved for backward, by address."""
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(x):
        saved[x.data_ptr()] = (x.numel() * x.element_size(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        chunk_gated_delta_rule(**leaves_of(inputs), **options)
    return saved


@parametrize(dtype=[torch.bfloat16, torch.float32])
@parametrize(flags={"plain": {}, "gate": GATE, "l2norm": L2NORM, "all": ALL_FLAGS})
def test_saved_are_the_inputs_and_A_alone(flags, dtype):
    B, T, H, HV, K, V, C = 2, 100, 2, 4, 32, 16, 64
    inputs = make_inputs(B, T, H, HV, K, V, dtype=dtype, flags=flags)
    saved = saved_storages(inputs, output_final_state=True, **flags)
    own = {x.data_ptr() for x in inputs.values()}
    others = sorted(bytes for address, (bytes, _) in saved.items() if address not in own)
    size, tokens = dtype.itemsize, B * T
    expected = [tokens * HV * C * size]  # A
    kept = set(inputs)
    if "use_qk_l2norm_in_kernel" in flags:  # normalised q and k, and rstd, in place of q and k
        expected += 2 * [tokens * H * K * size] + 2 * [tokens * H * 4]
        kept -= {"q", "k"}
    assert others == sorted(expected)
    assert {n for n, x in inputs.items() if x.data_ptr() in saved} == kept


@parametrize(flags={"plain": {}, "gate": GATE, "negative": NEGATIVE, "all": {**L2NORM, **GATE, **NEGATIVE}})
def test_saved_bytes_are_at_most_those_of_fla(flags):
    T, H, HV, K, V, C = 128, 2, 4, 128, 128, 64
    inputs = make_inputs(1, T, H, HV, K, V, dtype=torch.bfloat16, flags=flags, state=False)
    inputs |= {n: inputs[n].bfloat16() for n in ("g", "beta")}
    per_token = 4 * H * K + 2 * HV * V + 2 * HV * C + 4 * HV + 2 * HV
    per_token += 8 * H * ("use_qk_l2norm_in_kernel" in flags)
    per_token += 4 * HV * ("use_beta_sigmoid_in_kernel" in flags)
    per_token += 2 * HV * ("use_gate_in_kernel" in flags)
    parameters = 2 * 4 * HV
    total = sum(bytes for bytes, _ in saved_storages(inputs, **flags).values())
    assert total <= T * per_token + parameters


def test_nothing_is_saved_when_no_gradient_is_needed():
    inputs = make_inputs(1, 70, 1, 2, 16, 8, flags=L2NORM)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o, _ = chunk_gated_delta_rule(**inputs, **L2NORM)
        with torch.no_grad():
            chunk_gated_delta_rule(**leaves_of(inputs), **L2NORM)
    assert not saved
    assert not o.requires_grad


def test_A_is_not_even_made_when_no_gradient_is_needed(monkeypatch):
    from cula.gdn import _native

    results = []
    forward = _native.forward
    monkeypatch.setattr(_native, "forward", lambda *a: (results.append(a[8:15]), forward(*a)))
    inputs = make_inputs(1, 70, 1, 2, 16, 8, flags=L2NORM)
    chunk_gated_delta_rule(**inputs, **L2NORM)
    with torch.no_grad():
        chunk_gated_delta_rule(**leaves_of(inputs), **L2NORM)
    with torch.inference_mode():
        chunk_gated_delta_rule(**inputs, **L2NORM)
    assert [[x is not None for x in r] for r in results] == 3 * [[True, *6 * [False]]]
    chunk_gated_delta_rule(**leaves_of(inputs, "beta"), **L2NORM)
    assert [x is not None for x in results[-1]] == [True, False, *5 * [True]]


# Checkpointing, autocast, transforms ------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, device):
    inputs = make_inputs(1, 70, 1, 2, 16, 8, device=device, flags=ALL_FLAGS)

    def block(*xs):
        return chunk_gated_delta_rule(**dict(zip(inputs, xs, strict=True)), output_final_state=True, **ALL_FLAGS)

    plain, kept = leaves_of(inputs), leaves_of(inputs)
    loss_of(*block(*plain.values())).backward()
    loss_of(*checkpoint(block, *kept.values(), use_reentrant=use_reentrant)).backward()
    assert all(torch.equal(plain[n].grad, kept[n].grad) for n in inputs)


@parametrize(dtype=[torch.bfloat16, torch.float16])
def test_case_45_autocast_casts_q_k_and_v_only(dtype, device):
    inputs = make_inputs(1, 70, 1, 2, 16, 8, device=device)
    gradients = output_gradients(inputs, {})
    with torch.autocast(device, dtype=dtype):
        results = run(inputs, gradients=gradients)
    assert results["o"].dtype == dtype
    assert {x.dtype for n, x in results.items() if n != "o"} == {torch.float32}
    by_hand = run({n: x.to(dtype) if n in "qkv" else x for n, x in inputs.items()}, gradients=gradients)
    assert torch.equal(results["o"], by_hand["o"])
    assert torch.equal(results["dg"], by_hand["dg"])
    assert torch.equal(results["dq"], by_hand["dq"].float())


def test_autocast_leaves_float64_alone_and_can_be_off():
    double = make_inputs(1, 9, 1, 1, 4, 4, dtype=torch.float64)
    single = make_inputs(1, 9, 1, 1, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_identical(run(double), run(double))
        assert run(double)["o"].dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert run(single)["o"].dtype == torch.float32


def test_backward_outside_autocast(device):
    inputs = make_inputs(1, 70, 1, 2, 16, 8, device=device)
    inside, outside = leaves_of(inputs), leaves_of(inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss_of(*chunk_gated_delta_rule(**inside)).backward()
        loss = loss_of(*chunk_gated_delta_rule(**outside))
    loss.backward()
    assert all(torch.equal(inside[n].grad, outside[n].grad) for n in inputs if n != "initial_state")


def test_torch_func_grad():
    inputs = make_inputs(1, 20, 1, 2, 8, 4)
    loss = lambda xs: loss_of(*chunk_gated_delta_rule(**xs, output_final_state=True))  # noqa: E731
    found = torch.func.grad(loss)(inputs)
    leaves = leaves_of(inputs)
    loss(leaves).backward()
    assert all(torch.equal(found[n], leaves[n].grad) for n in inputs)
    with pytest.raises(RuntimeError, match="can not be differentiated again"):
        torch.func.grad(lambda xs: torch.func.grad(loss)(xs)["q"].sum())(inputs)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_vmap_is_refused(requires_grad):
    inputs = make_inputs(1, 9, 1, 1, 4, 4)
    q = inputs.pop("q").expand(3, -1, -1, -1, -1).clone().requires_grad_(requires_grad)
    with pytest.raises(NotImplementedError, match=r"^chunk_gated_delta_rule: torch\.vmap is not implemented"):
        torch.vmap(lambda q: chunk_gated_delta_rule(q, **inputs)[0])(q)
    with pytest.raises(NotImplementedError, match=r"^fused_recurrent_gated_delta_rule: torch\.vmap is not"):
        torch.vmap(lambda q: cula.gdn.fused_recurrent_gated_delta_rule(q, **inputs)[0])(q)


@pytest.mark.parametrize("operator", [chunk_gated_delta_rule, cula.gdn.fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_is_refused(operator, requires_grad):
    inputs = make_inputs(1, 9, 1, 1, 4, 4)
    v = inputs.pop("v")
    inputs["k"].requires_grad_(requires_grad)
    refused = pytest.raises(NotImplementedError, match=rf"^{operator.__name__}: forward-mode derivatives")
    with refused:
        torch.func.jvp(lambda v: operator(v=v, **inputs)[0], (v,), (v,))
    with torch.autograd.forward_ad.dual_level(), refused:
        operator(v=torch.autograd.forward_ad.make_dual(v, v), **inputs)


# Copies, threads, processes -----------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.operator = chunk_gated_delta_rule
        self.A_log = torch.nn.Parameter(torch.zeros(2))

    def forward(self, inputs):
        return self.operator(**inputs, A_log=self.A_log, use_gate_in_kernel=True)[0]


def test_functions_and_modules_that_hold_them_can_be_copied_and_pickled():
    inputs = make_inputs(1, 9, 1, 2, 4, 4)
    layer = Layer()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(inputs), layer(inputs))
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "reference_gated_delta_rule"):
        function = getattr(cula.gdn, name)
        assert copy.deepcopy(function) is function
        assert pickle.loads(pickle.dumps(function)) is function


def test_outputs_can_be_copied_and_pickled():
    inputs = leaves_of(make_inputs(1, 9, 1, 2, 4, 4))
    o, _ = chunk_gated_delta_rule(**inputs)
    assert torch.equal(copy.deepcopy(o.detach()), o)
    assert torch.equal(pickle.loads(pickle.dumps(o.detach())), o)


def test_case_54_two_host_threads():
    expected = [training_step(seed) for seed in range(2)]
    wrong = []

    def work(seed):
        wrong.extend(step for step in range(20) if not all(map(torch.equal, training_step(seed), expected[seed])))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def results_of_workers(method: str, inputs) -> list[list[torch.Tensor]]:
    """What four processes that start at once report."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    workers = [context.Process(target=report_training_step, args=(queue, inputs), daemon=True) for _ in range(4)]
    try:
        for worker in workers:
            worker.start()
        results = [[torch.from_numpy(x) for x in queue.get(timeout=120)] for _ in workers]
        for worker in workers:
            worker.join(60)
            assert worker.exitcode == 0
        return results
    finally:
        for worker in workers:
            worker.kill()


def test_case_56_first_call_in_a_spawned_worker():
    expected = training_step(0)
    for result in results_of_workers("spawn", None):
        assert all(map(torch.equal, result, expected))


def test_case_56_call_in_a_forked_worker_of_a_process_that_has_computed():
    inputs = make_inputs(1, 100, 1, 2, 16, 16)
    expected = list(run(inputs, gradients=output_gradients(inputs, V_FIRST), **V_FIRST).values())
    for result in results_of_workers("fork", inputs):
        assert all(map(torch.equal, result, expected))


def test_gradients_against_the_reference_with_state_v_first(device):
    inputs = make_inputs(1, 70, 1, 2, 16, 8, device=device, flags=V_FIRST)
    gradients = output_gradients(inputs, V_FIRST)
    assert_accurate(run(inputs, gradients=gradients, **V_FIRST), oracle(inputs, gradients=gradients, **V_FIRST))
