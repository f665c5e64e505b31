"""The chunked operator, as users call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cula.gdn import _arguments
from cula.gdn.autograd import INPUT_NAMES, forward_operator, is_plain
from cula.gdn.autograd_cp import context_parallel
from cula.gdn.serving import Serving

__all__ = ["chunk_gated_delta_rule", "chunk_gdn"]


def chunk_gated_delta_rule(
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
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    batch_invariant: bool = False,
    backend: str | None = None,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet's delta rule with decay, computed in chunks; differentiable.

    Per value head, with a K x V state S (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024):

        S   <- exp(g_t) S
        r_t  = beta_t (v_t - S^T k_t)
        S   <- S + k_t r_t^T
        o_t  = scale S^T q_t

    B batch, T tokens, H query/key heads, HV value heads (a multiple of H; value head j reads query/key head
    j // (HV / H)), K <= 256 key dim, V value dim, N sequences. "Float" is float64, float32, bfloat16 or float16. Any
    strides are accepted.

    Args:
        q, k: `[B, T, H, K]`, float, one dtype with v.
        v: `[B, T, HV, V]`.
        g: `[B, T, HV]`, float: log decay in nats (natural logarithm, usually negative); -inf resets the state. None
            is no decay. With use_gate_in_kernel: the raw gate. Nothing finite passes a reset, but a NaN or an
            infinity in front of it does, through the matrix products of the reset's chunk (0 * NaN); only a reset at
            the first row of a chunk stops it. (Nor does one in k, v, g or beta stop at earlier tokens of its chunk.)
        beta: `[B, T, HV]`, float: strength of the update; a logit with use_beta_sigmoid_in_kernel.
        scale: factor of the output; None is K^-0.5.
        initial_state: `[N, HV, K, V]`, float; None is zeros.
        output_final_state: whether to return the state behind the last token.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum of squares + 1e-6) first.
        use_beta_sigmoid_in_kernel: beta <- sigmoid(beta).
        allow_neg_eigval: beta <- 2 sigmoid(beta); needs use_beta_sigmoid_in_kernel.
        state_v_first: states are `[N, HV, V, K]`.
        cu_seqlens: `[N + 1]`, int32 or int64: sequences packed on the token axis, B = 1; ascending offsets that start
            at 0. The state restarts at each; empty ones are allowed. Outputs and gradients of tokens behind the last
            offset are zero. From a device they are read once for each tensor and version: one synchronisation.
            Writes that do not raise the tensor's version, as by kernels that take its address, are not seen: pass
            cu_seqlens_cpu then.
        cu_seqlens_cpu: cu_seqlens on the CPU; spares that synchronisation. Must agree with cu_seqlens, which is
            checked where that is on the CPU too; on a device it is taken on trust.
        chunk_indices: `[NT, 2]`, as of `prepare_chunk_indices`. Not needed; if given it must agree with cu_seqlens
            and chunk_size, which is checked where it is on the CPU.
        cp_context: of `cula.gdn.cp.build_cp_context`, or flash-linear-attention's own: the sequences go on on other
            ranks. Tensors are this rank's tokens, B = 1; cu_seqlens and cu_seqlens_cpu are the context's, whatever is
            passed. Forward and backward take one all-gather each, so every rank of the group must run both: its inputs
            require gradients as the others' do, and its loss depends on its outputs (add 0 * o.sum() where it would
            not). Gradients of A_log and dt_bias are this rank's share, to be summed over the group. Row n of
            initial_state, final_state and their gradients is local sequence n: initial_state is read where the
            sequence begins on this rank (elsewhere its row has no effect, and gradient 0), final_state is the state
            behind this rank's last token of it, which is the sequence's own where it ends here. A context without a
            group has no exchange: the local sequences stand alone.
        use_gate_in_kernel: the log decay is -exp(A_log) softplus(g + dt_bias).
        A_log: HV elements, float; required with use_gate_in_kernel.
        dt_bias: HV elements, float; only with use_gate_in_kernel.
        chunk_size: 16, 32 or 64 tokens; the result is the same up to rounding.
        batch_invariant: the bits of a sequence's o, final state and gradients do not depend on which other sequences
            are in the batch, nor on where in it the sequence is. (Those of dA_log and ddt_bias do: they are sums over
            all tokens.) Long sequences of few heads are then cut as one sequence of 32768 tokens would be, and on
            sm90 not at all in backward, which takes longer and, for long packed batches, more memory: `plan` says how
            much. The cpu backend has the property anyway. Not with a cp_context over a group.
        backend: "cpu", "cuda" or "sm90"; None or "auto" lets the library choose for the device of the tensors.
        output: `[B, T, HV, V]` in the dtype of q: o is written there. This and the following arguments are for
            serving; with any of them nothing has a gradient, and cp_context must be None.
        output_state: `[N, HV, K, V]`, float: final_state is written there, rounded once; needs output_final_state.
            May be initial_state itself; otherwise buffers share no memory with each other or with an input.
        state_indices: `[N]`, int32 or int64, on the device of q: initial_state (and output_state) are pools
            `[slots, HV, K, V]`, of which sequence n has slot state_indices[n]. With output_final_state, that slot of
            output_state, or of initial_state if there is none, is overwritten, and final_state is the pool. A sequence
            with slot -1 starts from zeros and leaves no state. Slots that are written must be distinct. On a GPU the
            values are read by the kernels alone, so that a captured graph follows them: a slot outside the pool counts
            as -1 there, and of sequences that share a slot it is undefined whose state, or parts, it holds. On the CPU
            both are errors.
        state_checkpoints: `[rows, HV, K, V]`, float32 (float64 for float64 inputs): the states behind every
            checkpoint_every_n_tokens tokens of each sequence are written there, len // checkpoint_every_n_tokens of
            them a sequence.
        checkpoint_cu_starts: `[N + 1]`, int32 or int64, on the device of q: those of sequence n from row
            checkpoint_cu_starts[n] on, none in or behind row checkpoint_cu_starts[n + 1]. None: one sequence behind the
            other (`prepare_checkpoint_offsets`).
        checkpoint_every_n_tokens: a multiple of chunk_size; 0 is no checkpoints.
        kwargs: the deprecated spelling transpose_state_layout of state_v_first.

    Returns:
        o: `[B, T, HV, V]` in the dtype of q.
        final_state: `[N, HV, K, V]`, float32 (float64 for float64 inputs), or None; output_state or the pool if given.

    Gradients have the dtype of their input. Under autocast q, k and v are cast to its dtype (float64 is not); g, beta,
    A_log, dt_bias and states keep theirs. Unlike flash-linear-attention, an argument that would have no effect is an
    error: an unknown keyword, A_log or dt_bias without use_gate_in_kernel.

    Raises:
        ValueError: a shape, length or option does not fit; the message names the argument.
        TypeError: a dtype does not fit, or an unknown keyword.
        AssertionError: K > 256; use_gate_in_kernel without A_log; cp_context without cu_seqlens. (States with
            cp_context, which flash-linear-attention refuses, are computed.)
        DeprecationWarning: head_first, which no longer exists, was passed.
        RuntimeError: no backend for this device in this build; lengths on a device during CUDA graph capture;
            a gradient of a gradient; another rank that failed.
        NotImplementedError: torch.vmap; forward-mode derivatives; torch.func with cp_context; torch.jit.trace.
    """
    if kwargs:
        state_v_first = _arguments.resolve_state_layout("chunk_gated_delta_rule", state_v_first, kwargs)
    plain = is_plain((q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, chunk_indices))
    _arguments.check_inputs(q, k, v, g, beta, use_gate_in_kernel)
    if not plain:  # which says as much
        _arguments.check_others(
            q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state,
            cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, chunk_indices=chunk_indices,
        )  # fmt: skip
    _arguments.check_chunk_size(chunk_size)
    if cp_context is not None:
        if not hasattr(cp_context, "cu_seqlens"):
            raise TypeError(f"cp_context: expected one of build_cp_context, got a {type(cp_context).__name__}")
        cu_seqlens, cu_seqlens_cpu = cp_context.cu_seqlens, getattr(cp_context, "cu_seqlens_cpu", None)
        if cu_seqlens is None:
            raise AssertionError("cp_context: expected a context with cu_seqlens, got one without")
        _arguments.check_tensor("cp_context.cu_seqlens", cu_seqlens)
        plain = plain and is_plain((cu_seqlens, cu_seqlens_cpu))
        if not hasattr(cp_context, "group"):
            raise TypeError(f"cp_context: expected one of build_cp_context, got a {type(cp_context).__name__}")
    if cu_seqlens is None and (cu_seqlens_cpu is not None or chunk_indices is not None):
        name = "chunk_indices" if cu_seqlens_cpu is None else "cu_seqlens_cpu"
        raise ValueError(f"{name}: expected cu_seqlens with it, got it alone")
    _arguments.check_options(
        scale, backend, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, output_final_state=output_final_state, batch_invariant=batch_invariant,
    )  # fmt: skip
    _arguments.refuse_tangents(
        "chunk_gated_delta_rule", q, k, v, g, beta, A_log, dt_bias, initial_state, output, output_state,
        state_checkpoints,
    )  # fmt: skip
    q, k, v = _arguments.autocast(q, k, v)

    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options = (
        scale, chunk_size, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, batch_invariant, "auto" if backend is None else backend,
    )  # fmt: skip
    wanted = Serving.of(
        output, output_state, state_indices, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens
    )
    if wanted is not None:
        if cp_context is not None:
            raise ValueError(f"{wanted.first_given()}: expected no cp_context with it, got one")
        return wanted.chunk(inputs, (cu_seqlens, cu_seqlens_cpu), chunk_indices, output_final_state, options)
    saves = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if cp_context is not None and cp_context.group is not None:
        if batch_invariant:
            raise ValueError(
                "batch_invariant: expected False with a cp_context over a group, whose cuts follow from the whole "
                "stream, got True"
            )
        _arguments.refuse_other_layouts(**dict(zip(INPUT_NAMES, inputs, strict=False)))
        return context_parallel(cp_context, inputs, chunk_indices, output_final_state, saves, options)
    try:
        o, final_state, *_ = forward_operator(saves, plain)(
            *inputs, cu_seqlens, cu_seqlens_cpu, chunk_indices, output_final_state, saves, *options
        )
    except RuntimeError:
        names = (*INPUT_NAMES, "chunk_indices")
        tensors = (*inputs, cu_seqlens, cu_seqlens_cpu, chunk_indices)
        _arguments.explain_failure("chunk_gated_delta_rule", **dict(zip(names, tensors, strict=True)))
        raise
    return o, final_state


chunk_gdn = chunk_gated_delta_rule
