// The parts of the chunked algorithm, each for one chunk of one head. The fused passes (forward.cpp, backward.cpp) and
// the stages (stages.cpp) are schedules over them.
//
// Symbols as in the stages: Q, K [n, K], V, dO [n, V], S, D [K, V] the state and its gradient, A = (I + L)^-1,
// E the decays of ChunkGate, R = beta (V - gamma K S) the residual before and V' = A R the one after the inverse.
// n is the number of rows of the chunk.
#pragma once

#include "gdn/cpu/kernels/gate.h"
#include "gdn/gdn.h"

namespace cula::gdn::cpu::CULA_ISA {

// What the functions below need beside their operands.
template <class Policy>
struct Worker {
  using T = typename Policy::Scalar;
  uint32_t* pair_scratch;

  Worker(Arena& arena, int64_t chunk_size, int64_t key_dim, int64_t value_block) {
    int64_t elements = 0;
    if constexpr (std::is_same_v<Policy, Bf16Pairs>) {
      const int64_t longest = std::max({chunk_size, key_dim, value_block});
      elements = pair_scratch_elements(longest, longest, longest);
    }
    pair_scratch = arena.take<uint32_t>(elements);
  }
};

// X Y: an operand of a product, plain or transposed.
template <class T>
struct Factor {
  const T* data;
  int64_t row_stride, column_stride;
};
template <class T>
Factor<T> plain(Tile<T> tile) {
  return {tile.data, tile.stride, 1};
}
template <class T>
Factor<T> transposed(Tile<T> tile) {
  return {tile.data, 1, tile.stride};
}

struct Extent {
  int64_t m, n, k;
};

template <class T>
struct Update {
  T alpha = T(1);
  bool accumulate = false;
  Triangle triangle = Triangle::kNone;
};

// C = alpha A B or C += alpha A B; extent is (rows of C, columns of C, depth). The operands are rounded as Policy says,
// which may be finer than the worker's own.
template <class Policy, class WorkerPolicy, class T = typename Policy::Scalar>
void multiply(const Worker<WorkerPolicy>& worker, Extent extent, Factor<T> a, Tile<T> b, Tile<T> c,
              Update<T> update = {}) {
  matmul<Policy>({.m = extent.m,
                  .n = extent.n,
                  .k = extent.k,
                  .a = a.data,
                  .a_row = a.row_stride,
                  .a_col = a.column_stride,
                  .b = b.data,
                  .b_row = b.stride,
                  .c = c.data,
                  .c_row = c.stride,
                  .alpha = update.alpha,
                  .accumulate = update.accumulate,
                  .triangle = update.triangle},
                 worker.pair_scratch);
}

// The policy without rounding of operands.
template <class Policy>
using Unrounded = std::conditional_t<std::is_same_v<Policy, Bf16Pairs>, Float32, Policy>;

// X_ij <- factor_i E_ij X_ij for j <= i (j < i if strict), 0 elsewhere. Selects, so that what lies outside may be
// anything.
template <class T>
void apply_decay(const ChunkGate<T>& gate, int64_t n, bool strict, Tile<T> x, const T* row_factor = nullptr) {
  const Vec<T> zero = {};
  for (int64_t i = 0; i < n; ++i) {
    T* row = x.row(i);
    const T* decay = gate.decay.row(i);
    const Vec<T> factor = broadcast(row_factor == nullptr ? T(1) : row_factor[i]);
    for (int64_t j = 0; j < padded(n); j += kLanes<T>) {
      const Vec<T> e = load(decay + j);
      store(row + j, e == zero ? zero : factor * e * load(row + j));
    }
    if (strict) row[i] = T(0);
  }
}

// A = (I + L)^-1 by forward substitution over rows: A_i = e_i - sum_{j < i} L_ij A_j.
template <class T>
void invert_unit_lower(Tile<T> L, int64_t n, Tile<T> A) {
  for (int64_t i = 0; i < n; ++i) {
    T* row = A.row(i);
    const int64_t width = (i + kLanes<T>) / kLanes<T> * kLanes<T>;
    for (int64_t column = 0; column < width; column += kLanes<T>) {
      Vec<T> sum = {};
      // Row j reaches column j only, so rows before this block of columns add nothing.
      for (int64_t j = column; j < i; ++j) sum = fma(broadcast(-L.row(i)[j]), load(A.row(j) + column), sum);
      store(row + column, sum);
    }
    for (int64_t j = width; j < padded(n); ++j) row[j] = T(0);
    row[i] = T(1);
    for (int64_t j = i + 1; j < width; ++j) row[j] = T(0);
  }
}

// L = strictly lower (beta_i E_ij <k_i, k_j>), from KK = K K^T.
template <class T>
void make_L(const ChunkGate<T>& gate, const T* beta, Tile<T> KK, int64_t n, Tile<T> L) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(L.row(i), KK.row(i), static_cast<size_t>(padded(n)) * sizeof(T));
  apply_decay(gate, n, true, L, beta);
}

// P = alpha tril(Q K^T * E)
template <class Policy, class T = typename Policy::Scalar>
void make_P(const Worker<Policy>& worker, const ChunkGate<T>& gate, Tile<T> Q, Tile<T> K_transposed, int64_t n,
            int64_t key_dim, T alpha, Tile<T> P) {
  multiply<Policy>(worker, {n, n, key_dim}, plain(Q), K_transposed, P, {.alpha = alpha, .triangle = Triangle::kLowerC});
  apply_decay(gate, n, false, P);
}

