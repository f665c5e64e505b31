"""Context parallelism between real processes (gloo), and between many simulated ranks in this one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cp_workers import Workers, whole_problem
from support import (
    ALL_FLAGS,
    FLAGS,
    TOLERANCES,
    V_FIRST,
    assert_accurate,
    assert_identical,
    oracle,
    parametrize,
    relative_error,
    run,
)

from cula.gdn import chunk_gated_delta_rule
from cula.gdn.cp import get_cp_cu_seqlens
from cula.gdn.simulation import simulate, simulated_ranks

BY_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")
SMALL = {"H": 1, "HV": 2, "K": 16, "V": 24}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    group = Workers(8)
    yield group
    group.close()


def assembled(ranks: list[dict[str, Any]], num_sequences: int) -> dict[str, torch.Tensor]:
    """The results of all ranks as those of the whole stream."""
    total = sum(len(rank["tokens"]) for rank in ranks)
    results: dict[str, torch.Tensor] = {}
    for name in ranks[0]:
        if name in BY_TOKEN:
            model = ranks[0][name]
            whole = torch.full((1, total, *model.shape[2:]), float("nan"), dtype=model.dtype)
            for rank in ranks:
                whole[:, rank["tokens"]] = rank[name][:, : len(rank["tokens"])]
            results[name] = whole
        elif name in ("dA_log", "ddt_bias"):
            results[name] = sum(rank[name].double() for rank in ranks).to(ranks[0][name].dtype)
        elif name in ("dinitial_state", "final_state"):
            whole = torch.zeros(num_sequences, *ranks[0][name].shape[1:], dtype=ranks[0][name].dtype)
            for rank in ranks:
                for i, n in enumerate(rank["ids"]):
                    if name == "dinitial_state":
                        whole[n] += rank[name][i]
                    elif rank["ends"][i]:
                        whole[n] = rank[name][i]
            results[name] = whole
    return results


def problem(
    lengths: list[int], flags: dict[str, Any] | None = None, replace: Any = None, states: bool = False, **sizes: Any
) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
    inputs, do, dht = whole_problem(lengths, flags or {}, replace or {}, state=states, **sizes)
    return inputs, (do, dht if states else None)


def check_group(
    workers: Workers, world_size: int, lengths: list[int], *, flags: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None, states: bool = False, replace: Any = None,
    like_one_rank: float | None = None, tolerance: float | None = None, **arguments: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """A group's results against one rank and against float64, in every output and gradient."""
    flags, options = flags or {}, options or {}
    placement = {"layout", "rank_lengths", "padding", "fla_context", "wrapper"}
    sizes = {name: x for name, x in arguments.items() if name not in placement}
    ranks = workers.call(
        world_size, "run_rank", lengths=lengths, flags=flags, options=options, states=states, replace=replace,
        **arguments,
    )  # fmt: skip
    together = assembled(ranks, len(lengths))
    inputs, gradients = problem(lengths, flags, replace, states, **sizes)
    alone = run(inputs, gradients=gradients, output_final_state=states, **flags, **options)
    exact = oracle(inputs, gradients=gradients, output_final_state=states, **flags, **options)
    assert_accurate(together, exact, tolerance)
    limit = like_one_rank or TOLERANCES[together["o"].dtype]
    for name, x in together.items():
        assert relative_error(x, alone[name]) < limit * (5 if name in ("dA_log", "ddt_bias") else 2), name
    # One exchange each way and nothing else, of the size that the protocol states.
    HV, K = together["o"].shape[2], together["dq"].shape[3]
    element = 8 if together["o"].dtype == torch.float64 else 4
    parts = 2 if arguments.get("layout") == "zigzag" else 1
    size = parts * HV * K * (K + together["o"].shape[3]) * element
    for rank in ranks:
        exchanges = 3 if arguments.get("wrapper") == "checkpoint" else 2  # a checkpoint runs forward twice
        assert rank["bytes"] == [size] * exchanges
        assert rank["forward_bytes"] == [size]
    return ranks


# FLA's own table of cases, a sixteenth of its lengths ----------------------------------------------------------------

