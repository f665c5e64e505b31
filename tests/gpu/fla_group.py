"""A group of ranks of flash-linear-attention (FLA) and of ours: payloads of either in one chain, merged by either.

    python fla_group.py
    TRITON_INTERPRET=1 python fla_group.py --device cpu --dtype float16 --tokens 96

Ranks are simulated one after another. Each makes its two payloads, by FLA's kernels and by this library; every chain of
them - FLA's, ours, and mixed - is merged by FLA's kernel and by ours, in both directions. Payloads must agree to the
rounding of operands, merges to fp32. Prints one line a comparison; ends with a status other than 0 if any failed.

Without a GPU, Triton's interpreter runs FLA's kernels; its products of bfloat16 are wrong. Needs
flash-linear-attention 0.6.0 and the installed package (or CULA_GDN_LIBRARY).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from fla_exchange import one_configuration

from cula.gdn import stages
from cula.gdn.autograd_cp import BackwardPass, ForwardPass, _merge
from cula.gdn.simulation import simulated_ranks

Tensor = torch.Tensor
OPTIONS = (None, 64, False, False, False, False)  # scale, chunk size, flags


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def our_payloads(t: dict[str, Tensor], ranks: int, options: tuple[Any, ...]) -> list[tuple[Tensor, Tensor]]:
    total = t["q"].shape[1]
    ends = torch.tensor([0, total], device=t["q"].device)
    result = []
    for rank in simulated_ranks(ends, ranks):
        inputs = (*(t[x][:, rank.tokens] for x in ("q", "k", "v", "g", "beta")), None, None, None)
        forward = ForwardPass(rank.partition, inputs, None, False, options)
        backward = BackwardPass(
            rank.partition, inputs, forward.saved, {}, forward.transitions(), t["do"][:, rank.tokens], None,
            (True,) * 5 + (False,) * 3, options,
        )  # fmt: skip
        result.append((forward.payload[0], backward.payload[0]))
    return result


def their_payloads(t: dict[str, Tensor], ranks: int) -> list[tuple[Tensor, Tensor]]:
    """All ranks make both, also those that hand nothing on."""
    from fla.ops.cp.chunk_bwd import chunk_cp_bwd_dh
    from fla.ops.cp.chunk_fwd import chunk_cp_fwd_h

    P = t["q"].shape[1] // ranks
    HV, V, K = t["v"].shape[2], t["v"].shape[3], t["k"].shape[3]
    result = []
    for rank in range(ranks):
        x = {name: value[:, rank * P : (rank + 1) * P].contiguous() for name, value in t.items()}
        gamma = stages.chunk_local_cumsum(x["g"], 64, scale=stages.RCP_LN2)
        w, u, _ = stages.chunk_gated_delta_rule_fwd_intra(x["k"], x["v"], gamma, x["beta"])
        dv = stages.chunk_bwd_dv_local(x["q"], x["k"], x["do"], gamma, scale=K**-0.5)
        ends = torch.tensor([0, P], device=gamma.device, dtype=torch.int32)
        hm, dhm = (torch.zeros(HV, K, V + K, device=gamma.device) for _ in range(2))
        chunk_cp_fwd_h(k=x["k"], w=w, u=u, hm=hm, g=gamma, cu_seqlens=ends)
        chunk_cp_bwd_dh(
            q=x["q"], k=x["k"], w=w, do=x["do"], dv=dv, dhm=dhm, g=gamma, scale=K**-0.5, cu_seqlens=ends
        )  # fmt: skip
        result.append((hm, dhm))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank")
    parser.add_argument("--heads", type=int, nargs=4, default=[2, 4, 128, 128], metavar=("H", "HV", "K", "V"))
    arguments = parser.parse_args()
    one_configuration()
    if arguments.device == "cpu":
        from fla.ops.cp import chunk_bwd, chunk_fwd, chunk_merge

        for module in (chunk_bwd, chunk_fwd, chunk_merge):
            module._check_cp_device = lambda device: None  # the interpreter needs no GPU
    from fla.ops.cp.chunk_merge import chunk_cp_merge

    dtype = getattr(torch, arguments.dtype)
    ranks, (H, HV, K, V) = arguments.ranks, arguments.heads
    total = ranks * arguments.tokens
    random = torch.Generator().manual_seed(0)

    def normal(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=random)

    t = {
        "q": F.normalize(normal(1, total, H, K), dim=-1).to(dtype),
        "k": F.normalize(normal(1, total, H, K), dim=-1).to(dtype),
        "v": normal(1, total, HV, V).to(dtype),
        "g": F.logsigmoid(normal(1, total, HV)) / 256,
        "beta": normal(1, total, HV).sigmoid(),
        "do": normal(1, total, HV, V).to(dtype),
    }
    t = {name: x.to(arguments.device) for name, x in t.items()}
    failures = 0

    def compare(what: str, found: float, limit: float) -> None:
        nonlocal failures
        bad = not found <= limit
        failures += bad
        print(f"{'FAIL' if bad else 'ok  '} {what:<44} {found:.1e} (limit {limit:.0e})", flush=True)

    rounding = 1e-2 if dtype == torch.bfloat16 else 2e-3
    theirs = their_payloads(t, ranks)
    for v_first in (False, True):
        options = (*OPTIONS, v_first, False, "auto")
        ours = our_payloads(t, ranks, options)
        for direction, name in ((0, "forward"), (1, "backward")):
            # The state that enters the last rank; the gradient of the state that leaves the first.
            order = list(range(ranks - 1, 0, -1)) if direction else list(range(ranks - 1))
            for rank in order if not v_first else ():
                mine, other = ours[rank][direction], theirs[rank][direction]
                compare(f"{name} rank {rank} S_ext", error(mine[..., :V], other[..., :V]), rounding)
                compare(f"{name} rank {rank} M", error(mine[..., V:], other[..., V:]), rounding)
            own = None
            for who in ("fla", "ours", "fla first", "ours first"):
                chain = [
                    (theirs if who == "fla" or (who != "ours" and (rank % 2 == 0) == (who == "fla first")) else ours)[
                        rank
                    ]
                    for rank in range(ranks)
                ]
                gathered = torch.stack([payloads[direction] for payloads in chain])
                by_us = _merge(gathered, order, options)[0]
                by_them = torch.zeros_like(by_us)
                chunk_cp_merge(
                    h=by_them, ag_hm=gathered, num_ranks=ranks - 1, rank=0 if direction else ranks - 1,
                    state_v_first=v_first, forward=not direction,
                )  # fmt: skip
                label = f"{name}{' v first' if v_first else ''}, chain of {who}"
                compare(f"{label}: merges", error(by_us, by_them), 1e-5)
                own = by_them if own is None else own
                compare(f"{label}: state", error(by_us, own), rounding)
    print(f"{failures} failed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
