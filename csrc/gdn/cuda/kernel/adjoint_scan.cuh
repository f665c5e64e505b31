// The adjoint of the recurrence, over the chunks of a sequence or segment from its end, for one value head and a block
// of value columns. D is the gradient of the state behind the chunk:
//
//   dV' = P^T dO + to_end (K D);  dW = A^T dV';  dv = beta dW
//   D  <- chunk_decay D - K^T (beta decay dW) + scale Q^T (decay dO)
//
// Writes D of every chunk, dW, dv, and what is left of D: the gradient of the initial state. The summary of a segment
// is what it makes of no gradient at its end.
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
  TensorArg grad_final_state;
  TensorArg seeds;  // [places, HV, K, V] fp32: D behind the segments; in place of grad_final_state if split
  TensorArg dh0;
  void* states;  // D, [slot][HV] blocks
  int64_t state_elements;
  TensorArg dW;
  TensorArg dv;
  TensorArg summary;  // of the summary alone: [places, HV, K, V] fp32, of every segment that is not the first
};

template <class T, int kKeyDim, int kSplit>
struct AdjointScanShared {
  struct Chunk {
    Tile<T, kKeyDim> k;
    Tile<T, kRows> A;
    Tile<T, kRows> P;
    Tile<T, kScanValues<kSplit>> grad_output;
    float factors[3][kRows];  // decay, to_end, beta
  };
  static constexpr int kPartialFloats = kSplit == 1 ? 0 : kSplit * 8 * 128;

  static constexpr size_t bytes(const ScanPipeline& pipeline) {
    return pipeline.stages * sizeof(Chunk) + (pipeline.shared_tile ? 0 : sizeof(Tile<T, kKeyDim>)) +
           kComputeWarps / kSplit * kPartialFloats * sizeof(float);
  }
};