TABLE = {
    "cp2_sequence_cut": (2, 4, 4, 64, [188, 250, 202], {}),
    "cp2_boundary_aligned": (2, 4, 4, 128, [320, 320], {}),
    "cp4_complex": (4, 4, 4, 128, [437, 203], {}),
    "cp4_single_sequence": (4, 4, 4, 128, [640], {}),
    "cp8_single_sequence": (8, 4, 4, 128, [4096], {}),
    "cp2_many_short_sequences": (2, 4, 4, 128, [62, 94, 125, 156, 78, 63, 62], {}),
    "cp2_gqa_sequence_cut": (2, 2, 4, 64, [188, 250, 202], {}),
    "cp2_gqa_single_sequence": (2, 2, 8, 64, [640], {}),
    "cp2_state_v_first": (2, 4, 4, 128, [188, 250, 202], V_FIRST),
    "cp4_state_v_first": (4, 4, 4, 128, [640], V_FIRST),
}


@parametrize(case=TABLE)
def test_table_of_flash_linear_attention(workers, case):
    world_size, H, HV, D, lengths, flags = case
    inputs, _ = problem(lengths, flags, H=H, HV=HV, K=D, V=D, dtype=torch.bfloat16)
    # Against one rank: FLA's limit, 0.003 (check_group doubles it for all).
    check_group(
        workers, world_size, lengths, flags=flags, H=H, HV=HV, K=D, V=D, dtype=torch.bfloat16,
        replace={"g": inputs["g"].bfloat16()}, like_one_rank=0.0015,
    )  # fmt: skip


# Layouts, flags, types -----------------------------------------------------------------------------------------------


@parametrize(layout=["contiguous", "zigzag"])
@parametrize(world_size=[1, 2, 3, 4, 8])
@parametrize(lengths=[[192], [70, 0, 1, 100, 0, 21], [24] * 8, [1] * 20 + [172]])
def test_layouts(workers, lengths, world_size, layout):
    check_group(workers, world_size, lengths, layout=layout, options={"chunk_size": 16}, **SMALL)


