"""What serving asks for: results in the caller's memory, state pools, checkpoints of states."""

import itertools

import pytest
import torch
from support import ALL_FLAGS, V_FIRST, assert_accurate, assert_identical, make_inputs, oracle, parametrize, run

from cula.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, prepare_checkpoint_offsets

FUNCTIONS = {"chunk": chunk_gated_delta_rule, "recurrent": fused_recurrent_gated_delta_rule}
both = parametrize(function=FUNCTIONS)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [70, 0, 130, 1]


def nan_like(shape, dtype=torch.float32, device="cpu"):
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def serve(inputs, function, **options):
    """(o, final_state) of a call without gradients."""
    with torch.no_grad():
        return function(**{"g": None, **inputs}, **{"output_final_state": True, **options})


def make_pool(states, slots, size, dtype=None, padding=0):
    """A pool with the states in their slots and NaN elsewhere; slots lie `padding` elements apart."""
    shape = (size, *states.shape[1:])
    step = states[0].numel() + padding
    storage = nan_like((size * step,), dtype or states.dtype, states.device)
    pool = storage.as_strided(shape, (step, *states.stride()[1:]))
    for n, slot in enumerate(slots):
        if slot >= 0:
            pool[slot] = states[n]
    return pool


# Results in the caller's memory ---------------------------------------------------------------------------------------


@both
@parametrize(dtype=DTYPES)
@parametrize(flags={"plain": {}, "all": ALL_FLAGS})
def test_outputs_are_written_where_the_caller_says(flags, dtype, function, device):
    inputs = make_inputs(2, 70, 1, 2, 20, 12, dtype=dtype, device=device, flags=flags)
    expected = run(inputs, function, **flags)
    output = nan_like(expected["o"].shape, dtype, device)
    output_state = nan_like(expected["final_state"].shape, expected["final_state"].dtype, device)
    o, final_state = serve(inputs, function, output=output, output_state=output_state, **flags)
    assert o is output
    assert final_state is output_state
    assert_identical({"o": o, "final_state": final_state}, expected)


@both
def test_one_buffer_alone(function, device):
    inputs = make_inputs(1, 70, 1, 2, 16, 8, device=device)
    expected = run(inputs, function)
    output = nan_like(expected["o"].shape, device=device)
    o, final_state = serve(inputs, function, output=output)
    assert o is output
    assert_identical({"o": o, "final_state": final_state}, expected)
    assert serve(inputs, function, output=output, output_final_state=False) == (output, None)
    state = nan_like(expected["final_state"].shape, device=device)
    o, final_state = serve(inputs, function, output_state=state)
    assert final_state is state
    assert_identical({"o": o, "final_state": final_state}, expected)


@both
def test_strided_buffers(function, device):
    inputs = make_inputs(1, 70, 1, 2, 16, 8, device=device)
    expected = run(inputs, function)
    wide = nan_like((1, 70, 2, 20), device=device)
    states = nan_like((1, 2, 8, 16), device=device)
    o, final_state = serve(inputs, function, output=wide[..., 4:12], output_state=states.mT)
    assert_identical({"o": o, "final_state": final_state}, expected)
    assert wide[..., :4].isnan().all()
    assert wide[..., 12:].isnan().all()


@both
def test_buffers_beside_inputs_in_one_allocation(function, device):
    inputs = make_inputs(1, 70, 2, 2, 16, 16, device=device)
    expected = run(inputs, function)
    fused = torch.stack([inputs["q"], inputs["k"], inputs["v"], nan_like(inputs["v"].shape, device=device)], dim=2)
    inputs["q"], inputs["k"], inputs["v"], output = fused.unbind(2)
    o, final_state = serve(inputs, function, output=output)
    assert_identical({"o": o, "final_state": final_state}, expected)


@both
@parametrize(dtype=[torch.float64, torch.float16, torch.bfloat16])
def test_final_states_of_any_float_type_are_rounded_once(dtype, function, device):
    inputs = make_inputs(2, 70, 1, 2, 20, 12, device=device)
    expected = run(inputs, function)
    _, state = serve(inputs, function, output_state=nan_like(expected["final_state"].shape, dtype, device))
    assert torch.equal(state, expected["final_state"].to(dtype))


