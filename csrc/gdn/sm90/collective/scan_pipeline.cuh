// The two passes over a sequence that the gradients need, in 64 value columns of one value head each:
//
//   recompute  forward in time: the state S that enters each chunk, and V'     collective/scan_recompute.cuh
//   adjoint    backward in time: the gradient D of the state that leaves each chunk, and dv = beta dW, dW being the
//              gradient of W = beta (V - decay K S)                            collective/scan_adjoint.cuh
//
// Both keep their state transposed in registers, as the forward pass does. One warpgroup advances it, one more loads
// chunks by TMA and, for the adjoint, makes P (collective/scan_feeder.cuh). Who waits for whom:
//
//   full[s]     the loads of stage s have landed              feeder -> consumer
//   empty[s]    the consumer has left the chunk of stage s    consumer -> feeder
//   scored[b]   P lies in buffer b                            feeder -> consumer
//   read[b]     the consumer is done with it                  consumer -> feeder
//   trimmed     the rows of the last chunk past its length have been zeroed in its tiles
//
// What a pass writes are images of tiles as they lie in shared memory, so that the gradient kernel loads them as plain
// runs of bytes: states [slot][HV][V / 64][K / 64], rows being value columns; V' [slot][HV][V / 64], rows being tokens,
// those past the chunk's length zero; but dv goes to its tensor. A summary writes none of them, but the state that it
// ends with.
//
// The gradients need dW as beta dW alone, but for that by beta, which is divided by it; where beta is too small for
// that, rows keep dW for a while (row_scale).
#pragma once

#include "gdn/sm90/collective/pipeline.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kScanThreads = 2 * kWarpgroupThreads;

// What a scan leaves: images of every chunk, or the state at its end alone.
enum class ScanKind { kImages, kSummary };

struct BackwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap A;
  CUtensorMap grad_output;
  CUtensorMap dv;
  CUtensorMap dq;
  CUtensorMap dk;
};

// Rows with a smaller beta, in magnitude, have dW itself where others have dv = beta dW, until the gradient kernel has
// made their gradient by beta: beta may be zero, and in fp16 dv subnormal.
template <class T>
inline constexpr float kSmallBeta = kDTypeOf<T> == DType::kFloat16 ? 0x1p-4f : 0x1p-32f;
template <class T>
__device__ __forceinline__ bool is_small_beta(float beta) {
  return !(fabsf(beta) >= kSmallBeta<T>);  // NaN is
}
// What such a place holds is row_scale dW, and row_weight of that is beta dW.
template <class T>
__device__ __forceinline__ float row_scale(float beta) {
  return is_small_beta<T>(beta) ? 1.0f : beta;
}
template <class T>
__device__ __forceinline__ float row_weight(float beta) {
  return is_small_beta<T>(beta) ? beta : 1.0f;
}

// The backward pass goes through the slots of chunks in windows, the last one first, so that what the scans leave for
// the gradients is bounded. A window parts no segment.
struct SlotWindow {
  int begin;
  int end;
  int total;  // slots

  __host__ __device__ int slots() const { return end - begin; }
  // A sequence without chunks belongs to the window of its slot, or, if that is behind all slots, to the last one.
  __device__ bool holds(int64_t slot) const { return slot >= begin && (slot < end || end == total); }
};

// Sequences are cut where slots are multiples of `chunks`, so that windows of that many slots part no segment, or,
// where one window holds all slots, counted from the sequence's start, which never gives more. Segments have places: of
// sequence n, whose first chunk has slot p, they start at place floor(p / chunks) + n. Places never meet, and some stay
// empty.
struct SlotSegments {
  SequenceTable sequences;
  int64_t chunks = 0;  // 0: sequences run whole
  bool from_start = false;

  __host__ __device__ int64_t num_places() const {
    return sequences.num_sequences + (chunks == 0 ? 0 : (sequences.num_slots() + chunks - 1) / chunks);
  }
  __device__ int64_t first_place(int64_t n) const {
    if (chunks == 0) return n;
    const int64_t slot = sequences.offsets == nullptr ? n * sequences.slots_per_row : sequences.boundary(n) / kRows + n;
    return slot / chunks + n;
  }
  // What the first segment of a sequence lacks.
  __device__ int64_t offset(const Sequence& sequence) const { return from_start ? 0 : sequence.first_slot % chunks; }
  // Of a sequence of that many chunks, at least one.
  __device__ int64_t last_place(int64_t n, const Sequence& sequence, int64_t length) const {
    return first_place(n) + (offset(sequence) + length - 1) / chunks;
  }
};

// Finds the segment of a place; false if it is empty. All lanes of the warp must call.
__device__ __forceinline__ bool find_segment(const SlotSegments& table, int64_t place, Segment& segment) {
  segment.sequence = table.chunks == 0 ? place : cuda::find_owner(table.sequences.num_sequences, place, [&](int64_t n) {
    return table.first_place(n);
  });
  const int64_t index = place - table.first_place(segment.sequence);
  const Sequence sequence = find_sequence(table.sequences, segment.sequence);
  const int64_t chunks = (sequence.length + kRows - 1) / kRows;
  int64_t first = 0;
  int64_t end = chunks;
  if (table.chunks != 0) {
    const int64_t offset = table.offset(sequence);
    first = index == 0 ? 0 : index * table.chunks - offset;
    // Negative where the device's lengths leave out the first places.
    if (index < 0 || (index > 0 && first >= chunks)) return false;
    const int64_t next = (index + 1) * table.chunks - offset;
    end = next < chunks ? next : chunks;
  }
  segment.first_chunk = first;
  segment.batch = sequence.batch;
  segment.token = sequence.begin + first * kRows;
  segment.slot = sequence.first_slot + first;
  segment.num_chunks = static_cast<int>(end - first);
  segment.is_first = index == 0;
  segment.is_last = end == chunks;
  segment.tail_length = segment.is_last ? static_cast<int>(sequence.length - (chunks - 1) * kRows) : kRows;
  return true;
}

