// The forward stages as kernels of their own, with FLA's operands: w and u instead of A W.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/gate.cuh"
#include "gdn/cuda/collective/product.cuh"
#include "gdn/cuda/collective/state.cuh"

namespace cula::gdn::cuda {

inline constexpr int kStageThreads = kProductThreads;

// w = A diag(beta decay) k, u = A diag(beta) v
// -------------------------------------------------------------------------

struct RecomputeArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t key_blocks;
  int64_t blocks;  // of 64 columns, first those of w
  TensorArg k;
  TensorArg v;
  TensorArg A;
  TensorArg w;
  TensorArg u;
  GateArgs gates;
};

template <class T>
struct RecomputeShared {
  Tile<T, kRows> A;
  Tile<T, kRows> x;
  GateRows gates;
};

template <class T>
__global__ void __launch_bounds__(kStageThreads, 1) recompute_kernel(const RecomputeArgs args) {
  auto& shared = *reinterpret_cast<RecomputeShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  const int64_t place = blockIdx.x / args.blocks;
  const int64_t block = blockIdx.x - place * args.blocks;
  const int64_t slot = place / args.value_heads;
  const int64_t head = place - slot * args.value_heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const bool keys = block < args.key_blocks;
  const int column = static_cast<int>(keys ? block : block - args.key_blocks) * kRows;
  const Window input = {chunk.batch,  chunk.token,
                        chunk.length, keys ? head / args.group : head,
                        column,       (keys ? args.key_dim : args.value_dim) - column};
  load_tile<T, kRows>(shared.A.data, args.A,
                      {chunk.batch, chunk.token, chunk.length, head, 0, args.sequences.chunk_size});
  load_tile<T, kRows>(shared.x.data, keys ? args.k : args.v, input);
  cp_async_commit();
  if (warp_id() == 0)
    load_gates<GateKind::kGamma>(shared.gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
  cp_async_wait<0>();
  sync_block();
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kRows; i += kStageThreads) {
    const int row = i / kRows;
    T& x = shared.x.data[row * kP + i - row * kRows];
    const float factor = shared.gates.beta[row] * (keys ? shared.gates.decay[row] : 1.0f);
    x = from_float<T>(to_float(x) * factor);
  }
  sync_block();
  const int m0 = warp_id() * 16;
  float c[8][4];
  clear(c);
  multiply_tiles(c, shared.A.data, shared.x.data, m0);
  sync_block();
  store_fragment<kP>(shared.x.data, m0, 0, c);
  sync_block();
  Window output = input;
  output.head = head;
  store_tile<T, kRows>(shared.x.data, keys ? args.w : args.u, output);
}

// States at the chunk starts and v_new --------------------------------------------------------------------------------

struct StateStageArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  TensorArg k;
  TensorArg w;
  TensorArg u;
  GateArgs gates;
  TensorArg initial_state;
  TensorArg h;         // [B, NT, HV, K, V]
  int64_t num_chunks;  // NT; what lengths on the device say beyond that is left out
  TensorArg v_new;
  TensorArg final_state;
};

template <class T, int kKeyDim>
struct StateStageShared {
  Tile<T, kKeyDim> keys;  // w, then k
  Tile<T, kRows> values;
  GateRows gates;
};

// The number of warps over which a state's keys are split.
template <int kKeyDim>
inline constexpr int kKeySplit = kKeyDim > 64 ? 2 : 1;

template <class T, int kKeyDim>
__global__ void __launch_bounds__(kStageThreads, 1) state_stage_kernel(const StateStageArgs args) {
  constexpr int kSplit = kKeySplit<kKeyDim>;
  constexpr int kKeys = kKeyDim / kSplit;
  constexpr int kP = kPitch<kKeyDim>;
  constexpr int kRowBlocks = kStageThreads / 32 / kSplit;
  constexpr int kPartial = 8 * 32 * 4;
  auto& shared = *reinterpret_cast<StateStageShared<T, kKeyDim>*>(dynamic_shared_memory());
  [[maybe_unused]] float* partial = reinterpret_cast<float*>(&shared + 1);

  const int64_t unit = blockIdx.x / args.value_blocks;
  const int block_value = static_cast<int>(blockIdx.x - unit * args.value_blocks) * 16 * kRowBlocks;
  const int64_t sequence_index = unit / args.value_heads;
  const int64_t head = unit - sequence_index * args.value_heads;
  const Sequence sequence = find_sequence(args.sequences, sequence_index);
  const int half = warp_id() % kSplit;
  const int row_block = warp_id() / kSplit;
  const StatePart part = {sequence_index, head,          half * kKeys, block_value + 16 * row_block,
                          args.key_dim,   args.value_dim};
  const int64_t first_chunk = dense_chunk_index(args.sequences, sequence_index, 0);

  float s[kKeys / 8][4];
  load_state<kKeys>(s, args.initial_state, part);
  const int chunk_size = args.sequences.chunk_size;
  const int64_t room = (args.num_chunks - first_chunk) * chunk_size;
  const int64_t length = sequence.length < room ? sequence.length : room;
  for (int64_t done = 0, c = 0; done < length; done += chunk_size, ++c) {
    const int64_t left = sequence.length - done;
    const int rows = static_cast<int>(left < chunk_size ? left : chunk_size);
    const int64_t token = sequence.begin + done;
    const TensorArg& h = args.h;
    store_chunk_state<T, kKeys>(
        s, h, sequence.batch * h.stride[0] + (first_chunk + c) * h.stride[1] + head * h.stride[2], part);
    load_tile<T, kKeyDim>(shared.keys.data, args.w, {sequence.batch, token, rows, head, 0, args.key_dim});
    const int columns = args.value_dim - block_value;
    load_tile<T, kRows>(shared.values.data, args.u,
                        {sequence.batch, token, rows, head, block_value, columns < kRows ? columns : kRows});
    cp_async_commit();
    if (warp_id() == 0) load_gates<GateKind::kGamma>(shared.gates, args.gates, sequence.batch, token, rows, head);
    cp_async_wait<0>();
    sync_block();
    TokenColumns y;
    clear(y);
    multiply_state<T, kP, kKeys>(y, s, shared.keys.data, part.key);
    if constexpr (kSplit == 2) {
      write_partial(partial + warp_id() * kPartial, y);
      sync_named(1 + row_block, 64);
      add_partial(y, partial + (warp_id() ^ 1) * kPartial);
    }
    add_columns<T>(y, shared.values.data, 16 * row_block, -1.0f);
    if (args.v_new && half == 0) {
      store_columns<T>(y, args.v_new, {sequence.batch, token, rows, head, part.value, args.value_dim - part.value});
    }
    sync_block();
    load_tile<T, kKeyDim>(shared.keys.data, args.k, {sequence.batch, token, rows, head / args.group, 0, args.key_dim});
    cp_async_commit();
    cp_async_wait<0>();
    sync_block();
    scale(s, shared.gates.chunk_decay);
    scale_columns(y, shared.gates.to_end);
    update_state<T, kP, kKeys>(s, y, shared.keys.data, part.key);
    sync_block();
  }
  if (args.final_state) store_state<kKeys>(s, args.final_state, part);
}

