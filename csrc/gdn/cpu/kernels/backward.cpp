// Backward: three passes over A, the inputs and the incoming gradients.
//   recompute  for each (sequence, value head, block of state columns), forward: the state S that enters each chunk and
//              V' = A R
//   adjoint    for the same units, in reverse: the gradient D of the state that leaves each chunk,
//              X = dL/dV' = P^T dO + diag(to_end) K D, dW = A^T X, and
//              D <- total D + scale Q^T diag(gamma) dO - K^T diag(beta gamma) dW
//   gradients  for each (chunk, key head), chunk-parallel: everything else. The group's value heads are one loop, so dq
//              and dk are summed in registers and no sum depends on the order of threads.
// The first two do not need each other and share one parallel loop. What they hand to the third grows with the tokens,
// so the three run over one batch of (sequence, key head) pairs after another, in the same memory.
//
// With dW the gradient of R (beta times that is the gradient of V), the gradient of the inverse needs no product with
// A: A^T dA A^T = A^T (X R^T) A^T = (A^T X) (A R)^T = dW V'^T, so dL = -tril(dW V'^T).
#include "gdn/cpu/kernels/kernels.h"
#include "gdn/cpu/kernels/sequence_pass.h"
#include "gdn/schedules.h"
#include "gdn/validate.h"

namespace cula::gdn::cpu::CULA_ISA {

namespace {

struct Gradients {
  TensorView dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0;
};

struct BackwardInputs : SequenceInputs {
  TensorView q_rstd, k_rstd, grad_output, grad_final_state;
};

// Scratch of one thread in the gradient pass. Columns of V come in blocks; what is summed over them has K or C columns.
template <class Policy>
struct GradientScratch : PrepareScratch<Policy> {
  using T = typename Policy::Scalar;
  Tile<T> Q, QK, dQ, dK;                                // of the key head
  Tile<T> attention_sum, key_sum;                       // [C, C] sums over the group, one product each at the end
  Tile<T> dP, dL, dO_S, V_D, dW_S;                      // of a value head, sums over blocks of V
  Tile<T> dO, X, V, V_new, V_new_transposed, dW, S, D;  // of a block of V
  Tile<T> S_transposed, D_transposed;
  T *gamma_gradient, *beta_gradient, *residual_gradient_dot_V;

