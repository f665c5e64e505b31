"""Rejected calls: the exception's type, the argument that its text names, and that nothing was written."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from support import GATE, SIGMOID, make_inputs, offsets, oracle, parametrize

from cula.gdn import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    library_info,
    plan,
    prepare_checkpoint_offsets,
    prepare_chunk_indices,
    prepare_chunk_offsets,
    reference_gated_delta_rule,
    stages,
)


def valid(**sizes):
    return make_inputs(**{"B": 2, "T": 70, "H": 2, "HV": 4, "K": 16, "V": 8, **sizes})


def packed(lengths=(30, 0, 40), **changes):
    return {**make_inputs(lengths=list(lengths), H=2, HV=4, K=16, V=8), **changes}


def with_heads(heads, value_heads):
    x = valid()
    x["q"], x["k"] = (torch.randn(2, 70, heads, 16) for _ in range(2))
    x["v"], x["g"], x["beta"] = torch.randn(2, 70, value_heads, 8), *(torch.randn(2, 70, value_heads) for _ in range(2))
    x.pop("initial_state")
    return x


def context(cu_seqlens):
    return types.SimpleNamespace(cu_seqlens=cu_seqlens)


WITHOUT_STATE = valid(state=False)
BIG_KEYS = make_inputs(1, 3, 1, 1, 257, 4)
HALF_Q = valid()
HALF_Q["q"] = HALF_Q["q"].half()

# Arguments, exception and pattern, by name. SPEC section 5's rows first.
REJECTED = {
    "both_names_of_state_v_first": (
        dict(valid(), transpose_state_layout=True, state_v_first=True),
        ValueError,
        "transpose_state_layout.*state_v_first",
    ),
    "case_32_q_and_k_heads": (
        dict(valid(), k=torch.randn(2, 70, 1, 16)),
        ValueError,
        r"^k: expected shape .*H.*\[2, 70, 1",
    ),
    "case_32_4_into_6": (with_heads(4, 6), ValueError, "HV.*multiple.*H = 4, got HV = 6"),
    "case_32_4_into_2": (with_heads(4, 2), ValueError, "HV.*multiple.*H = 4, got HV = 2"),
    "head_first": (dict(valid(), head_first=False), DeprecationWarning, "head_first"),
    "chunk_size": (dict(valid(), chunk_size=48), ValueError, "^chunk_size: expected 16, 32 or 64, got 48"),
    "chunk_size_zero": (dict(valid(), chunk_size=0), ValueError, "^chunk_size: .* got 0"),
    "chunk_size_negative": (dict(valid(), chunk_size=-64), ValueError, "^chunk_size: .* got -64"),
    "cp_without_lengths": (dict(WITHOUT_STATE, cp_context=context(None)), AssertionError, "^cp_context: .*cu_seqlens"),
    "cp_of_another_kind": (
        dict(WITHOUT_STATE, cp_context=True),
        TypeError,
        "^cp_context: expected one of build_cp_context, got a bool",
    ),
    "cp_without_group": (
        dict(WITHOUT_STATE, cp_context=context(offsets([70]))),
        TypeError,
        "^cp_context: .*build_cp_context.*SimpleNamespace",
    ),
    "batch_invariant_with_cp": (
        dict(
            WITHOUT_STATE,
            cp_context=types.SimpleNamespace(cu_seqlens=offsets([70]), group=object()),
            batch_invariant=True,
        ),
        ValueError,
        "^batch_invariant: expected False with a cp_context .* got True",
    ),
    "case_27_batch_and_cu_seqlens": (
        dict(valid(state=False), cu_seqlens=offsets([35, 35])),
        ValueError,
        "^cu_seqlens: .*batch size 1 .*flatten.*got 2",
    ),
    "case_26_number_of_states": (
        packed(initial_state=torch.randn(2, 4, 16, 8)),
        ValueError,
        r"^initial_state: expected shape \[N.*\[3.*got \[2",
    ),
    "number_of_states_of_a_batch": (
        dict(valid(), initial_state=torch.randn(1, 4, 16, 8)),
        ValueError,
        r"^initial_state: .*\[2, 4, 16, 8\], got \[1",
    ),
    "gate_without_A_log": (dict(valid(), **GATE), AssertionError, "^A_log: .*use_gate_in_kernel"),
    "neg_eigval_alone": (
        dict(valid(), allow_neg_eigval=True),
        ValueError,
        "^allow_neg_eigval: .*use_beta_sigmoid_in_kernel",
    ),
    "case_36_K_257": (BIG_KEYS, AssertionError, "K of at most 256, got 257"),
    # An argument that would have no effect.
    "A_log_alone": (dict(valid(), A_log=torch.zeros(4)), ValueError, "^A_log: .*use_gate_in_kernel"),
    "dt_bias_alone": (dict(valid(), dt_bias=torch.zeros(4)), ValueError, "^dt_bias: .*use_gate_in_kernel"),
    "scale_of_65_bits": (dict(valid(), scale=2**63), ValueError, "^scale: expected a number of 64 bits, got 9223"),
    "scale_of_many_bits": (dict(valid(), scale=-(10**400)), ValueError, "^scale: expected a number of 64 bits, got -1"),
    "unknown_keyword": (
        dict(valid(), use_graph=True),
        TypeError,
        r"chunk_gated_delta_rule\(\) got an unexpected keyword argument 'use_graph'",
    ),
    "cu_seqlens_cpu_alone": (dict(valid(), cu_seqlens_cpu=offsets([70])), ValueError, "^cu_seqlens_cpu: .*cu_seqlens"),
    "chunk_indices_alone": (
        dict(valid(), chunk_indices=torch.zeros(2, 2, dtype=torch.int64)),
        ValueError,
        "^chunk_indices: .*cu_seqlens",
    ),
    # Lengths.
    "case_26_ends_behind_T": (packed(cu_seqlens=torch.tensor([0, 192])), ValueError, "^cu_seqlens: .*T = 70, got 192"),
    "case_26_descending": (
        packed(cu_seqlens=torch.tensor([0, 50, 40, 70])),
        ValueError,
        "^cu_seqlens: .*ascending.*50 before 40",
    ),
    "case_26_does_not_start_at_0": (
        packed(cu_seqlens=torch.tensor([5, 70])),
        ValueError,
        "^cu_seqlens: .*start at 0, got 5",
    ),
    "case_26_empty": (packed(cu_seqlens=torch.tensor([], dtype=torch.int64)), ValueError, r"^cu_seqlens: .*N \+ 1"),
    "cu_seqlens_shape": (
        packed(cu_seqlens=torch.tensor([[0, 70]])),
        ValueError,
        r"^cu_seqlens: .*one dimension.*\[1, 2\]",
    ),
    "cu_seqlens_dtype": (
        packed(cu_seqlens=torch.tensor([0.0, 70.0])),
        TypeError,
        "^cu_seqlens: .*int32 or int64, got float32",
    ),
    "host_lengths_differ": (
        packed(cu_seqlens_cpu=offsets([30, 1, 39])),
        ValueError,
        "^cu_seqlens_cpu: expected the values",
    ),
    "host_lengths_shape": (packed(cu_seqlens_cpu=offsets([30, 40])), ValueError, "^cu_seqlens_cpu: expected the shape"),
    "chunk_indices_rows": (
        packed(chunk_indices=prepare_chunk_indices(offsets([30, 0, 40]), 16)),
        ValueError,
        r"^chunk_indices: .*\[NT, 2\] = \[2, 2\]",
    ),
    "chunk_indices_values": (
        packed(chunk_indices=torch.tensor([[0, 0], [1, 0]])),
        ValueError,
        r"^chunk_indices: expected \(2, 0\) in row 1 .*got \(1, 0\)",
    ),
    "chunk_indices_dtype": (packed(chunk_indices=torch.zeros(2, 2)), TypeError, "^chunk_indices: .*int32 or int64"),
    # Shapes and dtypes.
    "q_dimensions": (
        dict(valid(), q=torch.randn(2, 70, 16)),
        ValueError,
        r"^q: expected shape \[B, T, H, K\], got \[2, 70, 16\]",
    ),
    "v_dimensions": (
        dict(valid(), v=torch.randn(70, 8)),
        ValueError,
        r"^v: expected shape \[B, T, HV, V\], got \[70, 8\]",
    ),
    "k_dim": (
        dict(valid(), k=torch.randn(2, 70, 2, 8)),
        ValueError,
        r"^k: expected shape \[B, T, H, K\] = \[2, 70, 2, 16\], got",
    ),
    "v_tokens": (dict(valid(), v=torch.randn(2, 69, 4, 8)), ValueError, r"^v: .*\[2, 70, 4, 8\], got \[2, 69"),
    "g_shape": (dict(valid(), g=torch.randn(2, 70, 2)), ValueError, r"^g: .*\[2, 70, 4\], got \[2, 70, 2\]"),
    "beta_per_channel": (dict(valid(), beta=torch.rand(2, 70, 4, 8)), ValueError, r"^beta: .*\[2, 70, 4\], got"),
    "A_log_elements": (dict(valid(), A_log=torch.zeros(3), **GATE), ValueError, "^A_log: .*HV = 4 elements"),
    "dt_bias_elements": (
        dict(valid(), A_log=torch.zeros(4), dt_bias=torch.zeros(8), **GATE),
        ValueError,
        "^dt_bias: .*HV = 4 elements",
    ),
    "case_34_state_layout": (
        dict(valid(), state_v_first=True),
        ValueError,
        r"^initial_state: .*\[N, HV, V, K\] = \[2, 4, 8, 16\], got \[2, 4, 16, 8\]",
    ),
    "case_45_q_half": (HALF_Q, TypeError, "^k: expected float16 .*q, k and v.*got float32"),
    "case_45_v_bfloat16": (
        dict(valid(), v=valid()["v"].bfloat16()),
        TypeError,
        "^v: expected float32 .*q, k and v.*got bfloat16",
    ),
    "integer_g": (
        dict(valid(), g=torch.zeros(2, 70, 4, dtype=torch.int32)),
        TypeError,
        "^g: expected float64, float32, bfloat16 or float16, got int32",
    ),
    "integer_q": (
        dict(valid(), **{n: torch.zeros(2, 70, 2, 16, dtype=torch.int64) for n in "qk"}),
        TypeError,
        "^q: expected float64, .*int64",
    ),
    "complex_q": (dict(valid(), q=torch.zeros(2, 70, 2, 16, dtype=torch.complex64)), TypeError, "q"),
    "beta_none": (dict(valid(), beta=None), TypeError, "^beta: expected a tensor, got NoneType"),
    "raw_gate_none": (dict(valid(), g=None, A_log=torch.zeros(4), **GATE), ValueError, "^g: .*use_gate_in_kernel"),
    "no_heads": (with_heads(0, 0), ValueError, "H = 0"),
    # Backends and devices.
    "unknown_backend": (dict(valid(), backend="tpu"), ValueError, "^backend: expected auto, cpu, cuda .*got tpu"),
    "wrong_backend": (dict(valid(), backend="cuda"), ValueError, "^backend: expected auto or cpu .*got cuda"),
}


@parametrize(case=REJECTED)
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_rejected_call(case, needs_gradient):
    arguments, exception, pattern = case
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    arguments = dict(arguments)
    if needs_gradient:
        arguments["v"] = arguments["v"].clone().requires_grad_()
    with pytest.raises(exception, match=pattern) as caught:
        chunk_gated_delta_rule(**arguments)
    assert type(caught.value) is exception
    for name, x in before.items():
        assert torch.equal(arguments[name], x)


def test_rejected_backward_names_the_gradient():
    x = make_inputs(1, 9, 1, 1, 4, 4)
    inputs = [x[n] for n in ("q", "k", "v", "g", "beta")]
    _, _, A, *norms = torch.ops.cula_gdn.chunk_forward(
        *inputs, None, None, None, None, None, None, False, True, None, 64, *(False,) * 6, "auto"
    )
    for do, pattern in ((torch.zeros(1, 9, 1, 5), "^do: expected shape"), (torch.zeros(1, 9, 1, 4).int(), "^do: ")):
        with pytest.raises((ValueError, TypeError), match=pattern):
            torch.ops.cula_gdn.chunk_backward(
                do, None, *inputs, None, None, None, None, None, A, *norms, [True] * 5 + [False] * 3,
                None, 64, *(False,) * 6, "auto",
            )  # fmt: skip


class _Spy:
    """Stands in for a function of the compiled library and keeps the outputs of rejected calls."""

    def __init__(self, function, outputs):
        self.function, self.outputs, self.seen = function, outputs, []

    def __call__(self, *arguments):
        for x in arguments[self.outputs]:
            if x is not None:
                x.fill_(7)
                self.seen.append(x)
        return self.function(*arguments)


@parametrize(
    name=["case_26_ends_behind_T", "g_shape", "case_34_state_layout", "case_45_v_bfloat16", "chunk_indices_values"]
)
def test_rejected_call_writes_nothing(name, monkeypatch):
    from cula.gdn import _native

    spy = _Spy(_native.forward, slice(8, 15))
    monkeypatch.setattr(_native, "forward", spy)
    arguments, exception, _ = REJECTED[name]
    arguments = {**arguments, "output_final_state": True, "v": arguments["v"].clone().requires_grad_()}
    with pytest.raises(exception):
        chunk_gated_delta_rule(**arguments)
    assert len(spy.seen) == 3  # o, final state, A
    assert all((x == 7).all() for x in spy.seen)


# The other functions ------------------------------------------------------------------------------------------------


@parametrize(
    name=[
        "case_32_4_into_6",
        "case_27_batch_and_cu_seqlens",
        "case_26_number_of_states",
        "case_36_K_257",
        "neg_eigval_alone",
        "case_26_ends_behind_T",
        "g_shape",
        "case_45_v_bfloat16",
        "A_log_alone",
        "wrong_backend",
    ]
)
def test_decoding_rejects_the_same(name):
    arguments, exception, pattern = REJECTED[name]
    with pytest.raises(exception, match=pattern):
        fused_recurrent_gated_delta_rule(**arguments)


@parametrize(
    name=[
        "case_32_4_into_6",
        "case_27_batch_and_cu_seqlens",
        "case_26_number_of_states",
        "neg_eigval_alone",
        "case_26_ends_behind_T",
        "case_26_descending",
        "g_shape",
        "A_log_alone",
        "gate_without_A_log",
        "q_dimensions",
        "integer_g",
        "k_dim",
    ]
)
def test_the_reference_rejects_the_same(name):
    arguments, exception, _ = REJECTED[name]
    with pytest.raises(exception, match=r"^[\w, ]+: "):
        reference_gated_delta_rule(**arguments)


def _stage(name, *args, **kwargs):
    return lambda: getattr(stages, name)(*args, **kwargs)


K = torch.randn(1, 20, 2, 8)
V = torch.randn(1, 20, 4, 6)
G = torch.randn(1, 20, 4)
A = torch.randn(1, 20, 4, 64)
W = torch.randn(1, 20, 4, 8)
H = torch.randn(1, 1, 4, 8, 6)

REJECTED_STAGES = {
    "l2norm_eps": (_stage("l2norm_fwd", K, eps=1e-5), ValueError, "^eps: expected 1e-06, got 1e-05"),
    "cumsum_scale_of_65_bits": (
        _stage("chunk_local_cumsum", G, 64, scale=2**63),
        ValueError,
        "^scale: expected a number of 64 bits",
    ),
    "cumsum_scale_of_truth": (
        _stage("chunk_local_cumsum", G, 64, scale=True),
        TypeError,
        "^scale: expected a number or None, got bool",
    ),
    "kkt_chunk_size_of_65_bits": (
        _stage("chunk_scaled_dot_kkt_fwd", K, G, G, chunk_size=2**64),
        ValueError,
        "^chunk_size: expected a number of 64 bits",
    ),
    "fwd_h_length_kinds": (
        _stage("chunk_gated_delta_rule_fwd_h", K, W, V, cu_seqlens=torch.tensor([0.0, 20.0])),
        TypeError,
        r"^cu_seqlens: expected int32 or int64, got torch\.float32",
    ),
    "fwd_h_offset_kinds": (
        _stage("chunk_gated_delta_rule_fwd_h", K, W, V, cu_seqlens=offsets([20]), chunk_offsets=torch.zeros(2)),
        TypeError,
        r"^chunk_offsets: expected int32 or int64, got torch\.float32",
    ),
    "fwd_h_index_kinds": (
        _stage("chunk_gated_delta_rule_fwd_h", K, W, V, cu_seqlens=offsets([20]), chunk_indices=torch.zeros(1, 2) > 0),
        TypeError,
        r"^chunk_indices: expected int32 or int64, got torch\.bool",
    ),
    "l2norm_bwd_shape": (_stage("l2norm_bwd", K, G, K), ValueError, "^rstd: expected the leading shape"),
    "l2norm_integers": (_stage("l2norm_fwd", K.int()), TypeError, "^(x|q): expected float64"),
    "cumsum_head_first": (_stage("chunk_local_cumsum", G, 64, head_first=False), DeprecationWarning, "head_first"),
    "cumsum_unknown": (_stage("chunk_local_cumsum", G, 64, foo=1), TypeError, r"^chunk_local_cumsum\(\) got .* 'foo'"),
    "cumsum_per_channel": (_stage("chunk_local_cumsum", V, 64), ValueError, r"^g: expected shape \[B, T, HV\]"),
    "cumsum_use_graph": (_stage("chunk_local_cumsum", G, 64, use_graph=True), ValueError, "^use_graph: "),
    "cumsum_lengths_without_dimension": (
        _stage("chunk_local_cumsum", G, 64, cu_seqlens=torch.tensor(20)),
        ValueError,
        "^cu_seqlens: expected one dimension",
    ),
    "l2norm_of_nothing": (_stage("l2norm_fwd", None), TypeError, "^x: expected a tensor, got NoneType"),
    "l2norm_bwd_of_nothing": (_stage("l2norm_bwd", None, G, K), TypeError, "^y: expected a tensor, got NoneType"),
    "sigmoid_of_nothing": (_stage("fused_beta_sigmoid_fwd", None), TypeError, "^x: expected a tensor, got NoneType"),
    "sigmoid_bwd_of_nothing": (_stage("fused_beta_sigmoid_bwd", None, G), TypeError, "^x: expected a tensor"),
    "gate_of_nothing": (_stage("gdn_gate_fwd", None, torch.zeros(4)), TypeError, "^g: expected a tensor"),
    "gate_of_a_number": (_stage("gdn_gate_fwd", torch.tensor(1.0), torch.zeros(1)), ValueError, "^g: expected shape"),
    "gate_bwd_without_A_log": (_stage("gdn_gate_bwd", G, None, None, G), TypeError, "^A_log: expected a tensor"),
    "gate_bwd_without_dyg": (_stage("gdn_gate_bwd", G, torch.zeros(4), None, None), TypeError, "^dyg: expected a tens"),
    "gate_bwd_dyg_shape": (_stage("gdn_gate_bwd", G, torch.zeros(4), None, G[:, 1:]), ValueError, "^dyg: expected the"),
    "cumsum_chunk_size": (_stage("chunk_local_cumsum", G, 20), ValueError, "^chunk_size: "),
    "gate_elements": (_stage("gdn_gate_fwd", G, torch.zeros(3)), ValueError, "^A_log: .*HV = 4"),
    "kkt_without_beta": (_stage("chunk_scaled_dot_kkt_fwd", K), TypeError, "^beta: expected a tensor, got NoneType"),
    "kkt_chunk_size": (
        _stage("chunk_scaled_dot_kkt_fwd", K, G, G, chunk_size=-1),
        ValueError,
        "^chunk_size: expected 16, 32 or 64, got -1",
    ),
    "kkt_g_shape": (_stage("chunk_scaled_dot_kkt_fwd", K, G[:, :5], G), ValueError, "^g: expected shape"),
    "solve_columns": (_stage("solve_tril", torch.zeros(1, 20, 4, 24)), ValueError, "^chunk_size: .*got 24"),
    "intra_without_beta": (_stage("chunk_gated_delta_rule_fwd_intra", K, V, G), ValueError, "^beta: expected a tensor"),
    "intra_chunk_size": (
        _stage("chunk_gated_delta_rule_fwd_intra", K, V, G, G, chunk_size=-1),
        ValueError,
        "^chunk_size: ",
    ),
    "w_u_dtype": (_stage("recompute_w_u_fwd", K, V, G, A.bfloat16()), TypeError, "^A: expected float32"),
    "fwd_h_gk": (_stage("chunk_gated_delta_rule_fwd_h", K, W, V, gk=W), ValueError, "^gk: "),
    "fwd_h_offsets": (
        _stage("chunk_gated_delta_rule_fwd_h", K, W, V, cu_seqlens=offsets([20]), chunk_offsets=torch.tensor([0, 2])),
        ValueError,
        r"^chunk_offsets: expected \[0, 1\], got \[0, 2\]",
    ),
    "fwd_h_offsets_alone": (
        _stage("chunk_gated_delta_rule_fwd_h", K, W, V, chunk_offsets=torch.tensor([0, 1])),
        ValueError,
        "^chunk_offsets: ",
    ),
    "fwd_h_indices": (
        _stage("chunk_gated_delta_rule_fwd_h", K, W, V, cu_seqlens=offsets([20]), chunk_indices=torch.tensor([[0, 1]])),
        ValueError,
        "^chunk_indices: ",
    ),
    "fwd_h_lengths_without_dimension": (
        _stage("chunk_gated_delta_rule_fwd_h", K, W, V, output_final_state=True, cu_seqlens=torch.tensor(20)),
        ValueError,
        "^cu_seqlens: expected one dimension",
    ),
    "fwd_h_big_K": (
        _stage(
            "chunk_gated_delta_rule_fwd_h",
            torch.zeros(1, 2, 1, 300),
            torch.zeros(1, 2, 1, 300),
            torch.zeros(1, 2, 1, 4),
        ),
        AssertionError,
        "K of at most 256",
    ),
    "fwd_o_g_gamma": (_stage("chunk_fwd_o", K, K, V, H, g_gamma=G), ValueError, "^g_gamma: "),
    "fwd_o_h_layout": (_stage("chunk_fwd_o", K, K, V, H, state_v_first=True), ValueError, "^h: expected shape .*V, K"),
    "dv_local_A": (_stage("chunk_bwd_dv_local", K, K, V, A=A), ValueError, "^A: "),
    "dhu_use_graph": (
        _stage("chunk_gated_delta_rule_bwd_dhu", K, K, W, V, V, use_graph=True),
        ValueError,
        "^use_graph: ",
    ),
    "dhu_without_dv": (_stage("chunk_gated_delta_rule_bwd_dhu", K, K, W, V, None), TypeError, "^dv: expected a tensor"),
    "dhu_dht": (_stage("chunk_gated_delta_rule_bwd_dhu", K, K, W, V, V, dht=H), ValueError, "^dht: expected shape"),
    "dqkwg_without_w": (_stage("chunk_bwd_dqkwg", K, K, V, V, H, H, dv=V), TypeError, "^w: expected a tensor"),
    "dqkwg_without_dv": (_stage("chunk_bwd_dqkwg", K, K, V, V, H, H, w=W), TypeError, "^dv: expected a tensor"),
    "wy_without_beta": (_stage("prepare_wy_repr_bwd", K, V, None, A, W, V), TypeError, "^beta: expected a tensor"),
    "wy_A": (_stage("prepare_wy_repr_bwd", K, V, G, A[0], W, V), ValueError, r"^A: expected shape \[B, T, HV, C\]"),
}


@parametrize(case=REJECTED_STAGES)
def test_rejected_stage(case):
    call, exception, pattern = case
    with pytest.raises(exception, match=pattern) as caught:
        call()
    assert type(caught.value) is exception


@pytest.mark.parametrize(
    "name", ["k", "w", "initial_state", "cu_seqlens", "chunk_size", "output_final_state", "backend"]
)
def test_stages_name_arguments_of_wrong_types(name):
    x = {n: torch.rand(1, 70, 2, 8) for n in ("k", "w", "u")}
    for value in ([1.0], x["k"].to("meta"), x["k"].bool()):
        if name in ("k", "w", "initial_state") or isinstance(value, list):
            with pytest.raises((TypeError, ValueError), match=f"^{name}: expected "):
                stages.chunk_gated_delta_rule_fwd_h(**{**x, name: value})


@pytest.mark.parametrize("last", [2**44, 2**62, 71])
def test_lengths_are_checked_before_results_are_allocated_by_them(last):
    x = {n: torch.rand(1, 70, 2, 8) for n in ("k", "w", "u")}
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected ascending offsets from 0 to at most T = 70"):
        stages.chunk_gated_delta_rule_fwd_h(**x, cu_seqlens=torch.tensor([0, 30, last]))


def test_rejected_plans_and_tables():
    with pytest.raises(ValueError, match="HV = 3"):
        plan(1, 10, 2, 3, 16, 16)
    with pytest.raises(AssertionError, match="256"):
        plan(1, 10, 1, 1, 512, 16)
    with pytest.raises(ValueError, match=r"^device: "):
        plan(1, 10, 1, 1, 16, 16, device="meta")
    with pytest.raises(TypeError, match="int32"):
        plan(1, 10, 1, 1, 16, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        prepare_chunk_indices(torch.zeros(2, 2, dtype=torch.int64), 64)
    with pytest.raises(ValueError, match=r"^chunk_size: "):
        prepare_chunk_offsets(offsets([3]), 0)
    for prepare in (prepare_chunk_indices, prepare_chunk_offsets, prepare_checkpoint_offsets):
        with pytest.raises(ValueError, match=r"cu_seqlens: expected ascending offsets, got \[0, 64, 32\]"):
            prepare(offsets([64, -32]), 64)
        with pytest.raises(TypeError, match="cu_seqlens: expected a tensor, got list"):
            prepare([0, 64], 64)
        with pytest.raises(TypeError, match=r"cu_seqlens: expected int32 or int64, got torch\.float32"):
            prepare(offsets([64]).float(), 64)
        for size in (64.5, True):
            with pytest.raises(TypeError, match="expected an int, got"):
                prepare(offsets([64]), size)
        with pytest.raises(ValueError, match="expected a number of 64 bits, got"):
            prepare(offsets([64]), 2**63)
    with pytest.raises(ValueError, match="cu_seqlens_cpu: expected the shape of cu_seqlens"):
        prepare_chunk_indices(offsets([60]), 16, offsets([30, 30]))
    with pytest.raises(TypeError, match="cu_seqlens: expected a tensor, got NoneType"):
        prepare_chunk_indices(None, 16, offsets([60]))
    for size, named in ((130.0, "float"), (True, "bool")):
        with pytest.raises(TypeError, match=f"^tokens: expected an int, got {named}"):
            plan(1, size, 2, 4, 16, 8)
    for size in (2**70, -(2**70)):
        with pytest.raises(ValueError, match=r"^tokens: expected a number of 64 bits"):
            plan(1, size, 2, 4, 16, 8)
    for bad, message in (
        ({"cu_seqlens": [0, 1]}, "cu_seqlens: expected a tensor, got list"),
        ({"backend": 3}, "backend: expected a string or None, got int"),
        ({"use_qk_l2norm_in_kernel": 2}, "use_qk_l2norm_in_kernel: expected True or False, got int"),
        ({"batch_invariant": None}, "batch_invariant: expected True or False, got NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            plan(1, 130, 2, 4, 16, 8, **bad)
    with pytest.raises(ValueError, match=r"^backend: "):
        plan(1, 130, 2, 4, 16, 8, backend="")


def test_plans_of_problems_that_no_machine_holds():
    sizes = plan(1, 2**45, 1, 1, 16, 16)
    assert sizes.num_chunks == 2**39
    assert 0 < sizes.inference_workspace_bytes < sizes.backward_workspace_bytes
    with pytest.raises(
        ValueError, match=r"^v: expected sizes whose product fits 64 bits, got B = 1, T = 2251799813685248"
    ):
        plan(1, 2**51, 1, 1, 256, 256)  # its workspace would have 2^65 bytes


def test_tables_of_lengths_near_the_end_of_their_type():
    long = torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    assert prepare_chunk_offsets(long, 64).tolist() == [0, 2**25]
    assert prepare_checkpoint_offsets(long, 2**31).tolist() == [0, 0]
    assert prepare_chunk_offsets(offsets([60]), 2**63 - 1).tolist() == [0, 1]


@pytest.mark.skipif("cuda" in library_info().backends, reason="needs a build without CUDA")
def test_case_61_a_gpu_is_named_when_it_is_missing():
    with pytest.raises(RuntimeError, match="cpu backend only"):
        plan(1, 10, 1, 1, 16, 16, device="cuda")


def test_no_device_memory_is_named():
    inputs = {n: x.to("meta") for n, x in valid(state=False).items()}
    o, _ = chunk_gated_delta_rule(**inputs)  # shapes only, as torch's own operators do
    assert o.shape == (2, 70, 4, 8)
    assert o.is_meta


def test_case_17_no_gate_is_a_gate_of_zeros():
    inputs = valid()
    zero = {**inputs, "g": torch.zeros(2, 70, 4)}
    none = {**inputs, "g": None}
    assert torch.equal(chunk_gated_delta_rule(**none)[0], chunk_gated_delta_rule(**zero)[0])


def test_sigmoid_of_a_given_beta_is_not_assumed():
    inputs = valid()
    assert not torch.equal(chunk_gated_delta_rule(**inputs, **SIGMOID)[0], chunk_gated_delta_rule(**inputs)[0])
    assert oracle(inputs, **SIGMOID)["o"].dtype == torch.float64


@pytest.mark.parametrize(
    "operator", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, reference_gated_delta_rule]
)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(name, [1.0], "a tensor, got list") for name in ("g", "beta", "initial_state", "cu_seqlens", "A_log", "dt_bias")]
    + [("scale", value, f"a number or None, got {type(value).__name__}") for value in ("1", True, torch.ones(()))]
    + [
        ("output_final_state", "no", "True or False, got str"),
        ("state_v_first", 1, "True or False, got int"),
        ("batch_invariant", 1, "True or False, got int"),
        ("use_gate_in_kernel", None, "True or False, got NoneType"),
    ]
    + [("backend", 1, "a string or None, got int"), ("chunk_size", 64.0, "an int, got float")],
)
def test_wrong_types_are_named(operator, name, value, message):
    if name not in inspect.signature(operator).parameters:
        pytest.skip("not an argument of it")
    flags = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)} if name == "dt_bias" else {}
    with pytest.raises(TypeError, match=f"^{name}: expected {message}$"):
        operator(**{**valid(), **flags, name: value})


@pytest.mark.parametrize("operator", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("name", ["k", "v", "g", "beta", "initial_state", "cu_seqlens"])
def test_one_meta_tensor_among_others(operator, name):
    arguments = {
        "q": torch.randn(1, 8, 1, 4),
        "k": torch.randn(1, 8, 1, 4),
        "v": torch.randn(1, 8, 1, 4),
        "g": -torch.rand(1, 8, 1),
        "beta": torch.rand(1, 8, 1),
        "initial_state": torch.randn(1, 1, 4, 4),
        "cu_seqlens": torch.tensor([0, 8]),
    }
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=rf"{name}: expected a tensor on cpu"):
        operator(**arguments)


# Of tensors whose values do not lie in memory by strides.
LAYOUTS = {
    "sparse": (torch.Tensor.to_sparse, r"torch\.sparse_coo"),
    "quantized": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "quantized"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0]]), "nested"),
    "jagged": (lambda x: torch.nested.nested_tensor([x[0]], layout=torch.jagged), "nested"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize(
    "operator", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, reference_gated_delta_rule]
)
@pytest.mark.parametrize("name", ["q", "v", "g", "beta", "initial_state", "cu_seqlens"])
@parametrize(layout=LAYOUTS)
def test_other_layouts_are_named(operator, name, layout):
    convert, kind = layout
    x = {**make_inputs(lengths=[70], H=2, HV=4, K=16, V=8)}
    if name == "cu_seqlens" and kind == "nested":
        x[name] = torch.nested.nested_tensor([x[name]])
    else:
        x[name] = convert(x[name])
    with pytest.raises(ValueError, match=f"^{name}: expected a dense tensor, got a {kind} one$"):
        operator(**x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*quantize")
@parametrize(layout=LAYOUTS)
def test_stages_and_tables_name_other_layouts(layout):
    convert, kind = layout
    with pytest.raises(ValueError, match=f"^w: expected a dense tensor, got a {kind} one$"):
        stages.chunk_gated_delta_rule_fwd_h(K, convert(W), V)
    with pytest.raises(ValueError, match=r"^cu_seqlens: expected a dense tensor, got a torch\.sparse_coo one$"):
        prepare_chunk_indices(offsets([20]).to_sparse(), 64)


@pytest.mark.parametrize("operator", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
@pytest.mark.parametrize("name", ["output", "output_state"])
def test_buffers_that_do_not_lie_in_memory(operator, name):
    inputs = valid()
    buffers = {"output": torch.zeros(2, 70, 4, 8), "output_state": torch.zeros(2, 4, 16, 8)}
    for other, message in (
        (torch._neg_view(buffers[name]), "a tensor whose memory holds its values, got a negated view"),
        (torch.zeros(buffers[name].shape, dtype=torch.complex64).conj().imag, "a tensor whose memory .* negated view"),
        (buffers[name].to_sparse(), r"a dense tensor, got a torch\.sparse_coo one"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected {message}$"):
            operator(**inputs, output_final_state=True, **{**buffers, name: other})


@pytest.mark.parametrize("operator", [fused_recurrent_gated_delta_rule, reference_gated_delta_rule])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vmap])
def test_transforms_that_do_not_exist_are_named(operator, transform):
    inputs = valid()
    q = inputs.pop("q")
    with pytest.raises(NotImplementedError, match=rf"^{operator.__name__}: torch\."):
        transform(lambda q: operator(q, **inputs)[0].sum())(torch.stack([q, q]) if transform is torch.func.vmap else q)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("operator", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_torch_jit_trace_is_named(operator):
    inputs = valid()
    q = inputs.pop("q")
    with pytest.raises(NotImplementedError, match=rf"^{operator.__name__}: torch\.jit\.trace can not record it"):
        torch.jit.trace(lambda q: operator(q, **inputs)[0], (q,))
