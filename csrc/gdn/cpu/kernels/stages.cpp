// The matrix stages, each a loop over the collectives that the fused passes use.
#include <cstdlib>
#include <memory>
#include <new>

#include "gdn/cpu/kernels/kernels.h"
#include "gdn/cpu/kernels/sequence_pass.h"

namespace cula::gdn::cpu::CULA_ISA {

namespace {

// Scratch for every thread of a stage, which has no workspace argument. Each use builds its Scratch in the thread's
// part anew.
template <class Scratch>
class ScratchPool {
 public:
  template <class... Sizes>
  explicit ScratchPool(int num_threads, const Sizes&... sizes) {
    Arena count;
    Scratch(count, sizes...);
    bytes_ = count.used();
    constexpr size_t kAlignment = 64;
    block_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, bytes_ * static_cast<size_t>(num_threads))));
    if (!block_) throw std::bad_alloc();
  }

  template <class... Sizes>
  Scratch make(int worker, const Sizes&... sizes) const {
    Arena arena(block_.get() + bytes_ * static_cast<size_t>(worker));
    return Scratch(arena, sizes...);
  }

 private:
  struct Free {
    void operator()(char* block) const { std::free(block); }
  };
  size_t bytes_;
  std::unique_ptr<char, Free> block_;
};

// Calls body(first column, columns) for the blocks of V.
template <class Body>
void for_value_blocks(const Problem& p, Body&& body) {
  for (int64_t first = 0; first < p.value_dim; first += chunk_value_block(p)) {
    body(first, std::min(chunk_value_block(p), p.value_dim - first));
  }
}

// Calls body(scratch, chunk, global chunk, head) for every chunk and head, in parallel; heads is H or HV.
template <class Scratch, class Body>
void for_chunks(const Plan& plan, int64_t heads, Body&& body) {
  const Problem& p = plan.problem();
  const int64_t block = chunk_value_block(p);
  const ScratchPool<Scratch> pool(plan.num_threads(), p, block);
  parallel_for(plan.num_chunks() * heads, plan.num_threads(), [&](int64_t unit, int worker) {
    Scratch s = pool.make(worker, p, block);
    body(s, plan.chunks()[unit / heads], unit / heads, unit % heads);
  });
}

// Calls body(scratch, block) for every unit of a sequential pass, in parallel.
template <class Scratch, class Body>
void for_sequence_blocks(const Plan& plan, Body&& body) {
  const Problem& p = plan.problem();
  const ScratchPool<Scratch> pool(plan.num_threads(), p, plan.value_block());
  parallel_for(plan.sequential_units(), plan.num_threads(), [&](int64_t unit, int worker) {
    Scratch s = pool.make(worker, p, plan.value_block());
    body(s, SequenceBlock(plan, unit));
  });
}

// The gate of a stage: a stored running sum, or none.
template <class T>
void load_running_sum(const TensorView& g, const Problem& p, const ChunkRange& chunk, int64_t head,
                      ChunkGate<T>& gate) {
  if (!g) return gate.without_gate(chunk.length);
  double sums[kMaxChunk];
  load_column(rows_of(g, p, chunk.begin, head), chunk.length, sums);
  gate.from_running_sum(sums, chunk.length);
}

// Stages take beta as it is, whatever the flags of the problem.
template <class T>
void load_plain_beta(const TensorView& beta, const Problem& p, const ChunkRange& chunk, int64_t head, T* to) {
  load_column(rows_of(beta, p, chunk.begin, head), chunk.length, to);
}