@both
@parametrize(flags={"plain": {}, "v_first": V_FIRST})
def test_state_updated_in_place(flags, function, device):
    inputs = make_inputs(lengths=LENGTHS, H=1, HV=2, K=20, V=12, device=device, flags=flags)
    expected = run(inputs, function, **flags)
    state = inputs["initial_state"]
    o, final_state = serve(inputs, function, output_state=state, **flags)
    assert final_state is state
    assert_identical({"o": o, "final_state": state}, expected)


def test_version_counters_show_the_writes():
    inputs = make_inputs(1, 20, 1, 1, 8, 8)
    output, state = nan_like((1, 20, 1, 8)), nan_like((1, 1, 8, 8))
    before = (output._version, state._version, inputs["initial_state"]._version)
    serve(inputs, chunk_gated_delta_rule, output=output, output_state=state)
    assert output._version > before[0]
    assert state._version > before[1]
    assert inputs["initial_state"]._version == before[2]


def test_inference_tensors():
    with torch.inference_mode():
        inputs = make_inputs(1, 20, 1, 1, 8, 8)
        expected = run(inputs)
        output = nan_like((1, 20, 1, 8))
        serve(inputs, chunk_gated_delta_rule, output=output)
        assert torch.equal(output, expected["o"])


# Pools ----------------------------------------------------------------------------------------------------------------


@both
@parametrize(index=[torch.int32, torch.int64])
@parametrize(flags={"plain": {}, "v_first": V_FIRST, "all": ALL_FLAGS})
@pytest.mark.parametrize("padding", [0, 24])
def test_pool_in_place_gives_the_bits_of_separate_states(padding, flags, index, function, device):
    inputs = make_inputs(lengths=LENGTHS, H=1, HV=2, K=20, V=12, device=device, flags=flags)
    expected = run(inputs, function, **flags)
    slots = [4, 0, 6, 1]
    pool = make_pool(inputs["initial_state"], slots, 8, padding=padding)
    inputs["initial_state"] = pool
    indices = torch.tensor(slots, dtype=index, device=device)
    o, final_state = serve(inputs, function, state_indices=indices, **flags)
    assert final_state is pool
    assert_identical({"o": o, "final_state": pool[slots]}, expected)
    assert pool[[2, 3, 5, 7]].isnan().all()


@both
def test_strided_indices(function, device):
    inputs = make_inputs(3, 20, 1, 2, 8, 8, device=device)
    expected = run(inputs, function)
    inputs["initial_state"] = pool = make_pool(inputs["initial_state"], [2, 0, 1], 3)
    indices = torch.tensor([[2, 9], [0, 9], [1, 9]], device=device)[:, 0]
    o, _ = serve(inputs, function, state_indices=indices)
    assert_identical({"o": o, "final_state": pool[[2, 0, 1]]}, expected)


@both
def test_pool_read_and_another_written(function, device):
    inputs = make_inputs(lengths=LENGTHS, H=1, HV=2, K=20, V=12, device=device)
    expected = run(inputs, function)
    slots = [3, 1, 0, 2]
    pool = make_pool(inputs["initial_state"], slots, 4)
    before = pool.clone()
    target = nan_like((6, *pool.shape[1:]), torch.bfloat16, device)
    inputs["initial_state"] = pool
    o, final_state = serve(inputs, function, state_indices=torch.tensor(slots, device=device), output_state=target)
    assert final_state is target
    assert torch.equal(o, expected["o"])
    assert torch.equal(target[slots], expected["final_state"].bfloat16())
    assert target[4:].isnan().all()
    assert torch.equal(pool, before)


@both
def test_pool_that_is_written_only(function, device):
    inputs = make_inputs(lengths=LENGTHS, H=1, HV=2, K=20, V=12, device=device, state=False)
    expected = run(inputs, function)
    pool = nan_like((5, 2, 20, 12), device=device)
    slots = [3, 1, 0, 2]
    o, _ = serve(inputs, function, state_indices=torch.tensor(slots, device=device), output_state=pool)
    assert_identical({"o": o, "final_state": pool[slots]}, expected)
    assert pool[4].isnan().all()