// V' = A R with R = beta (V - gamma K S). R replaces V.
template <class Policy, class T = typename Policy::Scalar>
void make_residual(const Worker<Policy>& worker, const ChunkGate<T>& gate, const T* beta, Tile<T> K, Tile<T> A,
                   Tile<T> S, int64_t n, int64_t key_dim, int64_t columns, Tile<T> V, Tile<T> V_new) {
  multiply<Policy>(worker, {n, columns, key_dim}, plain(K), S, V_new);
  for (int64_t i = 0; i < n; ++i) {
    scale_row(-gate.from_start[i] * beta[i], padded(columns), V_new.row(i));
    const Vec<T> strength = broadcast(beta[i]);
    for (int64_t j = 0; j < padded(columns); j += kLanes<T>) {
      store(V.row(i) + j, fma(strength, load(V.row(i) + j), load(V_new.row(i) + j)));
    }
  }
  multiply<Policy>(worker, {n, columns, n}, plain(A), V, V_new, {.triangle = Triangle::kLowerA});
}

// S <- total S + K^T diag(to_end) V'. V' is overwritten by diag(to_end) V'.
template <class Policy, class T = typename Policy::Scalar>
void advance_state(const Worker<Policy>& worker, const ChunkGate<T>& gate, Tile<T> K, Tile<T> V_new, int64_t n,
                   int64_t key_dim, int64_t columns, Tile<T> S) {
  for (int64_t i = 0; i < n; ++i) scale_row(gate.to_end[i], padded(columns), V_new.row(i));
  for (int64_t p = 0; p < key_dim; ++p) scale_row(gate.total, padded(columns), S.row(p));
  multiply<Policy>(worker, {key_dim, columns, n}, transposed(K), V_new, S, {.accumulate = true});
}

// O = scale gamma Q S + P V', P holding its own scale.
template <class Policy, class T = typename Policy::Scalar>
void make_output(const Worker<Policy>& worker, const ChunkGate<T>& gate, T scale, Tile<T> Q, Tile<T> S, Tile<T> P,
                 Tile<T> V_new, int64_t n, int64_t key_dim, int64_t columns, Tile<T> O) {
  multiply<Policy>(worker, {n, columns, key_dim}, plain(Q), S, O);
  for (int64_t i = 0; i < n; ++i) scale_row(scale * gate.from_start[i], padded(columns), O.row(i));
  multiply<Policy>(worker, {n, columns, n}, plain(P), V_new, O, {.accumulate = true, .triangle = Triangle::kLowerA});
}

// X = diag(to_end) K D, the part of dL/dV' that comes through the state.
template <class Policy, class T = typename Policy::Scalar>
void make_state_value_gradient(const Worker<Policy>& worker, const ChunkGate<T>& gate, Tile<T> K, Tile<T> D, int64_t n,
                               int64_t key_dim, int64_t columns, Tile<T> X) {
  multiply<Policy>(worker, {n, columns, key_dim}, plain(K), D, X);
  for (int64_t i = 0; i < n; ++i) scale_row(gate.to_end[i], padded(columns), X.row(i));
}

// D <- total D + scale Q^T diag(gamma) dO. dO is overwritten by scale diag(gamma) dO.
template <class Policy, class T = typename Policy::Scalar>
void retreat_state(const Worker<Policy>& worker, const ChunkGate<T>& gate, T scale, Tile<T> Q, Tile<T> dO, int64_t n,
                   int64_t key_dim, int64_t columns, Tile<T> D) {
  for (int64_t i = 0; i < n; ++i) scale_row(scale * gate.from_start[i], padded(columns), dO.row(i));
  for (int64_t p = 0; p < key_dim; ++p) scale_row(gate.total, padded(columns), D.row(p));
  multiply<Policy>(worker, {key_dim, columns, n}, transposed(Q), dO, D, {.accumulate = true});
}

// A pair of rows (i, j), i > j, puts X_ij Y_ij on the log decay from j to i: row i gains it, row j loses it. Both sums
// come from the same numbers, so that what cancels does cancel, and neither ever holds the diagonal, whose rounding
// alone outweighs everything else at strong decay.
template <class T>
void add_pair_gradient(Tile<T> X, Tile<T> Y, const T* row_factor, int64_t n, T* gamma_gradient) {
  const Vec<T> zero = {};
  for (int64_t i = 1; i < n; ++i) {
    const T factor = row_factor == nullptr ? T(1) : row_factor[i];
    Vec<T> row_sums = {};
    int64_t j = 0;
    for (; j + kLanes<T> <= i; j += kLanes<T>) {
      const Vec<T> x = load(X.row(i) + j);
      const Vec<T> value = x == zero ? zero : broadcast(factor) * x * load(Y.row(i) + j);
      row_sums += value;
      store(gamma_gradient + j, load(gamma_gradient + j) - value);
    }
    T sum = horizontal_sum<T>(row_sums);
    for (; j < i; ++j) {
      const T x = X.row(i)[j];
      const T value = x == T(0) ? T(0) : factor * x * Y.row(i)[j];
      sum += value;
      gamma_gradient[j] -= value;
    }
    gamma_gradient[i] += sum;
  }
}

// Copies what is below the diagonal above it.
template <class T>
void mirror_lower(Tile<T> x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) x.row(j)[i] = x.row(i)[j];
  }
}

// Gradient by gamma to gradient by the gates: a gate acts on every row behind it in its segment. One that resets has
// no gradient.
template <class T>
void sum_gate_gradient(const ChunkGate<T>& gate, int64_t n, T* gradient) {
  T sum = T(0);
  for (int64_t i = n - 1; i >= 0; --i) {
    sum = gate.resets_at(i) ? T(0) : sum + gradient[i];
    gradient[i] = sum;
  }
}

}  // namespace cula::gdn::cpu::CULA_ISA
