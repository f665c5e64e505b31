"""Checks of context parallelism: halves of forward, summaries of sequences, merges; against float64."""

from __future__ import annotations

import torch

from harness.library import Shape
from harness.reference import INFINITY, TOLERANCE, Options, effective, error, make_inputs, recurrence, to_device
from harness.runner import Runner

Tensor = torch.Tensor

# M has products of twice an operand's bits (with fp16 fewer where elements are small) and fp32 sums. Its norm shrinks
# from chunk to chunk, what was rounded does not: the longest check, 22 chunks, leaves 1e-5 to 4e-5. One rounding of an
# operand to bfloat16 or fp16 would leave 2e-3 or 3e-4.
MAP_TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-4, torch.bfloat16: 5e-5}


def transition(shape: Shape, t: dict[str, Tensor], A: Tensor, n: int) -> Tensor:
    """M of a sequence [HV, K, K] from the A that was saved: M <- (decay I - K^T to_end A beta decay K) M by chunk."""
    x = effective(shape, {name: value.double().cpu() for name, value in t.items()})
    A = A.double().cpu()
    result = torch.eye(shape.K, dtype=torch.float64).repeat(shape.HV, 1, 1)
    for sequence, b, _, begin, end in shape.chunks:
        if sequence != n:
            continue
        rows = slice(begin, end)
        k, beta = x["k"][b, rows].transpose(0, 1), x["beta"][b, rows].transpose(0, 1)  # [HV, n, K], [HV, n]
        g = x["g"][b, rows].transpose(0, 1)
        reset = torch.isinf(g)
        sums = g.masked_fill(reset, 0.0).cumsum(-1)
        count = reset.cumsum(-1)
        decay = torch.where(count == 0, sums.exp(), torch.zeros(()))
        # From behind the last reset on, the sum restarts: what lies before cancels.
        to_end = torch.where(count == count[:, -1:], (sums[:, -1:] - sums).exp(), torch.zeros(()))
        a = A[b, rows].transpose(0, 1)[:, :, : end - begin]
        w = a @ ((beta * decay)[..., None] * k)
        step = decay[:, -1, None, None] * torch.eye(shape.K, dtype=torch.float64)
        result = (step - (to_end[..., None] * k).transpose(-1, -2) @ w) @ result
    return result


def normalized(shape: Shape, t: dict[str, Tensor], saved: list[Tensor | None]) -> dict[str, Tensor]:
    """The inputs with q and k as the library rounded them, so that what is compared starts from the same."""
    if not shape.l2norm:
        return t
    assert saved[0] is not None
    assert saved[2] is not None
    return {**t, "q": saved[0], "k": saved[2]}


