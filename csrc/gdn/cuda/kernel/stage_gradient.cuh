// Backward stages as kernels of their own, with FLA's operands: the gradients of q, k, w, v, beta and of the gate.
#pragma once

#include "gdn/cuda/kernel/stage_forward.cuh"

namespace cula::gdn::cuda {

// The gradient of the gate, summed in shared memory for one value head at a time. Blocks of keys come one after the
// other in one thread block, so that what a block of keys leaves can wait in dg (fp32) for the next: shared memory does
// not grow with the number of value heads.
struct HeadGateSums {
  const TensorArg& dg;
  const Chunk& chunk;
  float* sums;  // [kRows], shared

  // Every thread must call both; the sums are complete behind the next barrier.
  __device__ void begin(int64_t head, bool first) const {
    if (threadIdx.x >= kRows) return;
    const int row = static_cast<int>(threadIdx.x);
    sums[row] = first || !dg || row >= chunk.length ? 0.0f : dg.load(dg.offset(chunk.batch, chunk.token + row, head));
  }
  __device__ void end(int64_t head) const {
    const int row = static_cast<int>(threadIdx.x);
    if (dg && row < chunk.length) dg.store(dg.offset(chunk.batch, chunk.token + row, head), sums[row]);
  }
};

// dq, dk, dw, dg of the output and the states -------------------------------------------------------------------------

struct OperandStageArgs {
  SequenceTable sequences;
  int64_t heads;
  int64_t group;
  int key_dim;
  int value_dim;
  bool state_v_first;
  float scale;
  TensorArg q;
  TensorArg k;
  TensorArg v;  // v_new
  TensorArg h;
  TensorArg dv;  // dv2
  TensorArg grad_output;
  TensorArg dh;
  int64_t num_chunks;  // of h and dh
  TensorArg dq;
  TensorArg dk;
  TensorArg dw;
  TensorArg dg;
  GateArgs gates;
};

template <class T>
struct OperandStageShared {
  Tile<T, kRows> q;
  Tile<T, kRows> k;
  Tile<T, kRows> x;  // do, dv2, v_new, the gated scores' gradient
  Tile<T, kRows> y;  // h, v_new
  Tile<T, kRows> z;  // h, dh
  GateRows gates;
  float gate_sum[kRows];  // the gradient of the gate so far, of one value head; between key blocks it is in dg
};

template <class T>
__global__ void __launch_bounds__(kStageThreads, 1) operand_stage_kernel(const OperandStageArgs args) {
  auto& shared = *reinterpret_cast<OperandStageShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  const int64_t slot = blockIdx.x / args.heads;
  const int64_t key_head = blockIdx.x - slot * args.heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int64_t dense = dense_chunk_index(args.sequences, chunk.sequence, chunk.index);
  if (dense >= args.num_chunks) return;
  const int m0 = warp_id() * 16;
  const int last = chunk.length - 1;
  const HeadGateSums gate_sums = {args.dg, chunk, shared.gate_sum};
  const auto wait = [] {
    cp_async_commit();
    cp_async_wait<0>();
    sync_block();
  };
  // c += a b for a tile of values and a tile of a state, [keys][values] or [values][keys]
  const auto multiply_by_state = [&](float(&c)[8][4], const T* a) {
    if (args.state_v_first) {
      multiply_tiles(c, a, shared.z.data, m0);
    } else {
      multiply_tiles_by_rows(c, a, shared.z.data, m0);
    }
  };

  for (int key = 0; key < args.key_dim; key += kRows) {
    const Window keys = {chunk.batch, chunk.token, chunk.length, key_head, key, args.key_dim - key};
    float dq[8][4];
    float dk[8][4];
    clear(dq);
    clear(dk);
    for (int64_t member = 0; member < args.group; ++member) {
      const int64_t head = key_head * args.group + member;
      sync_block();  // the tiles and gates of the member before have been read
      if (warp_id() == 0)
        load_gates<GateKind::kGamma>(shared.gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
      load_tile<T, kRows>(shared.q.data, args.q, keys);
      load_tile<T, kRows>(shared.k.data, args.k, keys);
      gate_sums.begin(head, key == 0);
      const GateRows& gates = shared.gates;
      float* const gate_sum = shared.gate_sum;
      const auto values = [&](int value) {
        return Window{chunk.batch, chunk.token, chunk.length, head, value, args.value_dim - value};
      };
      const auto load_state = [&](T* tile, const TensorArg& h, int value) {
        const int64_t offset = chunk.batch * h.stride[0] + dense * h.stride[1] + head * h.stride[2];
        load_state_tile<T>(tile, h, offset, args.state_v_first, key, args.key_dim - key, value, args.value_dim - value);
      };
      // total += c; gate_sum += sign <c, tile> by rows; returns this lane's part of <c, tile>
      const auto take = [&](float(&total)[8][4], const float(&c)[8][4], const T* tile, float sign) {
        float whole = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m0 + fragment_row(2 * half);
          float sum = 0.0f;
#pragma unroll
          for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int j = 2 * half + i;
              sum += c[n][j] * to_float(tile[row * kP + fragment_column(n, j)]);
              total[n][j] += c[n][j];
            }
          }
          whole += sum;
          sum = group_sum<4>(sum);
          if ((lane_id() & 3) == 0) gate_sum[row] += sign * sum;
        }
        return whole;
      };

      // Through the state that enters: dq and dw
      {
        float c[8][4];
        const auto multiply = [&](const TensorArg& x) {
          clear(c);
          for (int value = 0; value < args.value_dim; value += kRows) {
            load_tile<T, kRows>(shared.x.data, x, values(value));
            load_state(shared.z.data, args.h, value);
            wait();
            multiply_by_state(c, shared.x.data);
            sync_block();
          }
        };
        multiply(args.grad_output);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) c[n][j] *= args.scale * gates.decay[m0 + fragment_row(j)];
        }
        take(dq, c, shared.q.data, 1.0f);
        multiply(args.dv);
        scale(c, -1.0f);
        Window wide = keys;
        wide.head = head;
        store_product<T>(shared.x.data, c, args.dw, wide, m0);
        sync_block();
      }
      // Through the state that leaves: dk
      float inner = 0.0f;  // <h, dh>
      float bonus = 0.0f;  // what to_end owes to the last row
      {
        float by_state[8][4];
        clear(by_state);
        for (int value = 0; value < args.value_dim; value += kRows) {
          load_tile<T, kRows>(shared.x.data, args.v, values(value));
          load_state(shared.z.data, args.dh, value);
          load_state(shared.y.data, args.h, value);
          wait();
          multiply_by_state(by_state, shared.x.data);
          for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows; i += kStageThreads) {
            const int at = i / kRows * kP + i % kRows;
            inner += to_float(shared.y.data[at]) * to_float(shared.z.data[at]);
          }
          sync_block();
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) by_state[n][j] *= gates.to_end[m0 + fragment_row(j)];
        }
        bonus = take(dk, by_state, shared.k.data, -1.0f);
      }
      // Through the scores: both
      {
        float c[8][4];
        clear(c);
        for (int value = 0; value < args.value_dim; value += kRows) {
          load_tile<T, kRows>(shared.x.data, args.grad_output, values(value));
          load_tile<T, kRows>(shared.y.data, args.v, values(value));
          wait();
          multiply_tiles_by_rows(c, shared.x.data, shared.y.data, m0);
          sync_block();
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int row = m0 + fragment_row(j);
            const int column = fragment_column(n, j);
            c[n][j] = column <= row ? args.scale * c[n][j] * gates.between(row, column) : 0.0f;
          }
        }
        store_fragment<kP>(shared.x.data, m0, 0, c);
        sync_block();
        clear(c);
        multiply_tiles(c, shared.x.data, shared.k.data, m0);
        take(dq, c, shared.q.data, 1.0f);
        clear(c);
        multiply_transposed_tiles(c, shared.x.data, shared.q.data, m0);
        take(dk, c, shared.k.data, -1.0f);
      }
      // One warp after the other adds its share to the last row, so that the order is fixed.
      inner = warp_sum(inner);
      bonus = warp_sum(bonus);
      for (int w = 0; w < kStageThreads / 32; ++w) {
        sync_block();
        if (w == warp_id() && lane_id() == 0) {
          gate_sum[last] += bonus + (gates.chunk_decay == 0.0f ? 0.0f : gates.chunk_decay * inner);
        }
      }
      sync_block();
      gate_sums.end(head);
    }
    sync_block();
    store_product<T>(shared.x.data, dq, args.dq, keys, m0);
    store_product<T>(shared.x.data, dk, args.dk, keys, m0);
  }
}

