// Shared memory of the fused forward kernel, and who waits for whom in it.
//
//   full[s]     the loads of stage s have landed                loader -> consumers, scorer
//   empty[s]    the consumers have left the chunk of stage s    consumers -> loader
//   scored[b]   P lies in buffer b                              scorer -> consumers
//   trimmed     the rows of the last chunk past its length have been zeroed in its tiles
//
// Loader and scorer are one warpgroup. A buffer of scores is free when the stage of the same chunk is.
#pragma once

#include "common/device/hand_over.cuh"
#include "common/device/ldmatrix.cuh"
#include "common/device/mbarrier.cuh"
#include "common/device/shared.cuh"
#include "common/device/stmatrix.cuh"
#include "common/device/tma.cuh"
#include "common/device/warpgroup.cuh"
#include "common/device/wgmma.cuh"
#include "gdn/sm90/collective/operand.cuh"
#include "gdn/sm90/collective/segments.cuh"
#include "gdn/sm90/collective/tile.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kScoreBuffers = 2;
// A K x V state of one head in global memory, or its 64-wide part: where it comes from and goes to.
struct StateSource {
  const void* data;  // null: zeros, or the identity
  DType dtype;
  int64_t key_stride;
  int64_t value_stride;
  bool identity;
};
struct StateTarget {
  void* data;  // null: not wanted
  DType dtype;
  int64_t key_stride;
  int64_t value_stride;
};

// What one block works on: one value head of one segment, and kValueTiles blocks of 64 value columns.
//
// All of it must be known to the compiler as uniform, as what depends on the block index and on memory at uniform
// addresses is, and votes and shared memory are not: otherwise the loops over chunks keep their state and the
// descriptors of wgmma in vector registers (9% of the kernel, nvcc 13.0).
struct Unit {
  int batch;
  int token;  // first, in its row of the batch
  int slot;   // first
  int head;
  int key_head;
  int value;  // first column
  int num_chunks;
  int tail_length;     // of the last chunk; 64 if it is full
  bool has_values;     // false: v counts as zero
  StateSource enters;  // of the head; `value` is the block's first row of it
  StateTarget leaves;
  int sequence;
  int first_chunk;  // of the sequence's
  int checkpoint;   // the first chunk here behind which there is one
};

template <int kKeyTiles, int kValueTiles, bool kOutput>
struct ForwardStage {
  SwizzledTile k[kKeyTiles];
  SwizzledTile v[kValueTiles];
  SwizzledTile A;
  SwizzledTile q[kKeyTiles];
};
template <int kKeyTiles, int kValueTiles>
struct ForwardStage<kKeyTiles, kValueTiles, false> {
  SwizzledTile k[kKeyTiles];
  SwizzledTile v[kValueTiles];
  SwizzledTile A;
};

// kOutput: whether the kernel writes O, or the state behind a segment alone.
template <int kKeyDim, int kValueTiles, bool kOutput>
struct ForwardShared {
  static constexpr int kKeyTiles = kKeyDim / 64;
  // A block of half a head has less to do a chunk, and its loads take as long: with three stages it takes up to 9%
  // longer than with four. Those of a whole head, which K = 128 leaves room for three, took 0.83 ms with two instead of
  // 0.58.
  static constexpr int kStages = kOutput && kValueTiles == 1 ? 4 : 3;
  using Stage = ForwardStage<kKeyTiles, kValueTiles, kOutput>;
  Stage stages[kStages];
  SwizzledTile scores[kOutput ? kScoreBuffers : 1];
  SwizzledTile out[kOutput ? kValueTiles : 1];  // rows are tokens
  ChunkFactors factors[kStages];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t scored[kScoreBuffers];
  uint64_t trimmed;

  // Addresses in the shared window.
  struct Map {
    uint32_t base;
    __device__ uint32_t stage(int s) const { return base + s * static_cast<uint32_t>(sizeof(Stage)); }
    __device__ uint32_t score(int b) const { return at(offsetof(ForwardShared, scores)) + b * kTileBytes; }
    __device__ uint32_t output(int tile) const { return at(offsetof(ForwardShared, out)) + tile * kTileBytes; }
    __device__ uint32_t factor(int s) const {
      return at(offsetof(ForwardShared, factors)) + s * static_cast<uint32_t>(sizeof(ChunkFactors));
    }
    __device__ uint32_t full_barrier(int s) const { return at(offsetof(ForwardShared, full)) + 8 * s; }
    __device__ uint32_t empty_barrier(int s) const { return at(offsetof(ForwardShared, empty)) + 8 * s; }
    __device__ uint32_t scored_barrier(int b) const { return at(offsetof(ForwardShared, scored)) + 8 * b; }
    __device__ uint32_t trimmed_barrier() const { return at(offsetof(ForwardShared, trimmed)); }

   private:
    __device__ uint32_t at(size_t offset) const { return base + static_cast<uint32_t>(offset); }
  };
  // Offsets of tiles inside a stage.
  static constexpr int kV = kKeyTiles * kTileBytes;
  static constexpr int kA = kV + kValueTiles * kTileBytes;
  static constexpr int kQ = kA + kTileBytes;
};

// Named barriers; 0 is the whole block's.
enum class NamedBarrier { kLoader = 1, kTurn0 = 2, kTurn1 = 3, kConsumer0 = 4, kConsumer1 = 5 };

struct ForwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  // A in boxes of 32 rows. The first 32 rows of a chunk end with the 32nd column here: the copy engine makes the zeros
  // behind, and nobody reads them, nor need write them.
  CUtensorMap A_upper;
  CUtensorMap A_lower;
  CUtensorMap o;
};

struct ForwardArgs {
  ForwardMaps maps;
  Segmentation segments;
  int64_t value_heads;
  int64_t group;
  int value_dim;
  float log2_scale;             // of the scale's magnitude: it goes into the exponent of the decay
  uint32_t scale_sign;          // its sign, for both halves of a packed pair
  const ChunkFactors* factors;  // [slot, HV]
  TensorArg initial_state;
  int initial_state_bytes;  // of an element
  TensorArg final_state;
  int final_state_bytes;
  TensorArg o;
  const int32_t* order;  // [place]: which sequence a place runs, by prepare; null: as they come
  // With segments, fp32, [place, HV]: the state behind each segment but the last of its sequence, [V, K]. Where
  // independent[place, HV] is not 0, the summary writes it; elsewhere the summary writes what the segment adds to it
  // (S_ext) and its transition M, transposed, [K, K], and the merge completes the state.
  float* states;
  float* transitions;
  int32_t* independent;
  // For serving.
  StateSlots initial_slots;
  StateSlots final_slots;
  // With segments, if the final states overwrite the initial ones: the merge moves the latter to the places of the last
  // segments of their sequences, which have no use for them, and the forward kernel finds them there.
  bool moves_initial_state = false;
  CheckpointArgs checkpoints;
};

}  // namespace cula::gdn::sm90