@both
def test_pool_that_is_read_only_may_be_shared(function, device):
    """Sequences that go on from the same prefix."""
    inputs = make_inputs(3, 70, 1, 2, 16, 8, device=device)
    state = inputs["initial_state"][:1].clone()
    expected = run({**inputs, "initial_state": state.expand(3, -1, -1, -1)}, function, output_final_state=False)
    inputs["initial_state"] = pool = make_pool(state, [1], 2)
    before = pool.clone()
    indices = torch.tensor([1, 1, 1], device=device)
    o, final_state = serve(inputs, function, state_indices=indices, output_final_state=False)
    assert final_state is None
    assert torch.equal(o, expected["o"])
    assert_identical({"pool": pool}, {"pool": before})


@both
def test_slot_minus_one_starts_from_zeros_and_leaves_nothing(function, device):
    inputs = make_inputs(lengths=LENGTHS, H=1, HV=2, K=20, V=12, device=device)
    slots = [2, -1, -1, 0]
    states = inputs["initial_state"].clone()
    states[[1, 2]] = 0.0
    expected = run({**inputs, "initial_state": states}, function)
    inputs["initial_state"] = pool = make_pool(states, slots, 3)
    o, _ = serve(inputs, function, state_indices=torch.tensor(slots, dtype=torch.int32, device=device))
    assert torch.equal(o, expected["o"])
    assert torch.equal(pool[[2, 0]], expected["final_state"][[0, 3]])
    assert pool[1].isnan().all()


def test_slots_outside_the_pool_count_as_none_on_a_gpu(device):
    if device == "cpu":
        pytest.skip("on the CPU they are errors")
    inputs = make_inputs(lengths=LENGTHS, H=1, HV=2, K=20, V=12, device=device)
    pool = make_pool(inputs["initial_state"], [0, 1, 2, 3], 6)[1:4]  # NaN behind its end, a state before it
    inputs["initial_state"] = pool
    results = []
    for outside in (-1, -7, 3, 1 << 40):
        state = pool.clone()
        slots = torch.tensor([0, outside, outside, 2], device=device)
        o, _ = serve({**inputs, "initial_state": state}, chunk_gated_delta_rule, state_indices=slots)
        results.append({"o": o, "pool": state})
    for result in results[1:]:
        assert_identical(result, results[0])


def test_decoding_from_a_pool_token_by_token(device):
    """Prefill into a pool, then steps in place, in an order of the batch that changes."""
    inputs = make_inputs(3, 69, 1, 2, 16, 8, device=device, state=False)
    expected = oracle(inputs)
    pool = nan_like((5, 2, 16, 8), device=device)
    slots = torch.tensor([4, 0, 2], device=device)
    prefix = {name: x[:, :64] for name, x in inputs.items()}
    o, _ = serve(prefix, chunk_gated_delta_rule, state_indices=slots, output_state=pool)
    outputs = [o]
    for t in range(64, 69):
        order = torch.randperm(3, device=device)
        token = {name: x[order, t : t + 1] for name, x in inputs.items()}
        o, _ = serve(
            {**token, "initial_state": pool}, fused_recurrent_gated_delta_rule, state_indices=slots[order],
        )  # fmt: skip
        outputs.append(o[order.argsort()])
    assert_accurate({"o": torch.cat(outputs, 1), "final_state": pool[slots]}, expected)
    assert pool[[1, 3]].isnan().all()


# Checkpoints ----------------------------------------------------------------------------------------------------------


def expected_checkpoints(inputs, function, lengths, every, **options):
    """The final states of the sequences cut off behind every so many tokens, in order."""
    states = []
    begin = 0
    for n, length in enumerate(lengths):
        for end in range(every, length + 1, every):
            part = {
                name: x[:, begin : begin + end] if name in ("q", "k", "v", "g", "beta") else x
                for name, x in inputs.items()
                if name != "cu_seqlens"
            }
            part["initial_state"] = inputs["initial_state"][n : n + 1]
            states.append(run(part, function, **options)["final_state"][0])
        begin += length
    return torch.stack(states)


