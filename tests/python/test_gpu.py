"""What exists on a GPU alone: captured graphs, synchronisation, streams, another current device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import ALL_FLAGS, assert_identical, make_inputs, offsets, output_gradients, parametrize, run

from cula.gdn import chunk_gated_delta_rule


@pytest.fixture
def gpu(device: str) -> str:
    if device == "cpu":
        pytest.skip("needs a GPU")
    return device


def captured(inputs, gradients, **options):
    """A graph of forward and backward, and the tensors that a replay fills."""
    run(inputs, gradients=gradients, **options)  # kernels are loaded outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(inputs, gradients=gradients, **options)
    return graph, results


@parametrize(flags={"plain": {}, "all": ALL_FLAGS})
def test_case_47_capture_of_fixed_lengths(flags, gpu):
    inputs = make_inputs(2, 130, 1, 2, 64, 64, dtype=torch.bfloat16, device=gpu, flags=flags)
    gradients = output_gradients(inputs, flags)
    graph, results = captured(inputs, gradients, **flags)
    inputs["v"].copy_(torch.randn(inputs["v"].shape))
    graph.replay()
    torch.cuda.synchronize()
    assert_identical(results, run(inputs, gradients=gradients, **flags))


def test_case_47_a_replay_follows_new_lengths(gpu):
    inputs = make_inputs(lengths=[60, 68], H=1, HV=2, K=64, V=64, dtype=torch.bfloat16, device=gpu)
    gradients = output_gradients(inputs, {})
    graph, results = captured(inputs, gradients, cu_seqlens_cpu=offsets([60, 68]))
    inputs["cu_seqlens"].copy_(offsets([100, 28]))
    graph.replay()
    torch.cuda.synchronize()
    assert_identical(results, run(inputs, gradients=gradients, cu_seqlens_cpu=offsets([100, 28])))


def test_case_47_capture_without_host_lengths_says_what_to_pass(gpu):
    inputs = make_inputs(lengths=[60, 68], H=1, HV=2, K=64, V=64, dtype=torch.bfloat16, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="pass cu_seqlens_cpu"), torch.cuda.graph(graph):
        run(inputs)


def test_case_59_one_synchronisation_for_all_layers(gpu):
    inputs = make_inputs(lengths=[60, 68], H=1, HV=2, K=64, V=64, dtype=torch.bfloat16, device=gpu)
    gradients = output_gradients(inputs, {})
    host = offsets([60, 68])
    expected = run(inputs, gradients=gradients)
    fresh = inputs | {"cu_seqlens": inputs["cu_seqlens"].clone()}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        given = run(inputs | {"cu_seqlens": fresh["cu_seqlens"]}, gradients=gradients, cu_seqlens_cpu=host)
        lengths = fresh["cu_seqlens"]
        with pytest.raises(RuntimeError, match="synchroniz"):
            chunk_gated_delta_rule(**fresh)
        torch.cuda.set_sync_debug_mode("default")
        chunk_gated_delta_rule(**fresh)
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(48):
            o, _ = chunk_gated_delta_rule(**fresh)
        assert fresh["cu_seqlens"] is lengths
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_identical(given, expected)
    assert torch.equal(o, expected["o"])


def test_a_stream_of_the_users(gpu):
    """The work goes to the current stream: behind what makes its inputs, which no other stream waits for."""
    inputs = make_inputs(1, 130, 1, 2, 64, 64, dtype=torch.bfloat16, device=gpu)
    gradients = output_gradients(inputs, {})
    expected = run(inputs, gradients=gradients)
    late = {name: torch.empty_like(x) for name, x in inputs.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for name, x in inputs.items():
            late[name].copy_(x)
        results = run(late, gradients=gradients)
    stream.synchronize()
    assert_identical(results, expected)


def test_a_thread_that_has_not_used_cuda(gpu):
    """As autograd's may be when this is the first of a backward pass: the memory comes out of torch's cache."""
    inputs = make_inputs(1, 130, 1, 2, 64, 64, dtype=torch.bfloat16, device=gpu)
    gradients = output_gradients(inputs, {})
    expected = run(inputs, gradients=gradients)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(max_workers=1) as thread:
        results = thread.submit(run, inputs, gradients=gradients).result()
    assert_identical(results, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_case_46_tensors_on_a_gpu_that_is_not_the_current_one(gpu):
    inputs = make_inputs(lengths=[60, 68], H=1, HV=2, K=64, V=64, dtype=torch.bfloat16, device=gpu)
    gradients = output_gradients(inputs, {})
    expected = run(inputs, gradients=gradients)
    other = {name: x.to("cuda:1") for name, x in inputs.items()}
    moved = tuple(x.to("cuda:1") for x in gradients)
    results = run(other, gradients=moved)
    assert torch.cuda.current_device() == 0
    assert {str(x.device) for x in results.values()} == {"cuda:1"}
    assert_identical({name: x.to(gpu) for name, x in results.items()}, expected)
    with pytest.raises(ValueError, match="device"):
        run(other | {"k": inputs["k"]})
