// Backward stages as kernels of their own, with FLA's operands: the gradients of the residuals and of the states.
#pragma once

#include "gdn/cuda/kernel/stage_forward.cuh"

namespace cula::gdn::cuda {

// dv = (scale (q k^T) between)^T do
// ------------------------------------------------------------------------------------

struct LocalValueGradientArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  float scale;
  TensorArg q;
  TensorArg k;
  TensorArg grad_output;
  TensorArg dv;
  GateArgs gates;
};

template <class T>
struct LocalValueGradientShared {
  Tile<T, kRows> q;
  Tile<T, kRows> k;
  Tile<T, kRows> grad_output;
  GateRows gates;
};

template <class T>
__global__ void __launch_bounds__(kStageThreads, 1) local_value_gradient_kernel(const LocalValueGradientArgs args) {
  auto& shared = *reinterpret_cast<LocalValueGradientShared<T>*>(dynamic_shared_memory());
  constexpr int kP = kPitch<kRows>;
  const int64_t place = blockIdx.x / args.value_blocks;
  const int value = static_cast<int>(blockIdx.x - place * args.value_blocks) * kRows;
  const int64_t slot = place / args.value_heads;
  const int64_t head = place - slot * args.value_heads;
  Chunk chunk;
  if (!find_chunk(args.sequences, slot, chunk)) return;
  const int64_t key_head = head / args.group;
  const Window values = {chunk.batch, chunk.token, chunk.length, head, value, args.value_dim - value};
  if (warp_id() == 0)
    load_gates<GateKind::kGamma>(shared.gates, args.gates, chunk.batch, chunk.token, chunk.length, head);
  load_tile<T, kRows>(shared.grad_output.data, args.grad_output, values);
  const int m0 = warp_id() * 16;
  float kq[8][4];  // rows: keys; columns: queries
  clear(kq);
  for (int key = 0; key < args.key_dim; key += kRows) {
    const Window keys = {chunk.batch, chunk.token, chunk.length, key_head, key, args.key_dim - key};
    load_tile<T, kRows>(shared.q.data, args.q, keys);
    load_tile<T, kRows>(shared.k.data, args.k, keys);
    cp_async_commit();
    cp_async_wait<0>();
    sync_block();
    multiply_tiles_by_rows(kq, shared.k.data, shared.q.data, m0);
    sync_block();
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key_row = m0 + fragment_row(j);
      const int query_row = fragment_column(n, j);
      kq[n][j] = query_row >= key_row ? args.scale * kq[n][j] * shared.gates.between(query_row, key_row) : 0.0f;
    }
  }
  float c[8][4];
  clear(c);
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    const FragmentA<T> p = to_a<T>(kq[k / 8], kq[k / 8 + 1]);
#pragma unroll
    for (int n = 0; n < kRows; n += 16) {
      mma(c[n / 8], c[n / 8 + 1], p, load_b_transposed<kP>(shared.grad_output.data, n, k));
    }
  }
  store_product<T>(shared.q.data, c, args.dv, values, m0);
}

// Gradients of the states, and dv2 ------------------------------------------------------------------------------------

struct StateGradientArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  float scale;
  TensorArg q;
  TensorArg k;
  TensorArg w;
  TensorArg grad_output;
  TensorArg dv;
  TensorArg dv2;
  TensorArg grad_final_state;
  TensorArg dh;
  int64_t num_chunks;  // of dh; what lengths on the device say beyond that is left out
  TensorArg dh0;
  GateArgs gates;
};

template <class T, int kKeyDim>
struct StateGradientShared {
  Tile<T, kKeyDim> keys;  // k, then w, then q
  Tile<T, kRows> values;  // dv, then do
  GateRows gates;
};

