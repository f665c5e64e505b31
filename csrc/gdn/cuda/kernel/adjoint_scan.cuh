// The adjoint of the recurrence, over the chunks of a sequence from its end, for one value head and a block of value
// columns. D is the gradient of the state behind the chunk:
//
//   dV' = P^T dO + to_end (K D);  dW = A^T dV';  dv = beta dW
//   D  <- chunk_decay D - K^T (beta decay dW) + scale Q^T (decay dO)
//
// Writes D of every chunk, dW, dv, and what is left of D: the gradient of the initial state.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/state.cuh"

namespace cula::gdn::cuda {

struct AdjointScanArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  int depth;  // tiles of k and q on their way or in use: 1, 2 or 4
  float scale;
  TensorArg q;
  TensorArg k;
  TensorArg A;
  TensorArg P;  // with the scale
  TensorArg grad_output;
  const float* factors;  // [3][HV][B T]: decay, to_end, beta
  int64_t factor_stride;
  TensorArg grad_final_state;
  TensorArg dh0;
  void* states;  // D, [slot][HV] blocks
  int64_t state_elements;
  TensorArg dW;
  TensorArg dv;
};

template <class T>
struct AdjointScanChunk {
  Tile<T, kRows> A;
  Tile<T, kRows> P;
  Tile<T, kRows> grad_output;
  float factors[3][kRows];
};

inline constexpr int kAdjointPartialFloats = 8 * 32 * 4;

template <class T, int kKeyDim, int kSplit>
struct AdjointScanShape {
  static constexpr int chunk_buffers(int depth) { return depth > 2 ? depth / 2 : 1; }
  static constexpr size_t shared_bytes(int depth, int warps) {
    return depth * sizeof(Tile<T, kKeyDim>) + chunk_buffers(depth) * sizeof(AdjointScanChunk<T>) +
           (kSplit == 2 ? warps * kAdjointPartialFloats * sizeof(float) : 0);
  }
};

