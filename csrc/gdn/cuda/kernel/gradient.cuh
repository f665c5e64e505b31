// The gradients of one chunk, given the state S that enters it, the gradient D of the state that leaves it, V' and dW.
//
// Three kernels, small enough that several blocks share a multiprocessor:
//   score_gradient    dP, M and what the 64 x 64 matrices add to the gradients of the gate and of beta
//   operand_gradient  dq and dk, 64 columns a block, summed over the value heads of the group; its row sums
//   gate_gradient     dg and dbeta out of the row sums
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/gate.cuh"
#include "gdn/cuda/collective/product.cuh"
#include "gdn/cuda/kernel/gradient_args.h"

namespace cula::gdn::cuda {

template <class T>
struct ScoreGradientShared {
  union {
    struct {
      Tile<T, kRows> q;
      Tile<T, kRows> k;
    } keys;
    struct {
      Tile<T, kRows> grad_output;
      Tile<T, kRows> dW;
      Tile<T, kRows> residual;
      Tile<T, kRows> v;
    } values;
    struct {
      Tile<float, kRows> pairs;      // what the gate sees of each pair of rows
      Tile<float, kRows> strengths;  // what beta sees
    } sums;
    struct {
      Tile<T, kRows> dP;
      Tile<T, kRows> M;
    } results;
  };
  float value_sum[kRows];  // <dW, v>
  GateRows gates;
};

template <class T>
__global__ void __launch_bounds__(kProductThreads, 2) score_gradient_kernel(const GradientArgs args) {
  auto& shared = *reinterpret_cast<ScoreGradientShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  const int64_t slot = blockIdx.x / args.heads;
  const int64_t key_head = blockIdx.x - slot * args.heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int m0 = warp_id() * 16;
  const int thread = static_cast<int>(threadIdx.x);

  float qk[8][4];
  float kk[8][4];
  clear(qk);
  clear(kk);
  for (int column = 0; column < args.key_dim; column += kRows) {
    const Window window = {chunk.batch, chunk.token, chunk.length, key_head, column, args.key_dim - column};
    load_tile<T, kRows>(shared.keys.q.data, args.q, window);
    load_tile<T, kRows>(shared.keys.k.data, args.k, window);
    cp_async_commit();
    cp_async_wait<0>();
    sync_block();
    multiply_lower_pair<T>(qk, kk, shared.keys.q.data, shared.keys.k.data, shared.keys.k.data, m0);
    sync_block();
  }

  for (int64_t head = key_head * args.group; head < (key_head + 1) * args.group; ++head) {
    if (warp_id() == 0)
      load_gates<GateKind::kLogDecay>(shared.gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
    float dp[8][4];
    float dl[8][4];
    clear(dp);
    clear(dl);
    float value_sum = 0.0f;  // of row thread / 2, every other column
    for (int column = 0; column < args.value_dim; column += kRows) {
      const Window window = {chunk.batch, chunk.token, chunk.length, head, column, args.value_dim - column};
      load_tile<T, kRows>(shared.values.grad_output.data, args.grad_output, window);
      load_tile<T, kRows>(shared.values.dW.data, args.dW, window);
      load_tile<T, kRows>(shared.values.residual.data, args.residual, window);
      load_tile<T, kRows>(shared.values.v.data, args.v, window);
      cp_async_commit();
      cp_async_wait<0>();
      sync_block();
      multiply_lower_pair<T>(dp, dl, shared.values.grad_output.data, shared.values.dW.data, shared.values.residual.data,
                             m0);
      const T* a = shared.values.dW.data + (thread >> 1) * kP + (thread & 1);
      const T* b = shared.values.v.data + (thread >> 1) * kP + (thread & 1);
#pragma unroll 8
      for (int i = 0; i < kRows; i += 2) value_sum += to_float(a[i]) * to_float(b[i]);
      sync_block();
    }
    value_sum += shuffle_xor(value_sum, 1);
    if ((thread & 1) == 0) shared.value_sum[thread >> 1] = value_sum;

    const GateRows& gates = shared.gates;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float pairs[1][4];
      float strengths[1][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = m0 + fragment_row(j);
        const int column = fragment_column(n, j);
        const float decay = column <= row ? gates.between(row, column) : 0.0f;
        const bool below = column < row;
        dp[n][j] = column <= row ? args.scale * dp[n][j] * decay : 0.0f;
        const float dl_decayed = below ? -dl[n][j] * decay : 0.0f;
        strengths[0][j] = below ? dl_decayed * kk[n][j] : 0.0f;
        dl[n][j] = gates.beta[row] * dl_decayed;
        pairs[0][j] = below ? dp[n][j] * qk[n][j] + gates.beta[row] * strengths[0][j] : 0.0f;
      }
      store_fragment<kP>(shared.sums.pairs.data, m0, 8 * n, pairs);
      store_fragment<kP>(shared.sums.strengths.data, m0, 8 * n, strengths);
    }
    sync_block();
    // Both sums of the gate come from the same numbers: whatever cancels, cancels exactly.
    if (thread < kRows) {
      const float* row = shared.sums.pairs.data + thread * kP;
      const float* column = shared.sums.pairs.data + thread;
      const float* strength = shared.sums.strengths.data + thread * kP;
      float gate_sum = 0.0f;
      float beta_sum = shared.value_sum[thread];
      for (int i = 0; i < kRows; ++i) {
        gate_sum += row[i] - column[i * kP];
        beta_sum += strength[i];
      }
      if (thread < chunk.length) {
        const int64_t at = head * args.sums.head_stride + chunk.batch * args.sequences.tokens + chunk.token + thread;
        args.sums.scores[at] = gate_sum;
        args.sums.beta[at] = beta_sum;
      }
    }
    sync_block();
    store_fragment<kP>(shared.results.dP.data, m0, 0, dp);
    store_fragment<kP>(shared.results.M.data, m0, 0, dl);
    sync_block();
    const Window window = {chunk.batch, chunk.token, chunk.length, head, 0, args.sequences.chunk_size};
    store_tile<T, kRows>(shared.results.dP.data, args.dP, window);
    store_tile<T, kRows>(shared.results.M.data, args.M, window);
    sync_block();
  }
}

template <class T>
struct OperandGradientShared {
  Tile<T, kRows> q;
  Tile<T, kRows> k;
  Tile<T, kRows> x;  // dO, V', dP
  Tile<T, kRows> y;  // dW, M
  Tile<T, kRows> z;  // S, D: [values][keys]
  float warp_sums[kProductThreads / 32];
  GateRows gates;
};

template <class T>
__global__ void __launch_bounds__(kProductThreads, 2) operand_gradient_kernel(const GradientArgs args) {
  auto& shared = *reinterpret_cast<OperandGradientShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  const int64_t place = blockIdx.x / args.key_blocks;
  const int64_t key_block = blockIdx.x - place * args.key_blocks;
  const int64_t slot = place / args.heads;
  const int64_t key_head = place - slot * args.heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int m0 = warp_id() * 16;
  const int key = static_cast<int>(key_block) * kRows;
  const int64_t value_heads = args.heads * args.group;
  const Window keys = {chunk.batch, chunk.token, chunk.length, key_head, key, args.key_dim - key};

  load_tile<T, kRows>(shared.q.data, args.q, keys);
  load_tile<T, kRows>(shared.k.data, args.k, keys);
  float dq[8][4];
  float dk[8][4];
  clear(dq);
  clear(dk);
  for (int64_t head = key_head * args.group; head < (key_head + 1) * args.group; ++head) {
    if (warp_id() == 0)
      load_gates<GateKind::kLogDecay>(shared.gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
    const GateRows& gates = shared.gates;
    const StateBlocks states = {args.state_elements * (slot * value_heads + head), args.padded_key_dim, args.value_dim,
                                key};
    const auto values = [&](int column) {
      return Window{chunk.batch, chunk.token, chunk.length, head, column, args.value_dim - column};
    };
    const int64_t sums_at =
        key_block * args.sums.stride + head * args.sums.head_stride + chunk.batch * args.sequences.tokens + chunk.token;
    {
      float by_output[8][4];
      float by_update[8][4];
      clear(by_output);
      clear(by_update);
      for (int column = 0; column < args.value_dim; column += kRows) {
        load_tile<T, kRows>(shared.x.data, args.grad_output, values(column));
        load_tile<T, kRows>(shared.y.data, args.dW, values(column));
        load_state_blocks<T>(shared.z.data, static_cast<const T*>(args.S), states, column);
        cp_async_commit();
        cp_async_wait<0>();
        sync_block();
        multiply_pair<T>(by_output, by_update, shared.x.data, shared.y.data, shared.z.data, m0);
        sync_block();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m0 + fragment_row(2 * half);
        const float decay = gates.decay[row];
        const float beta = gates.beta[row];
        float q_sum = 0.0f;
        float k_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int j = 2 * half + i;
            const int column = fragment_column(n, j);
            const float x = args.scale * decay * by_output[n][j];
            const float y = decay * by_update[n][j];
            q_sum += x * to_float(shared.q.data[row * kP + column]);
            k_sum += y * to_float(shared.k.data[row * kP + column]);
            dq[n][j] += x;
            dk[n][j] -= beta * y;
          }
        }
        q_sum = group_sum<4>(q_sum);
        k_sum = group_sum<4>(k_sum);
        if ((lane_id() & 3) == 0 && row < chunk.length) {
          args.sums.decay[sums_at + row] = q_sum - beta * k_sum;
          args.sums.beta_state[sums_at + row] = k_sum;
        }
      }
    }
    {
      float by_state[8][4];
      clear(by_state);
      float inner = 0.0f;
      for (int column = 0; column < args.value_dim; column += kRows) {
        load_tile<T, kRows>(shared.x.data, args.residual, values(column));
        load_state_blocks<T>(shared.z.data, static_cast<const T*>(args.D), states, column);
        load_state_blocks<T>(shared.y.data, static_cast<const T*>(args.S), states, column);
        cp_async_commit();
        cp_async_wait<0>();
        sync_block();
        multiply_tiles<T>(by_state, shared.x.data, shared.z.data, m0);
        for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows; i += kProductThreads) {
          const int at = i / kRows * kP + i % kRows;
          inner += to_float(shared.y.data[at]) * to_float(shared.z.data[at]);
        }
        sync_block();
      }
      inner = warp_sum(inner);
      const int warp = warp_id();
      if (lane_id() == 0) shared.warp_sums[warp] = inner;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m0 + fragment_row(2 * half);
        const float to_end = gates.to_end[row];
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int j = 2 * half + i;
            const float x = to_end * by_state[n][j];
            sum += x * to_float(shared.k.data[row * kP + fragment_column(n, j)]);
            dk[n][j] += x;
          }
        }
        sum = group_sum<4>(sum);
        if ((lane_id() & 3) == 0 && row < chunk.length) args.sums.to_end[sums_at + row] = sum;
      }
    }
    const Window square = {chunk.batch, chunk.token, chunk.length, head, 0, args.sequences.chunk_size};
    load_tile<T, kRows>(shared.x.data, args.dP, square);
    load_tile<T, kRows>(shared.y.data, args.M, square);
    cp_async_commit();
    cp_async_wait<0>();
    sync_block();
    if (threadIdx.x == 0) {
      float sum = 0.0f;
      for (int w = 0; w < kProductThreads / 32; ++w) sum += shared.warp_sums[w];
      args.sums.state[key_block * args.sums.state_stride + slot * value_heads + head] = sum;
    }
    // dq += dP k;  dk += dP^T q + (M + M^T) k
    multiply_tiles<T>(dq, shared.x.data, shared.k.data, m0);
    multiply_transposed_tiles<T>(dk, shared.x.data, shared.q.data, m0);
    multiply_tiles<T>(dk, shared.y.data, shared.k.data, m0);
    multiply_transposed_tiles<T>(dk, shared.y.data, shared.k.data, m0);
    sync_block();
  }
  if (args.dq) store_product<T>(shared.x.data, dq, args.dq, keys, m0);
  if (args.dk) store_product<T>(shared.x.data, dk, args.dk, keys, m0);
}

}  // namespace cula::gdn::cuda
