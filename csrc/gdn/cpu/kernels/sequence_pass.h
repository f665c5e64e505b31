// What the sequential passes share: a unit of work, its inputs and its scratch.
#pragma once

#include "gdn/cpu/batches.h"
#include "gdn/cpu/kernels/elementwise.h"
#include "gdn/cpu/kernels/prepare.h"

namespace cula::gdn::cpu::CULA_ISA {

// q and k after normalisation, everything else as the operator gets it.
struct SequenceInputs {
  TensorView q, k, v, g, beta, A_log, dt_bias, initial_state, A;
};

template <class T>
void load_gate(const SequenceInputs& in, const Problem& problem, const ChunkRange& chunk, int64_t head,
               ChunkGate<T>& gate) {
  GateParameters parameters;
  if (problem.use_gate) parameters = gate_parameters(in.A_log, in.dt_bias, head);
  double gates[kMaxChunk];
  load_log_gates(rows_of(in.g, problem, chunk.begin, head), problem.use_gate ? &parameters : nullptr, chunk.length,
                 gates);
  gate.from_log_gates(gates, chunk.length);
}

// Unit of a sequential pass: some columns of the state of one value head in one sequence.
struct SequenceBlock {
  int64_t sequence, head, first_column, columns;

  SequenceBlock() = default;
  SequenceBlock(const Plan& plan, int64_t unit) {
    const Problem& p = plan.problem();
    const int64_t blocks = plan.value_blocks();
    first_column = unit % blocks * plan.value_block();
    columns = std::min(plan.value_block(), p.value_dim - first_column);
    head = unit / blocks % p.value_heads;
    sequence = unit / blocks / p.value_heads;
  }
};

// Scratch of one thread.
template <class Policy>
struct SequenceScratch {
  using T = typename Policy::Scalar;
  Worker<Policy> worker;
  ChunkGate<T> gate;
  Tile<T> S, Q, K, K_transposed, V, V_new, A, P;
  T* beta;

