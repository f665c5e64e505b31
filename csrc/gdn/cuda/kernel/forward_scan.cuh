// The recurrence over the chunks of a sequence or segment, for one value head and a block of value columns:
//
//   W = beta (v - decay (K S));  V' = A W;  O = scale decay (Q S) + P V';  S <- chunk_decay S + K^T (to_end V')
//
// with the state in registers (collective/state.cuh) and all other operands in tiles that other warps bring ahead
// (collective/scan.cuh). Four kernels run it: forward writes O; another one the states on the way too, which costs
// registers; the backward pass wants the states and V'; the summary of a segment wants what it makes of no state,
// S_ext, and of any, M.
//
// Context parallelism wants the same of whole sequences, M with products of twice an operand's bits, since other
// members of a group rely on it. There the chunks may be fewer: those that the state behind the sequence still shows.
#pragma once

#include "gdn/cuda/collective/scan.cuh"

namespace cula::gdn::cuda {

enum class ScanResult { kOutput, kStates, kSummary, kCheckpoints };
constexpr bool has_output(ScanResult result) {
  return result == ScanResult::kOutput || result == ScanResult::kCheckpoints;
}

// With checkpoints a block has the registers of a multiprocessor for itself.
template <class T, int kKeyDim, class Team, ScanResult kResult>
inline constexpr int kForwardResidency = kResult == ScanResult::kCheckpoints ? 1 : kScanResidency<T, kKeyDim, Team>;

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
  int64_t factor_head_stride;  // B T
  TensorArg initial_state;
  TensorArg seeds;  // [places, HV, K, V] fp32: the states that enter the segments; in place of initial_state if split
  TensorArg final_state;
  TensorArg o;
  // kStates: the states at the chunk starts, [slot][HV] blocks, and V'.
  void* states;
  int64_t state_elements;
  TensorArg residual;
  // kSummary: S_ext [places, HV, K, V] fp32 and M [places, HV, K, K] fp32 of every segment that another one follows;
  // with `for_adjoint` also M of those that follow another.
  TensorArg summary;
  TensorArg map;
  bool for_adjoint = false;
  // kSummary of whole sequences: each has one, S_ext from initial_state, M to double precision.
  bool of_sequences = false;
  bool map_only = false;
  const int* reach = nullptr;  // [HV], with of_sequences: chunks from the end that matter; 0: all, and what enters
  // For serving.
  StateSlots initial_slots;
  StateSlots final_slots;
  CheckpointArgs checkpoints;
};

template <class T, int kKeyDim, class Team, ScanResult kResult>
struct ForwardScanShared {
  struct Scores {
    Tile<T, kRows> P;
  };
  struct Nothing {};
  struct Chunk : std::conditional_t<has_output(kResult), Scores, Nothing> {
    Tile<T, kKeyDim> k;
    Tile<T, kRows> A;
    Tile<T, Team::kValues> v;
    float factors[3][kRows];  // decay, to_end, beta
    alignas(16) int rows;
    int checkpoint;  // kCheckpoints: row for the state behind the chunk; -1: none
  };
  // Of a pair of warps: K S, and Q S.
  static constexpr int kPartialFloats = Team::kSplit == 1 ? 0 : (has_output(kResult) ? 2 : 1) * Team::kSplit * 8 * 128;
  static constexpr bool kQueries = has_output(kResult);

  static constexpr size_t bytes(const ScanPipeline& pipeline) {
    return pipeline.stages * sizeof(Chunk) + (kQueries && !pipeline.shared_tile ? sizeof(Tile<T, kKeyDim>) : 0) +
           Team::kRowBlocks * kPartialFloats * sizeof(float);
  }
};