struct ScanArgs {
  BackwardMaps maps;
  SlotSegments segments;
  SlotWindow window;
  int first_place;  // of the launch
  int places;
  int64_t value_heads;
  int64_t group;
  int value_tiles;  // V / 64
  float scale;
  const ChunkFactors* factors;  // [slot, HV]
  TensorArg initial_state;
  TensorArg grad_final_state;
  TensorArg dh0;
  SwizzledTile* S;
  SwizzledTile* D;
  SwizzledTile* residual;  // V'
  TensorArg dv;            // in the problem's type, for the copy engine
  // With segments, fp32, [place, HV]: the state behind each segment but the last of its sequence, and the gradient of
  // the state in front of each but the first, both [V, K]. Where the flag beside it is not 0, the scan finds it itself,
  // and the summary writes it only where the merge starts from it; elsewhere the summary writes what the segment adds
  // to it and the segment's transition M, transposed, [K, K], and the merge completes it.
  float* states;
  float* state_gradients;
  float* transitions;
  int32_t* state_known;
  int32_t* gradient_known;

  __host__ __device__ int value_dim() const { return 64 * value_tiles; }
};

// State number `index` of an array of dense [V][K] matrices of fp32, seen as that of the only sequence and head.
__device__ __forceinline__ TensorArg dense_state_arg(float* data, int64_t index, int value_dim, int key_dim) {
  TensorArg x;
  x.data = data + index * value_dim * key_dim;
  x.stride[2] = 1;
  x.stride[3] = key_dim;
  return x;
}

struct ScanUnit {
  int batch;
  int token;  // first, in its row of the batch
  int slot;   // first
  int head;
  int key_head;
  int value_tile;
  int num_chunks;
  int skipped;      // so many at the start of the pass lie outside the segment and leave nothing but the state
  int tail_length;  // of the last chunk; 64 if it is full
  int64_t sequence;
  TensorArg enters;  // the state, or its gradient; seen as [sequence, head, key, value]; none: zeros
  TensorArg leaves;
  bool is_transition;  // the state enters as the identity, and v counts as zero
};

template <int kKeyDim, bool kAdjoint>
struct ScanShared {
  static constexpr int kKeyTiles = kKeyDim / 64;
  static constexpr int kStages = 3;
  static constexpr int kStageTiles = kAdjoint ? 2 * kKeyTiles + 2 : kKeyTiles + 2;
  struct Stage {
    SwizzledTile tiles[kStageTiles];  // K; V or dO; A; Q
  };
  Stage stages[kStages];
  SwizzledTile out[kKeyTiles + 1 + (kAdjoint ? kScoreBuffers : 0)];  // state and rows on their way out; scores
  ChunkFactors factors[kStages];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t scored[kScoreBuffers];
  uint64_t read[kScoreBuffers];
  uint64_t trimmed;

  struct Map {
    uint32_t base;
    __device__ uint32_t stage(int s) const { return base + s * static_cast<uint32_t>(sizeof(Stage)); }
    __device__ uint32_t state() const { return at(offsetof(ScanShared, out)); }
    __device__ uint32_t rows() const { return state() + kKeyTiles * kTileBytes; }
    __device__ uint32_t score(int b) const { return rows() + (1 + b) * kTileBytes; }
    __device__ uint32_t factor(int s) const {
      return at(offsetof(ScanShared, factors)) + s * static_cast<uint32_t>(sizeof(ChunkFactors));
    }
    __device__ uint32_t full_barrier(int s) const { return at(offsetof(ScanShared, full)) + 8 * s; }
    __device__ uint32_t empty_barrier(int s) const { return at(offsetof(ScanShared, empty)) + 8 * s; }
    __device__ uint32_t scored_barrier(int b) const { return at(offsetof(ScanShared, scored)) + 8 * b; }
    __device__ uint32_t read_barrier(int b) const { return at(offsetof(ScanShared, read)) + 8 * b; }
    __device__ uint32_t trimmed_barrier() const { return at(offsetof(ScanShared, trimmed)); }

   private:
    __device__ uint32_t at(size_t offset) const { return base + static_cast<uint32_t>(offset); }
  };
  // Offsets of tiles inside a stage.
  static constexpr int kValues = kKeyTiles * kTileBytes;
  static constexpr int kA = kValues + kTileBytes;
  static constexpr int kQ = kA + kTileBytes;

  __device__ static void init(const Map& shared) {
    constexpr int kWarps = kWarpgroupThreads / 32;
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(shared.full_barrier(s), 1);
      mbarrier_init(shared.empty_barrier(s), group_arrivals(1));
    }
    for (int b = 0; b < kScoreBuffers; ++b) {
      mbarrier_init(shared.scored_barrier(b), warp_arrivals(kWarps));
      mbarrier_init(shared.read_barrier(b), warp_arrivals(kWarps));
    }
    mbarrier_init(shared.trimmed_barrier(), group_arrivals(1));
    mbarrier_init_fence();
  }
};

}  // namespace cula::gdn::sm90
