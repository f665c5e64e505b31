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

// The dot product of 32 elements of a row of two tiles: those of this thread, which shares the row with the next.
template <class T>
__device__ __forceinline__ float half_row_dot(const T* a, const T* b) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  const int thread = static_cast<int>(threadIdx.x);
  const int at = (thread >> 1) * kPitch<kRows> + (thread & 1) * 32;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; i += kElements) {
    const uint4 x = *reinterpret_cast<const uint4*>(a + at + i);
    const uint4 y = *reinterpret_cast<const uint4*>(b + at + i);
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
    const uint32_t ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (sizeof(T) == 2) {
        const float2 u = unpack2<T>(xs[e]);
        const float2 v = unpack2<T>(ys[e]);
        sum += u.x * v.x;
        sum += u.y * v.y;
      } else {
        sum += __uint_as_float(xs[e]) * __uint_as_float(ys[e]);
      }
    }
  }
  return sum;
}
static_assert(kProductThreads == 2 * kRows);

// Rows of the gates as prepare left them.
struct ScoreGates {
  float beta[kRows];
  float high[kRows];
  float low[kRows];
  int segment[kRows];  // plus one: 0 past the chunk

  __device__ GateRow row(int i) const { return {high[i], low[i], segment[i]}; }
};

// Tiles arrive a step ahead of their use: first q and k, 64 columns a step, then for each value head dO, dW, V' and v.
template <class T>
struct ScoreGradientShared {
  Tile<T, kRows> stages[2][4];  // behind a head's last step, the one in hand takes dP and M on their way out
  float column_sums[kProductThreads / 32][kRows];  // of what the gate sees of pairs of rows, by warp
  ScoreGates gates[2];
};

