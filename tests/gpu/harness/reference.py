"""The recurrence in float64, inputs for it, and how far a result is from it."""

from __future__ import annotations

import dataclasses
import math

import torch

from harness.library import Shape

Tensor = torch.Tensor
INFINITY = float("inf")


def effective(shape: Shape, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float64 q, k, v, log decay and beta behind every flag, differentiable."""
    q, k = t["q"], t["k"]
    if shape.l2norm:
        q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + 1e-6)
        k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g, beta = t["g"], t["beta"]
    if shape.gate:
        z = g + t.get("dt_bias", 0.0)
        g = -torch.exp(t["A_log"]) * (z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())))
    if shape.sigmoid:
        beta = torch.sigmoid(beta) * (2.0 if shape.neg_eigval else 1.0)
    group = shape.HV // shape.H
    return {"q": q.repeat_interleave(group, 2), "k": k.repeat_interleave(group, 2), "v": t["v"], "g": g, "beta": beta}


def recurrence(shape: Shape, t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """o and the final state of the token recurrence."""
    x = effective(shape, t)
    outputs = torch.zeros_like(x["v"])
    states = []
    for n, (b, begin, end) in enumerate(shape.ranges):
        s = torch.zeros(shape.HV, shape.K, shape.V, dtype=torch.float64, device=x["v"].device)
        if "h0" in t:
            s = t["h0"][n].transpose(-1, -2) if shape.v_first else t["h0"][n]
        rows = []
        for i in range(begin, end):
            decay = torch.exp(x["g"][b, i])
            s = torch.where((decay == 0)[:, None, None], torch.zeros_like(s), s * decay[:, None, None])
            k = x["k"][b, i]
            r = x["beta"][b, i][:, None] * (x["v"][b, i] - torch.einsum("hkv,hk->hv", s, k))
            s = s + k[:, :, None] * r[:, None, :]
            rows.append(torch.einsum("hkv,hk->hv", s, x["q"][b, i]) * shape.multiplier)
        if rows:
            index = torch.arange(begin, end, device=outputs.device)
            outputs = outputs.index_put((torch.tensor(b, device=outputs.device), index), torch.stack(rows))
        states.append(s.transpose(-1, -2) if shape.v_first else s)
    return outputs, torch.stack(states) if states else torch.zeros(0)


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 error; infinite if one is finite where the other is not, 0 for two zeros."""
    actual = actual.detach().double().cpu()
    expected = expected.detach().double().cpu()
    if actual.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(actual).all()):
        return INFINITY
    difference = float((actual - expected).norm())
    if difference <= 1e-9 * math.sqrt(actual.numel()):
        return 0.0
    return difference / max(float(expected.norm()), 1e-30)


TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}


@dataclasses.dataclass
class Options:
    """How the inputs of an operator check are made."""

    initial_state: bool = True
    final_state: bool = True
    gate_scale: float = 1.0  # of logsigmoid(normal)
    gate_dtype: torch.dtype = torch.float32
    beta_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    resets: tuple[int, ...] = ()  # tokens whose gate is -inf in head 0
    constant_gate: float | None = None
    strided: bool = False  # q, k, v as slices of one buffer, g and beta of another
    expanded_do: bool = False
    unaligned: bool = False
    dt_bias: bool = True
    small_betas: bool = False  # among others: 0, 2^-6, 2^-40


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def make_inputs(shape: Shape, options: Options, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*dims: int) -> Tensor:
        return torch.randn(*dims, generator=generator, device=device)

    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    if not shape.l2norm:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    t = {"q": q.to(shape.dtype), "k": k.to(shape.dtype), "v": v.to(shape.dtype)}
    if shape.gate:
        t["g"] = normal(B, T, HV).to(options.gate_dtype)
        t["A_log"] = (normal(HV) * 0.5).float()
        if options.dt_bias:
            t["dt_bias"] = normal(HV).float()
    else:
        g = torch.nn.functional.logsigmoid(normal(B, T, HV)) * options.gate_scale
        if options.constant_gate is not None:
            g = torch.full_like(g, options.constant_gate)
        for token in options.resets:
            g[:, token, 0] = -INFINITY
        t["g"] = g.to(options.gate_dtype)
    t["beta"] = (normal(B, T, HV) if shape.sigmoid else torch.rand(B, T, HV, generator=generator, device=device)).to(
        options.beta_dtype
    )
    if options.small_betas:
        shrink = torch.tensor([1.0, 0.0, 2.0**-6, 2.0**-40, 1.0], device=device)
        t["beta"] = t["beta"] * shrink[torch.arange(T, device=device) % 5, None].to(options.beta_dtype)
    if options.initial_state:
        t["h0"] = normal(*shape.state(shape.N, HV)).to(options.state_dtype)
    t["do"] = normal(B, T, HV, V).to(shape.dtype)
    if options.expanded_do:
        t["do"] = normal(1, 1, HV, 1).to(shape.dtype).expand(B, T, HV, V)
    if options.final_state:
        t["dht"] = normal(*shape.state(shape.N, HV))
    if options.strided and K == V and H == HV:
        buffer = torch.stack([t["q"], t["k"], t["v"]], dim=2).contiguous()
        t["q"], t["k"], t["v"] = buffer.unbind(2)
        pair = torch.cat([t["g"].float(), t["beta"].float()], dim=-1)
        t["g"], t["beta"] = pair[..., :HV], pair[..., HV:]
    if options.unaligned:
        for name in ("q", "k", "v"):
            buffer = torch.zeros(t[name].numel() + 1, dtype=t[name].dtype, device=device)
            buffer[1:] = t[name].flatten()
            t[name] = buffer[1:].view(t[name].shape)
    return t


def to_device(t: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """Keeps strides and storage offsets."""
    if device == "cpu":
        return t
    moved: dict[int, Tensor] = {}
    result = {}
    for name, x in t.items():
        storage = x.untyped_storage()
        if storage.data_ptr() not in moved:
            flat = torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.element_size(),))
            moved[storage.data_ptr()] = flat.to(device)
        result[name] = moved[storage.data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset())
    return result