  SequenceScratch(Arena& arena, const Problem& p, int64_t value_block)
      : worker(arena, p.chunk_size, p.key_dim, value_block),
        gate(arena, p.chunk_size),
        S(take_tile<T>(arena, p.key_dim, value_block)),
        Q(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        K(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        K_transposed(take_tile<T>(arena, p.key_dim, p.chunk_size)),
        V(take_tile<T>(arena, p.chunk_size, value_block)),
        V_new(take_tile<T>(arena, p.chunk_size, value_block)),
        A(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        P(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        beta(arena.take<T>(p.chunk_size)) {}
};

// With the tiles of the reverse pass, and of the stages that read w.
template <class Policy>
struct AdjointScratch : SequenceScratch<Policy> {
  using T = typename Policy::Scalar;
  Tile<T> dW;  // [C, block], gradient of R
  Tile<T> W;   // [C, K]

  AdjointScratch(Arena& arena, const Problem& p, int64_t value_block)
      : SequenceScratch<Policy>(arena, p, value_block),
        dW(take_tile<T>(arena, p.chunk_size, value_block)),
        W(take_tile<T>(arena, p.chunk_size, p.key_dim)) {}
};

// The block's columns of matrix `entry` of a state tensor; zero if there is none (`entry` -1, or no tensor).
template <class T>
void load_state(const TensorView& states, int64_t entry, const Problem& problem, const SequenceBlock& block,
                Tile<T> S) {
  if (!states || entry < 0) return fill_zero(S, problem.key_dim, block.columns);
  load_tile(state_of(states, problem, entry, block.head).columns_from(block.first_column), problem.key_dim,
            block.columns, S);
}

template <class T>
void store_state(const TensorView& states, int64_t entry, const Problem& problem, const SequenceBlock& block,
                 Tile<T> S) {
  if (!states || entry < 0) return;
  store_tile(S, problem.key_dim, block.columns,
             state_of(states, problem, entry, block.head).columns_from(block.first_column));
}

// The matrix of a chunk and value head in a [slots, HV / H, rows, columns] tensor that holds the slots of a batch.
inline MatrixView slot_matrix(const TensorView& x, const Plan& plan, const Batch& batch, int64_t chunk, int64_t head) {
  const int64_t group = x.shape[1];
  const int64_t slot = slot_of(plan, {.chunk = chunk, .head = head / group}) - batch.first_slot;
  return {element(x, slot * x.stride[0] + head % group * x.stride[1]), x.dtype, x.stride[2], 1};
}

// The columns of it that a unit of a sequential pass makes.
inline MatrixView slot_columns(const TensorView& x, const Plan& plan, const Batch& batch, int64_t chunk,
                               const SequenceBlock& block) {
  return slot_matrix(x, plan, batch, chunk, block.head).columns_from(block.first_column);
}

// Gate, beta, K, K^T and V (zero if `v` is absent) of a chunk, and its A from where the caller says; Q too unless `q`
// is absent.
template <class Scratch>
void load_sequence_chunk(const SequenceInputs& in, const MatrixView& A, const Problem& problem, const ChunkRange& chunk,
                         const SequenceBlock& block, Scratch& s) {
  const int64_t key_head = block.head / (problem.value_heads / problem.heads);
  load_gate(in, problem, chunk, block.head, s.gate);
  load_beta(rows_of(in.beta, problem, chunk.begin, block.head), problem, chunk.length, s.beta);
  load_tile(rows_of(in.k, problem, chunk.begin, key_head), chunk.length, problem.key_dim, s.K);
  if (in.v) {
    load_tile(rows_of(in.v, problem, chunk.begin, block.head).columns_from(block.first_column), chunk.length,
              block.columns, s.V);
  } else {
    fill_zero(s.V, chunk.length, block.columns);
  }
  load_tile(A, chunk.length, chunk.length, s.A);
  if (in.q) {
    transpose(s.K, chunk.length, problem.key_dim, s.K_transposed);
    load_tile(rows_of(in.q, problem, chunk.begin, key_head), chunk.length, problem.key_dim, s.Q);
  }
}

// One chunk of the adjoint recurrence, D being in S and dO, where there is a gradient of the output, in V:
//   X = P^T dO + diag(to_end) K D;  dW = A^T X;  D <- total D + scale Q^T diag(gamma) dO - K^T diag(beta gamma) dW
// use_X(X) sees X before dO is overwritten.
template <class Policy, class UseX, class T = typename Policy::Scalar>
void retreat_chunk(const Problem& problem, int64_t n, int64_t columns, T scale, bool has_grad_output,
                   AdjointScratch<Policy>& s, UseX&& use_X) {
  const Tile<T> D = s.S, dO = s.V, X = s.V_new;
  const int64_t key_dim = problem.key_dim;
  make_state_value_gradient<Policy>(s.worker, s.gate, s.K, D, n, key_dim, columns, X);
  if (has_grad_output) {
    make_P<Policy>(s.worker, s.gate, s.Q, s.K_transposed, n, key_dim, scale, s.P);
    multiply<Policy>(s.worker, {n, columns, n}, transposed(s.P), dO, X,
                     {.accumulate = true, .triangle = Triangle::kUpperA});
  }
  use_X(X);
  multiply<Policy>(s.worker, {n, columns, n}, transposed(s.A), X, s.dW, {.triangle = Triangle::kUpperA});
  if (has_grad_output) {
    retreat_state<Policy>(s.worker, s.gate, scale, s.Q, dO, n, key_dim, columns, D);
  } else {
    for (int64_t p = 0; p < key_dim; ++p) scale_row(s.gate.total, padded(columns), D.row(p));
  }
  for (int64_t i = 0; i < n; ++i) scale_row(s.beta[i] * s.gate.from_start[i], padded(columns), s.dW.row(i));
  multiply<Policy>(s.worker, {key_dim, columns, n}, transposed(s.K), s.dW, D, {.alpha = T(-1), .accumulate = true});
}

// Calls body(chunk, global index) for the chunks of a sequence, in order or in reverse.
template <class Body>
void for_each_chunk(const Plan& plan, int64_t sequence, Body&& body, bool reverse = false) {
  const SequenceRange& range = plan.sequences()[sequence];
  for (int64_t i = 0; i < range.num_chunks; ++i) {
    const int64_t index = range.first_chunk + (reverse ? range.num_chunks - 1 - i : i);
    body(plan.chunks()[index], index);
  }
}

}  // namespace cula::gdn::cpu::CULA_ISA