template <class T>
__global__ void __launch_bounds__(kProductThreads, 2) score_gradient_kernel(const GradientArgs args) {
  auto& shared = *reinterpret_cast<ScoreGradientShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  constexpr int kWarps = kProductThreads / 32;
  const int64_t slot = blockIdx.x / args.heads;
  const int64_t key_head = blockIdx.x - slot * args.heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int m0 = warp_id() * 16;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first_head = key_head * args.group;
  const int64_t end_head = first_head + args.group;

  const int key_steps = (args.key_dim + kRows - 1) / kRows;
  const int head_steps = (args.value_dim + kRows - 1) / kRows;
  int next_stage = 0;
  int next_column = 0;  // of q and k, then of the value head
  int64_t next_head = first_head - 1;
  const auto issue = [&] {
    Tile<T, kRows>* tiles = shared.stages[next_stage];
    if (next_head < first_head) {
      const Window window = {chunk.batch, chunk.token, chunk.length, key_head, next_column, args.key_dim - next_column};
      load_tile<T, kRows>(tiles[0].data, args.q, window);
      load_tile<T, kRows>(tiles[1].data, args.k, window);
    } else if (next_head < end_head) {
      const Window window = {chunk.batch, chunk.token, chunk.length,
                             next_head,   next_column, args.value_dim - next_column};
      load_tile<T, kRows>(tiles[0].data, args.grad_output, window);
      load_tile<T, kRows>(tiles[1].data, args.dW, window);
      load_tile<T, kRows>(tiles[2].data, args.residual, window);
      load_tile<T, kRows>(tiles[3].data, args.v, window);
      if (next_column == 0) {
        ScoreGates& gates = shared.gates[(next_head - first_head) & 1];
        const float* source =
            args.factors + next_head * args.sums.head_stride + chunk.batch * args.sequences.tokens + chunk.token;
        const int row = thread & (kRows - 1);
        const bool valid = row < chunk.length;
        const int64_t from = valid ? row : 0;
        if (thread < kRows) {
          cp_async<4>(&gates.beta[row], source + 2 * args.sums.stride + from, valid);
          cp_async<4>(&gates.high[row], source + 3 * args.sums.stride + from, valid);
        } else {
          cp_async<4>(&gates.low[row], source + 4 * args.sums.stride + from, valid);
          cp_async<4>(&gates.segment[row], source + 5 * args.sums.stride + from, valid);
        }
      }
    }
    cp_async_commit();
    next_stage ^= 1;
    next_column += kRows;
    if (next_column >= (next_head < first_head ? args.key_dim : args.value_dim)) {
      next_column = 0;
      ++next_head;
    }
  };
  // The tiles of the next step, with the ones behind it under way.
  int stage = 1;
  const auto advance = [&]() -> Tile<T, kRows>* {
    issue();
    cp_async_wait<1>();
    sync_block();
    stage ^= 1;
    return shared.stages[stage];
  };
  float qk[8][4];
  float kk[8][4];
  clear(qk);
  clear(kk);
  issue();
  for (int step = 0; step < key_steps; ++step) {
    const Tile<T, kRows>* tiles = advance();
    multiply_lower_pair<T>(qk, kk, tiles[0].data, tiles[1].data, tiles[1].data, m0);
    sync_block();
  }

  for (int64_t head = first_head; head < end_head; ++head) {
    float dp[8][4];
    float dl[8][4];
    clear(dp);
    clear(dl);
    float value_sum = 0.0f;  // <dW, v> of row thread / 2
    Tile<T, kRows>* tiles = nullptr;
    for (int step = 0; step < head_steps; ++step) {
      tiles = advance();
      multiply_lower_pair<T>(dp, dl, tiles[0].data, tiles[1].data, tiles[2].data, m0);
      value_sum += half_row_dot<T>(tiles[1].data, tiles[3].data);
      sync_block();
    }
    value_sum += shuffle_xor(value_sum, 1);

    // Both sums of the gate come from the same numbers, strictly below the diagonal, where nothing large cancels.
    const ScoreGates& gates = shared.gates[(head - first_head) & 1];
    const GateRow rows[2] = {gates.row(m0 + fragment_row(0)), gates.row(m0 + fragment_row(2))};
    float row_sum[2] = {0.0f, 0.0f};       // of what the gate sees
    float strength_sum[2] = {0.0f, 0.0f};  // of what beta sees
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float column_sum[2] = {0.0f, 0.0f};
      if (8 * n <= m0 + 15) {
        const GateRow columns[2] = {gates.row(fragment_column(n, 0)), gates.row(fragment_column(n, 1))};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = m0 + fragment_row(j);
          const int column = fragment_column(n, j);
          const float decay = rows[j >> 1].since(columns[j & 1]);
          const bool below = column < row;
          const float beta = gates.beta[row];
          dp[n][j] = column <= row ? args.scale * dp[n][j] * decay : 0.0f;
          const float strength = below ? -dl[n][j] * decay : 0.0f;
          dl[n][j] = beta * strength;
          const float by_strength = below ? strength * kk[n][j] : 0.0f;
          const float pair = below ? dp[n][j] * qk[n][j] + beta * by_strength : 0.0f;
          row_sum[j >> 1] += pair;
          column_sum[j & 1] += pair;
          strength_sum[j >> 1] += by_strength;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int mask = 4; mask < 32; mask <<= 1) column_sum[i] += shuffle_xor(column_sum[i], mask);
        if (lane_id() < 4) shared.column_sums[m0 / 16][fragment_column(n, i)] = column_sum[i];
      }
    }
    store_fragment<kP>(tiles[0].data, m0, 0, dp);
    store_fragment<kP>(tiles[1].data, m0, 0, dl);
    sync_block();
    const int64_t at = head * args.sums.head_stride + chunk.batch * args.sequences.tokens + chunk.token;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m0 + fragment_row(2 * half);
      const float sum = group_sum<4>(row_sum[half]);
      const float strength = group_sum<4>(strength_sum[half]);
      // <dW, v> of row r is with lanes 2 (r - m0) and the next.
      const float value = shuffle(value_sum, 2 * fragment_row(2 * half));
      if ((lane_id() & 3) == 0 && row < chunk.length) {
        float columns = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) columns += shared.column_sums[w][row];
        args.sums.scores[at + row] = sum - columns;
        args.sums.beta[at + row] = value + strength;
      }
    }
    const Window window = {chunk.batch, chunk.token, chunk.length, head, 0, args.sequences.chunk_size};
    store_tile<T, kRows>(tiles[0].data, args.dP, window);
    store_tile<T, kRows>(tiles[1].data, args.M, window);
    sync_block();
  }
  cp_async_wait<0>();
}