// o = scale (decay (q h) + (q k^T between) v) -------------------------------------------------------------------------

struct OutputArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  bool state_v_first;
  float scale;
  TensorArg q;
  TensorArg k;
  TensorArg v;
  TensorArg h;
  int64_t num_chunks;  // of h
  TensorArg o;
  GateArgs gates;
};

template <class T>
struct OutputShared {
  Tile<T, kRows> q;
  Tile<T, kRows> k;
  Tile<T, kRows> h;
  Tile<T, kRows> v;
  GateRows gates;
};

// A block of 64 keys x 64 values of a state tensor, as a tile of values by keys or of keys by values, whichever way
// the tensor lies.
template <class T>
__device__ __forceinline__ void load_state_tile(T* tile, const TensorArg& h, int64_t offset, bool v_first, int key,
                                                int keys, int value, int values) {
  TensorArg view = h;
  view.stride[0] = 0;
  view.stride[1] = v_first ? h.stride[4] : h.stride[3];
  view.stride[2] = 1;  // `head` carries the offset
  view.stride[3] = v_first ? h.stride[3] : h.stride[4];
  const int rows = v_first ? values : keys;
  load_tile<T, kRows>(
      tile, view,
      {0, v_first ? value : key, rows < kRows ? rows : kRows, offset, v_first ? key : value, v_first ? keys : values});
}

template <class T>
__global__ void __launch_bounds__(kStageThreads, 1) output_kernel(const OutputArgs args) {
  auto& shared = *reinterpret_cast<OutputShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  const int64_t place = blockIdx.x / args.value_blocks;
  const int value = static_cast<int>(blockIdx.x - place * args.value_blocks) * kRows;
  const int64_t slot = place / args.value_heads;
  const int64_t head = place - slot * args.value_heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int64_t key_head = head / args.group;
  const int64_t dense = dense_chunk_index(args.sequences, chunk.sequence, chunk.index);
  if (dense >= args.num_chunks) return;
  const int64_t h_at = chunk.batch * args.h.stride[0] + dense * args.h.stride[1] + head * args.h.stride[2];
  const Window values = {chunk.batch, chunk.token, chunk.length, head, value, args.value_dim - value};
  if (warp_id() == 0)
    load_gates<GateKind::kGamma>(shared.gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
  load_tile<T, kRows>(shared.v.data, args.v, values);
  const int m0 = warp_id() * 16;
  float qk[8][4];
  float o[8][4];
  clear(qk);
  clear(o);
  for (int key = 0; key < args.key_dim; key += kRows) {
    const Window keys = {chunk.batch, chunk.token, chunk.length, key_head, key, args.key_dim - key};
    load_tile<T, kRows>(shared.q.data, args.q, keys);
    load_tile<T, kRows>(shared.k.data, args.k, keys);
    load_state_tile<T>(shared.h.data, args.h, h_at, args.state_v_first, key, args.key_dim - key, value,
                       args.value_dim - value);
    cp_async_commit();
    cp_async_wait<0>();
    sync_block();
    multiply_tiles_by_rows(qk, shared.q.data, shared.k.data, m0);
    if (args.state_v_first) {
      multiply_tiles_by_rows(o, shared.q.data, shared.h.data, m0);
    } else {
      multiply_tiles(o, shared.q.data, shared.h.data, m0);
    }
    sync_block();
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = m0 + fragment_row(j);
    const float decay = shared.gates.decay[row];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int column = fragment_column(n, j);
      o[n][j] *= decay;
      qk[n][j] = column <= row ? qk[n][j] * shared.gates.between(row, column) : 0.0f;
    }
  }
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    const FragmentA<T> p = to_a<T>(qk[k / 8], qk[k / 8 + 1]);
#pragma unroll
    for (int n = 0; n < kRows; n += 16) mma(o[n / 8], o[n / 8 + 1], p, load_b_transposed<kP>(shared.v.data, n, k));
  }
  scale(o, args.scale);
  store_fragment<kP>(shared.q.data, m0, 0, o);
  sync_block();
  store_tile<T, kRows>(shared.q.data, args.o, values);
}

}  // namespace cula::gdn::cuda