@parametrize(flags={**FLAGS, "all": ALL_FLAGS})
@parametrize(dtype=[torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_flags_and_types(workers, flags, dtype):
    check_group(workers, 3, [50, 100, 42], flags=flags, dtype=dtype, options={"chunk_size": 32, "scale": 0.3}, **SMALL)


def test_parameters_in_16_bits_get_gradients_rounded_once(workers):
    inputs, _ = problem([50, 100, 42], ALL_FLAGS, **SMALL)
    replace = {name: inputs[name].bfloat16() for name in ("A_log", "dt_bias", "g", "beta")}
    ranks = check_group(workers, 3, [50, 100, 42], flags=ALL_FLAGS, replace=replace, tolerance=1e-2,
                        like_one_rank=1e-2, **SMALL)  # fmt: skip
    assert {ranks[0][f"d{name}"].dtype for name in replace} == {torch.bfloat16}


@parametrize(layout=["contiguous", "zigzag"])
def test_hard_resets(workers, layout):
    inputs, _ = problem([150, 42], **SMALL)
    g = inputs["g"].clone()
    g[0, 60, 0], g[0, 63, 1], g[0, 96, 0] = -torch.inf, -torch.inf, -torch.inf
    check_group(workers, 4, [150, 42], layout=layout, replace={"g": g}, **SMALL)


def test_no_gate(workers):
    inputs, _ = problem([128], **SMALL)
    ranks = check_group(workers, 2, [128], replace={"g": torch.zeros_like(inputs["g"])}, **SMALL)
    assert all(torch.isfinite(rank["dg"]).all() for rank in ranks)


def test_objects_of_flash_linear_attention_are_taken(workers):
    for layout in ("contiguous", "zigzag"):
        check_group(workers, 2, [70, 58], layout=layout, fla_context=True, **SMALL)


def test_context_without_a_group_has_no_exchange(workers):
    for rank in workers.call(2, "without_group"):
        assert torch.equal(rank["o"], rank["expected"])


def test_repeats_are_bitwise_equal(workers):
    arguments = {"lengths": [70, 90, 32], "flags": ALL_FLAGS, "states": True, "dtype": torch.bfloat16, **SMALL}
    first, second = (workers.call(4, "run_rank", **arguments) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        names = [name for name, x in a.items() if isinstance(x, torch.Tensor)]
        assert_identical({n: a[n] for n in names}, {n: b[n] for n in names})


# Exchange ------------------------------------------------------------------------------------------------------------


def test_exchange_runs_under_the_work_that_does_not_need_it(workers):
    """[70 | 58, 64]: rank 0 has all of one sequence and a head, rank 1 the other's tail and one of its own."""
    begins, ends = check_group(workers, 2, [40, 60, 28], **SMALL)
    # Nothing of rank 0's forward needs rank 1; of rank 1's, the second sequence does not need rank 0.
    assert begins["events"] == ["start", "cp_advance", "wait", "start", "cp_backward", "wait", "cp_backward"]
    assert ends["events"] == [
        "start",
        "cp_advance",
        "wait",
        "cp_advance",
        "start",
        "cp_backward",
        "cp_backward",
        "wait",
    ]


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("how", ["dies", "does not come"])
def test_lost_rank_fails_the_others_within_the_timeout(how, when):
    timeout = 3.0 if when == "forward" else 12.0  # in which a busy machine's forward must come to its end
    group = Workers(3, timeout=timeout)
    try:
        group.start(range(3), "leave", rank=1, how=how, when=when)
        for rank in (0, 2):
            # Far below torch's own timeout of half an hour, and far above the delays of a busy machine.
            assert group.result(rank) < timeout + 30
    finally:
        group.close()


# Ranks of another making ----------------------------------------------------------------------------------------------


@parametrize(layout=["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("world_size", "plain_ranks", "lengths"),
    [(2, [0], [75, 53]), (2, [1], [75, 53]), (3, [1], [192]), (4, [0, 3], [100, 60, 32]), (4, [1, 2], [192])],
)
def test_mixed_group_with_plain_torch(workers, world_size, plain_ranks, lengths, layout):
    for dtype in (torch.float32, torch.bfloat16):
        sizes = {"H": 1, "HV": 2, "K": 8, "V": 12, "dtype": dtype}
        ranks = workers.call(
            world_size, "mixed_rank", plain_ranks=plain_ranks, lengths=lengths, layout=layout, chunk_size=16, **sizes
        )
        inputs, gradients = problem(lengths, **sizes)
        names = [n for n in ranks[0] if n in BY_TOKEN]
        together = assembled([{n: r[n] for n in ("tokens", *names)} for r in ranks], len(lengths))
        assert_accurate(together, oracle(inputs, gradients=gradients, output_final_state=False))


# Cases ---------------------------------------------------------------------------------------------------------------


def precision_problem(tokens: int, beta: float) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Sizes and replacements: almost no decay, beta just below its limit, so that no state is ever forgotten."""
    random = torch.Generator().manual_seed(0)
    replace = {
        "g": -2e-3 * torch.rand(1, tokens, 1, generator=random),
        "beta": beta * (1 - 0.05 * torch.rand(1, tokens, 1, generator=random)),
    }
    return {"H": 1, "HV": 1, "K": 128, "V": 128, "dtype": torch.bfloat16}, replace


def assert_as_precise_as_one_rank(together: Any, inputs: Any, gradients: Any) -> None:
    """Against the chunked operator in float64: the token recurrence would take minutes for these lengths."""
    alone = run(inputs, gradients=gradients, output_final_state=False)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = run(double, gradients=gradients, output_final_state=False)
    assert set(together) == set(exact)
    for name, x in together.items():
        assert relative_error(x, exact[name]) <= 1.5 * relative_error(alone[name], exact[name]), name


@parametrize(beta=[1.0, 2.0])
def test_case_22_transition_product_keeps_its_precision(workers, beta):
    sizes, replace = precision_problem(4096, beta)
    together = assembled(workers.call(8, "run_rank", lengths=[4096], replace=replace, **sizes), 1)
    assert_as_precise_as_one_rank(together, *problem([4096], replace=replace, **sizes))


@parametrize(beta=[1.0, 2.0])
def test_case_22_at_its_full_length(beta):
    sizes, replace = precision_problem(32768, beta)
    inputs, gradients = problem([32768], replace=replace, **sizes)
    together = simulate(inputs, simulated_ranks(inputs["cu_seqlens"], 8), gradients=gradients)
    assert_as_precise_as_one_rank(together, inputs, gradients)


@parametrize(gates=["strong", "random"])
def test_case_33_heads_have_their_own_offsets_in_backward(workers, gates):
    inputs, _ = problem([256], H=4, K=32, V=32)
    g = torch.full_like(inputs["g"], -10.0) if gates == "strong" else -3 * torch.rand_like(inputs["g"])
    if gates == "strong":
        g[..., 0] = 0.0
    ranks = check_group(workers, 2, [256], replace={"g": g}, H=4, K=32, V=32)
    inputs["g"] = g
    alone = run(inputs, gradients=problem([256], H=4, K=32, V=32)[1], output_final_state=False)
    for name in BY_TOKEN:
        expected = alone[name][:, :128]
        for head in range(4):
            assert relative_error(ranks[0][name][:, :, head], expected[:, :, head]) < 1e-5, (name, head)


def test_case_49_one_rank_equals_the_plain_call(workers):
    (rank,) = workers.call(1, "run_rank", lengths=[70, 58], **SMALL)
    inputs, gradients = problem([70, 58], **SMALL)
    assert_identical(assembled([rank], 2), run(inputs, gradients=gradients, output_final_state=False))


def test_case_50_another_partition_than_by_the_flat_stream(workers):
    for rank in workers.call(2, "refusals"):
        assert "q: expected T = 64, this rank's share of the stream" in rank[1]
        assert "got T = 32" in rank[1]
        assert "got T = 128" in rank[2]


def test_wrong_calls_are_refused_before_the_exchange(workers):
    first, second = workers.call(2, "refusals")
    for raised, N in ((first, 1), (second, 2)):
        assert raised[0].startswith("AssertionError: cp_context: expected a context with cu_seqlens")
        assert raised[3].startswith("ValueError: cp_context: expected one of rank")
        assert raised[4].startswith("ValueError: cp_context: expected layout 'contiguous' or 'zigzag', got 'striped'")
        assert raised[5].startswith(f"ValueError: initial_state: expected shape [N, HV, K, V] = [{N}, 2, 16, 16]")
        assert raised[6].startswith("ValueError: chunk_indices: expected shape [NT, 2]")
        assert raised[7].startswith("ValueError: ")


@parametrize(layout=["contiguous", "zigzag"])
@parametrize(flags={"none": {}, "all": ALL_FLAGS})
@pytest.mark.parametrize(("world_size", "lengths"), [(2, [96, 32]), (4, [128]), (3, [1, 90, 101]), (4, [32] * 4)])
def test_case_51_states_together_with_context_parallelism(workers, world_size, lengths, flags, layout):
    check_group(workers, world_size, lengths, flags=flags, states=True, layout=layout, **SMALL)


def test_rows_of_states_elsewhere(workers):
    """The state of a sequence that goes on is that behind this rank's last token, and has a gradient too; the initial
    state of one that began elsewhere is not read."""
    first, second = workers.call(2, "run_rank", lengths=[128], states=True, **SMALL)
    inputs, _ = problem([128], states=True, **SMALL)
    head = {name: x[:, :64] if name in ("q", "k", "v", "g", "beta") else x for name, x in inputs.items()}
    head["cu_seqlens"] = torch.tensor([0, 64])
    _, expected = chunk_gated_delta_rule(**head, output_final_state=True)
    assert relative_error(first["final_state"], expected) < 1e-6
    assert not second["dinitial_state"].any()
    assert first["dinitial_state"].any()


def test_running_states_have_gradients_of_their_own(workers):
    """Equal to as many calls in a row, each with the state that the one before returned."""
    world_size, tokens = 3, 150
    sizes = {"dtype": torch.float64, **SMALL}
    inputs, (do, dht) = problem([tokens], states=True, **sizes)
    grad_states = [torch.randn(dht.shape, dtype=torch.float64) for _ in range(world_size)]
    ranks = workers.call(world_size, "running_states", tokens=tokens, grad_states=torch.stack(grad_states), **sizes)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if name != "cu_seqlens"}
    state, outputs = leaves["initial_state"], []
    for rank in range(world_size):
        share = {name: leaves[name][:, rank * 50 : (rank + 1) * 50] for name in ("q", "k", "v", "g", "beta")}
        o, state = chunk_gated_delta_rule(**share, initial_state=state, output_final_state=True)
        outputs += [o, state]
    upstream = [x for rank in range(world_size) for x in (do[:, rank * 50 : (rank + 1) * 50], grad_states[rank])]
    expected = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    together = assembled(ranks, 1)
    assert set(together) == {f"d{name}" for name in leaves}
    for name, x in zip(leaves, expected, strict=True):
        assert relative_error(together[f"d{name}"], x) < 1e-13, name


@parametrize(layout=["contiguous", "zigzag"])
@parametrize(lengths=[[16], [1, 1, 1, 13], [9] + [1] * 7])
def test_case_52_one_or_two_tokens_a_rank(workers, lengths, layout):
    check_group(workers, 8, lengths, layout=layout, **SMALL)


@pytest.mark.parametrize(
    ("world_size", "lengths", "rank_lengths", "padding"),
    [
        (2, [100, 28], [90, 38], 0),
        (3, [128], [100, 0, 28], 0),  # a rank without tokens in the middle of a sequence
        (3, [60, 68], [60, 0, 68], 0),  # .. and between two
        (4, [100, 28], [70, 58, 0, 0], 5),  # only padding behind the stream
        (8, [33, 5, 90], [1, 63, 0, 0, 40, 3, 20, 1], 3),
    ],
)
@parametrize(states=[False, True])
def test_case_52_uneven_ranks_and_ranks_of_padding_only(workers, world_size, lengths, rank_lengths, padding, states):
    ranks = check_group(
        workers, world_size, lengths, rank_lengths=rank_lengths, padding=padding, states=states, **SMALL
    )
    for rank, length in zip(ranks, rank_lengths, strict=True):
        assert rank["o"].shape[1] == length + padding
        for name in BY_TOKEN:
            assert not rank[name][:, length:].any(), name


def test_case_53_two_contexts_alive(workers):
    first, second = [37, 91], [100, 28]
    ranks = workers.call(2, "two_contexts", first=first, second=second, **SMALL)
    for index, lengths in enumerate((first, second)):
        isolated = workers.call(2, "run_rank", lengths=lengths, **SMALL)
        for rank, expected in zip(ranks, isolated, strict=True):
            names = [n for n in rank[index] if n in BY_TOKEN]
            assert_identical({n: rank[index][n] for n in names}, {n: expected[n] for n in names})


@parametrize(wrapper=["checkpoint", "compile"])
@parametrize(layout=["contiguous", "zigzag"])
def test_case_53_checkpointing_and_compilation(workers, wrapper, layout):
    ranks = check_group(workers, 2, [37, 91], wrapper=wrapper, layout=layout, **SMALL)
    plain = workers.call(2, "run_rank", lengths=[37, 91], layout=layout, **SMALL)
    for rank, expected in zip(ranks, plain, strict=True):
        names = [n for n in rank if n in BY_TOKEN]
        assert_identical({n: rank[n] for n in names}, {n: expected[n] for n in names})


# Many ranks in one process --------------------------------------------------------------------------------------------


@functools.cache
def long_problem() -> tuple[Any, Any, Any, Any]:
    lengths, sizes = [700, 3, 1217, 128], {"H": 1, "HV": 2, "K": 32, "V": 48}
    inputs, gradients = problem(lengths, ALL_FLAGS, states=True, **sizes)
    alone = run(inputs, gradients=gradients, **ALL_FLAGS)
    exact = oracle(inputs, gradients=gradients, **ALL_FLAGS)
    return inputs, gradients, alone, exact


@parametrize(layout=["contiguous", "zigzag"])
@parametrize(world_size=[2, 4, 8, 16, 32, 64])
def test_simulated_ranks(world_size, layout):
    inputs, gradients, alone, exact = long_problem()
    ranks = simulated_ranks(inputs["cu_seqlens"], world_size, layout)
    stream = {name: x for name, x in inputs.items() if name != "cu_seqlens"} | {"cu_seqlens": inputs["cu_seqlens"]}
    together = simulate(stream, ranks, gradients=gradients, output_final_state=True, **ALL_FLAGS)
    assert_accurate(together, exact)
    for name, x in together.items():
        assert relative_error(x, exact[name]) <= 1.5 * relative_error(alone[name], exact[name]) + 1e-6, name


def test_simulated_sequences_without_tokens_keep_their_states():
    """They are on no rank, but one run has their states, and the gradients of these."""
    inputs, gradients = problem([0, 70, 0, 58], states=True, **SMALL)
    together = simulate(inputs, simulated_ranks(inputs["cu_seqlens"], 2), gradients=gradients, output_final_state=True)
    alone = run(inputs, gradients=gradients, output_final_state=True)
    for name in ("final_state", "dinitial_state"):
        assert_identical({name: together[name][[0, 2]]}, {name: alone[name][[0, 2]]})
        assert relative_error(together[name], alone[name]) < TOLERANCES[torch.float32], name


@pytest.mark.parametrize(
    ("change", "final_state", "kind", "message"),
    [
        ({"scale": torch.ones(())}, True, TypeError, "^scale: expected inputs among q, k, "),
        ({"cu_seqlens": None}, True, ValueError, "^cu_seqlens: expected the offsets"),
        ({}, False, ValueError, "^gradients: expected output_final_state=True"),
    ],
)
def test_simulation_refuses_what_it_would_not_compute(change, final_state, kind, message):
    inputs, gradients = problem([64], states=True, **SMALL)
    ranks = simulated_ranks(inputs["cu_seqlens"], 2)
    given = {name: x for name, x in {**inputs, **change}.items() if x is not None}
    with pytest.raises(kind, match=message):
        simulate(given, ranks, gradients=gradients, output_final_state=final_state)


def test_transforms_of_torch_func_are_refused_by_name():
    inputs, _ = problem([64], **SMALL)
    context = get_cp_cu_seqlens(inputs.pop("cu_seqlens"), world_size=2, rank=0)
    context.group = object()  # is not asked
    with pytest.raises(NotImplementedError, match=r"^cp_context: torch\.func's transforms"):
        torch.func.grad(lambda q: chunk_gated_delta_rule(**{**inputs, "q": q}, cp_context=context)[0].sum())(
            inputs["q"]
        )


def test_simulation_refuses_ranks_of_another_stream():
    inputs, _ = problem([70, 58], **SMALL)
    ranks = simulated_ranks(inputs["cu_seqlens"], 2)
    for wrong in (ranks[:1], [*ranks, ranks[0]], [], simulated_ranks(torch.tensor([0, 130]), 2)):
        with pytest.raises(ValueError, match=r"^ranks: expected all those of simulated_ranks"):
            simulate(inputs, wrong)
    with pytest.raises(ValueError, match=r"^v: expected shape \[1, T, HV, V\] with cu_seqlens' T = 128"):
        simulate(inputs | {"v": inputs["v"][:, :100]}, ranks)


def test_simulated_ranks_are_what_processes_compute(workers):
    inputs, gradients = problem([70, 90, 32], ALL_FLAGS, states=True, **SMALL)
    processes = assembled(workers.call(4, "run_rank", lengths=[70, 90, 32], flags=ALL_FLAGS, states=True, **SMALL), 3)
    ranks = simulated_ranks(inputs["cu_seqlens"], 4)
    simulated = simulate(inputs, ranks, gradients=gradients, output_final_state=True, **ALL_FLAGS)
    assert_identical(simulated, processes)
