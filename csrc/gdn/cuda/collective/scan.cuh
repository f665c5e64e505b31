// What the passes over the chunks of a sequence share: who of a block does what, and the pipeline between them.
//
// Most warps of a block compute, each with its part of the state in registers (collective/state.cuh); the others bring
// tiles ahead of them. The keys of a state may be split over a pair of warps. A chunk's operands arrive in one of a few
// stages; q, which is needed late and briefly, in a tile of its own. Where shared memory is short of that tile, q takes
// the place of k, and k is brought again behind it.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/collective/state.cuh"

namespace cula::gdn::cuda {

// Row blocks of 16 value columns, and the warps that share the keys of one.
template <int kKeySplit, int kBlocks>
struct ScanTeam {
  static constexpr int kSplit = kKeySplit;
  static constexpr int kRowBlocks = kBlocks;
  static constexpr int kComputeWarps = kSplit * kRowBlocks;
  static constexpr int kLoadThreads = 16 * kComputeWarps;
  static constexpr int kThreads = 32 * kComputeWarps + kLoadThreads;
  static constexpr int kValues = 16 * kRowBlocks;  // value columns of the block
};

inline constexpr int kMaxStages = 3;

// Named barriers. "Full": those who bring arrive, those who compute wait. "Empty": the other way round.
enum ScanBarrier : int {
  kChunkFull = 1,  // one a stage
  kChunkEmpty = kChunkFull + kMaxStages,
  kQueriesFull = kChunkEmpty + kMaxStages,
  kQueriesEmpty,
  kKeysFull,  // the second coming of k
  kKeysEmpty,
  kPair,  // one a row block: the warps that share its state
};

// Blocks that share a multiprocessor, which bounds their registers.
template <class T, int kKeyDim, class Team>
inline constexpr int kScanResidency = sizeof(T) == 2 && kKeyDim <= 128 && Team::kComputeWarps <= 4 ? 2 : 1;

// Tiles of a pass: as many stages as `stages`, and a tile for q unless `shared_tile`.
struct ScanPipeline {
  int stages = 1;
  bool shared_tile = false;
};

// Among those who bring; negative for those who compute.
template <class Team>
__device__ __forceinline__ int load_thread() {
  return static_cast<int>(threadIdx.x) - 32 * Team::kComputeWarps;
}

// What a pass reads besides its chunks: nothing, q behind all uses of k, or q between two uses of k.
enum class ScanQueries { kNone, kBehindKeys, kBetweenKeys };

// The part of those who bring. load_chunk(chunk, stage), load_queries(chunk) and load_keys(chunk, stage) issue copies.
template <class Team, ScanQueries kQueries, class LoadChunk, class LoadQueries, class LoadKeys>
__device__ __forceinline__ void bring_chunks(int chunks, const ScanPipeline& pipeline, const LoadChunk& load_chunk,
                                             const LoadQueries& load_queries, const LoadKeys& load_keys) {
  // With three stages a chunk is announced once the next one is under way.
  const bool lags = kQueries == ScanQueries::kNone && pipeline.stages == 3;
  int stage = 0;
  int previous = 0;
  for (int c = 0; c < chunks; ++c) {
    if (c >= pipeline.stages) sync_named(kChunkEmpty + stage, Team::kThreads);
    load_chunk(c, stage);
    cp_async_commit();
    if constexpr (kQueries != ScanQueries::kNone) {
      if (pipeline.shared_tile) {
        cp_async_wait<0>();
        arrive_named(kChunkFull + stage, Team::kThreads);
        sync_named(kQueriesEmpty, Team::kThreads);
        load_queries(c);
        cp_async_commit();
        cp_async_wait<0>();
        arrive_named(kQueriesFull, Team::kThreads);
        if constexpr (kQueries == ScanQueries::kBetweenKeys) {
          sync_named(kKeysEmpty, Team::kThreads);
          load_keys(c, stage);
          cp_async_commit();
          cp_async_wait<0>();
          arrive_named(kKeysFull, Team::kThreads);
        }
      } else {
        if (c > 0) sync_named(kQueriesEmpty, Team::kThreads);
        load_queries(c);
        cp_async_commit();
        cp_async_wait<1>();
        arrive_named(kChunkFull + stage, Team::kThreads);
        cp_async_wait<0>();
        arrive_named(kQueriesFull, Team::kThreads);
      }
    } else if (lags) {
      cp_async_wait<1>();
      if (c > 0) arrive_named(kChunkFull + previous, Team::kThreads);
    } else {
      cp_async_wait<0>();
      arrive_named(kChunkFull + stage, Team::kThreads);
    }
    previous = stage;
    stage = stage + 1 == pipeline.stages ? 0 : stage + 1;
  }
  if (lags && chunks > 0) {
    cp_async_wait<0>();
    arrive_named(kChunkFull + previous, Team::kThreads);
  }
}

// The part of those who compute.
template <class Team>
class ScanConsumer {
 public:
  __device__ ScanConsumer(int chunks, const ScanPipeline& pipeline) : left_(chunks), pipeline_(pipeline) {}