template <class T, int kKeyDim, int kSplit, bool kSummary>
__global__ void __launch_bounds__(kScanThreads, (kScanResidency<T, kKeyDim>))
    adjoint_scan_kernel(const AdjointScanArgs args) {
  using Shared = AdjointScanShared<T, kKeyDim, kSplit>;
  using SharedChunk = typename Shared::Chunk;
  constexpr int kKeys = kKeyDim / kSplit;
  constexpr int kP = kPitch<kKeyDim>;
  constexpr int kValues = kScanValues<kSplit>;
  constexpr int kValuePitch = kPitch<kValues>;

  auto* chunks = reinterpret_cast<SharedChunk*>(dynamic_shared_memory());
  auto* query_tile = reinterpret_cast<Tile<T, kKeyDim>*>(chunks + args.pipeline.stages);
  [[maybe_unused]] float* partial = reinterpret_cast<float*>(query_tile + (args.pipeline.shared_tile ? 0 : 1));
  T* queries = args.pipeline.shared_tile ? chunks[0].k.data : query_tile->data;

  const int64_t unit = blockIdx.x / args.value_blocks;
  const int block_value = static_cast<int>(blockIdx.x - unit * args.value_blocks) * kValues;
  const int64_t place = unit / args.value_heads;
  const int64_t head = unit - place * args.value_heads;
  const int64_t key_head = head / args.group;
  Segment segment;
  if (!find_segment(args.sequences, place, segment)) return;
  if (kSummary && segment.first) return;
  const int64_t last_chunk = segment.first_chunk + segment.num_chunks - 1;  // c counts from it

  if (is_load_warp()) {
    const auto load_keys = [&](int c, int stage) {
      load_tile_by<T, kKeyDim, kLoadThreads>(
          chunks[stage].k.data, args.k,
          chunk_window(args.sequences, segment.sequence, last_chunk - c, key_head, 0, args.key_dim), load_thread());
    };
    const auto load_queries = [&](int c) {
      load_tile_by<T, kKeyDim, kLoadThreads>(
          queries, args.q, chunk_window(args.sequences, segment.sequence, last_chunk - c, key_head, 0, args.key_dim),
          load_thread());
    };
    const float* factors = args.factors + head * (args.factor_stride / args.value_heads);
    const auto load_chunk = [&](int c, int stage) {
      SharedChunk& chunk = chunks[stage];
      load_keys(c, stage);
      Window window =
          chunk_window(args.sequences, segment.sequence, last_chunk - c, head, 0, args.sequences.chunk_size);
      load_tile_by<T, kRows, kLoadThreads>(chunk.A.data, args.A, window, load_thread());
      load_tile_by<T, kRows, kLoadThreads>(chunk.P.data, args.P, window, load_thread());
      load_factors(chunk.factors, factors + window.batch * args.sequences.tokens + window.token, args.factor_stride,
                   window.rows);
      window.column = block_value;
      window.columns = args.value_dim - block_value;
      load_tile_by<T, kValues, kLoadThreads>(chunk.grad_output.data, args.grad_output, window, load_thread());
    };
    bring_chunks<ScanQueries::kBehindKeys>(segment.num_chunks, args.pipeline, load_chunk, load_queries, load_keys);
    return;
  }

  const int key_part = warp_id() % kSplit;
  const int row_block = warp_id() / kSplit;
  const int tile_value = 16 * row_block;
  StatePart part = {segment.sequence_index, head,          key_part * kKeys, block_value + tile_value,
                    args.key_dim,           args.value_dim};
  float d[kKeys / 8][4];
  if constexpr (kSummary) {
    clear(d);
  } else if (args.seeds) {
    StatePart entry = part;
    entry.sequence = place;
    load_state<kKeys>(d, args.seeds, entry);
  } else {
    load_state<kKeys>(d, args.grad_final_state, part);
  }

  [[maybe_unused]] float* pair_partial = partial + row_block * Shared::kPartialFloats;
  ScanConsumer consumer(segment.num_chunks, args.pipeline);
  for (int c = 0; c < segment.num_chunks; ++c) {
    const SharedChunk& chunk = chunks[consumer.stage()];
    const int64_t at = last_chunk - c;
    if constexpr (!kSummary) {
      const int64_t slot = segment.sequence.first_slot + at;
      store_state_blocks<T, kKeyDim, kKeys>(
          d, static_cast<T*>(args.states) + (slot * args.value_heads + head) * args.state_elements, part);
    }
    consumer.wait_chunk();

    TokenColumns x;
    clear(x);
    multiply_state<T, kP, kKeys>(x, d, chunk.k.data, part.key);
    if constexpr (kSplit > 1) exchange_partials<kSplit>(pair_partial, x, key_part, row_block);
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
    const Window rows =
        chunk_window(args.sequences, segment.sequence, at, head, part.value, args.value_dim - part.value);
    if constexpr (!kSummary) {
      if (key_part == 0) store_columns<T>(w, args.dW, rows);
    }
    const float chunk_decay = chunk.factors[0][rows.rows - 1];
    scale_columns(w, chunk.factors[2]);
    if constexpr (!kSummary) {
      if (key_part == kSplit - 1 && args.dv) store_columns<T>(w, args.dv, rows);
    }
    scale_columns(w, chunk.factors[0]);
    scale(w, -1.0f);
    scale(d, chunk_decay);

    update_state<T, kP, kKeys>(d, w, chunk.k.data, part.key);
    // dO comes from its tile again: registers are scarcer.
    FragmentA<T> decayed[4];
    load_column_fragments<T, kValuePitch>(decayed, chunk.grad_output.data, tile_value);
    scale_fragments<T>(decayed, chunk.factors[0]);
    consumer.wait_queries();
    add_scaled<T, kP, kKeys>(d, decayed, queries, part.key, args.scale);
    consumer.release_queries();
    consumer.release_chunk();
  }

  if constexpr (kSummary) {
    part.sequence = place;
    store_state<kKeys>(d, args.summary, part);
  } else {
    if (args.dh0 && segment.first) store_state<kKeys>(d, args.dh0, part);
  }
}

}  // namespace cula::gdn::cuda