@parametrize(dtype=DTYPES)
@parametrize(flags={"plain": {}, "all": ALL_FLAGS})
@parametrize(
    case=[("chunk", 64, 64), ("chunk", 128, 64), ("chunk", 32, 16), ("recurrent", 1, None), ("recurrent", 50, None)]
)
def test_checkpoints_are_the_states_on_the_way(case, flags, dtype, device):
    name, every, chunk_size = case
    function, options = FUNCTIONS[name], {**flags, **({"chunk_size": chunk_size} if chunk_size else {})}
    lengths = [128, 0, 200, 63, 65] if every > 1 else [5, 0, 3]
    inputs = make_inputs(lengths=lengths, H=1, HV=2, K=20, V=12, dtype=dtype, device=device, flags=flags)
    expected = run(inputs, function, **options)
    starts = prepare_checkpoint_offsets(inputs["cu_seqlens"], every)
    assert starts.tolist() == [0, *itertools.accumulate(length // every for length in lengths)]
    checkpoints = nan_like(
        (int(starts[-1]) + 1, *expected["final_state"].shape[1:]), expected["final_state"].dtype, device
    )
    o, final_state = serve(inputs, function, state_checkpoints=checkpoints, checkpoint_every_n_tokens=every, **options)
    assert_identical({"o": o, "final_state": final_state}, expected)
    assert checkpoints[-1].isnan().all()
    states = expected_checkpoints(inputs, function, lengths, every, **options)
    assert torch.equal(checkpoints[:-1], states)


@both
def test_checkpoints_of_a_batch(function, device):
    inputs = make_inputs(3, 150, 1, 2, 16, 8, device=device)
    checkpoints = nan_like((6, 2, 16, 8), device=device)
    serve(inputs, function, state_checkpoints=checkpoints, checkpoint_every_n_tokens=64)
    for row, (b, end) in enumerate(itertools.product(range(3), (64, 128))):
        part = {name: x[b : b + 1] if name == "initial_state" else x[b : b + 1, :end] for name, x in inputs.items()}
        assert torch.equal(checkpoints[row], run(part, function)["final_state"][0])


@both
@parametrize(index=[torch.int32, torch.int64])
def test_checkpoints_where_the_caller_says(index, function, device):
    lengths = [130, 10, 64]
    inputs = make_inputs(lengths=lengths, H=1, HV=2, K=16, V=8, device=device)
    checkpoints = nan_like((6, 2, 16, 8), device=device)
    serve(
        inputs, function, state_checkpoints=checkpoints, checkpoint_every_n_tokens=64, output_final_state=False,
        checkpoint_cu_starts=torch.tensor([1, 4, 4, 5], dtype=index, device=device),
    )  # fmt: skip
    states = expected_checkpoints(inputs, function, lengths, 64)
    assert torch.equal(checkpoints[[1, 2, 4]], states)
    assert checkpoints[[0, 3, 5]].isnan().all()


def test_a_prefix_cache(device):
    """A sequence goes on from the checkpoint of another one that begins with the same tokens."""
    inputs = make_inputs(1, 200, 1, 2, 16, 8, device=device, state=False)
    expected = run(inputs)
    cache = nan_like((3, 2, 16, 8), device=device)
    serve(inputs, chunk_gated_delta_rule, state_checkpoints=cache, checkpoint_every_n_tokens=64)
    rest = {name: x[:, 128:] for name, x in inputs.items()}
    o, final_state = serve(
        {**rest, "initial_state": cache},
        chunk_gated_delta_rule,
        output_state=nan_like((3, 2, 16, 8), device=device),
        state_indices=torch.tensor([1], device=device),
    )
    assert_identical(
        {"o": o, "final_state": final_state[1:2]}, {"o": expected["o"][:, 128:], "final_state": expected["final_state"]}
    )


@both
def test_everything_at_once(function, device):
    flags = ALL_FLAGS
    inputs = make_inputs(lengths=LENGTHS, H=1, HV=2, K=20, V=12, dtype=torch.bfloat16, device=device, flags=flags)
    expected = run(inputs, function, **flags)
    states = expected_checkpoints(inputs, function, LENGTHS, 64, **flags)
    slots = [4, 0, 6, 1]
    inputs["initial_state"] = pool = make_pool(inputs["initial_state"], slots, 8)
    output = nan_like(expected["o"].shape, torch.bfloat16, device)
    checkpoints = nan_like(states.shape, device=device)
    serve(
        inputs, function, output=output, output_state=pool, state_indices=torch.tensor(slots, device=device),
        state_checkpoints=checkpoints, checkpoint_every_n_tokens=64, **flags,
    )  # fmt: skip
    assert_identical({"o": output, "final_state": pool[slots]}, expected)
    assert torch.equal(checkpoints, states)


# torch ----------------------------------------------------------------------------------------------------------------


@both
def test_compiled(function):
    inputs = make_inputs(2, 20, 1, 1, 8, 8)
    expected = run(inputs, function)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(inputs, output, pool, indices):
        o, _ = function(**inputs, initial_state=pool, output_final_state=True, output=output, state_indices=indices)
        return o.clone()

    pool = make_pool(inputs.pop("initial_state"), [2, 0], 3)
    output = nan_like(expected["o"].shape)
    with torch.no_grad():
        o = step(inputs, output, pool, torch.tensor([2, 0]))
    assert_identical({"o": o, "final_state": pool[[2, 0]]}, expected)
    assert torch.equal(output, expected["o"])


def test_schemas_hold():
    inputs = make_inputs(2, 20, 1, 1, 8, 8)
    g = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    results = (nan_like((2, 20, 1, 8)), nan_like((2, 1, 8, 8)), nan_like((10, 1, 8, 8)))
    options = (None, 64, *(False,) * 6, "auto")
    arguments = (*g, None, None, inputs["initial_state"], None, None)
    torch.library.opcheck(
        torch.ops.cula_gdn.recurrent_forward_out.default, (*arguments, None, None, 4, *results, *options)
    )
    torch.library.opcheck(
        torch.ops.cula_gdn.chunk_forward_out.default, (*arguments, None, None, None, 0, *results[:2], None, *options)
    )


# Errors ---------------------------------------------------------------------------------------------------------------


def refuse(error, text, function=chunk_gated_delta_rule, inputs=None, **options):
    inputs = inputs or make_inputs(2, 70, 1, 2, 16, 8)
    buffers = [x for x in options.values() if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in (*buffers, *inputs.values())]
    with pytest.raises(error, match=text):
        function(**inputs, **{"output_final_state": True, **options})
    for x, old in zip((*buffers, *inputs.values()), before, strict=True):
        assert torch.equal(x.detach().nan_to_num(7.0), old.detach().nan_to_num(7.0))  # nothing was written


ONE = {
    "output": lambda: {"output": torch.zeros(2, 70, 2, 8)},
    "output_state": lambda: {"output_state": torch.zeros(2, 2, 16, 8)},
    "state_indices": lambda: {"state_indices": torch.tensor([0, 1])},
    "state_checkpoints": lambda: {"state_checkpoints": torch.zeros(2, 2, 16, 8), "checkpoint_every_n_tokens": 64},
}


@both
@parametrize(name=list(ONE))
@pytest.mark.parametrize("leaf", ["q", "beta", "initial_state"])
def test_gradients_are_refused(leaf, name, function):
    inputs = make_inputs(2, 70, 1, 2, 16, 8)
    inputs[leaf].requires_grad_()
    refuse(ValueError, f"^{name}: .*gradient", function, inputs, **ONE[name]())


def test_buffer_that_requires_a_gradient():
    refuse(ValueError, "^output: .*gradient", output=torch.zeros(2, 70, 2, 8, requires_grad=True))


@parametrize(name=list(ONE))
def test_context_parallelism_is_refused(name):
    class Context:
        cu_seqlens = cu_seqlens_cpu = torch.tensor([0, 70])
        group = None

    inputs = make_inputs(1, 70, 1, 2, 16, 8)
    refuse(ValueError, f"^{name}: .*cp_context", inputs=inputs, cp_context=Context(), **ONE[name]())


@both
def test_output_that_does_not_fit(function):
    refuse(
        ValueError,
        r"^output: expected shape \[B, T, HV, V\] = \[2, 70, 2, 8\], got \[2, 70, 2, 9\]",
        function,
        output=torch.zeros(2, 70, 2, 9),
    )
    refuse(TypeError, "^output: expected torch.float32", function, output=torch.zeros(2, 70, 2, 8).double())
    refuse(TypeError, "^output: expected a tensor", function, output=[1.0])
    expanded = torch.zeros(1, 70, 2, 8).expand(2, -1, -1, -1)
    refuse(ValueError, r"^o: .*expanded along dimension 0", function, output=expanded)
    woven = torch.as_strided(torch.zeros(1700), (2, 70, 2, 8), (800, 9, 8, 1))
    refuse(ValueError, r"^o: .*got stride 9 along dimension 1", function, output=woven)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.zeros(2, 70, 2, 8), torch.ones(2, 70, 2, 8))
        refuse(NotImplementedError, "forward-mode", function, output=dual)


@both
def test_output_state_that_does_not_fit(function):
    state = torch.zeros(2, 2, 16, 8)
    refuse(
        ValueError, r"^output_state: expected shape \[N, HV, K, V\] = \[2, 2, 16, 8\]", function, output_state=state[:1]
    )
    refuse(
        ValueError,
        r"^output_state: expected shape \[N, HV, V, K\] = \[2, 2, 8, 16\]",
        function,
        make_inputs(2, 70, 1, 2, 16, 8, flags=V_FIRST),
        output_state=state,
        **V_FIRST,
    )
    refuse(
        ValueError,
        r"^output_state: expected shape \[slots, HV, K, V\] = \[any, 2, 16, 8\]",
        function,
        output_state=torch.zeros(5, 2, 16, 9),
        state_indices=torch.tensor([0, 1]),
    )
    refuse(TypeError, "^output_state: expected float64", function, output_state=state.int())
    refuse(
        ValueError,
        "^output_state: expected output_final_state=True",
        function,
        output_state=state,
        output_final_state=False,
    )


@both
def test_indices_that_do_not_fit(function):
    refuse(ValueError, r"^state_indices: expected shape \[N\]", function, state_indices=torch.tensor([0]))
    refuse(TypeError, "^state_indices: expected int32 or int64", function, state_indices=torch.tensor([0.0, 1.0]))
    refuse(TypeError, "^state_indices: expected int32 or int64", function, state_indices=torch.tensor([True, False]))
    refuse(ValueError, "^state_indices: .*got 2 for sequence 1", function, state_indices=torch.tensor([0, 2]))
    refuse(ValueError, "^state_indices: .*got -2 for sequence 0", function, state_indices=torch.tensor([-2, 1]))
    refuse(
        ValueError, "^state_indices: expected distinct slots.*got 1 twice", function, state_indices=torch.tensor([1, 1])
    )
    refuse(
        ValueError,
        r"one of the 3 slots of final_state \(output_state\)",
        function,
        state_indices=torch.tensor([0, 4]),
        output_state=torch.zeros(3, 2, 16, 8),
        inputs=make_inputs(2, 70, 1, 2, 16, 8, state=False),
    )
    refuse(
        ValueError,
        "^state_indices: expected a pool",
        function,
        make_inputs(2, 70, 1, 2, 16, 8, state=False),
        state_indices=torch.tensor([0, 1]),
    )


def test_checkpoints_that_do_not_fit():
    checkpoints = torch.zeros(2, 2, 16, 8)
    every = {"checkpoint_every_n_tokens": 64}
    refuse(ValueError, "^state_checkpoints: expected a tensor", **every)
    refuse(ValueError, "^state_checkpoints: expected checkpoint_every_n_tokens", state_checkpoints=checkpoints)
    refuse(
        ValueError, "^checkpoint_cu_starts: expected checkpoint_every_n_tokens", checkpoint_cu_starts=torch.tensor([0])
    )
    refuse(
        ValueError,
        "^state_checkpoints: expected room for the 2 checkpoints",
        state_checkpoints=checkpoints[:1],
        **every,
    )
    refuse(ValueError, "^state_checkpoints: expected shape", state_checkpoints=checkpoints[..., :4], **every)
    refuse(TypeError, "^state_checkpoints: expected float64", state_checkpoints=checkpoints.int(), **every)
    refuse(TypeError, "^state_checkpoints: expected float32", state_checkpoints=checkpoints.bfloat16(), **every)
    for n in (-64, 32, 65):
        refuse(
            ValueError,
            f"^checkpoint_every_n_tokens: expected a positive multiple of chunk_size 64, got {n}",
            state_checkpoints=checkpoints,
            checkpoint_every_n_tokens=n,
        )
    refuse(
        ValueError,
        "^checkpoint_every_n_tokens: expected a number of 64 bits",
        state_checkpoints=checkpoints,
        checkpoint_every_n_tokens=2**64,
    )
    for n in (0.0, False):
        refuse(TypeError, "^checkpoint_every_n_tokens: expected an int", checkpoint_every_n_tokens=n)
    for n in (64.0, True, "64", None):
        refuse(
            TypeError,
            "^checkpoint_every_n_tokens: expected an int",
            state_checkpoints=checkpoints,
            checkpoint_every_n_tokens=n,
        )
    refuse(
        ValueError,
        "^checkpoint_every_n_tokens: expected a positive number, got -1",
        fused_recurrent_gated_delta_rule,
        state_checkpoints=checkpoints,
        checkpoint_every_n_tokens=-1,
    )
    lowest = -(2**63)
    for starts in ([0, 1, 3], [-1, 0, 1], [0, 0, 1], [1, 2, 2], [0, 1, lowest], [1, lowest, 2], [10**12, lowest, 0]):
        refuse(
            ValueError,
            "^checkpoint_cu_starts: expected room for the 1 checkpoints",
            state_checkpoints=checkpoints,
            checkpoint_cu_starts=torch.tensor(starts),
            **every,
        )
    refuse(
        ValueError,
        r"^checkpoint_cu_starts: expected shape \[N \+ 1\]",
        state_checkpoints=checkpoints,
        checkpoint_cu_starts=torch.tensor([0, 1]),
        **every,
    )


@both
def test_buffers_that_share_memory(function):
    """Nothing may be read or written twice, but a state that is updated in place."""
    inputs = make_inputs(2, 70, 2, 2, 16, 16)
    for name in ("v", "q"):
        refuse(
            ValueError,
            rf"\(output\): expected memory of its own.*got some of {name}'s",
            function,
            inputs,
            output=inputs[name],
        )
    state = inputs["initial_state"]
    refuse(
        ValueError,
        r"\(output_state\): .*all of initial_state's\), got some of initial_state's",
        function,
        inputs,
        output_state=state.mT,
    )
    both_ = torch.zeros(3, 2, 16, 16)
    refuse(ValueError, r"\(output_state\): ", function, {**inputs, "initial_state": both_[:2]}, output_state=both_[1:])
    memory = torch.zeros(2, 70, 2, 16)
    refuse(
        ValueError,
        r"^final_state \(output_state\): .*some of o \(output\)'s",
        function,
        inputs,
        output=memory,
        output_state=memory.view(-1)[:1024].view(2, 2, 16, 16),
    )
    refuse(
        ValueError,
        "^state_checkpoints: .*some of final_state",
        function,
        inputs,
        output_state=both_[:2],
        state_checkpoints=both_,
        checkpoint_every_n_tokens=64,
    )


def test_helper_refuses():
    with pytest.raises(ValueError, match=r"^checkpoint_every_n_tokens: "):
        prepare_checkpoint_offsets(torch.tensor([0, 5]), 0)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        prepare_checkpoint_offsets(torch.tensor(5), 64)