// L of every chunk and value head, handed to `use(scratch, chunk, value head)`.
template <class Policy, class Use>
void for_each_L(const Plan& plan, const DLTensor* k_tensor, const DLTensor* g_tensor, const DLTensor* beta_tensor,
                Use&& use) {
  const Problem& p = plan.problem();
  const TensorView k = TensorView::from(k_tensor, "k"), g = TensorView::from(g_tensor, "g"),
                   beta = TensorView::from(beta_tensor, "beta");
  const int64_t group = p.value_heads / p.heads;
  for_chunks<PrepareScratch<Policy>>(
      plan, p.heads, [&](PrepareScratch<Policy>& s, const ChunkRange& chunk, int64_t, int64_t head) {
        load_keys<Policy>(k, p, chunk, head, s);
        for (int64_t value_head = head * group; value_head < (head + 1) * group; ++value_head) {
          load_running_sum(g, p, chunk, value_head, s.gate);
          load_plain_beta(beta, p, chunk, value_head, s.beta);
          make_L(s.gate, s.beta, s.KK, chunk.length, s.L);
          use(s, chunk, value_head);
        }
      });
}

// Scratch of the chunk-parallel stages, for one thread.
template <class Policy>
struct StageScratch : SequenceScratch<Policy> {
  using T = typename Policy::Scalar;
  Tile<T> QK, KK, X, D, S_transposed, D_transposed, V_transposed, dQ, dK, dW, W, sum, pairs, key_sum;
  T *gamma_gradient, *beta_gradient;