def summaries(run: Runner, name: str, shape: Shape, sequences: list[int], options: Options | None = None,
              factor: float = 1.0) -> None:  # fmt: skip
    """Both summaries of some sequences, with and without starts, and the halves of forward."""
    if not run.wanted(name):
        return
    options = options or Options(gate_scale=1 / 64)
    t = to_device(make_inputs(shape, options), run.device)
    tolerance = TOLERANCE[shape.dtype] * factor
    errors: dict[str, tuple[float, float]] = {}
    try:
        saved, expected_saved = run.saved(shape), run.saved(shape)
        cu_seqlens = run.cu_seqlens(shape)
        o = run.empty(shape.B, shape.T, shape.HV, shape.V, dtype=shape.dtype)
        ht = run.empty(*shape.state(shape.N, shape.HV), dtype=torch.float32)
        inputs = [t.get(x) for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "h0")]
        run.library.run("cp_prepare", shape, [*inputs, o, ht, *saved, cu_seqlens], kind=3)
        run.library.run("cp_advance", shape, [*inputs, o, ht, *saved, cu_seqlens], kind=4)
        whole, whole_state = run.forward(shape, options, t, saved=expected_saved)
        pairs = [(o, whole), (ht, whole_state)]
        pairs += [(a, b) for a, b in zip(saved, expected_saved, strict=True) if a is not None]
        equal = all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs if b is not None)
        errors["halves"] = (0.0 if equal else INFINITY), 0.0

        # What no sequence that is summarised contains may hold anything.
        P, HV, K, V = len(sequences), shape.HV, shape.K, shape.V
        index = torch.tensor(sequences, dtype=torch.int64)
        gates = [t.get(x) for x in ("g", "beta", "A_log", "dt_bias")]
        q, k = (None, None) if shape.l2norm else (t["q"], t["k"])
        norms = [saved[0], saved[2]]
        given = {name: t.get(name) for name in ("h0", "dht")}
        starts = {name: None if x is None else x[index.to(x.device)].contiguous() for name, x in given.items()}
        x = {name: value.double().cpu() for name, value in normalized(shape, t, saved).items()}
        plain = Shape(**{**vars(shape), "l2norm": False})
        for start in (False, True):
            h0, dht = (starts["h0"], starts["dht"]) if start else (None, None)
            summary = run.empty(P, HV, K, V + K, dtype=torch.float32)
            arguments = [k, t["v"], *gates, h0, norms[1], saved[4], index, summary, cu_seqlens]
            run.library.run("cp_summarize", shape, arguments, kind=5)
            exact = {name: value.clone().requires_grad_(True) for name, value in x.items() if name not in ("do", "dht")}
            exact["h0"] = x["h0"].clone() if start else torch.zeros_like(x["h0"])
            exact["h0"].requires_grad_(True)
            outputs, states = recurrence(plain, exact)
            chosen = states[index]
            chosen = chosen.transpose(-1, -2) if shape.v_first else chosen
            label = "+h0" if start else ""
            errors[f"S{label}"] = error(summary[..., :V], chosen), tolerance
            maps = torch.stack([transition(plain, x, saved[4], n) for n in sequences])  # type: ignore[arg-type]
            errors[f"M{label}"] = error(summary[..., V:], maps), MAP_TOLERANCE[shape.dtype]

            loss = (torch.nan_to_num(outputs) * x["do"]).sum() + 0.0 * exact["h0"].sum()
            if start:
                loss = loss + (states * x["dht"]).sum()
            (gradient,) = torch.autograd.grad(loss, [exact["h0"]])
            gradient = gradient[index].transpose(-1, -2) if shape.v_first else gradient[index]
            kept = summary[..., V:].contiguous()
            for passed in (None, kept):
                adjoint = run.empty(P, HV, K, V + K, dtype=torch.float32)
                arguments = [q, k, *gates, *norms, saved[4], t["do"], dht, passed, index, adjoint, cu_seqlens]
                run.library.run("cp_summarize_adjoint", shape, arguments, kind=6)
                errors[f"dS{label}"] = error(adjoint[..., :V], gradient), 2 * tolerance
                if passed is None:
                    errors[f"dM{label}"] = error(adjoint[..., V:], maps.transpose(-1, -2)), MAP_TOLERANCE[shape.dtype]
                else:
                    same = torch.equal(adjoint[..., V:], kept.transpose(-1, -2))
                    errors[f"dM given{label}"] = (0.0 if same else INFINITY), 0.0
        again = run.empty(P, HV, K, V + K, dtype=torch.float32)
        arguments = [k, t["v"], *gates, starts["h0"], norms[1], saved[4], index, again, cu_seqlens]
        run.library.run("cp_summarize", shape, arguments, kind=5)
        errors["repeat"] = (0.0 if torch.equal(again, summary) else INFINITY), 0.0
        run.report(name, errors)
    except Exception as exception:
        run.fail(name, exception)


