// The recurrence over the chunks of a sequence, for one value head and a block of value columns:
//
//   W = beta (v - decay (K S));  V' = A W;  O = scale decay (Q S) + P V';  S <- chunk_decay S + K^T (to_end V')
//
// with the state in registers (collective/state.cuh) and all other operands in tiles that are loaded ahead. Forward
// writes O; the backward pass runs the same recurrence for the states and V'.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/state.cuh"

namespace cula::gdn::cuda {

struct ForwardScanArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  int depth;  // tiles of q and k on their way or in use: 1, 2 or 4
  float scale;
  TensorArg q;
  TensorArg k;
  TensorArg v;
  TensorArg A;
  TensorArg P;           // with the scale
  const float* factors;  // [3][HV][B T]: decay, to_end, beta
  int64_t factor_stride;
  TensorArg initial_state;
  TensorArg final_state;
  TensorArg o;
  // Without output: the states at the chunk starts, [slot][HV] blocks, and V'.
  void* states;
  int64_t state_elements;
  TensorArg residual;
};

template <class T, bool kOutput>
struct ForwardScanChunk {
  Tile<T, kRows> A;
  Tile<T, kRows> v;
  Tile<T, kRows> P;
  float factors[3][kRows];
};
template <class T>
struct ForwardScanChunk<T, false> {
  Tile<T, kRows> A;
  Tile<T, kRows> v;
  float factors[3][kRows];
};

// What one warp of a pair tells the other: K S whole, and the half of Q S that the other finishes.
inline constexpr int kPartialFloats = (8 + 4) * 32 * 4;

// The pieces that a block's shared memory is made of.
template <class T, int kKeyDim, int kSplit, bool kOutput>
struct ForwardScanShape {
  static constexpr int chunk_buffers(int depth) { return !kOutput ? depth : (depth > 2 ? depth / 2 : 1); }
  static constexpr size_t shared_bytes(int depth, int warps) {
    return depth * sizeof(Tile<T, kKeyDim>) + chunk_buffers(depth) * sizeof(ForwardScanChunk<T, kOutput>) +
           (kSplit == 2 ? warps * kPartialFloats * sizeof(float) : 0);
  }
};

