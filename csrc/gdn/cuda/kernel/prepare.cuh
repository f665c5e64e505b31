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
  // [3][HV][B T] fp32: decay, to_end, beta; with gate_rows [6]: also the running sum, high and low, and, as an integer,
  // the number of resets through the row plus one.
  float* factors = nullptr;
  int64_t factor_stride = 0;  // HV B T
  bool gate_rows = false;
  const int* reach = nullptr;  // [HV]: chunks from the start whose results are wanted; 0: all
};

inline constexpr int kGateWarps = kInverseThreads / 32;  // value heads whose gates are made at once

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
  GateRows gates[kGateWarps];
};

// Stores the lower triangle of a matrix in fp32 as T, by all threads; what lies past the chunk is zero.
template <class T>
__device__ __forceinline__ void store_triangle(const float* tile, const TensorArg& x, const Window& w) {
  constexpr int kP = kPitch<kRows>;
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  constexpr int kPerRow = kRows / kElements;
  const int64_t base = x.offset(w.batch, w.token, w.head);
  if (x.vector_bytes == 16) {
#pragma unroll
    for (int first = 0; first < kRows * kPerRow; first += kInverseThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int row = i / kPerRow;
      const int column = i % kPerRow * kElements;
      if (row >= w.rows || column >= w.columns) continue;
      alignas(16) T piece[kElements];
#pragma unroll
      for (int e = 0; e < kElements; e += 4) {
        const float4 x4 = *reinterpret_cast<const float4*>(tile + row * kP + column + e);
        piece[e] = from_float<T>(column + e < w.rows ? x4.x : 0.0f);
        piece[e + 1] = from_float<T>(column + e + 1 < w.rows ? x4.y : 0.0f);
        piece[e + 2] = from_float<T>(column + e + 2 < w.rows ? x4.z : 0.0f);
        piece[e + 3] = from_float<T>(column + e + 3 < w.rows ? x4.w : 0.0f);
      }
      *reinterpret_cast<uint4*>(static_cast<T*>(x.data) + base + row * x.stride[1] + column) =
          *reinterpret_cast<const uint4*>(piece);
    }
  } else {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows; i += kInverseThreads) {
      const int row = i / kRows;
      const int column = i % kRows;
      if (row >= w.rows || column >= w.columns) continue;
      x.store(base + row * x.stride[1] + column * x.stride[3],
              to_float(from_float<T>(column < w.rows ? tile[row * kP + column] : 0.0f)));
    }
  }
}

template <class T, GateKind kKind>
__global__ void __launch_bounds__(kInverseThreads,
                                  kKind == GateKind::kLogDecay && kDTypeOf<T> == DType::kBFloat16 ? 3 : 2)
    prepare_kernel(const PrepareArgs args) {
  PrepareShared<T>& shared = *reinterpret_cast<PrepareShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  const int64_t slot = blockIdx.x / args.heads;
  const int64_t key_head = blockIdx.x - slot * args.heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  if (args.reach != nullptr) {
    const int64_t first = key_head * args.group;
    bool wanted = false;
    for (int64_t head = first; head < first + args.group; ++head) {
      wanted |= args.reach[head] == 0 || chunk.index < args.reach[head];
    }
    if (!wanted) return;
  }
  const int m0 = warp_id() * 16;
  const bool wants_scores = static_cast<bool>(args.P);
  const bool wants_triangle = args.A || args.L;

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
  const int64_t first_head = key_head * args.group;
  const int group = static_cast<int>(args.group);
  const auto make_gates = [&](int64_t head) {
    GateRows& gates = shared.gates[warp_id()];
    load_gates<kKind>(gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
    if (args.factors == nullptr) return;
    sync_warp();
    float* target = args.factors + head * (args.factor_stride / (args.heads * args.group)) +
                    chunk.batch * args.sequences.tokens + chunk.token;
    store_factors(gates, target, args.factor_stride, chunk.length);
    if (!args.gate_rows) return;
    for (int row = lane_id(); row < chunk.length; row += 32) {
      target[3 * args.factor_stride + row] = gates.high[row];
      target[4 * args.factor_stride + row] = gates.low[row];
      reinterpret_cast<int*>(target)[5 * args.factor_stride + row] = gates.segment[row] + 1;
    }
  };

  // Value heads whose gates are made side by side, one a warp; larger groups take several rounds.
  for (int round = 0; round < group; round += kGateWarps) {
    load_block(0);
    cp_async_commit();
    if (round + warp_id() < group) make_gates(first_head + round + warp_id());  // while the operands are on their way

    float kk[8][4];
    float qk[8][4];
    clear(kk);
    clear(qk);
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

    for (int turn = 0; turn < kGateWarps && round + turn < group; ++turn) {
      const int64_t head = first_head + round + turn;
      const GateRows& gates = shared.gates[turn];
      GateRow rows[2];
      rows[0] = gates.row(m0 + fragment_row(0));
      rows[1] = gates.row(m0 + fragment_row(2));
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float l[1][4];
        float p[1][4];
        if (8 * n <= m0 + 15) {
          const GateRow columns[2] = {gates.row(fragment_column(n, 0)), gates.row(fragment_column(n, 1))};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int row = m0 + fragment_row(j);
            const int column = fragment_column(n, j);
            const float decay = rows[j >> 1].since(columns[j & 1]);
            l[0][j] = column < row ? gates.beta[row] * (kk[n][j] * decay) : 0.0f;
            p[0][j] = column <= row ? args.scale * qk[n][j] * decay : 0.0f;
          }
        } else {
          clear(l);
          clear(p);
        }
        if (wants_triangle) store_fragment<kP>(shared.matrices.triangle.data, m0, 8 * n, l);
        if (wants_scores) store_fragment<kP>(shared.matrices.scores.data, m0, 8 * n, p);
      }
      sync_block();
      const Window window = {chunk.batch, chunk.token, chunk.length, head, 0, args.sequences.chunk_size};
      if (wants_scores) store_tile<T, kRows>(shared.matrices.scores.data, args.P, window);
      if (args.L) {
        store_tile<float, kRows>(shared.matrices.triangle.data, args.L, window);
        sync_block();
      }
      if (args.A) {
        invert_triangle<kDTypeOf<T> == DType::kBFloat16 ? 1 : 3>(shared.matrices.triangle.data);
        store_triangle<T>(shared.matrices.triangle.data, args.A, window);
      }
      sync_block();
    }
  }
}

}  // namespace cula::gdn::cuda