  StageScratch(Arena& arena, const Problem& p, int64_t block)
      : SequenceScratch<Policy>(arena, p, block),
        QK(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        KK(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        X(take_tile<T>(arena, p.chunk_size, block)),
        D(take_tile<T>(arena, p.key_dim, block)),
        S_transposed(take_tile<T>(arena, block, p.key_dim)),
        D_transposed(take_tile<T>(arena, block, p.key_dim)),
        V_transposed(take_tile<T>(arena, block, p.chunk_size)),
        dQ(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        dK(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        dW(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        W(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        sum(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        pairs(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        key_sum(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        gamma_gradient(arena.take<T>(padded(p.chunk_size))),
        beta_gradient(arena.take<T>(padded(p.chunk_size))) {}
};

template <class T>
void clear(T* values, int64_t count) {
  std::memset(values, 0, static_cast<size_t>(padded(count)) * sizeof(T));
}

template <class Policy>
void run_recompute_w_u(const Plan& plan, const stages::RecomputeWU& t) {
  using Scratch = StageScratch<Policy>;
  const Problem& p = plan.problem();
  const TensorView k = TensorView::from(t.k, "k"), v = TensorView::from(t.v, "v"), g = TensorView::from(t.g, "g"),
                   beta = TensorView::from(t.beta, "beta"), A = TensorView::from(t.A, "A"),
                   w = TensorView::from(t.w, "w"), u = TensorView::from(t.u, "u");
  const int64_t group = p.value_heads / p.heads;
  for_chunks<Scratch>(plan, p.value_heads, [&](Scratch& s, const ChunkRange& chunk, int64_t, int64_t head) {
    const int64_t n = chunk.length;
    load_running_sum(g, p, chunk, head, s.gate);
    load_plain_beta(beta, p, chunk, head, s.beta);
    load_tile(rows_of(A, p, chunk.begin, head), n, n, s.A);
    load_tile(rows_of(k, p, chunk.begin, head / group), n, p.key_dim, s.K);
    for (int64_t i = 0; i < n; ++i) scale_row(s.beta[i] * s.gate.from_start[i], padded(p.key_dim), s.K.row(i));
    multiply<Policy>(s.worker, {n, p.key_dim, n}, plain(s.A), s.K, s.sum, {.triangle = Triangle::kLowerA});
    store_tile(s.sum, n, p.key_dim, rows_of(w, p, chunk.begin, head));
    for_value_blocks(p, [&](int64_t first, int64_t columns) {
      load_tile(rows_of(v, p, chunk.begin, head).columns_from(first), n, columns, s.V);
      for (int64_t i = 0; i < n; ++i) scale_row(s.beta[i], padded(columns), s.V.row(i));
      multiply<Policy>(s.worker, {n, columns, n}, plain(s.A), s.V, s.V_new, {.triangle = Triangle::kLowerA});
      store_tile(s.V_new, n, columns, rows_of(u, p, chunk.begin, head).columns_from(first));
    });
  });
}

template <class Policy>
void run_fwd_h(const Plan& plan, const stages::StateForward& t) {
  using T = typename Policy::Scalar;
  using Scratch = AdjointScratch<Policy>;
  const Problem& p = plan.problem();
  const TensorView k = TensorView::from(t.k, "k"), w = TensorView::from(t.w, "w"), u = TensorView::from(t.u, "u"),
                   g = TensorView::from(t.g, "g"), h = TensorView::from(t.h, "h"),
                   v_new = TensorView::from(t.v_new, "v_new"),
                   final_state = TensorView::from(t.final_state, "final_state");
  const TensorView initial_state = TensorView::from(t.initial_state, "initial_state");
  const int64_t group = p.value_heads / p.heads;
  for_sequence_blocks<Scratch>(plan, [&](Scratch& s, const SequenceBlock& block) {
    const auto block_of = [&](const MatrixView& view) { return view.columns_from(block.first_column); };
    load_state(initial_state, block.sequence, p, block, s.S);
    for_each_chunk(plan, block.sequence, [&](const ChunkRange& chunk, int64_t index) {
      const int64_t n = chunk.length;
      store_tile(s.S, p.key_dim, block.columns, block_of(chunk_state_of(h, p, index, block.head)));
      load_running_sum(g, p, chunk, block.head, s.gate);
      load_tile(rows_of(w, p, chunk.begin, block.head), n, p.key_dim, s.W);
      load_tile(block_of(rows_of(u, p, chunk.begin, block.head)), n, block.columns, s.V_new);
      multiply<Policy>(s.worker, {n, block.columns, p.key_dim}, plain(s.W), s.S, s.V_new,
                       {.alpha = T(-1), .accumulate = true});
      if (v_new) store_tile(s.V_new, n, block.columns, block_of(rows_of(v_new, p, chunk.begin, block.head)));
      load_tile(rows_of(k, p, chunk.begin, block.head / group), n, p.key_dim, s.K);
      advance_state<Policy>(s.worker, s.gate, s.K, s.V_new, n, p.key_dim, block.columns, s.S);
    });
    if (final_state) {
      store_tile(s.S, p.key_dim, block.columns, block_of(state_of(final_state, p, block.sequence, block.head)));
    }
  });
}

// Q, K, K^T and the gate of a chunk and value head.
template <class T, class Scratch>
void load_q_k_gate(const Problem& p, const TensorView& q, const TensorView& k, const TensorView& g,
                   const ChunkRange& chunk, int64_t head, Scratch& s) {
  const int64_t key_head = head / (p.value_heads / p.heads);
  load_running_sum(g, p, chunk, head, s.gate);
  load_tile(rows_of(q, p, chunk.begin, key_head), chunk.length, p.key_dim, s.Q);
  load_tile(rows_of(k, p, chunk.begin, key_head), chunk.length, p.key_dim, s.K);
  transpose<T>(s.K, chunk.length, p.key_dim, s.K_transposed);
}

template <class Policy>
void run_fwd_o(const Plan& plan, const stages::OutputForward& t) {
  using T = typename Policy::Scalar;
  using Scratch = StageScratch<Policy>;
  const Problem& p = plan.problem();
  const T scale = T(plan.scale());
  const TensorView q = TensorView::from(t.q, "q"), k = TensorView::from(t.k, "k"), v = TensorView::from(t.v, "v"),
                   h = TensorView::from(t.h, "h"), g = TensorView::from(t.g, "g"), o = TensorView::from(t.o, "o");
  for_chunks<Scratch>(plan, p.value_heads, [&](Scratch& s, const ChunkRange& chunk, int64_t index, int64_t head) {
    const int64_t n = chunk.length;
    load_q_k_gate<T>(p, q, k, g, chunk, head, s);
    make_P<Policy>(s.worker, s.gate, s.Q, s.K_transposed, n, p.key_dim, scale, s.P);
    for_value_blocks(p, [&](int64_t first, int64_t columns) {
      load_tile(rows_of(v, p, chunk.begin, head).columns_from(first), n, columns, s.V_new);
      load_tile(chunk_state_of(h, p, index, head).columns_from(first), p.key_dim, columns, s.S);
      make_output<Policy>(s.worker, s.gate, scale, s.Q, s.S, s.P, s.V_new, n, p.key_dim, columns, s.V);
      store_tile(s.V, n, columns, rows_of(o, p, chunk.begin, head).columns_from(first));
    });
  });
}

template <class Policy>
void run_bwd_dv_local(const Plan& plan, const stages::LocalValueGradient& t) {
  using T = typename Policy::Scalar;
  using Scratch = StageScratch<Policy>;
  const Problem& p = plan.problem();
  const TensorView q = TensorView::from(t.q, "q"), k = TensorView::from(t.k, "k"), g = TensorView::from(t.g, "g"),
                   grad_output = TensorView::from(t.grad_output, "do"), dv = TensorView::from(t.dv, "dv");
  for_chunks<Scratch>(plan, p.value_heads, [&](Scratch& s, const ChunkRange& chunk, int64_t, int64_t head) {
    const int64_t n = chunk.length;
    load_q_k_gate<T>(p, q, k, g, chunk, head, s);
    make_P<Policy>(s.worker, s.gate, s.Q, s.K_transposed, n, p.key_dim, T(plan.scale()), s.P);
    for_value_blocks(p, [&](int64_t first, int64_t columns) {
      load_tile(rows_of(grad_output, p, chunk.begin, head).columns_from(first), n, columns, s.V);
      multiply<Policy>(s.worker, {n, columns, n}, transposed(s.P), s.V, s.X, {.triangle = Triangle::kUpperA});
      store_tile(s.X, n, columns, rows_of(dv, p, chunk.begin, head).columns_from(first));
    });
  });
}

template <class Policy>
void run_bwd_dhu(const Plan& plan, const stages::StateBackward& t) {
  using T = typename Policy::Scalar;
  using Scratch = AdjointScratch<Policy>;
  const Problem& p = plan.problem();
  const TensorView q = TensorView::from(t.q, "q"), k = TensorView::from(t.k, "k"), w = TensorView::from(t.w, "w"),
                   g = TensorView::from(t.g, "g"), grad_output = TensorView::from(t.grad_output, "do"),
                   dv = TensorView::from(t.dv, "dv"), dh = TensorView::from(t.dh, "dh"),
                   dh0 = TensorView::from(t.dh0, "dh0"), dv2 = TensorView::from(t.dv2, "dv2");
  const TensorView dht = TensorView::from(t.dht, "dht");
  const int64_t group = p.value_heads / p.heads;
  for_sequence_blocks<Scratch>(plan, [&](Scratch& s, const SequenceBlock& block) {
    const auto block_of = [&](const MatrixView& view) { return view.columns_from(block.first_column); };
    const Tile<T> D = s.S, dO = s.V, X = s.V_new;
    load_state(dht, block.sequence, p, block, D);
    for_each_chunk(
        plan, block.sequence,
        [&](const ChunkRange& chunk, int64_t index) {
          const int64_t n = chunk.length;
          store_tile(D, p.key_dim, block.columns, block_of(chunk_state_of(dh, p, index, block.head)));
          load_running_sum(g, p, chunk, block.head, s.gate);
          load_tile(rows_of(k, p, chunk.begin, block.head / group), n, p.key_dim, s.K);
          load_tile(rows_of(q, p, chunk.begin, block.head / group), n, p.key_dim, s.Q);
          load_tile(rows_of(w, p, chunk.begin, block.head), n, p.key_dim, s.W);
          load_tile(block_of(rows_of(dv, p, chunk.begin, block.head)), n, block.columns, s.dW);
          load_tile(block_of(rows_of(grad_output, p, chunk.begin, block.head)), n, block.columns, dO);
          make_state_value_gradient<Policy>(s.worker, s.gate, s.K, D, n, p.key_dim, block.columns, X);
          for (int64_t i = 0; i < n; ++i) add_row(T(1), s.dW.row(i), padded(block.columns), X.row(i));
          store_tile(X, n, block.columns, block_of(rows_of(dv2, p, chunk.begin, block.head)));
          retreat_state<Policy>(s.worker, s.gate, T(plan.scale()), s.Q, dO, n, p.key_dim, block.columns, D);
          multiply<Policy>(s.worker, {p.key_dim, block.columns, n}, transposed(s.W), X, D,
                           {.alpha = T(-1), .accumulate = true});
        },
        /*reverse=*/true);
    if (dh0) store_tile(D, p.key_dim, block.columns, block_of(state_of(dh0, p, block.sequence, block.head)));
  });
}

template <class Policy>
void run_bwd_dqkwg(const Plan& plan, const stages::OperandGradients& t) {
  using T = typename Policy::Scalar;
  using Scratch = StageScratch<Policy>;
  const Problem& p = plan.problem();
  const T scale = T(plan.scale());
  const TensorView q = TensorView::from(t.q, "q"), k = TensorView::from(t.k, "k"), v = TensorView::from(t.v, "v"),
                   g = TensorView::from(t.g, "g"), h = TensorView::from(t.h, "h"), dv = TensorView::from(t.dv, "dv"),
                   grad_output = TensorView::from(t.grad_output, "do"), dh = TensorView::from(t.dh, "dh"),
                   dq = TensorView::from(t.dq, "dq"), dk = TensorView::from(t.dk, "dk"),
                   dw = TensorView::from(t.dw, "dw"), dg = TensorView::from(t.dg, "dg");
  const int64_t group = p.value_heads / p.heads;

  for_chunks<Scratch>(plan, p.heads, [&](Scratch& s, const ChunkRange& chunk, int64_t index, int64_t key_head) {
    const int64_t n = chunk.length, width = padded(p.key_dim);
    const Tile<T> dP = s.P, from_state = s.sum, to_state = s.W;
    load_q_k_gate<T>(p, q, k, g, chunk, key_head * group, s);
    multiply<Policy>(s.worker, {n, n, p.key_dim}, plain(s.Q), s.K_transposed, s.QK, {.triangle = Triangle::kLowerC});
    fill_zero(s.dQ, n, p.key_dim);
    fill_zero(s.dK, n, p.key_dim);
    fill_zero(s.pairs, n, n);
    for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      load_running_sum(g, p, chunk, head, s.gate);
      double state_product = 0.0;  // <S, D>
      for_value_blocks(p, [&](int64_t first, int64_t columns) {
        const bool add = first != 0;
        load_tile(rows_of(v, p, chunk.begin, head).columns_from(first), n, columns, s.V_new);
        load_tile(rows_of(dv, p, chunk.begin, head).columns_from(first), n, columns, s.X);
        load_tile(rows_of(grad_output, p, chunk.begin, head).columns_from(first), n, columns, s.V);
        load_tile(chunk_state_of(h, p, index, head).columns_from(first), p.key_dim, columns, s.S);
        load_tile(chunk_state_of(dh, p, index, head).columns_from(first), p.key_dim, columns, s.D);
        transpose(s.V_new, n, columns, s.V_transposed);
        transpose(s.S, p.key_dim, columns, s.S_transposed);
        transpose(s.D, p.key_dim, columns, s.D_transposed);
        multiply<Policy>(s.worker, {n, n, columns}, plain(s.V), s.V_transposed, dP,
                         {.alpha = scale, .accumulate = add, .triangle = Triangle::kLowerC});
        multiply<Policy>(s.worker, {n, p.key_dim, columns}, plain(s.V), s.S_transposed, from_state,
                         {.accumulate = add});
        multiply<Policy>(s.worker, {n, p.key_dim, columns}, plain(s.V_new), s.D_transposed, to_state,
                         {.accumulate = add});
        multiply<Policy>(s.worker, {n, p.key_dim, columns}, plain(s.X), s.S_transposed, s.dW,
                         {.alpha = T(-1), .accumulate = add});
        for (int64_t row = 0; row < p.key_dim; ++row) state_product += dot_row(s.S.row(row), s.D.row(row), columns);
      });
      store_tile(s.dW, n, p.key_dim, rows_of(dw, p, chunk.begin, head));

      clear(s.gamma_gradient, n);
      double to_last_row = s.gate.total == T(0) ? 0.0 : s.gate.total * state_product;
      for (int64_t i = 0; i < n; ++i) {
        scale_row(scale * s.gate.from_start[i], width, from_state.row(i));
        scale_row(s.gate.to_end[i], width, to_state.row(i));
        add_row(T(1), from_state.row(i), width, s.dQ.row(i));
        add_row(T(1), to_state.row(i), width, s.dK.row(i));
        const T update_term = dot_row(to_state.row(i), s.K.row(i), p.key_dim);
        s.gamma_gradient[i] = dot_row(from_state.row(i), s.Q.row(i), p.key_dim);
        if (i == n - 1) continue;  // its own share cancels, see backward.cpp
        s.gamma_gradient[i] -= update_term;
        to_last_row += update_term;
      }
      s.gamma_gradient[n - 1] += T(to_last_row);
      apply_decay(s.gate, n, false, dP);
      add_pair_gradient<T>(dP, s.QK, nullptr, n, s.gamma_gradient);
      for (int64_t i = 0; i < n; ++i) add_row(T(1), dP.row(i), padded(n), s.pairs.row(i));
      if (dg) store_column(s.gamma_gradient, n, rows_of(dg, p, chunk.begin, head));
    }
    multiply<Policy>(s.worker, {n, p.key_dim, n}, plain(s.pairs), s.K, s.dQ,
                     {.accumulate = true, .triangle = Triangle::kLowerA});
    multiply<Policy>(s.worker, {n, p.key_dim, n}, transposed(s.pairs), s.Q, s.dK,
                     {.accumulate = true, .triangle = Triangle::kUpperA});
    store_tile(s.dQ, n, p.key_dim, rows_of(dq, p, chunk.begin, key_head));
    store_tile(s.dK, n, p.key_dim, rows_of(dk, p, chunk.begin, key_head));
  });
}

template <class Policy>
void run_wy_bwd(const Plan& plan, const stages::WyBackward& t) {
  using T = typename Policy::Scalar;
  using Scratch = StageScratch<Policy>;
  const Problem& p = plan.problem();
  const TensorView k = TensorView::from(t.k, "k"), v = TensorView::from(t.v, "v"),
                   beta = TensorView::from(t.beta, "beta"), g = TensorView::from(t.g, "g"),
                   A = TensorView::from(t.A, "A"), dw = TensorView::from(t.dw, "dw"), du = TensorView::from(t.du, "du"),
                   dk = TensorView::from(t.dk, "dk"), dv = TensorView::from(t.dv, "dv"),
                   db = TensorView::from(t.db, "db"), dg = TensorView::from(t.dg, "dg");
  const int64_t group = p.value_heads / p.heads;

  for_chunks<Scratch>(plan, p.heads, [&](Scratch& s, const ChunkRange& chunk, int64_t, int64_t key_head) {
    const int64_t n = chunk.length, width = padded(p.key_dim);
    const Tile<T> dA = s.P, A_transposed = s.QK, half = s.pairs, by_v = s.QK, key_sum = s.key_sum;
    load_tile(rows_of(k, p, chunk.begin, key_head), n, p.key_dim, s.K);
    transpose(s.K, n, p.key_dim, s.K_transposed);
    multiply<Policy>(s.worker, {n, n, p.key_dim}, plain(s.K), s.K_transposed, s.KK, {.triangle = Triangle::kLowerC});
    fill_zero(s.dK, n, p.key_dim);
    fill_zero(key_sum, n, n);
    for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      load_running_sum(g, p, chunk, head, s.gate);
      load_plain_beta(beta, p, chunk, head, s.beta);
      load_tile(rows_of(A, p, chunk.begin, head), n, n, s.A);
      load_tile(rows_of(dw, p, chunk.begin, head), n, p.key_dim, s.dW);

      // w = A diag(beta gamma) K
      multiply<Policy>(s.worker, {n, p.key_dim, n}, transposed(s.A), s.dW, s.W, {.triangle = Triangle::kUpperA});
      multiply<Policy>(s.worker, {n, n, p.key_dim}, plain(s.dW), s.K_transposed, dA, {.triangle = Triangle::kLowerC});
      clear(s.gamma_gradient, n);
      clear(s.beta_gradient, n);
      for (int64_t i = 0; i < n; ++i) {
        const T product = s.gate.from_start[i] * dot_row(s.W.row(i), s.K.row(i), p.key_dim);
        s.beta_gradient[i] = product;
        s.gamma_gradient[i] = s.beta[i] * product;
        add_row(s.beta[i] * s.gate.from_start[i], s.W.row(i), width, s.dK.row(i));
        for (int64_t j = 0; j < i; ++j) dA.row(i)[j] *= s.beta[j] * s.gate.from_start[j];
      }
      // u = A diag(beta) V
      for_value_blocks(p, [&](int64_t first, int64_t columns) {
        load_tile(rows_of(v, p, chunk.begin, head).columns_from(first), n, columns, s.V);
        load_tile(rows_of(du, p, chunk.begin, head).columns_from(first), n, columns, s.X);
        multiply<Policy>(s.worker, {n, columns, n}, transposed(s.A), s.X, s.V_new, {.triangle = Triangle::kUpperA});
        transpose(s.V, n, columns, s.V_transposed);
        multiply<Policy>(s.worker, {n, n, columns}, plain(s.X), s.V_transposed, by_v, {.triangle = Triangle::kLowerC});
        for (int64_t i = 0; i < n; ++i) {
          s.beta_gradient[i] += dot_row(s.V_new.row(i), s.V.row(i), columns);
          scale_row(s.beta[i], padded(columns), s.V_new.row(i));
          for (int64_t j = 0; j < i; ++j) dA.row(i)[j] += s.beta[j] * by_v.row(i)[j];
        }
        store_tile(s.V_new, n, columns, rows_of(dv, p, chunk.begin, head).columns_from(first));
      });
      // dL = -tril(A^T dA A^T), strictly below the diagonal
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = i; j < padded(n); ++j) dA.row(i)[j] = T(0);
      }
      transpose(s.A, n, n, A_transposed);
      multiply<Policy>(s.worker, {n, n, n}, plain(dA), A_transposed, half, {.triangle = Triangle::kLowerA});
      multiply<Policy>(s.worker, {n, n, n}, transposed(s.A), half, dA, {.alpha = T(-1), .triangle = Triangle::kUpperA});
      apply_decay(s.gate, n, true, dA);
      add_pair_gradient<T>(dA, s.KK, s.beta, n, s.gamma_gradient);
      for (int64_t i = 0; i < n; ++i) {
        s.beta_gradient[i] += dot_row(dA.row(i), s.KK.row(i), i);
        add_row(s.beta[i], dA.row(i), padded(n), key_sum.row(i));
      }
      store_column(s.beta_gradient, n, rows_of(db, p, chunk.begin, head));
      if (dg) store_column(s.gamma_gradient, n, rows_of(dg, p, chunk.begin, head));
    }
    mirror_lower(key_sum, n);
    multiply<Policy>(s.worker, {n, p.key_dim, n}, plain(key_sum), s.K, s.dK, {.accumulate = true});
    store_tile(s.dK, n, p.key_dim, rows_of(dk, p, chunk.begin, key_head));
  });
}

}  // namespace

void chunk_scaled_dot_kkt_fwd(const Plan& plan, const stages::ScaledDotKkt& t, Stream) {
  const Problem& p = plan.problem();
  const TensorView L = TensorView::from(t.L, "L");
  with_policy(p, [&](auto policy) {
    for_each_L<decltype(policy)>(plan, t.k, t.g, t.beta, [&](auto& s, const ChunkRange& chunk, int64_t head) {
      store_chunk_square(s.L, p, chunk, rows_of(L, p, chunk.begin, head));
    });
  });
  zero_padding_rows(L, plan);
}

void solve_tril(const Plan& plan, const stages::SolveTril& t, Stream) {
  const Problem& p = plan.problem();
  const TensorView L = TensorView::from(t.L, "L"), A = TensorView::from(t.A, "A");
  with_policy(p, [&](auto policy) {
    using Scratch = PrepareScratch<decltype(policy)>;
    for_chunks<Scratch>(plan, p.value_heads, [&](Scratch& s, const ChunkRange& chunk, int64_t, int64_t head) {
      load_tile(rows_of(L, p, chunk.begin, head), chunk.length, chunk.length, s.L);
      invert_unit_lower(s.L, chunk.length, s.A);
      store_chunk_square(s.A, p, chunk, rows_of(A, p, chunk.begin, head));
    });
  });
  zero_padding_rows(A, plan);
}

void chunk_gated_delta_rule_fwd_intra(const Plan& plan, const stages::Intra& t, Stream stream) {
  const Problem& p = plan.problem();
  const TensorView A = TensorView::from(t.A, "A");
  with_policy(p, [&](auto policy) {
    for_each_L<decltype(policy)>(plan, t.k, t.g, t.beta, [&](auto& s, const ChunkRange& chunk, int64_t head) {
      invert_unit_lower(s.L, chunk.length, s.A);
      store_chunk_square(s.A, p, chunk, rows_of(A, p, chunk.begin, head));
    });
  });
  zero_padding_rows(A, plan);
  recompute_w_u_fwd(plan, {t.k, t.v, t.beta, t.A, t.g, t.w, t.u}, stream);
}

void recompute_w_u_fwd(const Plan& plan, const stages::RecomputeWU& t, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_recompute_w_u<decltype(policy)>(plan, t); });
  zero_padding_rows(TensorView::from(t.w, "w"), plan);
  zero_padding_rows(TensorView::from(t.u, "u"), plan);
}

void chunk_gated_delta_rule_fwd_h(const Plan& plan, const stages::StateForward& t, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_fwd_h<decltype(policy)>(plan, t); });
  zero_padding_rows(TensorView::from(t.v_new, "v_new"), plan);
}