def merges(run: Runner, name: str, shape: Shape, entries: int, state_dtype: torch.dtype = torch.float32,
           summary_dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
    if not run.wanted(name):
        return
    HV, K, V = shape.HV, shape.K, shape.V
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(entries + 2, HV, K, V + K, generator=generator)
    given[..., V:] *= 0.5 / K**0.5
    given = given.to(summary_dtype)
    order = torch.randperm(entries + 2, generator=generator)[:entries]
    try:
        expected = torch.zeros(HV, K, V, dtype=torch.float64)
        for n in order.tolist():
            expected = given[n, ..., V:].double() @ expected + given[n, ..., :V].double()
        if entries > 0:
            given[order[0], ..., V:] = INFINITY
        state = run.empty(*shape.state(HV), dtype=state_dtype)
        run.library.run("cp_merge", shape, [given.to(run.device), order, state], kind=7)
        found = state.transpose(-1, -2) if shape.v_first else state
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[state_dtype]
        run.report(name, {"state": (error(found, expected), tolerance)})
    except Exception as exception:
        run.fail(name, exception)


def only_padding(run: Runner, name: str) -> None:
    """A rank whose tokens belong to no sequence: its outputs are zero."""
    if not run.wanted(name):
        return
    shape = Shape(T=70, H=1, HV=2, offsets=[0])
    t = to_device(make_inputs(shape, Options(initial_state=False)), run.device)
    try:
        o = run.empty(1, shape.T, shape.HV, shape.V, dtype=shape.dtype)
        arguments = [*(t[x] for x in ("q", "k", "v", "g", "beta")), None, None, None, o, None, *run.saved(shape)]
        for call, kind in (("cp_prepare", 3), ("cp_advance", 4)):
            run.library.run(call, shape, [*arguments, run.cu_seqlens(shape)], kind=kind)
        run.report(name, {"o": (float(o.float().abs().max()), 0.0)})
    except Exception as exception:
        run.fail(name, exception)


def small(run: Runner, dtypes: tuple[torch.dtype, ...]) -> None:
    """Sizes that the emulator has the patience for."""
    for dtype in dtypes:
        d = str(dtype).removeprefix("torch.")
        packed = [0, 15, 100, 230, 230, 295]
        summaries(run, f"cp {d} 64x64", Shape(dtype, T=130, H=1, HV=2), [0])
        summaries(run, f"cp {d} packed", Shape(dtype, T=300, H=1, HV=2, K=128, V=64, offsets=packed), [2, 4, 3, 0])
        summaries(run, f"cp {d} rows", Shape(dtype, B=3, T=70, H=1, HV=1, K=64, V=128), [2, 0])
        summaries(
            run, f"cp {d} all flags",
            Shape(dtype, T=150, H=1, HV=3, K=60, V=100, C=32, offsets=[0, 1, 64, 64, 140], l2norm=True, gate=True,
                  sigmoid=True, neg_eigval=True, v_first=True), [3, 1], factor=1.5,
        )  # fmt: skip
        summaries(
            run,
            f"cp {d} resets",
            Shape(dtype, T=200, H=1, HV=2),
            [0],
            Options(gate_scale=1 / 64, resets=(0, 37, 38, 127)),
        )
        # Chunks at one end do not see the other any more, and M is zero.
        summaries(run, f"cp {d} forgets", Shape(dtype, T=400, H=1, HV=2, C=16), [0], Options(constant_gate=-1.0))
        flags = {"l2norm": True, "gate": True, "sigmoid": True, "neg_eigval": True, "v_first": True}
        summaries(
            run, f"cp {d} flags, chunks of 64",
            Shape(dtype, T=230, H=1, HV=2, K=64, V=128, offsets=[0, 1, 140, 140, 200], **flags), [3, 1], factor=1.5,
        )  # fmt: skip
        summaries(
            run, f"cp {d} forgets, chunks of 64", Shape(dtype, T=420, H=1, HV=2, offsets=[0, 410]), [0],
            Options(constant_gate=-0.6),
        )  # fmt: skip
        # More chunks than the ends that are looked at first; with strong gates no others are.
        for gate in (-0.002, -0.5):
            summaries(run, f"cp {d} 66 chunks, gate {gate}", Shape(dtype, T=4170, H=1, HV=1), [0],
                      Options(constant_gate=gate))  # fmt: skip
        summaries(run, f"cp {d} strided", Shape(dtype, T=66, H=2, HV=2), [0], Options(gate_scale=1 / 64, strided=True))
        summaries(run, f"cp {d} no tokens", Shape(dtype, T=0, H=1, HV=1), [0])
    only_padding(run, "cp only padding")
    merges(run, "cp merge 3", Shape(HV=2, K=64, V=128), 3)
    merges(run, "cp merge none", Shape(HV=2, K=60, V=20), 0)
    merges(run, "cp merge 1", Shape(HV=1, K=128, V=100, v_first=True), 1)
    merges(run, "cp merge 600", Shape(HV=1, K=16, V=16, v_first=True), 600)
    merges(run, "cp merge bf16 state", Shape(HV=1, K=256, V=32), 4, torch.bfloat16, torch.float16)


def large(run: Runner, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        d = str(dtype).removeprefix("torch.")
        for K, V in ((128, 128), (256, 64), (256, 512)):
            summaries(run, f"cp {d} {K}x{V}", Shape(dtype, T=260, H=1, HV=2, K=K, V=V), [0])
        summaries(run, f"cp {d} many heads", Shape(dtype, T=130, H=16, HV=32, K=128, V=128), [0])
        for scale in (1 / 16, 1 / 1024):
            shape = Shape(dtype, T=1500, H=1, HV=2, K=128, V=128, offsets=[0, 100, 1490])
            summaries(run, f"cp {d} gates * {scale:g}", shape, [1], Options(gate_scale=scale))
