"""Every stage against its formula, each from rounded inputs of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from harness.library import Shape
from harness.reference import INFINITY, TOLERANCE, Options, error, make_inputs, to_device

if TYPE_CHECKING:
    from harness.runner import Runner

Tensor = torch.Tensor


def stage_errors(runner: Runner, shape: Shape, with_gate: bool, backward: bool, options: Options
                 ) -> Iterator[tuple[str, tuple[float, float]]]:  # fmt: skip
    x = shape.dtype
    tolerance = TOLERANCE[x]
    B, T, H, HV, K, V, C = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V, shape.C
    t = to_device(make_inputs(shape, options), runner.device)
    seqlens = runner.cu_seqlens(shape)
    like: dict[str, tuple[int, ...]] = {
        "hv": (B, T, HV),
        "k": (B, T, H, K),
        "wk": (B, T, HV, K),
        "v": (B, T, HV, V),
    }

    def new(kind: str, dtype: torch.dtype = x) -> Tensor:
        return runner.empty(*like[kind], dtype=dtype)

    run = runner.library.run

    # Preparation
    y, rstd = new("k"), runner.empty(B, T, H, dtype=torch.float32)
    run("l2norm_fwd", shape, [t["k"] * 3, y, rstd])
    raw = (t["k"] * 3).double()
    exact_rstd = 1 / torch.sqrt(raw.square().sum(-1) + 1e-6)
    yield "l2norm", (max(error(y, raw * exact_rstd[..., None]), error(rstd, exact_rstd)), tolerance)
    dx = new("k")
    run("l2norm_bwd", shape, [y, rstd, t["q"], dx])
    yd, dy = y.double(), t["q"].double()
    expected = rstd.double()[..., None] * (dy - yd * (yd * dy).sum(-1, keepdim=True))
    yield "l2norm_bwd", (error(dx, expected), tolerance)
    logits, sigma = torch.randn(B, T, HV, device=runner.device), new("hv", torch.float32)
    run("fused_beta_sigmoid_fwd", shape, [logits, sigma], (2.0,))
    yield "sigmoid", (error(sigma, 2 * torch.sigmoid(logits.double())), 1e-6)
    dlogits = new("hv", torch.float32)
    run("fused_beta_sigmoid_bwd", shape, [logits, t["beta"], dlogits], (2.0,))
    s = torch.sigmoid(logits.double())
    yield "sigmoid_bwd", (error(dlogits, 2 * s * (1 - s) * t["beta"].double()), 2e-6)

    def cumsum(g: Tensor, reverse: bool) -> Tensor:
        out = torch.zeros_like(g, dtype=torch.float64)
        for _, b, _, begin, end in shape.chunks:
            rows = g[b, begin:end].double()
            if reverse:
                out[b, begin:end] = rows.flip(0).cumsum(0).flip(0)
                continue
            total = torch.zeros_like(rows[0])
            for i in range(end - begin):
                total = torch.where(rows[i] == -INFINITY, torch.zeros_like(total), total + rows[i])
                out[b, begin + i] = torch.where(rows[i] == -INFINITY, rows[i], total)
        return out

    gamma = new("hv", torch.float32)
    run("chunk_local_cumsum", shape, [t["g"], gamma, seqlens], (1 / math.log(2), 0.0))
    exact_gamma = cumsum(t["g"], False) / math.log(2)
    both = torch.isinf(gamma) == torch.isinf(exact_gamma)
    if not bool(both.all()):
        yield "cumsum_resets", (INFINITY, 0.0)
    hide = {"neginf": 0.0, "nan": float("nan")}
    yield "cumsum", (error(torch.nan_to_num(gamma, **hide), torch.nan_to_num(exact_gamma, **hide)), 1e-6)
    reverse = new("hv", torch.float32)
    finite = torch.nan_to_num(t["g"], neginf=0.0)
    run("chunk_local_cumsum", shape, [finite, reverse, seqlens], (1.0, 1.0))
    yield "reverse", (error(reverse, cumsum(finite, True)), 1e-6)

    a_log, bias = torch.randn(HV, device=runner.device), torch.randn(HV, device=runner.device)
    z = logits.double() + bias.double()
    softplus = z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))
    gate = -torch.exp(a_log.double()) * softplus
    out = new("hv", torch.float32)
    run("gdn_gate_fwd", shape, [logits, a_log, bias, out])
    yield "gate", (error(out, gate), 1e-6)
    run("gdn_gate_chunk_cumsum", shape, [logits, a_log, bias, out, seqlens], (1.0,))
    yield "gate_cumsum", (error(out, cumsum(gate, False)), 1e-6)
    dg, da, db = new("hv", torch.float32), torch.empty_like(a_log), torch.empty_like(bias)
    run("gdn_gate_bwd", shape, [logits, a_log, bias, t["beta"], dg, da, db])
    exact_dg = -torch.exp(a_log.double()) * torch.sigmoid(z) * t["beta"].double()
    exact_da = (gate * t["beta"].double()).sum((0, 1))
    worst = max(error(dg, exact_dg), error(da, exact_da), error(db, exact_dg.sum((0, 1))))
    yield "gate_bwd", (worst, 2e-6)

    # Forward, each stage from rounded inputs of its own
    group = HV // H
    q, k = t["q"].double().repeat_interleave(group, 2), t["k"].double().repeat_interleave(group, 2)
    v, beta = t["v"].double(), t["beta"].double()
    gates = gamma if with_gate else None
    g2 = gamma.double() if with_gate else torch.zeros(B, T, HV, dtype=torch.float64, device=runner.device)

    def factors(b: int, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of one chunk, [HV, ..]: E, decay from the start, to the end, of the whole chunk."""
        rows = g2[b, begin:end].transpose(0, 1)
        reset = rows == -INFINITY
        segment = reset.long().cumsum(-1)
        values = torch.where(reset, torch.zeros_like(rows), rows)
        n = end - begin
        lower = torch.ones(n, n, dtype=torch.bool, device=rows.device).tril()
        kept = (segment[:, :, None] == segment[:, None, :]) & lower
        difference = torch.where(
            kept, values[:, :, None] - values[:, None, :], torch.full((), -INFINITY).double().to(rows.device)
        )
        decay = torch.where(segment == 0, torch.exp2(values), torch.zeros_like(values))
        to_end = torch.where(segment == segment[:, -1:], torch.exp2(values[:, -1:] - values), torch.zeros_like(values))
        return torch.exp2(difference), decay, to_end, decay[:, -1]

    def heads(x: Tensor, b: int, begin: int, end: int) -> Tensor:
        return x[b, begin:end].transpose(0, 1)

    def put(out: Tensor, b: int, begin: int, value: Tensor) -> None:
        value = value.transpose(0, 1)
        out[b, begin : begin + value.shape[0], :, : value.shape[2]] = value

    def zeros(kind: str) -> Tensor:
        return torch.zeros(like[kind], dtype=torch.float64, device=runner.device)

    L, A = runner.empty(B, T, HV, C, dtype=torch.float32), runner.empty(B, T, HV, C, dtype=x)
    exact_L = torch.zeros(B, T, HV, C, dtype=torch.float64, device=runner.device)
    exact_A = exact_L.clone()
    for _, b, _, begin, end in shape.chunks:
        E = factors(b, begin, end)[0]
        kc = heads(k, b, begin, end)
        lower = (heads(beta[..., None], b, begin, end) * (kc @ kc.transpose(-1, -2)) * E).tril(-1)
        put(exact_L, b, begin, lower)
        put(exact_A, b, begin, torch.linalg.inv(torch.eye(end - begin, device=lower.device).double() + lower))
    run("chunk_scaled_dot_kkt_fwd", shape, [t["k"], gates, t["beta"], L, seqlens])
    yield "kkt", (error(L, exact_L), 1e-5)
    A32 = torch.empty_like(L)
    run("solve_tril", shape, [L, A32, seqlens])
    yield "solve", (error(A32, exact_A), 1e-5)
    w, u = new("wk"), new("v")
    run("chunk_gated_delta_rule_fwd_intra", shape, [t["k"], t["v"], gates, t["beta"], w, u, A, seqlens])
    yield "intra_A", (error(A, exact_A), tolerance)
    exact_w, exact_u = zeros("wk"), zeros("v")
    for _, b, _, begin, end in shape.chunks:
        a = heads(A.double(), b, begin, end)[..., : end - begin]
        decay = factors(b, begin, end)[1]
        bc = heads(beta[..., None], b, begin, end)
        put(exact_u, b, begin, a @ (bc * heads(v, b, begin, end)))
        put(exact_w, b, begin, a @ (bc * decay[..., None] * heads(k, b, begin, end)))
    yield "intra_wu", (max(error(w, exact_w), error(u, exact_u)), tolerance)
    w2, u2 = new("wk"), new("v")
    run("recompute_w_u_fwd", shape, [t["k"], t["v"], t["beta"], A, gates, w2, u2, seqlens])
    yield "recompute", (0.0 if torch.equal(w, w2) and torch.equal(u, u2) else INFINITY, 0.0)

    def state(s: Tensor) -> Tensor:
        return s.transpose(-1, -2) if shape.v_first else s

    NT = shape.NT
    h, v_new = runner.empty(*shape.state(B, NT, HV), dtype=x), new("v")
    ht = runner.empty(*shape.state(shape.N, HV), dtype=torch.float32)
    run("chunk_gated_delta_rule_fwd_h", shape, [t["k"], w, u, gates, t["h0"], h, v_new, ht, seqlens])
    exact_h, exact_v_new = torch.zeros_like(h, dtype=torch.float64), zeros("v")
    S = state(t["h0"].double()).clone()
    for n, b, index, begin, end in shape.chunks:
        _, _, to_end, whole = factors(b, begin, end)
        exact_h[b, index] = state(S[n])
        y = heads(u.double(), b, begin, end) - heads(w.double(), b, begin, end) @ S[n]
        put(exact_v_new, b, begin, y)
        S[n] = whole[:, None, None] * S[n] + heads(k, b, begin, end).transpose(-1, -2) @ (to_end[..., None] * y)
    yield "h", (error(h, exact_h), tolerance)
    yield "v_new", (error(v_new, exact_v_new), tolerance)
    yield "final", (error(ht, state(S)), tolerance)
    o = new("v")
    run("chunk_fwd_o", shape, [t["q"], t["k"], v_new, h, gates, o, seqlens])
    exact_o = zeros("v")
    for _, b, index, begin, end in shape.chunks:
        E, decay, _, _ = factors(b, begin, end)
        qc, kc, yc = heads(q, b, begin, end), heads(k, b, begin, end), heads(v_new.double(), b, begin, end)
        value = decay[..., None] * (qc @ state(h.double()[b, index])) + (qc @ kc.transpose(-1, -2) * E) @ yc
        put(exact_o, b, begin, shape.multiplier * value)
    yield "o", (error(o, exact_o), tolerance)
    if not backward:
        return

    # Backward
    do = t["do"]
    dv = new("v")
    run("chunk_bwd_dv_local", shape, [t["q"], t["k"], gates, do, dv, seqlens])
    exact_dv = zeros("v")
    for _, b, _, begin, end in shape.chunks:
        E = factors(b, begin, end)[0]
        p = shape.multiplier * (heads(q, b, begin, end) @ heads(k, b, begin, end).transpose(-1, -2)) * E
        put(exact_dv, b, begin, p.transpose(-1, -2) @ heads(do.double(), b, begin, end))
    yield "dv_local", (error(dv, exact_dv), tolerance)
    dh, dh0, dv2 = torch.full_like(h, float("nan")), torch.full_like(ht, float("nan")), new("v")
    run("chunk_gated_delta_rule_bwd_dhu", shape,
        [t["q"], t["k"], w, gates, t["dht"], do, dv, dh, dh0, dv2, seqlens])  # fmt: skip
    exact_dh, exact_dv2 = torch.zeros_like(exact_h), zeros("v")
    D = state(t["dht"].double()).clone()
    for n, b, index, begin, end in reversed(shape.chunks):
        _, decay, to_end, whole = factors(b, begin, end)
        exact_dh[b, index] = state(D[n])
        X = to_end[..., None] * (heads(k, b, begin, end) @ D[n]) + heads(dv.double(), b, begin, end)
        put(exact_dv2, b, begin, X)
        gq = shape.multiplier * decay[..., None] * heads(q, b, begin, end)
        D[n] = (whole[:, None, None] * D[n] + gq.transpose(-1, -2) @ heads(do.double(), b, begin, end)
                - heads(w.double(), b, begin, end).transpose(-1, -2) @ X)  # fmt: skip
    yield "dh", (error(dh, exact_dh), tolerance)
    yield "dv2", (error(dv2, exact_dv2), tolerance)
    yield "dh0", (error(dh0, state(D)), tolerance)

    dq, dk, dw, dg = new("k"), new("k"), new("wk"), new("hv", torch.float32)
    run("chunk_bwd_dqkwg", shape, [t["q"], t["k"], v_new, w, gates, h, dv2, do, dh, dq, dk, dw,
                                   dg if with_gate else None, seqlens])  # fmt: skip
    exact_dq, exact_dk, exact_dw, exact_dg = zeros("wk"), zeros("wk"), zeros("wk"), zeros("hv")
    for _, b, index, begin, end in shape.chunks:
        E, decay, to_end, whole = factors(b, begin, end)
        qc, kc, y = heads(q, b, begin, end), heads(k, b, begin, end), heads(v_new.double(), b, begin, end)
        Sc, Dc = state(h.double()[b, index]), state(dh.double()[b, index])
        doc, Xc = heads(do.double(), b, begin, end), heads(dv2.double(), b, begin, end)
        dS = shape.multiplier * (doc @ y.transpose(-1, -2)) * E
        dq_c = shape.multiplier * decay[..., None] * (doc @ Sc.transpose(-1, -2)) + dS @ kc
        dk_in = to_end[..., None] * (y @ Dc.transpose(-1, -2))
        dk_c = dk_in + dS.transpose(-1, -2) @ qc
        put(exact_dq, b, begin, dq_c)
        put(exact_dk, b, begin, dk_c)
        put(exact_dw, b, begin, -Xc @ Sc.transpose(-1, -2))
        dg_c = (dq_c * qc).sum(-1) - (dk_c * kc).sum(-1)
        dg_c[:, -1] += whole * (Sc * Dc).sum((-1, -2)) + (dk_in * kc).sum((-1, -2))
        exact_dg[b, begin:end] = dg_c.transpose(0, 1)

    def grouped(z: Tensor) -> Tensor:
        return z.view(B, T, H, group, K).sum(3)

    yield "dq", (error(dq, grouped(exact_dq)), tolerance)
    yield "dk1", (error(dk, grouped(exact_dk)), tolerance)
    yield "dw", (error(dw, exact_dw), tolerance)
    if with_gate:
        yield "dg1", (error(dg, exact_dg), 2 * tolerance)

    dk, dvv, db, dg = new("k"), new("v"), new("hv", torch.float32), new("hv", torch.float32)
    run("prepare_wy_repr_bwd", shape, [t["k"], t["v"], t["beta"], gates, A, dw, dv2, dk, dvv, db,
                                       dg if with_gate else None, seqlens])  # fmt: skip
    exact_dk, exact_dv, exact_db, exact_dg = zeros("wk"), zeros("v"), zeros("hv"), zeros("hv")
    for _, b, _, begin, end in shape.chunks:
        E, decay, _, _ = factors(b, begin, end)
        a = heads(A.double(), b, begin, end)[..., : end - begin]
        kc, vc, bc = heads(k, b, begin, end), heads(v, b, begin, end), heads(beta[..., None], b, begin, end)
        dwc, Xc = heads(dw.double(), b, begin, end), heads(dv2.double(), b, begin, end)
        zw, zu = a.transpose(-1, -2) @ dwc, a.transpose(-1, -2) @ Xc
        dA = (dwc @ (bc * decay[..., None] * kc).transpose(-1, -2) + Xc @ (bc * vc).transpose(-1, -2)).tril(-1)
        dP = -(a.transpose(-1, -2) @ dA @ a.transpose(-1, -2)).tril(-1) * E
        M = bc * (kc @ kc.transpose(-1, -2))
        put(exact_dk, b, begin, bc * decay[..., None] * zw + bc * (dP @ kc) + dP.transpose(-1, -2) @ (bc * kc))
        put(exact_dv, b, begin, bc * zu)
        db_c = decay * (zw * kc).sum(-1) + (zu * vc).sum(-1) + ((dP @ kc) * kc).sum(-1)
        dg_c = (zw * bc * decay[..., None] * kc).sum(-1) + (dP * M).sum(-1) - (dP * M).sum(-2)
        exact_db[b, begin:end] = db_c.transpose(0, 1)
        exact_dg[b, begin:end] = dg_c.transpose(0, 1)
    yield "dk2", (error(dk, grouped(exact_dk)), 2 * tolerance)
    yield "dv", (error(dvv, exact_dv), tolerance)
    yield "db", (error(db, exact_db), 2 * tolerance)
    if with_gate:
        yield "dg2", (error(dg, exact_dg), 2 * tolerance)
