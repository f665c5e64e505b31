// The recurrence over the chunks of a sequence or segment, for one value head and a block of value columns:
//
//   W = beta (v - decay (K S));  V' = A W;  O = scale decay (Q S) + P V';  S <- chunk_decay S + K^T (to_end V')
//
// with the state in registers (collective/state.cuh) and all other operands in tiles that a warp brings ahead
// (collective/scan.cuh). Three kernels run it: forward writes O; the backward pass wants the states and V'; the summary
// of a segment wants what it makes of no state, S_ext, and of any, M.
#pragma once

#include "gdn/cuda/collective/scan.cuh"

namespace cula::gdn::cuda {

enum class ScanResult { kOutput, kStates, kSummary };

struct ForwardScanArgs {
  SequenceTable sequences;
  int64_t value_heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int64_t value_blocks;
  ScanPipeline pipeline;
  float scale;
  TensorArg q;
  TensorArg k;
  TensorArg v;
  TensorArg A;
  TensorArg P;           // with the scale
  const float* factors;  // [3][HV][B T]: decay, to_end, beta
  int64_t factor_stride;
  TensorArg initial_state;
  TensorArg seeds;  // [places, HV, K, V] fp32: the states that enter the segments; in place of initial_state if split
  TensorArg final_state;
  TensorArg o;
  // kStates: the states at the chunk starts, [slot][HV] blocks, and V'.
  void* states;
  int64_t state_elements;
  TensorArg residual;
  // kSummary: [places, HV, K, V + K] fp32, S_ext and M of every segment that another one follows; with `for_adjoint`
  // also M of those that follow another.
  TensorArg summary;
  bool for_adjoint = false;
};

template <class T, int kKeyDim, int kSplit, ScanResult kResult>
struct ForwardScanShared {
  struct Scores {
    Tile<T, kRows> P;
  };
  struct Nothing {};
  struct Chunk : std::conditional_t<kResult == ScanResult::kOutput, Scores, Nothing> {
    Tile<T, kKeyDim> k;
    Tile<T, kRows> A;
    Tile<T, kScanValues<kSplit>> v;
    float factors[3][kRows];  // decay, to_end, beta
  };
  // Of a pair of warps: K S, and Q S.
  static constexpr int kPartialFloats = kSplit == 1 ? 0 : (kResult == ScanResult::kOutput ? 2 : 1) * kSplit * 8 * 128;
  static constexpr bool kQueries = kResult == ScanResult::kOutput;

