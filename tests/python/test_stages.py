"""Every stage against its formula in plain torch float64, and the stages joined into the whole operator."""

from __future__ import annotations

import formulas
import pytest
import torch
from support import ALL_FLAGS, assert_accurate, make_inputs, offsets, output_gradients, parametrize, relative_error, run

from cula.gdn import prepare_chunk_indices, prepare_chunk_offsets, stages

TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCES)
SHAPES = {
    "batch": {"B": 2, "T": 70, "H": 1, "HV": 2},
    "packed": {"lengths": [65, 0, 16, 7], "H": 2, "HV": 4},
    "small_chunks": {"T": 45, "H": 1, "HV": 3, "chunk_size": 16},
}


class Setting:
    """Random operands of all stages in one dtype, and the common arguments in both spellings."""

    def __init__(self, shape: dict, dtype: torch.dtype, device: str, gate: str = "ordinary") -> None:
        self.dtype, self.device, self.tolerance = dtype, device, TOLERANCES[dtype]
        self.chunk_size = shape.get("chunk_size", 64)
        sizes = {name: size for name, size in shape.items() if name != "chunk_size"}
        inputs = make_inputs(**sizes, K=20, V=12, dtype=dtype, device=device)
        self.q, self.k, self.v, self.beta, self.h0 = (inputs[n] for n in ("q", "k", "v", "beta", "initial_state"))
        self.cu_seqlens = inputs.get("cu_seqlens")
        self.scale = 0.3
        self.formula = formulas.Problem(
            self.chunk_size, None if self.cu_seqlens is None else self.cu_seqlens.cpu(), self.scale
        )
        self.common = {"cu_seqlens": self.cu_seqlens}
        self.statistics = torch.float64 if dtype == torch.float64 else torch.float32
        g = inputs["g"].cpu().double()
        if gate == "reset":
            g[0, [3, 20, 21], 0] = -torch.inf
        self.raw_g = g.to(self.statistics).to(device)
        gamma = formulas.local_cumsum(self.formula, g, scale=stages.RCP_LN2)
        self.g = None if gate == "none" else gamma.to(self.statistics).to(device)
        self.random = torch.Generator().manual_seed(5)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(dtype or self.dtype).to(self.device)

    def states(self, transposed: bool = False) -> torch.Tensor:
        B, T, _, K = self.q.shape
        x = self.normal(B, self.formula.num_chunks(B, T), *self.v.shape[2:3], K, self.v.shape[3])
        return x.transpose(-1, -2).contiguous() if transposed else x

    def check(self, found, expected, dtypes, factor: float = 1.0) -> None:
        """Every result against the formula's, its dtype among others."""
        assert len(found) == len(expected) == len(dtypes)
        for index, (x, reference, dtype) in enumerate(zip(found, expected, dtypes, strict=True)):
            assert x.dtype == dtype, index
            limit = factor * self.tolerance
            assert relative_error(x, reference) <= limit, f"result {index}"


def exact(*tensors):
    return [None if x is None else x.detach().cpu().double() for x in tensors]


# Preparation --------------------------------------------------------------------------------------------------------


@parametrize(dtype=DTYPES)
@pytest.mark.parametrize("size", [2, 60, 128, 300])
def test_l2norm(size, dtype, device):
    s = Setting(SHAPES["batch"], dtype, device)
    x = s.normal(2, 5, 3, size)
    y, rstd = stages.l2norm_fwd(x)
    s.check((y, rstd), formulas.l2norm(*exact(x)), (dtype, s.statistics))
    dy = s.normal(*x.shape)
    s.check([stages.l2norm_bwd(y, rstd, dy)], [formulas.l2norm_backward(*exact(y, rstd, dy))], [dtype])
    wide, _ = stages.l2norm_fwd(x, output_dtype=torch.float64)
    assert wide.dtype == torch.float64
    assert relative_error(wide, formulas.l2norm(*exact(x))[0]) <= TOLERANCES[s.statistics]