  GradientScratch(Arena& arena, const Problem& p, int64_t block)
      : PrepareScratch<Policy>(arena, p, block),
        Q(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        QK(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        dQ(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        dK(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        attention_sum(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        key_sum(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        dP(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        dL(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        dO_S(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        V_D(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        dW_S(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        dO(take_tile<T>(arena, p.chunk_size, block)),
        X(take_tile<T>(arena, p.chunk_size, block)),
        V(take_tile<T>(arena, p.chunk_size, block)),
        V_new(take_tile<T>(arena, p.chunk_size, block)),
        V_new_transposed(take_tile<T>(arena, block, p.chunk_size)),
        dW(take_tile<T>(arena, p.chunk_size, block)),
        S(take_tile<T>(arena, p.key_dim, block)),
        D(take_tile<T>(arena, p.key_dim, block)),
        S_transposed(take_tile<T>(arena, block, p.key_dim)),
        D_transposed(take_tile<T>(arena, block, p.key_dim)),
        gamma_gradient(arena.take<T>(padded(p.chunk_size))),
        beta_gradient(arena.take<T>(padded(p.chunk_size))),
        residual_gradient_dot_V(arena.take<T>(padded(p.chunk_size))) {}
};

// The workspace, laid out once for its size and once for use.
template <class Policy>
struct BackwardWorkspace {
  using T = typename Policy::Scalar;
  const std::vector<Batch>& batches;
  int64_t group;
  TensorView h, dh;      // [slots, HV / H, K, V]
  TensorView v_new, dv;  // [slots, HV / H, C, V]: V' and X
  GateSums* gate_sums;   // [chunks, HV]
  void* thread_scratch;
  size_t thread_bytes;

  BackwardWorkspace(Arena& arena, const Plan& plan) : batches(plan.schedules().backward_batches(plan)) {
    const Problem& p = plan.problem();
    const DType stat = stat_dtype(p);
    const int64_t num_chunks = plan.num_chunks();
    group = p.value_heads / p.heads;
    const int64_t slots = most_slots(batches);
    h = take_tensor(arena, stat, {slots, group, p.key_dim, p.value_dim});
    dh = take_tensor(arena, stat, {slots, group, p.key_dim, p.value_dim});
    v_new = take_tensor(arena, stat, {slots, group, p.chunk_size, p.value_dim});
    dv = take_tensor(arena, stat, {slots, group, p.chunk_size, p.value_dim});
    gate_sums = arena.take<GateSums>(p.use_gate ? num_chunks * p.value_heads : 0);
    Arena adjoint, gradient;
    AdjointScratch<Policy>(adjoint, p, plan.value_block());
    GradientScratch<Policy>(gradient, p, chunk_value_block(p));
    thread_bytes = std::max(adjoint.used(), gradient.used());
    thread_scratch = arena.take<char>(static_cast<int64_t>(thread_bytes) * plan.num_threads());
  }

  void* scratch_of(int worker) const { return static_cast<char*>(thread_scratch) + thread_bytes * worker; }
};

template <class Policy>
void recompute(const Plan& plan, const BackwardInputs& in, const BackwardWorkspace<Policy>& ws, const Batch& batch,
               const SequenceBlock& block, int worker) {
  const Problem& p = plan.problem();
  Arena scratch(ws.scratch_of(worker));
  SequenceScratch<Policy> s(scratch, p, plan.value_block());
  SequenceInputs without_q = in;
  without_q.q = TensorView();
  load_state(in.initial_state, block.sequence, p, block, s.S);
  for_each_chunk(plan, block.sequence, [&](const ChunkRange& chunk, int64_t index) {
    store_tile(s.S, p.key_dim, block.columns, slot_columns(ws.h, plan, batch, index, block));
    load_sequence_chunk(without_q, rows_of(in.A, p, chunk.begin, block.head), p, chunk, block, s);
    make_residual<Policy>(s.worker, s.gate, s.beta, s.K, s.A, s.S, chunk.length, p.key_dim, block.columns, s.V,
                          s.V_new);
    store_tile(s.V_new, chunk.length, block.columns, slot_columns(ws.v_new, plan, batch, index, block));
    advance_state<Policy>(s.worker, s.gate, s.K, s.V_new, chunk.length, p.key_dim, block.columns, s.S);
  });
}

template <class Policy>
void adjoint(const Plan& plan, const BackwardInputs& in, const BackwardWorkspace<Policy>& ws, const Batch& batch,
             const SequenceBlock& block, const TensorView& dh0, int worker) {
  using T = typename Policy::Scalar;
  const Problem& p = plan.problem();
  Arena scratch(ws.scratch_of(worker));
  AdjointScratch<Policy> s(scratch, p, plan.value_block());
  SequenceInputs with_grad_output = in;  // dO takes the place of V
  with_grad_output.v = in.grad_output;
  const Tile<T> D = s.S;
  load_state(in.grad_final_state, block.sequence, p, block, D);
  for_each_chunk(
      plan, block.sequence,
      [&](const ChunkRange& chunk, int64_t index) {
        const int64_t n = chunk.length;
        store_tile(D, p.key_dim, block.columns, slot_columns(ws.dh, plan, batch, index, block));
        load_sequence_chunk(with_grad_output, rows_of(in.A, p, chunk.begin, block.head), p, chunk, block, s);
        retreat_chunk<Policy>(p, n, block.columns, T(plan.scale()), true, s, [&](Tile<T> X) {
          store_tile(X, n, block.columns, slot_columns(ws.dv, plan, batch, index, block));
        });
      },
      /*reverse=*/true);
  if (dh0) {
    store_tile(D, p.key_dim, block.columns,
               state_of(dh0, p, block.sequence, block.head).columns_from(block.first_column));
  }
}

// One value head of one chunk: everything that sums over V, then what follows from it.
template <class Policy, class T = typename Policy::Scalar>
void value_head_gradients(const Plan& plan, const BackwardInputs& in, const Gradients& out,
                          const BackwardWorkspace<Policy>& ws, const Batch& batch, int64_t chunk_index, int64_t head,
                          GradientScratch<Policy>& s) {
  const Problem& p = plan.problem();
  const ChunkRange& chunk = plan.chunks()[chunk_index];
  const int64_t n = chunk.length, key_dim = p.key_dim;
  const T scale = T(plan.scale());
  const ChunkGate<T>& gate = s.gate;
  load_gate(in, p, chunk, head, s.gate);
  load_beta(rows_of(in.beta, p, chunk.begin, head), p, n, s.beta);
  load_tile(rows_of(in.A, p, chunk.begin, head), n, n, s.A);

  double state_product = 0.0;  // <S, D>
  std::memset(s.residual_gradient_dot_V, 0, sizeof(T) * n);
  for (int64_t first = 0; first < p.value_dim; first += chunk_value_block(p)) {
    const int64_t columns = std::min(chunk_value_block(p), p.value_dim - first);
    const bool add = first != 0;
    const auto load = [&](const MatrixView& from, int64_t rows, Tile<T> to) {
      load_tile(from.columns_from(first), rows, columns, to);
    };
    load(rows_of(in.grad_output, p, chunk.begin, head), n, s.dO);
    load(rows_of(in.v, p, chunk.begin, head), n, s.V);
    load(slot_matrix(ws.v_new, plan, batch, chunk_index, head), n, s.V_new);
    load(slot_matrix(ws.dv, plan, batch, chunk_index, head), n, s.X);
    load(slot_matrix(ws.h, plan, batch, chunk_index, head), key_dim, s.S);
    load(slot_matrix(ws.dh, plan, batch, chunk_index, head), key_dim, s.D);
    transpose(s.V_new, n, columns, s.V_new_transposed);
    transpose(s.S, key_dim, columns, s.S_transposed);
    transpose(s.D, key_dim, columns, s.D_transposed);

    multiply<Policy>(s.worker, {n, n, columns}, plain(s.dO), s.V_new_transposed, s.dP,
                     {.alpha = scale, .accumulate = add, .triangle = Triangle::kLowerC});
    multiply<Policy>(s.worker, {n, columns, n}, transposed(s.A), s.X, s.dW, {.triangle = Triangle::kUpperA});
    multiply<Policy>(s.worker, {n, n, columns}, plain(s.dW), s.V_new_transposed, s.dL,
                     {.alpha = T(-1), .accumulate = add, .triangle = Triangle::kLowerC});
    // The gate's gradient is a small difference of products with the states: their operands are not rounded.
    multiply<Unrounded<Policy>>(s.worker, {n, key_dim, columns}, plain(s.dO), s.S_transposed, s.dO_S,
                                {.accumulate = add});
    multiply<Unrounded<Policy>>(s.worker, {n, key_dim, columns}, plain(s.V_new), s.D_transposed, s.V_D,
                                {.accumulate = add});
    multiply<Unrounded<Policy>>(s.worker, {n, key_dim, columns}, plain(s.dW), s.S_transposed, s.dW_S,
                                {.accumulate = add});

    for (int64_t row = 0; row < key_dim; ++row) state_product += dot_row(s.S.row(row), s.D.row(row), columns);
    for (int64_t i = 0; i < n; ++i) {
      s.residual_gradient_dot_V[i] += dot_row(s.dW.row(i), s.V.row(i), columns);
      scale_row(s.beta[i], padded(columns), s.dW.row(i));
    }
    if (out.dv) store_tile(s.dW, n, columns, rows_of(out.dv, p, chunk.begin, head).columns_from(first));
  }

  // Terms through the states, by rows.
  double to_last_row = gate.total == T(0) ? 0.0 : gate.total * state_product;
  for (int64_t i = 0; i < n; ++i) {
    const T gamma = gate.from_start[i];
    const T output_term = scale * gamma * dot_row(s.dO_S.row(i), s.Q.row(i), key_dim);
    const T residual_term = gamma * dot_row(s.dW_S.row(i), s.K.row(i), key_dim);
    const T update_term = gate.to_end[i] * dot_row(s.V_D.row(i), s.K.row(i), key_dim);
    add_row(scale * gamma, s.dO_S.row(i), padded(key_dim), s.dQ.row(i));
    add_row(-s.beta[i] * gamma, s.dW_S.row(i), padded(key_dim), s.dK.row(i));
    add_row(gate.to_end[i], s.V_D.row(i), padded(key_dim), s.dK.row(i));
    s.beta_gradient[i] = s.residual_gradient_dot_V[i] - residual_term;
    s.gamma_gradient[i] = output_term - s.beta[i] * residual_term;
    // A row loses what the last row gains. Of the last row that is nothing, and adding what is then subtracted would
    // leave only its rounding.
    if (i == n - 1) continue;
    s.gamma_gradient[i] -= update_term;
    to_last_row += update_term;
  }
  s.gamma_gradient[n - 1] += T(to_last_row);

  // Terms through the pairs of rows: P and L.
  apply_decay(gate, n, false, s.dP);
  add_pair_gradient<T>(s.dP, s.QK, nullptr, n, s.gamma_gradient);
  apply_decay(gate, n, true, s.dL);
  add_pair_gradient<T>(s.dL, s.KK, s.beta, n, s.gamma_gradient);
  for (int64_t i = 0; i < n; ++i) {
    add_row(T(1), s.dP.row(i), padded(n), s.attention_sum.row(i));
    add_row(s.beta[i], s.dL.row(i), padded(n), s.key_sum.row(i));
    s.beta_gradient[i] += dot_row(s.dL.row(i), s.KK.row(i), i);
  }

  sum_gate_gradient(gate, n, s.gamma_gradient);
  store_gate_gradient(plan, in, out, ws, chunk_index, head, s.gamma_gradient);
  if (out.dbeta) store_beta_gradient(in, out, p, chunk, head, s.beta_gradient);
}

// From the gradient of the log decay to that of g as it was given, and the chunk's share of the parameters' gradients.
template <class Policy, class T = typename Policy::Scalar>
void store_gate_gradient(const Plan& plan, const BackwardInputs& in, const Gradients& out,
                         const BackwardWorkspace<Policy>& ws, int64_t chunk_index, int64_t head, T* gradient) {
  const Problem& p = plan.problem();
  const ChunkRange& chunk = plan.chunks()[chunk_index];
  if (p.use_gate) {
    const GateParameters parameters = gate_parameters(in.A_log, in.dt_bias, head);
    double raw[kMaxChunk];
    load_column(rows_of(in.g, p, chunk.begin, head), chunk.length, raw);
    const GateSums sums = backward_through_gate(parameters, raw, chunk.length, gradient);
    ws.gate_sums[chunk_index * p.value_heads + head] = sums;
  }
  if (out.dg) store_column(gradient, chunk.length, rows_of(out.dg, p, chunk.begin, head));
}

template <class T>
void store_beta_gradient(const BackwardInputs& in, const Gradients& out, const Problem& p, const ChunkRange& chunk,
                         int64_t head, T* gradient) {
  if (p.use_beta_sigmoid) {
    double logits[kMaxChunk];
    load_column(rows_of(in.beta, p, chunk.begin, head), chunk.length, logits);
    for (int64_t i = 0; i < chunk.length; ++i) {
      const double s = sigmoid(logits[i]);
      gradient[i] = T(gradient[i] * beta_scale(p) * s * (1.0 - s));
    }
  }
  store_column(gradient, chunk.length, rows_of(out.dbeta, p, chunk.begin, head));
}

// dx = rstd (dy - y <dy, y>), in place of dy.
template <class T>
void backward_through_norm(const TensorView& rstd, const Problem& p, const ChunkRange& chunk, int64_t head, Tile<T> y,
                           Tile<T> dy) {
  T factor[kMaxChunk];
  load_column(rows_of(rstd, p, chunk.begin, head), chunk.length, factor);
  for (int64_t i = 0; i < chunk.length; ++i) {
    add_row(-dot_row(dy.row(i), y.row(i), p.key_dim), y.row(i), padded(p.key_dim), dy.row(i));
    scale_row(factor[i], padded(p.key_dim), dy.row(i));
  }
}

template <class Policy>
void chunk_gradients(const Plan& plan, const BackwardInputs& in, const Gradients& out,
                     const BackwardWorkspace<Policy>& ws, const Batch& batch, const ChunkHead& slot, int worker) {
  const Problem& p = plan.problem();
  const ChunkRange& chunk = plan.chunks()[slot.chunk];
  const int64_t n = chunk.length, head = slot.head, group = p.value_heads / p.heads;
  Arena scratch(ws.scratch_of(worker));
  GradientScratch<Policy> s(scratch, p, chunk_value_block(p));

  load_keys<Policy>(in.k, p, chunk, head, s);
  load_tile(rows_of(in.q, p, chunk.begin, head), n, p.key_dim, s.Q);
  multiply<Policy>(s.worker, {n, n, p.key_dim}, plain(s.Q), s.K_transposed, s.QK, {.triangle = Triangle::kLowerC});
  fill_zero(s.dQ, n, p.key_dim);
  fill_zero(s.dK, n, p.key_dim);
  fill_zero(s.attention_sum, n, n);
  fill_zero(s.key_sum, n, n);
  for (int64_t value_head = head * group; value_head < (head + 1) * group; ++value_head) {
    value_head_gradients(plan, in, out, ws, batch, slot.chunk, value_head, s);
  }

  // dQ += G K; dK += G^T Q + (F + F^T) K, with G, F the sums over the group of dP * E and beta dL * E.
  multiply<Policy>(s.worker, {n, p.key_dim, n}, plain(s.attention_sum), s.K, s.dQ,
                   {.accumulate = true, .triangle = Triangle::kLowerA});
  multiply<Policy>(s.worker, {n, p.key_dim, n}, transposed(s.attention_sum), s.Q, s.dK,
                   {.accumulate = true, .triangle = Triangle::kUpperA});
  mirror_lower(s.key_sum, n);
  multiply<Policy>(s.worker, {n, p.key_dim, n}, plain(s.key_sum), s.K, s.dK, {.accumulate = true});

  if (p.use_qk_l2norm) {
    backward_through_norm(in.q_rstd, p, chunk, head, s.Q, s.dQ);
    backward_through_norm(in.k_rstd, p, chunk, head, s.K, s.dK);
  }
  if (out.dq) store_tile(s.dQ, n, p.key_dim, rows_of(out.dq, p, chunk.begin, head));
  if (out.dk) store_tile(s.dK, n, p.key_dim, rows_of(out.dk, p, chunk.begin, head));
}

template <class Policy>
void run_backward(const Plan& plan, const BackwardTensors& t, Workspace workspace) {
  const Problem& p = plan.problem();
  Arena arena(workspace.data);
  const BackwardWorkspace<Policy> ws(arena, plan);

  BackwardInputs in;
  in.q = TensorView::from(p.use_qk_l2norm ? t.saved->q_normalized : t.q, "q");
  in.k = TensorView::from(p.use_qk_l2norm ? t.saved->k_normalized : t.k, "k");
  in.v = TensorView::from(t.v, "v");
  in.g = TensorView::from(t.g, "g");
  in.beta = TensorView::from(t.beta, "beta");
  in.A_log = TensorView::from(t.A_log, "A_log");
  in.dt_bias = TensorView::from(t.dt_bias, "dt_bias");
  in.initial_state = TensorView::from(t.initial_state, "initial_state");
  in.A = TensorView::from(t.saved->A, "A");
  in.q_rstd = TensorView::from(t.saved->q_rstd, "q_rstd");
  in.k_rstd = TensorView::from(t.saved->k_rstd, "k_rstd");
  in.grad_output = TensorView::from(t.grad_output, "do");
  in.grad_final_state = TensorView::from(t.grad_final_state, "dht");
  const Gradients out = {.dq = TensorView::from(t.dq, "dq"),
                         .dk = TensorView::from(t.dk, "dk"),
                         .dv = TensorView::from(t.dv, "dv"),
                         .dg = TensorView::from(t.dg, "dg"),
                         .dbeta = TensorView::from(t.dbeta, "dbeta"),
                         .dA_log = TensorView::from(t.dA_log, "dA_log"),
                         .ddt_bias = TensorView::from(t.ddt_bias, "ddt_bias"),
                         .dh0 = TensorView::from(t.dh0, "dh0")};
  for (const TensorView* gradient : {&out.dq, &out.dk, &out.dv, &out.dg, &out.dbeta}) {
    zero_padding_rows(*gradient, plan);
  }

  const int64_t units_of_pair = ws.group * plan.value_blocks();
  for (const Batch& batch : ws.batches) {
    const int64_t first_unit = batch.first_pair * units_of_pair;
    const int64_t units = batch.end_pair * units_of_pair - first_unit;
    parallel_for(2 * units, plan.num_threads(), [&](int64_t unit, int worker) {
      const SequenceBlock block(plan, first_unit + unit % units);
      if (unit < units) {
        adjoint(plan, in, ws, batch, block, out.dh0, worker);
      } else {
        recompute(plan, in, ws, batch, block, worker);
      }
    });
    parallel_for(batch.num_slots(), plan.num_threads(), [&](int64_t slot, int worker) {
      chunk_gradients(plan, in, out, ws, batch, chunk_head_of_slot(plan, batch.first_slot + slot), worker);
    });
  }

  if (!p.use_gate) return;
  parallel_for(p.value_heads, plan.num_threads(), [&](int64_t head, int) {
    const int64_t num_chunks = plan.num_chunks();
    GateSums total;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) total += ws.gate_sums[chunk * p.value_heads + head];
    if (out.dA_log) store_scalar(out.dA_log, head, total.dA_log);
    if (out.ddt_bias) store_scalar(out.ddt_bias, head, total.ddt_bias);
  });
}

}  // namespace

size_t backward_workspace_bytes(const Plan& plan) {
  Arena arena;
  with_policy(plan.problem(), [&](auto policy) { BackwardWorkspace<decltype(policy)>(arena, plan); });
  return arena.used();
}

void backward(const Plan& plan, const BackwardTensors& t, Workspace workspace, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_backward<decltype(policy)>(plan, t, workspace); });
}

}  // namespace cula::gdn::cpu::CULA_ISA