void chunk_fwd_o(const Plan& plan, const stages::OutputForward& t, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_fwd_o<decltype(policy)>(plan, t); });
  zero_padding_rows(TensorView::from(t.o, "o"), plan);
}

void chunk_bwd_dv_local(const Plan& plan, const stages::LocalValueGradient& t, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_bwd_dv_local<decltype(policy)>(plan, t); });
  zero_padding_rows(TensorView::from(t.dv, "dv"), plan);
}

void chunk_gated_delta_rule_bwd_dhu(const Plan& plan, const stages::StateBackward& t, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_bwd_dhu<decltype(policy)>(plan, t); });
  zero_padding_rows(TensorView::from(t.dv2, "dv2"), plan);
}

void chunk_bwd_dqkwg(const Plan& plan, const stages::OperandGradients& t, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_bwd_dqkwg<decltype(policy)>(plan, t); });
  zero_padding_rows(TensorView::from(t.dq, "dq"), plan);
  zero_padding_rows(TensorView::from(t.dk, "dk"), plan);
  zero_padding_rows(TensorView::from(t.dw, "dw"), plan);
  zero_padding_rows(TensorView::from(t.dg, "dg"), plan);
}

void prepare_wy_repr_bwd(const Plan& plan, const stages::WyBackward& t, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_wy_bwd<decltype(policy)>(plan, t); });
  zero_padding_rows(TensorView::from(t.dk, "dk"), plan);
  zero_padding_rows(TensorView::from(t.dv, "dv"), plan);
  zero_padding_rows(TensorView::from(t.db, "db"), plan);
  zero_padding_rows(TensorView::from(t.dg, "dg"), plan);
}

}  // namespace cula::gdn::cpu::CULA_ISA