@parametrize(dtype=DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_fused_beta_sigmoid(scale, dtype, device):
    s = Setting(SHAPES["batch"], dtype, device)
    x = s.normal(2, 7, 3)
    dy = s.normal(2, 7, 3, dtype=s.statistics)
    sigmoid = exact(x)[0].sigmoid()
    y = stages.fused_beta_sigmoid_fwd(x, scale)
    assert y.dtype == s.statistics
    assert relative_error(y, scale * sigmoid) <= TOLERANCES[s.statistics]
    dx = exact(dy)[0] * scale * sigmoid * (1 - sigmoid)
    s.check([stages.fused_beta_sigmoid_bwd(x, dy, scale=scale)], [dx], [dtype])
    assert torch.equal(stages.fused_beta_sigmoid_fwd(x), stages.fused_beta_sigmoid_fwd(x, 1.0))


@parametrize(shape=SHAPES)
@parametrize(dtype=DTYPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_chunk_local_cumsum(shape, dtype, reverse, device):
    s = Setting(shape, torch.float64 if dtype == torch.float64 else torch.float32, device)
    g = s.raw_g.to(dtype)
    for scale in (None, 1.5):
        out = stages.chunk_local_cumsum(g, s.chunk_size, reverse=reverse, scale=scale, **s.common)
        expected = formulas.local_cumsum(s.formula, *exact(g), 1.0 if scale is None else scale, reverse)
        s.check([out], [expected], [torch.float32], factor=1 if dtype != torch.float64 else 1e6)
    assert stages.chunk_local_cumsum(g, s.chunk_size, output_dtype=None, **s.common).dtype == dtype
    exact_sum = stages.chunk_local_cumsum(g, s.chunk_size, reverse=reverse, output_dtype=torch.float64, **s.common)
    s.check([exact_sum], [formulas.local_cumsum(s.formula, *exact(g), 1.0, reverse)], [torch.float64])


def test_chunk_local_cumsum_restarts_behind_a_reset(device):
    s = Setting(SHAPES["batch"], torch.float32, device, gate="reset")
    found = stages.chunk_local_cumsum(s.raw_g, 64, scale=stages.RCP_LN2)
    assert torch.equal(torch.isinf(found), torch.isinf(s.raw_g))
    assert torch.allclose(found, s.g, rtol=1e-6)


@parametrize(shape=SHAPES)
@parametrize(dtype=DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_gdn_gate(shape, dtype, bias, device):
    s = Setting(shape, torch.float64 if dtype == torch.float64 else torch.float32, device)
    g, dyg = s.normal(*s.raw_g.shape, dtype=dtype), s.normal(*s.raw_g.shape, dtype=s.statistics)
    HV = g.shape[2]
    A_log, dt_bias = s.normal(HV, dtype=s.statistics), s.normal(HV, dtype=s.statistics) if bias else None
    out = stages.gdn_gate_fwd(g, A_log, dt_bias, output_dtype=s.statistics)
    expected = formulas.gate(*exact(g, A_log, dt_bias))
    s.check([out], [expected], [s.statistics])
    summed = stages.gdn_gate_chunk_cumsum(
        g, A_log, s.chunk_size, scale=stages.RCP_LN2, dt_bias=dt_bias, output_dtype=s.statistics, **s.common
    )
    s.check([summed], [formulas.local_cumsum(s.formula, expected, stages.RCP_LN2)], [s.statistics])
    dg, dA_log, ddt_bias = stages.gdn_gate_bwd(g, A_log, dt_bias, dyg)
    gradients = formulas.gate_backward(*exact(g, A_log, dt_bias, dyg))
    assert relative_error(dg, gradients[0]) <= TOLERANCES[dtype]
    assert dg.dtype == dtype
    s.check([dA_log], gradients[1:2], [s.statistics], factor=3)
    assert (ddt_bias is not None) == bias
    if bias:
        s.check([ddt_bias], gradients[2:], [s.statistics], factor=3)


def test_gdn_gate_takes_any_leading_dimensions():
    g, A_log, dyg = torch.randn(3, 2, 5, 4), torch.randn(2, 2), torch.randn(3, 2, 5, 4)
    flat = g.view(1, -1, 4)
    assert torch.equal(stages.gdn_gate_fwd(g, A_log).view_as(flat), stages.gdn_gate_fwd(flat, A_log))
    dg, dA_log, _ = stages.gdn_gate_bwd(g, A_log, None, dyg)
    dg_flat, dA_log_flat, _ = stages.gdn_gate_bwd(flat, A_log.view(4), None, dyg.view_as(flat))
    assert torch.equal(dg.view_as(flat), dg_flat)
    assert torch.equal(dA_log.view(4), dA_log_flat)


# Forward ------------------------------------------------------------------------------------------------------------

# Every shape and kind of gate in the exact dtype and in float32; the 16-bit ones where rounding matters most.
_SETTINGS = [
    *((shape, dtype, gate) for shape in SHAPES for dtype in DTYPES[:2] for gate in ("ordinary", "none", "reset")),
    *(("packed", dtype, "ordinary") for dtype in DTYPES[2:]),
]
every_setting = pytest.mark.parametrize(
    ("shape", "dtype", "gate"), _SETTINGS, ids=[f"{s}-{str(d).removeprefix('torch.')}-{g}" for s, d, g in _SETTINGS]
)


@every_setting
def test_kkt_inverse_w_and_u(shape, dtype, gate, device):
    s = Setting(SHAPES[shape], dtype, device, gate)
    k, v, g, beta = exact(s.k, s.v, s.g, s.beta)
    L = stages.chunk_scaled_dot_kkt_fwd(
        s.k, s.g, s.beta, chunk_size=s.chunk_size, output_dtype=s.statistics, **s.common
    )
    expected_L = formulas.scaled_dot_kkt(s.formula, k, g, beta)
    assert relative_error(L, expected_L) <= TOLERANCES[s.statistics]
    A = stages.solve_tril(L, output_dtype=dtype, **s.common)
    expected_A = formulas.solve_tril(s.formula, *exact(L))
    s.check([A], [expected_A], [dtype])
    assert not A[expected_A == 0].any()  # above the diagonal and past the chunk
    assert (A[expected_A == 1] == 1).all()
    w, u = stages.recompute_w_u_fwd(s.k, s.v, s.beta, A, s.g, **s.common)
    s.check((w, u), formulas.recompute_w_u(s.formula, k, v, beta, *exact(A), g), (dtype, dtype))
    w, u, A = stages.chunk_gated_delta_rule_fwd_intra(s.k, s.v, s.g, s.beta, chunk_size=s.chunk_size, **s.common)
    s.check([A], [formulas.solve_tril(s.formula, expected_L)], [dtype])
    s.check((w, u), formulas.recompute_w_u(s.formula, k, v, beta, *exact(A), g), (dtype, dtype))


@every_setting
@pytest.mark.parametrize("v_first", [False, True])
def test_states_and_output(shape, dtype, gate, v_first, device):
    s = Setting(SHAPES[shape], dtype, device, gate)
    layout = lambda x: x.transpose(-1, -2) if v_first else x  # noqa: E731
    q, k, v, g, h0 = exact(s.q, s.k, s.v, s.g, s.h0)
    w = 0.1 * s.normal(*s.v.shape[:3], s.k.shape[3])
    common = {"chunk_size": s.chunk_size, "state_v_first": v_first, **s.common}
    h, v_new, final_state = stages.chunk_gated_delta_rule_fwd_h(
        s.k, w, s.v, s.g, initial_state=layout(s.h0), output_final_state=True, **common
    )
    expected = formulas.state_forward(s.formula, k, *exact(w), v, g, h0)
    s.check((layout(h), v_new, layout(final_state)), expected, (dtype, dtype, s.statistics), factor=2)
    o = stages.chunk_fwd_o(s.q, s.k, v_new, h, s.g, scale=s.scale, **common)
    s.check([o], [formulas.output(s.formula, q, k, *exact(v_new, layout(h)), g)], [dtype])

    h, v_new, final_state = stages.chunk_gated_delta_rule_fwd_h(s.k, w, s.v, s.g, save_new_value=False, **common)
    assert v_new is None
    assert final_state is None
    s.check([layout(h)], formulas.state_forward(s.formula, k, *exact(w), v, g, None)[:1], [dtype], factor=2)
    o = stages.chunk_fwd_o(s.q, s.k, s.v, h, s.g, **common)
    default_scale = formulas.Problem(s.formula.chunk_size, s.formula.cu_seqlens, s.q.shape[3] ** -0.5)
    s.check([o], [formulas.output(default_scale, q, k, v, *exact(layout(h)), g)], [dtype])


# Backward -----------------------------------------------------------------------------------------------------------


@every_setting
@pytest.mark.parametrize("v_first", [False, True])
def test_state_and_operand_gradients(shape, dtype, gate, v_first, device):
    s = Setting(SHAPES[shape], dtype, device, gate)
    layout = lambda x: x.transpose(-1, -2) if v_first else x  # noqa: E731
    q, k, v, g = exact(s.q, s.k, s.v, s.g)
    do, w = s.normal(*s.v.shape), 0.1 * s.normal(*s.v.shape[:3], s.k.shape[3])
    dht = s.normal(*s.h0.shape, dtype=s.statistics)
    common = {"chunk_size": s.chunk_size, "scale": s.scale, **s.common}
    dv = stages.chunk_bwd_dv_local(s.q, s.k, do, s.g, **common)
    s.check([dv], [formulas.local_value_gradient(s.formula, q, k, g, *exact(do))], [dtype])

    common["state_v_first"] = v_first
    dh, dh0, dv2 = stages.chunk_gated_delta_rule_bwd_dhu(
        s.q, s.k, w, do, dv, s.g, h0=layout(s.h0), dht=layout(dht), **common
    )
    expected = formulas.state_backward(s.formula, q, k, *exact(w), g, *exact(dht, do, dv))
    s.check((layout(dh), layout(dh0), dv2), expected, (dtype, s.statistics, dtype), factor=2)
    assert stages.chunk_gated_delta_rule_bwd_dhu(s.q, s.k, w, do, dv, s.g, **common)[1] is None

    h = layout(s.states())
    dq, dk, dw, dg = stages.chunk_bwd_dqkwg(s.q, s.k, s.v, do, h, dh, w=w, g=s.g, dv=dv2, **common)
    expected = formulas.operand_gradients(s.formula, q, k, v, g, *exact(layout(h), dv2, do, layout(dh)))
    s.check((dq, dk, dw), expected[:3], [dtype] * 3)
    assert (dg is None) == (gate == "none")
    if dg is not None:
        s.check([dg], expected[3:], [s.statistics], factor=2)


@every_setting
def test_prepare_wy_repr_bwd(shape, dtype, gate, device):
    s = Setting(SHAPES[shape], dtype, device, gate)
    beta_dtype = torch.bfloat16 if gate == "none" else torch.float32
    beta = s.beta.to(beta_dtype)
    k, v, g, b = exact(s.k, s.v, s.g, beta)
    A = formulas.solve_tril(s.formula, formulas.scaled_dot_kkt(s.formula, k, g, b)).to(dtype).to(device)
    dw, du = s.normal(*s.v.shape[:3], s.k.shape[3]), s.normal(*s.v.shape)
    dk, dv, db, dg = stages.prepare_wy_repr_bwd(s.k, s.v, beta, A, dw, du, s.g, **s.common)
    expected = formulas.wy_backward(s.formula, k, v, b, g, *exact(A, dw, du))
    s.check((dk, dv), expected[:2], [dtype] * 2, factor=2)
    assert db.dtype == beta_dtype
    assert relative_error(db, expected[2]) <= max(2 * s.tolerance, torch.finfo(beta_dtype).eps)
    assert (dg is None) == (gate == "none")
    if dg is not None:
        s.check([dg], expected[3:], [s.statistics], factor=2)


# Together -----------------------------------------------------------------------------------------------------------


def run_by_stages(inputs, do, dht, scale, chunk_size):
    """The whole operator with all flags, forward and backward, put together from the stages as SPEC orders them."""
    cu_seqlens = inputs.get("cu_seqlens")
    packed = {"cu_seqlens": cu_seqlens}
    if cu_seqlens is not None:
        packed["chunk_indices"] = prepare_chunk_indices(cu_seqlens, chunk_size)
    sized = {"chunk_size": chunk_size, **packed}
    states = {"state_v_first": True, **sized}
    statistics = inputs["initial_state"].dtype
    q, q_rstd = stages.l2norm_fwd(inputs["q"])
    k, k_rstd = stages.l2norm_fwd(inputs["k"])
    v, raw_g, A_log, dt_bias, h0 = (inputs[name] for name in ("v", "g", "A_log", "dt_bias", "initial_state"))
    beta = stages.fused_beta_sigmoid_fwd(inputs["beta"], 2.0)
    g = stages.gdn_gate_chunk_cumsum(
        raw_g, A_log, chunk_size, scale=stages.RCP_LN2, dt_bias=dt_bias, output_dtype=statistics, **packed
    )
    w, u, A = stages.chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, **sized)
    h, v_new, final_state = stages.chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=u, g=g, initial_state=h0, output_final_state=True, **states
    )
    o = stages.chunk_fwd_o(q=q, k=k, v=v_new, h=h, g=g, scale=scale, **states)

    w, u = stages.recompute_w_u_fwd(k=k, v=v, beta=beta, A=A, g=g, **packed)
    h, v_new, _ = stages.chunk_gated_delta_rule_fwd_h(k=k, w=w, u=u, g=g, initial_state=h0, **states)
    dv = stages.chunk_bwd_dv_local(q=q, k=k, g=g, do=do, scale=scale, **sized)
    dh, dh0, dv = stages.chunk_gated_delta_rule_bwd_dhu(
        q=q, k=k, w=w, g=g, h0=h0, dht=dht, do=do, dv=dv, scale=scale, **states
    )
    dq, dk, dw, dg = stages.chunk_bwd_dqkwg(
        q=q, k=k, v=v_new, w=w, g=g, h=h, dv=dv, do=do, dh=dh, scale=scale, **states
    )
    dk2, dv, db, dg2 = stages.prepare_wy_repr_bwd(k=k, v=v, beta=beta, g=g, A=A, dw=dw, du=dv, **packed)
    dg = stages.chunk_local_cumsum(dg + dg2, chunk_size, reverse=True, output_dtype=statistics, **packed)
    dg, dA_log, ddt_bias = stages.gdn_gate_bwd(g=raw_g, A_log=A_log, dt_bias=dt_bias, dyg=dg)
    return {
        "o": o,
        "final_state": final_state,
        "dq": stages.l2norm_bwd(q, q_rstd, dq),
        "dk": stages.l2norm_bwd(k, k_rstd, dk + dk2),
        "dv": dv,
        "dg": dg,
        "dbeta": stages.fused_beta_sigmoid_bwd(inputs["beta"], db, scale=2.0),
        "dA_log": dA_log,
        "ddt_bias": ddt_bias,
        "dinitial_state": dh0,
    }


@parametrize(lengths=[None, [65, 0, 40, 1, 30]])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_stages_together_are_the_operator(lengths, dtype, tolerance, chunk_size, device):
    inputs = make_inputs(1, 130, 2, 4, 20, 12, dtype=dtype, device=device, lengths=lengths, flags=ALL_FLAGS)
    do, dht = output_gradients(inputs, ALL_FLAGS)
    expected = run(inputs, gradients=(do, dht), scale=0.3, chunk_size=chunk_size, **ALL_FLAGS)
    # FLA's gradient of g is a difference of rounded row sums, and its sums over tokens cancel: they lose digits.
    factors = {"dg": 8, "dA_log": 30, "ddt_bias": 30}
    assert_accurate(run_by_stages(inputs, do, dht, 0.3, chunk_size), expected, tolerance, factors)


# Chunk tables -------------------------------------------------------------------------------------------------------


@parametrize(dtype=[torch.int32, torch.int64])
def test_chunk_tables(dtype, device):
    cu_seqlens = offsets([130, 0, 64, 1], dtype, device)
    indices = prepare_chunk_indices(cu_seqlens, 64)
    assert indices.tolist() == [[0, 0], [0, 1], [0, 2], [2, 0], [3, 0]]
    assert (indices.dtype, indices.device) == (dtype, cu_seqlens.device)
    assert torch.equal(prepare_chunk_indices(cu_seqlens, 64, cu_seqlens_cpu=cu_seqlens.cpu()), indices)
    chunk_offsets = prepare_chunk_offsets(cu_seqlens, 64)
    assert chunk_offsets.tolist() == [0, 3, 3, 4, 5]
    assert (chunk_offsets.dtype, chunk_offsets.device) == (torch.int64, cu_seqlens.device)
    assert prepare_chunk_indices(offsets([]), 64).shape == (0, 2)
    assert prepare_chunk_offsets(offsets([]), 64).tolist() == [0]


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_tables_agree_with_the_formulas(chunk_size):
    cu_seqlens = offsets([5, 0, 200, 64, 33])
    expected = formulas.chunks_of(1, 302, chunk_size, cu_seqlens)
    indices = prepare_chunk_indices(cu_seqlens, chunk_size).tolist()
    assert indices == [[chunk.sequence, chunk.position] for chunk in expected]
    first = prepare_chunk_offsets(cu_seqlens, chunk_size).tolist()
    assert [first[n] + c for n, c in indices] == [chunk.index for chunk in expected]
