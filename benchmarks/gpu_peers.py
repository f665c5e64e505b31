"""Other GPU implementations of the operator, behind one calling convention: for benchmarks only.

Each peer times what its users call for one layer: whole forward with initial and final state, whole backward from what
its forward saved. A peer that is not installed, or does not take a shape, is left out with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torch import Tensor

Inputs = dict[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    name: str
    version: str
    forward: Callable[[Inputs], Call]
    # Runs forward once, returns the call of backward; its results are dq, dk, dv, dbeta, dg, dh0 first.
    backward: Callable[[Inputs], Call] | None
    operator: Callable[..., Any] | None = None  # what its users differentiate through
    takes_gate: bool = False  # that operator takes raw gates and logits of beta


def _version(package: str) -> str:
    return metadata.version(package)


def fla() -> Peer:
    """flash-linear-attention, its own kernels: FLA_FLASH_QLA=0 must be set before."""
    from fla.ops.gated_delta_rule import chunk

    def forward(x: Inputs) -> Call:
        return lambda: chunk.chunk_gated_delta_rule_fwd(
            x["q"], x["k"], x["v"], x["g"], x["beta"], x["scale"], x["h0"], True, cu_seqlens=x["cu_seqlens"]
        )

    def backward(x: Inputs) -> Call:
        gamma, _, A, *_ = forward(x)()
        return lambda: chunk.chunk_gated_delta_rule_bwd(
            x["q"], x["k"], x["v"], gamma, x["beta"], A, x["scale"], x["h0"], x["do"], x["dht"],
            cu_seqlens=x["cu_seqlens"],
        )  # fmt: skip

    return Peer("fla", _version("flash-linear-attention"), forward, backward, chunk.chunk_gated_delta_rule, True)


def flashqla() -> Peer:
    import flash_qla

    def forward(x: Inputs) -> Call:
        return lambda: flash_qla.chunk_gated_delta_rule_fwd(
            x["q"], x["k"], x["v"], x["g"], x["beta"], scale=x["scale"], initial_state=x["h0"],
            output_final_state=True, output_h=False, cu_seqlens=x["cu_seqlens"], auto_cp=True,
        )  # fmt: skip

    def backward(x: Inputs) -> Call:
        gamma, A, *_ = forward(x)()
        return lambda: flash_qla.chunk_gated_delta_rule_bwd(
            x["q"], x["k"], x["v"], gamma, x["beta"], A, x["do"], x["dht"], scale=x["scale"], initial_state=x["h0"],
            cu_seqlens=x["cu_seqlens"], auto_cp=True,
        )  # fmt: skip

    def operator(*operands: Tensor, cu_seqlens_cpu: Tensor, **options: Any) -> Any:
        return flash_qla.chunk_gated_delta_rule(*operands, **options)

    return Peer("flashqla", _version("flash-qla"), forward, backward, operator)


def flashinfer() -> Peer:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    def forward(x: Inputs) -> Call:
        alpha, h0 = x["g"].exp()[0], x["h0"].transpose(-1, -2).contiguous()  # decay itself; states [N, HV, V, K]
        q, k, v, beta = (x[name][0] for name in ("q", "k", "v", "beta"))
        return lambda: chunk_gated_delta_rule(
            q=q, k=k, v=v, g=alpha, beta=beta, scale=x["scale"], initial_state=h0, cu_seqlens=x["cu_seqlens"],
            output_final_state=True,
        )  # fmt: skip

    return Peer("flashinfer", _version("flashinfer-python"), forward, None)


LOADERS: dict[str, Callable[[], Peer]] = {"fla": fla, "flashqla": flashqla, "flashinfer": flashinfer}


def load(names: list[str]) -> tuple[list[Peer], list[str]]:
    peers, absent = [], []
    for name in names:
        try:
            peers.append(LOADERS[name]())
        except Exception as error:  # noqa: PERF203  an import of a just-in-time compiled package can fail in any way
            absent.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return peers, absent


def gradient_names() -> list[str]:
    return ["dq", "dk", "dv", "dbeta", "dg", "dh0"]


def results(direction: str, returned: Any, peer: str) -> dict[str, Tensor]:
    """o and the final state, or the gradients, out of what a peer's call returns, laid out as ours."""
    if direction == "backward":
        return dict(zip(gradient_names(), returned, strict=False))
    if peer == "fla":
        return {"o": returned[1], "final_state": returned[3]}
    if peer == "flashinfer":
        return {"o": returned[0][None], "final_state": returned[1].transpose(-1, -2)}
    return {}  # flash_qla's forward returns what its own backward needs, in an order that is not documented