// dk, dv, dbeta, dg of w, u and the inverse ---------------------------------------------------------------------------

struct WyStageArgs {
  SequenceTable sequences;
  int64_t heads;
  int64_t group;
  int key_dim;
  int value_dim;
  TensorArg k;
  TensorArg v;
  TensorArg A;
  TensorArg dw;
  TensorArg du;
  TensorArg dk;
  TensorArg dv;
  TensorArg db;
  TensorArg dg;
  GateArgs gates;
};

template <class T>
struct WyStageShared {
  Tile<T, kRows> A;
  Tile<T, kRows> x;  // dw, du
  Tile<T, kRows> y;  // k, v
  Tile<T, kRows> z;  // dA and what follows from it
  GateRows gates;
  float gate_sum[kRows];  // as in OperandStageShared
  // and [group][kRows] floats: the gradient of beta so far
};

template <class T>
__global__ void __launch_bounds__(kStageThreads, 1) wy_stage_kernel(const WyStageArgs args) {
  auto& shared = *reinterpret_cast<WyStageShared<T>*>(dynamic_shared_memory());
  float* beta_sums = reinterpret_cast<float*>(&shared + 1);
  constexpr int kP = kPitch<kRows>;
  const int64_t slot = blockIdx.x / args.heads;
  const int64_t key_head = blockIdx.x - slot * args.heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int m0 = warp_id() * 16;
  const HeadGateSums gate_sums = {args.dg, chunk, shared.gate_sum};
  for (int i = static_cast<int>(threadIdx.x); i < args.group * kRows; i += kStageThreads) beta_sums[i] = 0.0f;
  const auto wait = [] {
    cp_async_commit();
    cp_async_wait<0>();
    sync_block();
  };
  // Rows of tile y times a factor a row
  const auto scale_y = [&](bool with_decay) {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows; i += kStageThreads) {
      const int row = i / kRows;
      T& y = shared.y.data[row * kP + i - row * kRows];
      y = from_float<T>(to_float(y) * (shared.gates.beta[row] * (with_decay ? shared.gates.decay[row] : 1.0f)));
    }
    sync_block();
  };
  // Per row, sum over the columns of c times the tile
  const auto row_sums = [&](float(&sums)[2], const float(&c)[8][4], const T* tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* row = tile + (m0 + fragment_row(2 * half)) * kP;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        sum += c[n][2 * half] * to_float(row[fragment_column(n, 0)]) +
               c[n][2 * half + 1] * to_float(row[fragment_column(n, 1)]);
      }
      sums[half] = group_sum<4>(sum);
    }
  };

  for (int key = 0; key < args.key_dim; key += kRows) {
    const Window keys = {chunk.batch, chunk.token, chunk.length, key_head, key, args.key_dim - key};
    float dk[8][4];
    clear(dk);
    for (int64_t member = 0; member < args.group; ++member) {
      const int64_t head = key_head * args.group + member;
      const GateRows& gates = shared.gates;
      float* beta_sum = beta_sums + member * kRows;
      float* const gate_sum = shared.gate_sum;
      const auto add_sums = [&](float* target, const float(&sums)[2], bool with_decay, bool with_beta) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m0 + fragment_row(2 * half);
          float value = sums[half];
          if (with_decay) value *= gates.decay[row];
          if (with_beta) value *= gates.beta[row];
          if ((lane_id() & 3) == 0) target[row] += value;
        }
      };
      sync_block();
      gate_sums.begin(head, key == 0);
      if (warp_id() == 0)
        load_gates<GateKind::kGamma>(shared.gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
      load_tile<T, kRows>(shared.A.data, args.A,
                          {chunk.batch, chunk.token, chunk.length, head, 0, args.sequences.chunk_size});
      // dA = dw (beta decay k)^T + du (beta v)^T, and with it k k^T
      float da[8][4];
      float kk[8][4];
      clear(da);
      clear(kk);
      for (int column = 0; column < args.key_dim; column += kRows) {
        Window window = {chunk.batch, chunk.token, chunk.length, key_head, column, args.key_dim - column};
        load_tile<T, kRows>(shared.y.data, args.k, window);
        window.head = head;
        load_tile<T, kRows>(shared.x.data, args.dw, window);
        wait();
        multiply_tiles_by_rows(kk, shared.y.data, shared.y.data, m0);
        sync_block();
        scale_y(true);
        multiply_tiles_by_rows(da, shared.x.data, shared.y.data, m0);
        sync_block();
      }
      for (int column = 0; column < args.value_dim; column += kRows) {
        const Window window = {chunk.batch, chunk.token, chunk.length, head, column, args.value_dim - column};
        load_tile<T, kRows>(shared.y.data, args.v, window);
        load_tile<T, kRows>(shared.x.data, args.du, window);
        wait();
        if (key == 0) {
          float zu[8][4];
          clear(zu);
          multiply_transposed_tiles(zu, shared.A.data, shared.x.data, m0);
          float sums[2];
          row_sums(sums, zu, shared.y.data);
          add_sums(beta_sum, sums, false, false);
#pragma unroll
          for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int j = 0; j < 4; ++j) zu[n][j] *= gates.beta[m0 + fragment_row(j)];
          }
          store_product<T>(shared.z.data, zu, args.dv, window, m0);
          sync_block();
        }
        scale_y(false);
        multiply_tiles_by_rows(da, shared.x.data, shared.y.data, m0);
        sync_block();
      }
      // dP = -tril1(A^T dA A^T) between
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (fragment_column(n, j) >= m0 + fragment_row(j)) da[n][j] = 0.0f;
        }
      }
      store_fragment<kP>(shared.z.data, m0, 0, da);
      sync_block();
      float dp[8][4];
      clear(dp);
      multiply_tiles_by_rows(dp, shared.z.data, shared.A.data, m0);  // dA A^T
      sync_block();
      store_fragment<kP>(shared.z.data, m0, 0, dp);
      sync_block();
      clear(dp);
      multiply_transposed_tiles(dp, shared.A.data, shared.z.data, m0);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = m0 + fragment_row(j);
          const int column = fragment_column(n, j);
          dp[n][j] = column < row ? -dp[n][j] * gates.between(row, column) : 0.0f;
          kk[n][j] = column < row ? gates.beta[row] * dp[n][j] * kk[n][j] : 0.0f;
        }
      }
      sync_block();
      if (key == 0) {
        // Row sums minus column sums of the same matrix
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum = 0.0f;
#pragma unroll
          for (int n = 0; n < 8; ++n) sum += kk[n][2 * half] + kk[n][2 * half + 1];
          sum = group_sum<4>(sum);
          if ((lane_id() & 3) == 0) gate_sum[m0 + fragment_row(2 * half)] += sum;
        }
        for (int w = 0; w < kStageThreads / 32; ++w) {
          sync_block();
          if (w != warp_id()) continue;
#pragma unroll
          for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float sum = kk[n][i] + kk[n][2 + i];
              sum += shuffle_xor(sum, 4);
              sum += shuffle_xor(sum, 8);
              sum += shuffle_xor(sum, 16);
              if (lane_id() < 4) gate_sum[fragment_column(n, i)] -= sum;
            }
          }
        }
      }
      store_fragment<kP>(shared.z.data, m0, 0, dp);
      load_tile<T, kRows>(shared.y.data, args.k, keys);
      Window wide = keys;
      wide.head = head;
      load_tile<T, kRows>(shared.x.data, args.dw, wide);
      wait();
      // dP k: through beta, and to dk
      float c[8][4];
      clear(c);
      multiply_tiles(c, shared.z.data, shared.y.data, m0);
      float sums[2];
      row_sums(sums, c, shared.y.data);
      add_sums(beta_sum, sums, false, false);
      // A^T dw
      float zw[8][4];
      clear(zw);
      multiply_transposed_tiles(zw, shared.A.data, shared.x.data, m0);
      row_sums(sums, zw, shared.y.data);
      add_sums(beta_sum, sums, true, false);
      add_sums(gate_sum, sums, true, true);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = m0 + fragment_row(j);
          dk[n][j] += gates.beta[row] * (c[n][j] + gates.decay[row] * zw[n][j]);
        }
      }
      sync_block();
      gate_sums.end(head);
      scale_y(false);
      multiply_transposed_tiles(dk, shared.z.data, shared.y.data, m0);
    }
    sync_block();
    store_product<T>(shared.x.data, dk, args.dk, keys, m0);
  }
  sync_block();
  for (int i = static_cast<int>(threadIdx.x); i < args.group * kRows; i += kStageThreads) {
    const int member = i / kRows;
    const int row = i - member * kRows;
    if (row >= chunk.length) continue;
    const int64_t head = key_head * args.group + member;
    args.db.store(args.db.offset(chunk.batch, chunk.token + row, head), beta_sums[i]);
  }
}

}  // namespace cula::gdn::cuda