template <class T, int kKeyDim, int kSplit, bool kOutput>
__global__ void __launch_bounds__(kSplit * 128, 1) forward_scan_kernel(const ForwardScanArgs args) {
  using Shape = ForwardScanShape<T, kKeyDim, kSplit, kOutput>;
  constexpr int kKeys = kKeyDim / kSplit;
  constexpr int kP = kPitch<kKeyDim>;
  constexpr int kTilesPerChunk = kOutput ? 2 : 1;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int row_blocks = warps / kSplit;

  auto* tiles = reinterpret_cast<Tile<T, kKeyDim>*>(dynamic_shared_memory());
  auto* chunks = reinterpret_cast<ForwardScanChunk<T, kOutput>*>(tiles + args.depth);
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

  const auto window = [&](int64_t c, int64_t window_head, int column, int columns) {
    const int64_t left = sequence.length - c * chunk_size;
    return Window{sequence.batch,
                  sequence.begin + c * chunk_size,
                  static_cast<int>(left < chunk_size ? left : chunk_size),
                  window_head,
                  column,
                  columns};
  };
  // Step s of the pipeline brings tile s: q and k of chunk after chunk, or k alone.
  const auto issue = [&](int64_t step) {
    const int64_t c = step / kTilesPerChunk;
    if (c < num_chunks) {
      T* tile = tiles[step % args.depth].data;
      const Window keys = window(c, key_head, 0, args.key_dim);
      if (kOutput && step % 2 == 0) {
        load_tile<T, kKeyDim>(tile, args.q, keys);
      } else {
        load_tile<T, kKeyDim>(tile, args.k, keys);
        ForwardScanChunk<T, kOutput>& chunk = chunks[c % chunk_buffers];
        load_tile<T, kRows>(chunk.A.data, args.A, window(c, head, 0, chunk_size));
        if constexpr (kOutput) load_tile<T, kRows>(chunk.P.data, args.P, window(c, head, 0, chunk_size));
        const int columns = args.value_dim - block_value;
        load_tile<T, kRows>(chunk.v.data, args.v,
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

  float s[kKeys / 8][4];
  load_state<kKeys>(s, args.initial_state, part);
  for (int step = 0; step < args.depth - 1; ++step) issue(step);

  for (int64_t c = 0; c < num_chunks; ++c) {
    TokenColumns w;
    [[maybe_unused]] TokenColumns o;
    if constexpr (kOutput) {
      advance(2 * c);
      clear(o);
      multiply_state<T, kP, kKeys>(o, s, tiles[2 * c % args.depth].data, part.key);
    }
    const int64_t step = c * kTilesPerChunk + kTilesPerChunk - 1;
    advance(step);
    const T* k = tiles[step % args.depth].data;
    const ForwardScanChunk<T, kOutput>& chunk = chunks[c % chunk_buffers];
    if constexpr (!kOutput) {
      const int64_t place = (sequence.first_slot + c) * args.value_heads + head;
      store_state_blocks<T, kKeyDim, kKeys>(s, static_cast<T*>(args.states) + place * args.state_elements, part);
    }

    clear(w);
    multiply_state<T, kP, kKeys>(w, s, k, part.key);
    [[maybe_unused]] float o_half[4][4];  // with split keys: the 32 tokens whose output this warp finishes
    if constexpr (kSplit == 2) {
      float* mine = partial + warp_id() * kPartialFloats;
      const float* other = partial + (warp_id() ^ 1) * kPartialFloats;
      write_partial(mine, w);
      if constexpr (kOutput) {
        float theirs[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            o_half[i][j] = half == 0 ? o[i][j] : o[i + 4][j];
            theirs[i][j] = half == 0 ? o[i + 4][j] : o[i][j];
          }
        }
        write_partial(mine + 8 * 32 * 4, theirs);
      }
      sync_named(1 + row_block, 64);
      add_partial(w, other);
      if constexpr (kOutput) add_partial(o_half, other + 8 * 32 * 4);
    }

    // W = beta (v - decay U)
    scale_columns(w, chunk.factors[0]);
    add_columns<T>(w, chunk.v.data, tile_value, -1.0f);
    scale_columns(w, chunk.factors[2]);

    // V' = A W
    TokenColumns v;
    clear(v);
    multiply_lower<T>(v, w, chunk.A.data);

    const Window rows = window(c, head, part.value, args.value_dim - part.value);
    if constexpr (!kOutput) {
      if (half == 0) store_columns<T>(v, args.residual, rows);
    } else if constexpr (kSplit == 1) {
      scale_columns(o, chunk.factors[0]);
      scale(o, args.scale);
      multiply_lower<T>(o, v, chunk.P.data);
      store_columns<T>(o, args.o, rows);
    } else {
      const int first = 32 * half;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = *reinterpret_cast<const float2*>(chunk.factors[0] + first + 8 * i + 2 * (lane_id() & 3));
        o_half[i][0] *= f.x;
        o_half[i][1] *= f.y;
        o_half[i][2] *= f.x;
        o_half[i][3] *= f.y;
      }
      scale(o_half, args.scale);
#pragma unroll
      for (int j = 0; j < kRows; j += 16) {
        const FragmentA<T> a = to_a<T>(v[j / 8], v[j / 8 + 1]);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          if (first + 8 * i >= j)
            mma(o_half[i], o_half[i + 1], a, load_b<kPitch<kRows>>(chunk.P.data, first + 8 * i, j));
        }
      }
      Window rows_half = rows;
      rows_half.token += first;
      rows_half.rows -= first;
      store_columns<T>(o_half, args.o, rows_half);
    }

    // S <- chunk_decay S + K^T (to_end V')
    const int last = rows.rows - 1;
    scale(s, chunk.factors[0][last]);
    scale_columns(v, chunk.factors[1]);
    update_state<T, kP, kKeys>(s, v, k, part.key);
  }
  if (args.final_state) store_state<kKeys>(s, args.final_state, part);
}

}  // namespace cula::gdn::cuda