  __device__ int left() const { return left_; }
  __device__ int stage() const { return stage_; }
  __device__ void wait_chunk() const { sync_named(kChunkFull + stage_, Team::kThreads); }
  __device__ void release_chunk() {
    if (left_ > pipeline_.stages) arrive_named(kChunkEmpty + stage_, Team::kThreads);
    --left_;
    stage_ = stage_ + 1 == pipeline_.stages ? 0 : stage_ + 1;
  }
  __device__ void wait_queries() const {
    if (pipeline_.shared_tile) arrive_named(kQueriesEmpty, Team::kThreads);
    sync_named(kQueriesFull, Team::kThreads);
  }
  __device__ void release_queries() const {
    if (!pipeline_.shared_tile && left_ > 1) arrive_named(kQueriesEmpty, Team::kThreads);
  }
  // Behind release_queries: the keys are there again.
  __device__ void wait_keys() const {
    if (!pipeline_.shared_tile) return;
    arrive_named(kKeysEmpty, Team::kThreads);
    sync_named(kKeysFull, Team::kThreads);
  }

 private:
  int left_;  // chunks, with the one in hand
  const ScanPipeline& pipeline_;
  int stage_ = 0;
};

// Partial sums of the warps that share a row block, in the order of the warps, so that all get the same bits.
// `buffer`: of this row block, 2 x kTiles x 128 floats.
template <class Team, int kTiles>
__device__ __forceinline__ void exchange_partials(float* buffer, float (&c)[kTiles][4], int part, int row_block) {
  constexpr int kFloats = kTiles * 128;
  write_partial(buffer + part * kFloats, c);
  sync_named(kPair + row_block, 32 * Team::kSplit);
  static_assert(Team::kSplit == 2);  // the sum of two does not depend on their order
  add_partial(c, buffer + (part ^ 1) * kFloats);
}

// Which segment, value head and block of value columns a block works on.
struct ScanUnit {
  int64_t place;
  int64_t head;
  int block;
  Segment segment;
};

// False if the place holds no segment.
__device__ __forceinline__ bool find_unit(const SequenceTable& table, int64_t value_heads, int64_t blocks,
                                          int64_t index, ScanUnit& unit) {
  // The index of a block of the grid has 32 bits, and so has what divides it: 64-bit division is a subroutine.
  const auto row = static_cast<uint32_t>(index) / static_cast<uint32_t>(blocks);
  const auto place = row / static_cast<uint32_t>(value_heads);
  unit.block = static_cast<int>(static_cast<uint32_t>(index) - row * static_cast<uint32_t>(blocks));
  unit.place = place;
  unit.head = row - place * static_cast<uint32_t>(value_heads);
  return find_segment(table, unit.place, unit.segment);
}

// The rows of chunk `c` of a sequence.
__device__ __forceinline__ Window chunk_window(const SequenceTable& table, const Sequence& sequence, int64_t c,
                                               int64_t head, int64_t column, int columns) {
  const int64_t first = c * table.chunk_size;
  const int64_t left = sequence.length - first;
  return {sequence.batch,
          sequence.begin + first,
          static_cast<int>(left < table.chunk_size ? left : table.chunk_size),
          head,
          column,
          columns};
}

// Three factors a row of a chunk, from [3][HV][B T], by those who bring.
template <class Team>
__device__ __forceinline__ void load_factors(float (&target)[3][kRows], const float* source, int64_t stride, int rows) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    static_assert(Team::kLoadThreads >= kRows);
    const int row = load_thread<Team>();
    if (row < kRows) cp_async<4>(&target[i][row], row < rows ? source + i * stride + row : source, row < rows);
  }
}

}  // namespace cula::gdn::cuda