// Each step brings three tiles of 64 values or of 64 rows by the block's 64 keys, a step ahead of their use.
template <class T>
struct OperandGradientShared {
  Tile<T, kRows> q;
  Tile<T, kRows> k;
  Tile<T, kRows> stages[2][3];
  float warp_sums[kProductThreads / 32];
};

template <class T>
__global__ void __launch_bounds__(kProductThreads, 2) operand_gradient_kernel(const GradientArgs args) {
  auto& shared = *reinterpret_cast<OperandGradientShared<T>*>(dynamic_shared_memory());
  const int64_t place = blockIdx.x / args.key_blocks;
  const int64_t key_block = blockIdx.x - place * args.key_blocks;
  const int64_t slot = place / args.heads;
  const int64_t key_head = place - slot * args.heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int m0 = warp_id() * 16;
  const int key = static_cast<int>(key_block) * kRows;
  const int64_t value_heads = args.heads * args.group;
  const int64_t first_head = key_head * args.group;
  const int64_t end_head = first_head + args.group;
  const Window keys = {chunk.batch, chunk.token, chunk.length, key_head, key, args.key_dim - key};

  // Steps of a head: dO, dW, S by blocks of values; V', S, D by blocks of values; dP, M.
  const int blocks = (args.value_dim + kRows - 1) / kRows;
  int next_stage = 0;
  int next_step = 0;
  int64_t next_head = first_head;
  const auto issue = [&] {
    if (next_head < end_head) {
      Tile<T, kRows>* tiles = shared.stages[next_stage];
      const StateBlocks states = {args.state_elements * (slot * value_heads + next_head), args.padded_key_dim,
                                  args.value_dim, key};
      const int column = (next_step < blocks ? next_step : next_step - blocks) * kRows;
      Window window = {chunk.batch, chunk.token, chunk.length, next_head, column, args.value_dim - column};
      if (next_step < blocks) {
        load_tile<T, kRows>(tiles[0].data, args.grad_output, window);
        load_tile<T, kRows>(tiles[1].data, args.dW, window);
        load_state_blocks<T>(tiles[2].data, static_cast<const T*>(args.S), states, column);
      } else if (next_step < 2 * blocks) {
        load_tile<T, kRows>(tiles[0].data, args.residual, window);
        load_state_blocks<T>(tiles[1].data, static_cast<const T*>(args.S), states, column);
        load_state_blocks<T>(tiles[2].data, static_cast<const T*>(args.D), states, column);
      } else {
        window.column = 0;
        window.columns = args.sequences.chunk_size;
        load_tile<T, kRows>(tiles[0].data, args.dP, window);
        load_tile<T, kRows>(tiles[1].data, args.M, window);
      }
    }
    cp_async_commit();
    next_stage ^= 1;
    if (++next_step > 2 * blocks) {
      next_step = 0;
      ++next_head;
    }
  };
  int stage = 1;
  const auto advance = [&]() -> Tile<T, kRows>* {
    issue();
    cp_async_wait<1>();
    sync_block();
    stage ^= 1;
    return shared.stages[stage];
  };

  load_tile<T, kRows>(shared.q.data, args.q, keys);
  load_tile<T, kRows>(shared.k.data, args.k, keys);
  issue();
  float dq[8][4];
  float dk[8][4];
  clear(dq);
  clear(dk);
  for (int64_t head = first_head; head < end_head; ++head) {
    const int64_t at = head * args.sums.head_stride + chunk.batch * args.sequences.tokens + chunk.token;
    const int64_t sums_at = key_block * args.sums.stride + at;
    float decay[2];
    float to_end[2];
    float beta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m0 + fragment_row(2 * half);
      const bool valid = row < chunk.length;
      decay[half] = valid ? args.factors[at + row] : 0.0f;
      to_end[half] = valid ? args.factors[args.sums.stride + at + row] : 0.0f;
      beta[half] = valid ? args.factors[2 * args.sums.stride + at + row] : 0.0f;
    }
    {
      float by_output[8][4];
      float by_update[8][4];
      clear(by_output);
      clear(by_update);
      for (int block = 0; block < blocks; ++block) {
        const Tile<T, kRows>* tiles = advance();
        multiply_pair<T>(by_output, by_update, tiles[0].data, tiles[1].data, tiles[2].data, m0);
        sync_block();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m0 + fragment_row(2 * half);
        float q_sum = 0.0f;
        float k_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float2 q = load_pair<T>(shared.q.data, row, fragment_column(n, 0));
          const float2 k = load_pair<T>(shared.k.data, row, fragment_column(n, 0));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int j = 2 * half + i;
            const float x = args.scale * decay[half] * by_output[n][j];
            const float y = decay[half] * by_update[n][j];
            q_sum += x * (i == 0 ? q.x : q.y);
            k_sum += y * (i == 0 ? k.x : k.y);
            dq[n][j] += x;
            dk[n][j] -= beta[half] * y;
          }
        }
        q_sum = group_sum<4>(q_sum);
        k_sum = group_sum<4>(k_sum);
        if ((lane_id() & 3) == 0 && row < chunk.length) {
          args.sums.decay[sums_at + row] = q_sum - beta[half] * k_sum;
          args.sums.beta_state[sums_at + row] = k_sum;
        }
      }
    }
    {
      float by_state[8][4];
      clear(by_state);
      float inner = 0.0f;
      for (int block = 0; block < blocks; ++block) {
        const Tile<T, kRows>* tiles = advance();
        multiply_tiles<T>(by_state, tiles[0].data, tiles[2].data, m0);
        inner += half_row_dot<T>(tiles[1].data, tiles[2].data);
        sync_block();
      }
      inner = warp_sum(inner);
      const int warp = warp_id();
      if (lane_id() == 0) shared.warp_sums[warp] = inner;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m0 + fragment_row(2 * half);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float2 k = load_pair<T>(shared.k.data, row, fragment_column(n, 0));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int j = 2 * half + i;
            const float x = to_end[half] * by_state[n][j];
            sum += x * (i == 0 ? k.x : k.y);
            dk[n][j] += x;
          }
        }
        sum = group_sum<4>(sum);
        if ((lane_id() & 3) == 0 && row < chunk.length) args.sums.to_end[sums_at + row] = sum;
      }
    }
    const Tile<T, kRows>* tiles = advance();
    if (threadIdx.x == 0) {
      float sum = 0.0f;
      for (int w = 0; w < kProductThreads / 32; ++w) sum += shared.warp_sums[w];
      args.sums.state[key_block * args.sums.state_stride + slot * value_heads + head] = sum;
    }
    // dq += dP k;  dk += dP^T q + (M + M^T) k
    multiply_tiles<T>(dq, tiles[0].data, shared.k.data, m0);
    multiply_transposed_tiles<T>(dk, tiles[0].data, shared.q.data, m0);
    multiply_tiles<T>(dk, tiles[1].data, shared.k.data, m0);
    multiply_transposed_tiles<T>(dk, tiles[1].data, shared.k.data, m0);
    sync_block();
  }
  cp_async_wait<0>();
  if (args.dq) store_product<T>(shared.stages[0][0].data, dq, args.dq, keys, m0);
  if (args.dk) store_product<T>(shared.stages[0][0].data, dk, args.dk, keys, m0);
}

}  // namespace cula::gdn::cuda