template <class T, int kKeyDim, class Team, ScanResult kResult>
__global__ void __launch_bounds__(Team::kThreads, (kForwardResidency<T, kKeyDim, Team, kResult>))
    forward_scan_kernel(const ForwardScanArgs args) {
  using Shared = ForwardScanShared<T, kKeyDim, Team, kResult>;
  using SharedChunk = typename Shared::Chunk;
  constexpr int kSplit = Team::kSplit;
  constexpr int kKeys = kKeyDim / kSplit;
  constexpr int kP = kPitch<kKeyDim>;
  constexpr int kValues = Team::kValues;
  constexpr int kValuePitch = kPitch<kValues>;
  constexpr bool kOutput = has_output(kResult);
  constexpr bool kCheckpoints = kResult == ScanResult::kCheckpoints;
  constexpr bool kSummary = kResult == ScanResult::kSummary;

  auto* chunks = reinterpret_cast<SharedChunk*>(dynamic_shared_memory());
  auto* query_tile = reinterpret_cast<Tile<T, kKeyDim>*>(chunks + args.pipeline.stages);
  [[maybe_unused]] float* partial =
      reinterpret_cast<float*>(query_tile + (Shared::kQueries && !args.pipeline.shared_tile ? 1 : 0));
  T* queries = args.pipeline.shared_tile ? chunks[0].k.data : query_tile->data;

  const int map_blocks = kSummary ? (args.key_dim + kValues - 1) / kValues : 0;  // blocks of the columns of M
  const int64_t blocks = args.value_blocks + map_blocks;
  ScanUnit unit;
  if (!find_unit(args.sequences, args.value_heads, blocks, blockIdx.x, unit)) return;
  const Segment& segment = unit.segment;
  const bool of_map = kSummary && unit.block >= args.value_blocks;
  [[maybe_unused]] bool forgets = false;
  if constexpr (kSummary) {
    if (!args.of_sequences) {
      if (segment.last && (segment.first || !of_map || !args.for_adjoint)) return;
    } else if (args.reach[unit.head] != 0) {
      forgets = true;
      const int chunks = of_map ? 0 : args.reach[unit.head];  // M is zero
      unit.segment.first_chunk += segment.num_chunks - chunks;
      unit.segment.num_chunks = chunks;
    }
  }
  const int64_t head = unit.head;
  const int first_block = of_map ? static_cast<int>(args.value_blocks) : 0;
  const int block_value = (unit.block - first_block) * kValues;
  const int value_dim = of_map ? args.key_dim : args.value_dim;

  if (load_thread<Team>() >= 0) {
    const int64_t key_head = static_cast<uint32_t>(head) / static_cast<uint32_t>(args.group);
    const auto load_keys = [&](int c, int stage) {
      load_tile_by<T, kKeyDim, Team::kLoadThreads>(
          chunks[stage].k.data, args.k,
          chunk_window(args.sequences, segment.sequence, segment.first_chunk + c, key_head, 0, args.key_dim),
          load_thread<Team>());
    };
    const auto load_queries = [&](int c) {
      load_tile_by<T, kKeyDim, Team::kLoadThreads>(
          queries, args.q,
          chunk_window(args.sequences, segment.sequence, segment.first_chunk + c, key_head, 0, args.key_dim),
          load_thread<Team>());
    };
    const int columns = of_map ? 0 : value_dim - block_value;  // v is zero for M
    const float* factors = args.factors + head * args.factor_head_stride;
    const auto load_chunk = [&](int c, int stage) {
      SharedChunk& chunk = chunks[stage];
      load_keys(c, stage);
      Window window =
          chunk_window(args.sequences, segment.sequence, segment.first_chunk + c, head, 0, args.sequences.chunk_size);
      load_lower_tile_by<T, Team::kLoadThreads>(chunk.A.data, args.A, window, load_thread<Team>());
      if constexpr (kOutput)
        load_lower_tile_by<T, Team::kLoadThreads>(chunk.P.data, args.P, window, load_thread<Team>());
      load_factors<Team>(chunk.factors, factors + window.batch * args.sequences.tokens + window.token,
                         args.factor_stride, window.rows);
      [[maybe_unused]] int checkpoint = -1;
      if constexpr (kCheckpoints) {
        const CheckpointArgs& checkpoints = args.checkpoints;
        const int64_t tokens = (segment.first_chunk + c) * args.sequences.chunk_size + window.rows;
        if (tokens % checkpoints.every == 0) {
          checkpoint = static_cast<int>(checkpoints.row(args.sequences, segment.sequence_index, tokens));
        }
      }
      if (load_thread<Team>() == 0) {
        chunk.rows = window.rows;
        if constexpr (kCheckpoints) chunk.checkpoint = checkpoint;
      }
      window.column = of_map ? 0 : block_value;
      window.columns = columns;
      load_tile_by<T, kValues, Team::kLoadThreads>(chunk.v.data, args.v, window, load_thread<Team>());
    };
    bring_chunks<Team, kOutput ? ScanQueries::kBetweenKeys : ScanQueries::kNone>(segment.num_chunks, args.pipeline,
                                                                                 load_chunk, load_queries, load_keys);
    return;
  }

  const int key_part = warp_id() % kSplit;
  const int row_block = warp_id() / kSplit;
  const int tile_value = 16 * row_block;
  const auto part_of = [&](const ScanUnit& u, int64_t sequence) {
    const int warp = warp_id();
    const bool in_map = kSummary && u.block >= args.value_blocks;
    const int first = in_map ? static_cast<int>(args.value_blocks) : 0;
    return StatePart{sequence,
                     u.head,
                     warp % kSplit * kKeys,
                     (u.block - first) * Team::kValues + 16 * (warp / kSplit),
                     args.key_dim,
                     in_map ? args.key_dim : args.value_dim};
  };
  float s[kKeys / 8][4];
  constexpr int kAtOnce = kKeys / 8 < 8 ? kKeys / 8 : 8;  // all of a state of doubles: more than there are registers
  if constexpr (kSummary) {
    const StatePart part = part_of(unit, 0);
    if (of_map || forgets || !args.of_sequences) {
      const bool identity = of_map && !forgets;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          s[i][j] = identity && part.key + fragment_column(i, j) == part.value + fragment_row(j) ? 1.0f : 0.0f;
        }
      }
    } else {
      load_state<kKeys>(s, args.initial_state, part);
    }
  } else if (args.seeds) {
    load_state<kKeys, kAtOnce>(s, args.seeds, part_of(unit, unit.place));
  } else {
    load_state<kKeys, kAtOnce>(s, args.initial_state, part_of(unit, args.initial_slots.of(segment.sequence_index)));
  }

  // Where the results of the chunk in hand lie: as little as the loop needs, since registers are scarce.
  const int value = block_value + tile_value;
  const Window begin =
      chunk_window(args.sequences, segment.sequence, segment.first_chunk, head, value, value_dim - value);
  const TensorArg& result = kOutput ? args.o : args.residual;
  [[maybe_unused]] int64_t result_at =
      result.offset(begin.batch, begin.token, begin.head) + begin.column * result.stride[3];
  [[maybe_unused]] int64_t state_at =
      ((segment.sequence.first_slot + segment.first_chunk) * args.value_heads + head) * args.state_elements;
  const int key = key_part * kKeys;
  [[maybe_unused]] float* pair_partial = partial + row_block * Shared::kPartialFloats;
  ScanConsumer<Team> consumer(segment.num_chunks, args.pipeline);
  const bool doubled = kSummary && of_map && args.of_sequences;
  for (; consumer.left() > 0; consumer.release_chunk()) {
    const SharedChunk& chunk = chunks[consumer.stage()];
    if constexpr (kResult == ScanResult::kStates) {
      store_state_blocks<T, kKeyDim, kKeys>(s, static_cast<T*>(args.states) + state_at, {0, 0, key, value, 0, 0});
      state_at += args.value_heads * args.state_elements;
    }
    consumer.wait_chunk();

    TokenColumns w;
    clear(w);
    if (doubled) {
      multiply_state<T, kP, kKeys, Precision::kDouble>(w, s, chunk.k.data, key);
    } else {
      multiply_state<T, kP, kKeys>(w, s, chunk.k.data, key);
    }
    if constexpr (kSplit > 1) exchange_partials<Team>(pair_partial, w, key_part, row_block);
    take_residual<T, kValuePitch>(w, chunk.v.data, opaque(tile_value), chunk.factors[0], chunk.factors[2]);
    TokenColumns v;
    clear(v);
    if (doubled) {
      multiply_lower<T, Precision::kDouble>(v, w, chunk.A.data);
    } else {
      multiply_lower<T>(v, w, chunk.A.data);
    }

    if constexpr (kResult == ScanResult::kStates) {
      if (key_part == 0) store_columns<T>(v, args.residual, result_at, chunk.rows, value_dim - value);
    }
    if constexpr (kOutput) {
      // Half of the tokens at a time, the columns from `first` on.
      const auto finish = [&](float(&o)[4][4], int first) {
        scale(o, args.scale);
        scale_columns(o, chunk.factors[0] + first);
        multiply_lower<T>(o, v, chunk.P.data, first);
        store_columns<T>(o, args.o, result_at + first * args.o.stride[1], chunk.rows - first, value_dim - value);
      };
      consumer.wait_queries();
      if constexpr (kSplit == 1) {
#pragma unroll
        for (int first = 0; first < kRows; first += kRows / 2) {
          float o[4][4];
          clear(o);
          multiply_state<T, kP, kKeys>(o, s, queries, key, first);
          if (first != 0) consumer.release_queries();
          finish(o, first);
        }
      } else {
        // The warps of a pair finish a half each.
        TokenColumns all;
        clear(all);
        multiply_state<T, kP, kKeys>(all, s, queries, key);
        consumer.release_queries();
        exchange_partials<Team>(pair_partial + kSplit * 8 * 128, all, key_part, row_block);
        float o[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) o[i][j] = key_part == 0 ? all[i][j] : all[i + 4][j];
        }
        finish(o, key_part * (kRows / 2));
      }
      consumer.wait_keys();
    }

    // S <- chunk_decay S + K^T (to_end V')
    scale(s, chunk.factors[0][chunk.rows - 1]);
    scale_columns(v, chunk.factors[1]);
    if (doubled) {
      update_state<T, kP, kKeys, Precision::kDouble>(s, v, chunk.k.data, key);
    } else {
      update_state<T, kP, kKeys>(s, v, chunk.k.data, key);
    }
    if constexpr (kCheckpoints) {
      if (chunk.checkpoint >= 0) {
        // As behind the loop.
        ScanUnit here;
        find_unit(args.sequences, args.value_heads, blocks, opaque(static_cast<int64_t>(blockIdx.x)), here);
        store_state_as<float, kKeys>(s, args.checkpoints.states, part_of(here, chunk.checkpoint));
      }
    }
    result_at += args.sequences.chunk_size * result.stride[1];
  }

  // Found again rather than kept through the loop.
  ScanUnit again;
  find_unit(args.sequences, args.value_heads, blocks, opaque(static_cast<int64_t>(blockIdx.x)), again);
  if constexpr (kSummary) {
    store_state<kKeys>(s, again.block >= args.value_blocks ? args.map : args.summary, part_of(again, again.place));
  } else {
    if (args.final_state && again.segment.last) {
      store_state<kKeys>(s, args.final_state, part_of(again, args.final_slots.of(again.segment.sequence_index)));
    }
  }
}

}  // namespace cula::gdn::cuda