template <class T, int kKeyDim>
__global__ void __launch_bounds__(kStageThreads, 1) state_gradient_kernel(const StateGradientArgs args) {
  constexpr int kSplit = kKeySplit<kKeyDim>;
  constexpr int kKeys = kKeyDim / kSplit;
  constexpr int kP = kPitch<kKeyDim>;
  constexpr int kRowBlocks = kStageThreads / 32 / kSplit;
  constexpr int kPartial = 8 * 32 * 4;
  auto& shared = *reinterpret_cast<StateGradientShared<T, kKeyDim>*>(dynamic_shared_memory());
  [[maybe_unused]] float* partial = reinterpret_cast<float*>(&shared + 1);

  const int64_t unit = blockIdx.x / args.value_blocks;
  const int block_value = static_cast<int>(blockIdx.x - unit * args.value_blocks) * 16 * kRowBlocks;
  const int64_t sequence_index = unit / args.value_heads;
  const int64_t head = unit - sequence_index * args.value_heads;
  const int64_t key_head = head / args.group;
  const Sequence sequence = find_sequence(args.sequences, sequence_index);
  const int half = warp_id() % kSplit;
  const int row_block = warp_id() / kSplit;
  const StatePart part = {sequence_index, head,          half * kKeys, block_value + 16 * row_block,
                          args.key_dim,   args.value_dim};
  const int64_t first_chunk = dense_chunk_index(args.sequences, sequence_index, 0);
  const int columns = args.value_dim - block_value;

  float d[kKeys / 8][4];
  load_state<kKeys>(d, args.grad_final_state, part);
  const int chunk_size = args.sequences.chunk_size;
  const int64_t room = args.num_chunks - first_chunk;
  const int64_t chunks_said = (sequence.length + chunk_size - 1) / chunk_size;
  const int64_t num_chunks = chunks_said < room ? chunks_said : room;
  for (int64_t c = num_chunks - 1; c >= 0; --c) {
    const int64_t left = sequence.length - c * chunk_size;
    const int rows = static_cast<int>(left < chunk_size ? left : chunk_size);
    const int64_t token = sequence.begin + c * chunk_size;
    const TensorArg& dh = args.dh;
    store_chunk_state<T, kKeys>(
        d, dh, sequence.batch * dh.stride[0] + (first_chunk + c) * dh.stride[1] + head * dh.stride[2], part);
    const Window values = {sequence.batch, token, rows, head, block_value, columns < kRows ? columns : kRows};
    const auto load_keys = [&](const TensorArg& x, int64_t tensor_head) {
      load_tile<T, kKeyDim>(shared.keys.data, x, {sequence.batch, token, rows, tensor_head, 0, args.key_dim});
    };
    const auto wait = [] {
      cp_async_commit();
      cp_async_wait<0>();
      sync_block();
    };
    load_keys(args.k, key_head);
    load_tile<T, kRows>(shared.values.data, args.dv, values);
    if (warp_id() == 0) load_gates<GateKind::kGamma>(shared.gates, args.gates, sequence.batch, token, rows, head);
    wait();
    TokenColumns x;
    clear(x);
    multiply_state<T, kP, kKeys>(x, d, shared.keys.data, part.key);
    if constexpr (kSplit == 2) {
      write_partial(partial + warp_id() * kPartial, x);
      sync_named(1 + row_block, 64);
      add_partial(x, partial + (warp_id() ^ 1) * kPartial);
    }
    scale_columns(x, shared.gates.to_end);
    add_columns<T>(x, shared.values.data, 16 * row_block, 1.0f);
    sync_block();
    load_keys(args.w, head);
    load_tile<T, kRows>(shared.values.data, args.grad_output, values);
    wait();
    // Behind the barrier: every warp has read dv, which may be the same memory.
    if (half == 0) {
      store_columns<T>(x, args.dv2, {sequence.batch, token, rows, head, part.value, args.value_dim - part.value});
    }
    scale(d, shared.gates.chunk_decay);
    scale(x, -1.0f);
    update_state<T, kP, kKeys>(d, x, shared.keys.data, part.key);
    TokenColumns o;
    load_columns<T>(o, shared.values.data, 16 * row_block);
    scale_columns(o, shared.gates.decay);
    FragmentA<T> decayed[4];
    to_fragments<T>(decayed, o);
    sync_block();
    load_keys(args.q, key_head);
    wait();
    add_scaled<T, kP, kKeys>(d, decayed, shared.keys.data, part.key, args.scale);
    sync_block();
  }
  if (args.dh0) store_state<kKeys>(d, args.dh0, part);
}

}  // namespace cula::gdn::cuda
