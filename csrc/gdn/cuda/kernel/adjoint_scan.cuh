// The adjoint of the recurrence, over the chunks of a sequence or segment from its end, for one value head and a block
// of value columns. D is the gradient of the state behind the chunk:
//
//   dV' = P^T dO + to_end (K D);  dW = A^T dV';  dv = beta dW
//   D  <- chunk_decay D - K^T (beta decay dW) + scale Q^T (decay dO)
//
// Writes D of every chunk, dW, dv, and what is left of D: the gradient of the initial state. The summary of a segment
// is what it makes of no gradient at its end; that of a whole sequence, for context parallelism, what it makes of the
// one that is given, through as many chunks as the gradient of its first state still shows.
#pragma once

#include "gdn/cuda/collective/scan.cuh"

namespace cula::gdn::cuda {

struct AdjointScanArgs {
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
  TensorArg A;
  TensorArg P;  // with the scale
  TensorArg grad_output;
  const float* factors;  // [3][HV][B T]: decay, to_end, beta
  int64_t factor_stride;
  int64_t factor_head_stride;  // B T
  TensorArg grad_final_state;
  TensorArg seeds;  // [places, HV, K, V] fp32: D behind the segments; in place of grad_final_state if split
  TensorArg dh0;
  void* states;  // D, [slot][HV] blocks
  int64_t state_elements;
  TensorArg dW;
  TensorArg dv;
  TensorArg summary;           // of the summary alone: [places, HV, K, V] fp32, of every segment that is not the first
  bool of_sequences = false;   // the summary of whole sequences, from grad_final_state
  const int* reach = nullptr;  // [HV], with of_sequences: chunks from the start that matter; 0: all, and what leaves
};

template <class T, int kKeyDim, class Team>
struct AdjointScanShared {
  struct Chunk {
    Tile<T, kKeyDim> k;
    Tile<T, kRows> A;
    Tile<T, kRows> P;
    Tile<T, Team::kValues> grad_output;
    float factors[3][kRows];  // decay, to_end, beta
    alignas(16) int rows;
  };
  static constexpr int kPartialFloats = Team::kSplit == 1 ? 0 : Team::kSplit * 8 * 128;

