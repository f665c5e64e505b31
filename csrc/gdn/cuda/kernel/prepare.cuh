// What depends on one chunk alone: L or its inverse A, the gated scores P, and the factors of the rows.
//
// One block a (chunk, key head): K K^T and Q K^T once, then each value head of the group.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/gate.cuh"
#include "gdn/cuda/collective/inverse.cuh"

namespace cula::gdn::cuda {

struct PrepareArgs {
  SequenceTable sequences;
  int64_t heads;
  int64_t group;  // value heads a key head
  int key_dim;
  float scale;  // of P
  TensorArg q;  // needed for P
  TensorArg k;
  GateArgs gates;
  // Results; those absent are not computed.
  TensorArg L;  // [B, T, HV, C]
  TensorArg A;  // [B, T, HV, C]
  TensorArg P;  // [B, T, HV, C], scale (q k^T) between(i, j) on and below the diagonal
  // [3][HV][B T] fp32: decay, to_end, beta
  float* factors;
  int64_t factor_stride;  // HV B T
};

template <class T>
struct PrepareShared {
  // The operand tiles are dead before the matrices of the first value head are written.
  union {
    struct {
      Tile<T, kRows> q[2];
      Tile<T, kRows> k[2];
    } operands;
    struct {
      Tile<float, kRows> triangle;
      Tile<T, kRows> scores;
    } matrices;
  };
  GateRows gates;
};

template <class T, GateKind kKind>
__global__ void __launch_bounds__(kInverseThreads, 2) prepare_kernel(const PrepareArgs args) {
  PrepareShared<T>& shared = *reinterpret_cast<PrepareShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  const int64_t slot = blockIdx.x / args.heads;
  const int64_t key_head = blockIdx.x - slot * args.heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int m0 = warp_id() * 16;
  const bool wants_scores = static_cast<bool>(args.P);
  const bool wants_triangle = args.A || args.L;

  float kk[8][4];
  float qk[8][4];
  clear(kk);
  clear(qk);
  const int blocks = (args.key_dim + kRows - 1) / kRows;
  const auto load_block = [&](int block) {
    const Window window = {chunk.batch,
                           chunk.token,
                           chunk.length,
                           key_head,
                           static_cast<int64_t>(block) * kRows,
                           args.key_dim - block * kRows};
    load_tile<T, kRows>(shared.operands.k[block & 1].data, args.k, window);
    if (wants_scores) load_tile<T, kRows>(shared.operands.q[block & 1].data, args.q, window);
  };
  load_block(0);
  cp_async_commit();
  for (int block = 0; block < blocks; ++block) {
    if (block + 1 < blocks) load_block(block + 1);
    cp_async_commit();
    cp_async_wait<1>();
    sync_block();
    const T* k = shared.operands.k[block & 1].data;
    const T* q = shared.operands.q[block & 1].data;
#pragma unroll
    for (int k0 = 0; k0 < kRows; k0 += 16) {
      FragmentA<T> rows_k;
      FragmentA<T> rows_q;
      if (wants_triangle) rows_k = load_a<kP>(k, m0, k0);
      if (wants_scores) rows_q = load_a<kP>(q, m0, k0);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        if (8 * n > m0 + 15) continue;  // above the diagonal
        const FragmentB<T> b = load_b<kP>(k, 8 * n, k0);
        if (wants_triangle) mma(kk[n], kk[n + 1], rows_k, b);
        if (wants_scores) mma(qk[n], qk[n + 1], rows_q, b);
      }
    }
    sync_block();
  }

  for (int64_t head = key_head * args.group; head < (key_head + 1) * args.group; ++head) {
    if (warp_id() == 0) load_gates<kKind>(shared.gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
    sync_block();
    const GateRows& gates = shared.gates;
    if (args.factors != nullptr && static_cast<int>(threadIdx.x) < chunk.length) {
      const int row = static_cast<int>(threadIdx.x);
      float* target = args.factors + head * (args.factor_stride / (args.heads * args.group)) +
                      chunk.batch * args.sequences.tokens + chunk.token + row;
      target[0] = gates.decay[row];
      target[args.factor_stride] = gates.to_end[row];
      target[2 * args.factor_stride] = gates.beta[row];
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float l[1][4];
      float p[1][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = m0 + fragment_row(j);
        const int column = fragment_column(n, j);
        const float decay = column <= row ? gates.between(row, column) : 0.0f;
        l[0][j] = column < row ? gates.beta[row] * (kk[n][j] * decay) : 0.0f;
        p[0][j] = column <= row ? args.scale * qk[n][j] * decay : 0.0f;
      }
      if (wants_triangle) store_fragment<kP>(shared.matrices.triangle.data, m0, 8 * n, l);
      if (wants_scores) store_fragment<kP>(shared.matrices.scores.data, m0, 8 * n, p);
    }
    sync_block();
    const Window window = {chunk.batch, chunk.token, chunk.length, head, 0, args.sequences.chunk_size};
    if (wants_scores) {
      store_tile<T, kRows>(shared.matrices.scores.data, args.P, window);
      sync_block();
    }
    if (args.L) store_tile<float, kRows>(shared.matrices.triangle.data, args.L, window);
    if (args.A) {
      sync_block();
      invert_triangle(shared.matrices.triangle.data);
      // Rounded through the tile of the scores, which have left.
      for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows; i += kInverseThreads) {
        const int row = i / kRows;
        const int column = i - row * kRows;
        shared.matrices.scores.data[row * kP + column] =
            from_float<T>(column < chunk.length ? shared.matrices.triangle.data[row * kP + column] : 0.0f);
      }
      sync_block();
      store_tile<T, kRows>(shared.matrices.scores.data, args.A, window);
    }
    sync_block();
  }
}

}  // namespace cula::gdn::cuda