  static constexpr size_t bytes(const ScanPipeline& pipeline) {
    return pipeline.stages * sizeof(Chunk) + (kQueries && !pipeline.shared_tile ? sizeof(Tile<T, kKeyDim>) : 0) +
           kComputeWarps / kSplit * kPartialFloats * sizeof(float);
  }
};

template <class T, int kKeyDim, int kSplit, ScanResult kResult>
__global__ void __launch_bounds__(kScanThreads, (kScanResidency<T, kKeyDim>))
    forward_scan_kernel(const ForwardScanArgs args) {
  using Shared = ForwardScanShared<T, kKeyDim, kSplit, kResult>;
  using SharedChunk = typename Shared::Chunk;
  constexpr int kKeys = kKeyDim / kSplit;
  constexpr int kP = kPitch<kKeyDim>;
  constexpr int kValues = kScanValues<kSplit>;
  constexpr int kValuePitch = kPitch<kValues>;
  constexpr bool kOutput = kResult == ScanResult::kOutput;
  constexpr bool kSummary = kResult == ScanResult::kSummary;

  auto* chunks = reinterpret_cast<SharedChunk*>(dynamic_shared_memory());
  auto* query_tile = reinterpret_cast<Tile<T, kKeyDim>*>(chunks + args.pipeline.stages);
  [[maybe_unused]] float* partial =
      reinterpret_cast<float*>(query_tile + (Shared::kQueries && !args.pipeline.shared_tile ? 1 : 0));
  T* queries = args.pipeline.shared_tile ? chunks[0].k.data : query_tile->data;

  const int map_blocks = kSummary ? (args.key_dim + kValues - 1) / kValues : 0;  // blocks of the columns of M
  const int64_t blocks = args.value_blocks + map_blocks;
  const int64_t unit = blockIdx.x / blocks;
  const int block = static_cast<int>(blockIdx.x - unit * blocks);
  const int64_t place = unit / args.value_heads;
  const int64_t head = unit - place * args.value_heads;
  const int64_t key_head = head / args.group;
  Segment segment;
  if (!find_segment(args.sequences, place, segment)) return;
  const bool of_map = kSummary && block >= args.value_blocks;
  if (kSummary && segment.last && (segment.first || !of_map || !args.for_adjoint)) return;
  const int block_value = (of_map ? block - static_cast<int>(args.value_blocks) : block) * kValues;
  const int value_dim = of_map ? args.key_dim : args.value_dim;

  if (is_load_warp()) {
    const auto load_keys = [&](int c, int stage) {
      load_tile_by<T, kKeyDim, kLoadThreads>(
          chunks[stage].k.data, args.k,
          chunk_window(args.sequences, segment.sequence, segment.first_chunk + c, key_head, 0, args.key_dim),
          load_thread());
    };
    const auto load_queries = [&](int c) {
      load_tile_by<T, kKeyDim, kLoadThreads>(
          queries, args.q,
          chunk_window(args.sequences, segment.sequence, segment.first_chunk + c, key_head, 0, args.key_dim),
          load_thread());
    };
    const int columns = of_map ? 0 : value_dim - block_value;  // v is zero for M
    const float* factors = args.factors + head * (args.factor_stride / args.value_heads);
    const auto load_chunk = [&](int c, int stage) {
      SharedChunk& chunk = chunks[stage];
      load_keys(c, stage);
      Window window = chunk_window(args.sequences, segment.sequence, segment.first_chunk + c, head, 0,
                                   args.sequences.chunk_size);
      load_tile_by<T, kRows, kLoadThreads>(chunk.A.data, args.A, window, load_thread());
      if constexpr (kOutput) load_tile_by<T, kRows, kLoadThreads>(chunk.P.data, args.P, window, load_thread());
      load_factors(chunk.factors, factors + window.batch * args.sequences.tokens + window.token, args.factor_stride,
                   window.rows);
      window.column = of_map ? 0 : block_value;
      window.columns = columns;
      load_tile_by<T, kValues, kLoadThreads>(chunk.v.data, args.v, window, load_thread());
    };
    bring_chunks<kOutput ? ScanQueries::kBetweenKeys : ScanQueries::kNone>(segment.num_chunks, args.pipeline, load_chunk, load_queries, load_keys);
    return;
  }

  const int key_part = warp_id() % kSplit;
  const int row_block = warp_id() / kSplit;
  const int tile_value = 16 * row_block;
  StatePart part = {segment.sequence_index, head,         key_part * kKeys, block_value + tile_value,
                    args.key_dim,           value_dim};
  float s[kKeys / 8][4];
  if constexpr (kSummary) {
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        s[i][j] = of_map && part.key + fragment_column(i, j) == part.value + fragment_row(j) ? 1.0f : 0.0f;
      }
    }
  } else if (args.seeds) {
    StatePart entry = part;
    entry.sequence = place;
    load_state<kKeys>(s, args.seeds, entry);
  } else {
    load_state<kKeys>(s, args.initial_state, part);
  }

  [[maybe_unused]] float* pair_partial = partial + row_block * Shared::kPartialFloats;
  ScanConsumer consumer(segment.num_chunks, args.pipeline);
  for (int c = 0; c < segment.num_chunks; ++c) {
    const SharedChunk& chunk = chunks[consumer.stage()];
    if constexpr (kResult == ScanResult::kStates) {
      const int64_t slot = segment.sequence.first_slot + segment.first_chunk + c;
      store_state_blocks<T, kKeyDim, kKeys>(
          s, static_cast<T*>(args.states) + (slot * args.value_heads + head) * args.state_elements, part);
    }
    consumer.wait_chunk();

    TokenColumns w;
    clear(w);
    multiply_state<T, kP, kKeys>(w, s, chunk.k.data, part.key);
    if constexpr (kSplit > 1) exchange_partials<kSplit>(pair_partial, w, key_part, row_block);
    take_residual<T, kValuePitch>(w, chunk.v.data, tile_value, chunk.factors[0], chunk.factors[2]);
    TokenColumns v;
    clear(v);
    multiply_lower<T>(v, w, chunk.A.data);

    const Window rows = chunk_window(args.sequences, segment.sequence, segment.first_chunk + c, head, part.value,
                                     value_dim - part.value);
    if constexpr (kResult == ScanResult::kStates) {
      if (key_part == 0) store_columns<T>(v, args.residual, rows);
    }
    if constexpr (kOutput) {
      TokenColumns all;
      clear(all);
      consumer.wait_queries();
      multiply_state<T, kP, kKeys>(all, s, queries, part.key);
      consumer.release_queries();
      // The warps of a pair finish the output of half of the tokens each.
      constexpr int kOutTiles = 8 / kSplit;
      float o[kOutTiles][4];
      const int first = 8 * kOutTiles * key_part;
      if constexpr (kSplit > 1) {
        exchange_partials<kSplit>(pair_partial + kSplit * 8 * 128, all, key_part, row_block);
      }
#pragma unroll
      for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          o[i][j] = args.scale * (kSplit == 1 || key_part == 0 ? all[i][j] : all[i + 8 - kOutTiles][j]);
        }
      }
      scale_columns(o, chunk.factors[0] + first);
      multiply_lower<T>(o, v, chunk.P.data, first);
      Window mine = rows;
      mine.token += first;
      mine.rows -= first;
      store_columns<T>(o, args.o, mine);
      consumer.wait_keys();
    }

    // S <- chunk_decay S + K^T (to_end V')
    scale(s, chunk.factors[0][rows.rows - 1]);
    scale_columns(v, chunk.factors[1]);
    update_state<T, kP, kKeys>(s, v, chunk.k.data, part.key);
    consumer.release_chunk();
  }

  if constexpr (kSummary) {
    TensorArg target = args.summary;
    target.data = static_cast<float*>(target.data) + (of_map ? args.value_dim : 0);
    part.sequence = place;
    store_state<kKeys>(s, target, part);
  } else {
    if (args.final_state && segment.last) store_state<kKeys>(s, args.final_state, part);
  }
}

}  // namespace cula::gdn::cuda