  static constexpr size_t bytes(const ScanPipeline& pipeline) {
    return pipeline.stages * sizeof(Chunk) + (pipeline.shared_tile ? 0 : sizeof(Tile<T, kKeyDim>)) +
           Team::kRowBlocks * kPartialFloats * sizeof(float);
  }
};

template <class T, int kKeyDim, class Team, bool kSummary>
__global__ void __launch_bounds__(Team::kThreads, (kScanResidency<T, kKeyDim, Team>))
    adjoint_scan_kernel(const AdjointScanArgs args) {
  using Shared = AdjointScanShared<T, kKeyDim, Team>;
  using SharedChunk = typename Shared::Chunk;
  constexpr int kSplit = Team::kSplit;
  constexpr int kKeys = kKeyDim / kSplit;
  constexpr int kP = kPitch<kKeyDim>;
  constexpr int kValues = Team::kValues;
  constexpr int kValuePitch = kPitch<kValues>;

  auto* chunks = reinterpret_cast<SharedChunk*>(dynamic_shared_memory());
  auto* query_tile = reinterpret_cast<Tile<T, kKeyDim>*>(chunks + args.pipeline.stages);
  [[maybe_unused]] float* partial = reinterpret_cast<float*>(query_tile + (args.pipeline.shared_tile ? 0 : 1));
  T* queries = args.pipeline.shared_tile ? chunks[0].k.data : query_tile->data;

  ScanUnit unit;
  if (!find_unit(args.sequences, args.value_heads, args.value_blocks, blockIdx.x, unit)) return;
  const Segment& segment = unit.segment;
  [[maybe_unused]] bool forgets = false;
  if constexpr (kSummary) {
    if (!args.of_sequences) {
      if (segment.first) return;
    } else if (args.reach[unit.head] != 0) {
      forgets = true;
      unit.segment.num_chunks = args.reach[unit.head];
    }
  }
  const int64_t head = unit.head;
  const int block_value = unit.block * kValues;
  const int64_t last_chunk = segment.first_chunk + segment.num_chunks - 1;  // c counts from it

  if (load_thread<Team>() >= 0) {
    const int64_t key_head = static_cast<uint32_t>(head) / static_cast<uint32_t>(args.group);
    const auto load_keys = [&](int c, int stage) {
      load_tile_by<T, kKeyDim, Team::kLoadThreads>(
          chunks[stage].k.data, args.k,
          chunk_window(args.sequences, segment.sequence, last_chunk - c, key_head, 0, args.key_dim),
          load_thread<Team>());
    };
    const auto load_queries = [&](int c) {
      load_tile_by<T, kKeyDim, Team::kLoadThreads>(
          queries, args.q, chunk_window(args.sequences, segment.sequence, last_chunk - c, key_head, 0, args.key_dim),
          load_thread<Team>());
    };
    const float* factors = args.factors + head * args.factor_head_stride;
    const auto load_chunk = [&](int c, int stage) {
      SharedChunk& chunk = chunks[stage];
      load_keys(c, stage);
      Window window =
          chunk_window(args.sequences, segment.sequence, last_chunk - c, head, 0, args.sequences.chunk_size);
      load_lower_tile_by<T, Team::kLoadThreads>(chunk.A.data, args.A, window, load_thread<Team>());
      load_lower_tile_by<T, Team::kLoadThreads>(chunk.P.data, args.P, window, load_thread<Team>());
      load_factors<Team>(chunk.factors, factors + window.batch * args.sequences.tokens + window.token,
                         args.factor_stride, window.rows);
      if (load_thread<Team>() == 0) chunk.rows = window.rows;
      window.column = block_value;
      window.columns = args.value_dim - block_value;
      load_tile_by<T, kValues, Team::kLoadThreads>(chunk.grad_output.data, args.grad_output, window,
                                                   load_thread<Team>());
    };
    bring_chunks<Team, ScanQueries::kBehindKeys>(segment.num_chunks, args.pipeline, load_chunk, load_queries,
                                                 load_keys);
    return;
  }

  const int key_part = warp_id() % kSplit;
  const int row_block = warp_id() / kSplit;
  const int tile_value = 16 * row_block;
  const auto part_of = [&](const ScanUnit& u, int64_t sequence) {
    const int warp = warp_id();
    return StatePart{sequence,     u.head,        warp % kSplit * kKeys, u.block * kValues + 16 * (warp / kSplit),
                     args.key_dim, args.value_dim};
  };
  float d[kKeys / 8][4];
  if constexpr (kSummary) {
    if (args.of_sequences && !forgets) {
      load_state<kKeys>(d, args.grad_final_state, part_of(unit, 0));
    } else {
      clear(d);
    }
  } else if (args.seeds) {
    load_state<kKeys>(d, args.seeds, part_of(unit, unit.place));
  } else {
    load_state<kKeys>(d, args.grad_final_state, part_of(unit, segment.sequence_index));
  }

  // Where the results of the chunk in hand lie: as little as the loop needs, since registers are scarce.
  const int value = block_value + tile_value;
  const Window end = chunk_window(args.sequences, segment.sequence, last_chunk, head, value, args.value_dim - value);
  [[maybe_unused]] int64_t dW_at = args.dW.offset(end.batch, end.token, end.head) + end.column * args.dW.stride[3];
  [[maybe_unused]] int64_t dv_at = args.dv.offset(end.batch, end.token, end.head) + end.column * args.dv.stride[3];
  [[maybe_unused]] int64_t state_at =
      ((segment.sequence.first_slot + last_chunk) * args.value_heads + head) * args.state_elements;
  const int key = key_part * kKeys;
  [[maybe_unused]] float* pair_partial = partial + row_block * Shared::kPartialFloats;
  ScanConsumer<Team> consumer(segment.num_chunks, args.pipeline);
  for (; consumer.left() > 0; consumer.release_chunk()) {
    const SharedChunk& chunk = chunks[consumer.stage()];
    if constexpr (!kSummary) {
      store_state_blocks<T, kKeyDim, kKeys>(d, static_cast<T*>(args.states) + state_at, {0, 0, key, value, 0, 0});
      state_at -= args.value_heads * args.state_elements;
    }
    consumer.wait_chunk();

    TokenColumns x;
    clear(x);
    multiply_state<T, kP, kKeys>(x, d, chunk.k.data, key);
    if constexpr (kSplit > 1) exchange_partials<Team>(pair_partial, x, key_part, row_block);
    scale_columns(x, chunk.factors[1]);

    // dV' = P^T dO + to_end (K D)
    {
      FragmentA<T> o[4];
      load_column_fragments<T, kValuePitch>(o, chunk.grad_output.data, tile_value);
      multiply_lower_transposed<T>(x, o, chunk.P.data);
    }

    // dW = A^T dV'
    TokenColumns w;
    clear(w);
    {
      FragmentA<T> operand[4];
      to_fragments<T>(operand, x);
      multiply_lower_transposed<T>(w, operand, chunk.A.data);
    }
    if constexpr (!kSummary) {
      if (key_part == 0) store_columns<T>(w, args.dW, dW_at, chunk.rows, args.value_dim - value);
    }
    const float chunk_decay = chunk.factors[0][chunk.rows - 1];
    scale_columns(w, chunk.factors[2]);
    if constexpr (!kSummary) {
      if (key_part == kSplit - 1 && args.dv) {
        store_columns<T>(w, args.dv, dv_at, chunk.rows, args.value_dim - value);
      }
    }
    scale_columns(w, chunk.factors[0]);
    scale(w, -1.0f);
    scale(d, chunk_decay);

    update_state<T, kP, kKeys>(d, w, chunk.k.data, key);
    // dO comes from its tile again: registers are scarcer.
    FragmentA<T> decayed[4];
    load_column_fragments<T, kValuePitch>(decayed, chunk.grad_output.data, tile_value);
    scale_fragments<T>(decayed, chunk.factors[0]);
    consumer.wait_queries();
    add_scaled<T, kP, kKeys>(d, decayed, queries, key, args.scale);
    consumer.release_queries();
    dW_at -= args.sequences.chunk_size * args.dW.stride[1];
    dv_at -= args.sequences.chunk_size * args.dv.stride[1];
  }

  // Found again rather than kept through the loop.
  ScanUnit again;
  find_unit(args.sequences, args.value_heads, args.value_blocks, opaque(static_cast<int64_t>(blockIdx.x)), again);
  if constexpr (kSummary) {
    store_state<kKeys>(d, args.summary, part_of(again, again.place));
  } else {
    if (args.dh0 && again.segment.first) {
      store_state<kKeys>(d, args.dh0, part_of(again, again.segment.sequence_index));
    }
  }
}

}  // namespace cula::gdn::cuda
