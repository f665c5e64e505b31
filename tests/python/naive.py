"""The recurrence in plain torch float64, its gradients by autograd: checks the library's own reference."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor


def naive_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    q, k, v, beta = q.double(), k.double(), v.double(), beta.double()
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if use_qk_l2norm_in_kernel:
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    g = torch.zeros_like(beta) if g is None else g.double()
    if use_gate_in_kernel:
        z = g if dt_bias is None else g + dt_bias.double().reshape(HV)
        g = -A_log.double().reshape(HV).exp() * F.softplus(z, threshold=1e9)
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) * beta.sigmoid()

    # Independent runs of the recurrence: (rows of the batch, tokens, sequences of the state).
    if cu_seqlens is None:
        runs = [(slice(0, B), slice(0, T), slice(0, B))]
    else:
        ends = cu_seqlens.tolist()
        runs = [(slice(0, 1), slice(a, b), slice(n, n + 1)) for n, (a, b) in enumerate(itertools.pairwise(ends))]
    outputs, states = [], []
    for rows, tokens, sequences in runs:
        S = q.new_zeros((rows.stop - rows.start, HV, K, V))
        if initial_state is not None:
            h0 = initial_state[sequences].double()
            S = S + (h0.transpose(-1, -2) if state_v_first else h0)
        for t in range(tokens.start, tokens.stop):
            k_t = k[rows, t, :, :, None]
            S = S * g[rows, t, :, None, None].exp()
            r = beta[rows, t, :, None] * (v[rows, t] - (S * k_t).sum(-2))
            S = S + k_t * r[:, :, None, :]
            outputs.append(scale * (S * q[rows, t, :, :, None]).sum(-2))
        states.append(S)
    covered = T if cu_seqlens is None else int(cu_seqlens[-1])
    o = torch.stack(outputs, dim=1) if outputs else v[:, :0]
    o = torch.cat([o, torch.zeros_like(v[:, covered:])], dim=1)
    if not output_final_state:
        return o, None
    final_state = torch.cat(states) if states else q.new_zeros((0, HV, K, V))
    return o, final_state.transpose(-1, -2) if state_v_first else final_state
