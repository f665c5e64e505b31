"""The operator in float64 by chunks, differentiable: fast enough for sequences of tens of thousands of tokens.

Shares no formula with the library's kernels beyond the definition: each chunk's residuals come from a triangular solve.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Tensor, scale: float, size: int = 64
) -> tuple[Tensor, Tensor]:
    """o [T, H, V] and the final state [H, K, V] of one sequence; float64 [T, H, ..] inputs, g natural and finite."""
    state = h0
    outputs = []
    for begin in range(0, q.shape[0], size):
        rows = slice(begin, min(begin + size, q.shape[0]))
        qc, kc, vc = (x[rows].transpose(0, 1) for x in (q, k, v))
        gamma = g[rows].cumsum(0).transpose(0, 1)
        bc = beta[rows].transpose(0, 1)[..., None]
        n = qc.shape[1]
        lower = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        difference = gamma[:, :, None] - gamma[:, None, :]
        decay = torch.where(lower, torch.exp(torch.where(lower, difference, 0.0)), 0.0)
        left = torch.eye(n, dtype=q.dtype, device=q.device) + (bc * (kc @ kc.transpose(1, 2)) * decay).tril(-1)
        right = bc * (vc - torch.exp(gamma)[..., None] * (kc @ state))
        residual = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)
        outputs.append(
            scale * (torch.exp(gamma)[..., None] * (qc @ state) + (qc @ kc.transpose(1, 2) * decay) @ residual)
        )
        to_end = torch.exp(gamma[:, -1:] - gamma)[..., None]
        state = torch.exp(gamma[:, -1])[:, None, None] * state + kc.transpose(1, 2) @ (to_end * residual)
    return torch.cat(outputs, 1).transpose(0, 1), state