template <class T, int kKeyDim, int kSplit>
__global__ void __launch_bounds__(kSplit * 128, 1) adjoint_scan_kernel(const AdjointScanArgs args) {
  using Shape = AdjointScanShape<T, kKeyDim, kSplit>;
  constexpr int kKeys = kKeyDim / kSplit;
  constexpr int kP = kPitch<kKeyDim>;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int row_blocks = warps / kSplit;

  auto* tiles = reinterpret_cast<Tile<T, kKeyDim>*>(dynamic_shared_memory());
  auto* chunks = reinterpret_cast<AdjointScanChunk<T>*>(tiles + args.depth);
  const int chunk_buffers = Shape::chunk_buffers(args.depth);
  [[maybe_unused]] float* partial = reinterpret_cast<float*>(chunks + chunk_buffers);

  const int64_t unit = blockIdx.x / args.value_blocks;
  const int value_block = static_cast<int>(blockIdx.x - unit * args.value_blocks);
  const int64_t sequence_index = unit / args.value_heads;
  const int64_t head = unit - sequence_index * args.value_heads;
  const int64_t key_head = head / args.group;
  const Sequence sequence = find_sequence(args.sequences, sequence_index);
  const int chunk_size = args.sequences.chunk_size;
  const int64_t num_chunks = (sequence.length + chunk_size - 1) / chunk_size;

  const int half = warp_id() % kSplit;  // of the keys
  const int row_block = warp_id() / kSplit;
  const int block_value = value_block * 16 * row_blocks;
  const int tile_value = 16 * row_block;
  const StatePart part = {sequence_index, head, half * kKeys, block_value + tile_value, args.key_dim, args.value_dim};

  // c counts from the end.
  const auto window = [&](int64_t c, int64_t window_head, int column, int columns) {
    const int64_t first = (num_chunks - 1 - c) * chunk_size;
    const int64_t left = sequence.length - first;
    return Window{sequence.batch,
                  sequence.begin + first,
                  static_cast<int>(left < chunk_size ? left : chunk_size),
                  window_head,
                  column,
                  columns};
  };
  // Steps 2 c and 2 c + 1 of the pipeline bring k (with all that goes with the chunk) and q.
  const auto issue = [&](int64_t step) {
    const int64_t c = step / 2;
    if (c < num_chunks) {
      T* tile = tiles[step % args.depth].data;
      const Window keys = window(c, key_head, 0, args.key_dim);
      if (step % 2 == 1) {
        load_tile<T, kKeyDim>(tile, args.q, keys);
      } else {
        load_tile<T, kKeyDim>(tile, args.k, keys);
        AdjointScanChunk<T>& chunk = chunks[c % chunk_buffers];
        load_tile<T, kRows>(chunk.A.data, args.A, window(c, head, 0, chunk_size));
        load_tile<T, kRows>(chunk.P.data, args.P, window(c, head, 0, chunk_size));
        const int columns = args.value_dim - block_value;
        load_tile<T, kRows>(chunk.grad_output.data, args.grad_output,
                            window(c, head, block_value, columns < 16 * row_blocks ? columns : 16 * row_blocks));
        const float* source = args.factors + head * (args.factor_stride / args.value_heads) +
                              sequence.batch * args.sequences.tokens + keys.token;
        for (int i = static_cast<int>(threadIdx.x); i < 3 * kRows; i += static_cast<int>(blockDim.x)) {
          const int row = i % kRows;
          const bool valid = row < keys.rows;
          cp_async<4>(&chunk.factors[0][0] + i, valid ? source + (i / kRows) * args.factor_stride + row : args.factors,
                      valid);
        }
      }
    }
    cp_async_commit();
  };
  // Makes tile `step` visible, and starts the load that takes the place of the tile before it.
  const auto advance = [&](int64_t step) {
    if (args.depth == 1) {
      sync_block();
      issue(step);
      cp_async_wait<0>();
      sync_block();
      return;
    }
    if (args.depth == 4) {
      cp_async_wait<2>();
    } else {
      cp_async_wait<0>();
    }
    sync_block();
    issue(step + args.depth - 1);
  };

  float d[kKeys / 8][4];
  load_state<kKeys>(d, args.grad_final_state, part);
  for (int step = 0; step < args.depth - 1; ++step) issue(step);

  for (int64_t c = 0; c < num_chunks; ++c) {
    advance(2 * c);
    const T* k = tiles[2 * c % args.depth].data;
    const AdjointScanChunk<T>& chunk = chunks[c % chunk_buffers];
    const int64_t place = (sequence.first_slot + num_chunks - 1 - c) * args.value_heads + head;
    store_state_blocks<T, kKeyDim, kKeys>(d, static_cast<T*>(args.states) + place * args.state_elements, part);

    TokenColumns x;
    clear(x);
    multiply_state<T, kP, kKeys>(x, d, k, part.key);
    if constexpr (kSplit == 2) {
      write_partial(partial + warp_id() * kAdjointPartialFloats, x);
      sync_named(1 + row_block, 64);
      add_partial(x, partial + (warp_id() ^ 1) * kAdjointPartialFloats);
    }
    scale_columns(x, chunk.factors[1]);

    // dV' = P^T dO + to_end (K D); (decay dO) stays for the update by q
    TokenColumns o;
    load_columns<T>(o, chunk.grad_output.data, tile_value);
    multiply_lower_transposed<T>(x, o, chunk.P.data);
    scale_columns(o, chunk.factors[0]);
    FragmentA<T> decayed[4];
    to_fragments<T>(decayed, o);

    // dW = A^T dV'
    TokenColumns w;
    clear(w);
    multiply_lower_transposed<T>(w, x, chunk.A.data);
    const Window rows = window(c, head, part.value, args.value_dim - part.value);
    if (half == 0) store_columns<T>(w, args.dW, rows);
    const float chunk_decay = chunk.factors[0][rows.rows - 1];
    scale_columns(w, chunk.factors[2]);
    if (half == kSplit - 1 && args.dv) store_columns<T>(w, args.dv, rows);
    scale_columns(w, chunk.factors[0]);
    scale(w, -1.0f);
    scale(d, chunk_decay);
    update_state<T, kP, kKeys>(d, w, k, part.key);

    advance(2 * c + 1);
    const T* q = tiles[(2 * c + 1) % args.depth].data;
    add_scaled<T, kP, kKeys>(d, decayed, q, part.key, args.scale);
  }
  if (args.dh0) store_state<kKeys>(d, args.dh0, part);
}

}  // namespace cula::gdn::cuda
