// Long sequences are cut into segments of a fixed number of chunks, which run side by side. Segments are numbered by
// places that need no prefix sum: of packed sequence n, whose first chunk has slot p, they start at place
// floor(p / segment_chunks) + n. Places never meet, and some stay empty.
#pragma once

#include "gdn/sm90/collective/factors.cuh"

namespace cula::gdn::sm90 {

struct Segmentation {
  SequenceTable sequences;
  int64_t chunks = 0;  // of a segment; 0: sequences run whole

  __host__ __device__ int64_t per_row() const {
    const int64_t slots = sequences.slots_per_row;
    if (chunks == 0 || slots == 0) return 1;
    return static_cast<uint32_t>(slots + chunks - 1) / static_cast<uint32_t>(chunks);
  }
  __host__ __device__ int64_t num_places() const {
    if (sequences.offsets == nullptr) return sequences.num_sequences * per_row();
    return sequences.num_sequences + (chunks == 0 ? 0 : sequences.num_slots() / chunks);
  }
  __device__ int64_t first_place(int64_t n) const {
    return chunks == 0 ? n : (sequences.boundary(n) / kRows + n) / chunks + n;
  }
};

// Of a sequence's last segment; one without chunks has one segment.
__device__ __forceinline__ int64_t last_place(const Segmentation& table, int64_t n) {
  const int64_t chunks = (find_sequence(table.sequences, n).length + kRows - 1) / kRows;
  const int64_t first = table.sequences.offsets == nullptr ? n * table.per_row() : table.first_place(n);
  return table.chunks == 0 || chunks == 0 ? first : first + (chunks - 1) / table.chunks;
}

struct Segment {
  int64_t sequence;
  int64_t first_chunk;  // of the sequence's
  int64_t batch;
  int64_t token;  // first, in its row of the batch
  int64_t slot;   // first
  int num_chunks;
  int tail_length;  // of the last chunk
  bool is_first;
  bool is_last;
};

// Finds the segment of a place; false if it is empty.
__device__ __forceinline__ bool find_segment(const Segmentation& table, int64_t place, Segment& segment) {
  int64_t index;
  if (table.sequences.offsets == nullptr) {
    // Places number less than 2^32, as blocks do; a 64-bit division is a call.
    const auto per_row = static_cast<uint32_t>(table.per_row());
    segment.sequence = static_cast<uint32_t>(place) / per_row;
    index = place - segment.sequence * per_row;
  } else {
    // The last sequence whose first place is at or before this one. By every thread alike, without a vote: the compiler
    // then knows that what follows is uniform, loops over chunks among it.
    int64_t low = table.chunks == 0 ? place : 0;
    int64_t count = table.chunks == 0 ? 1 : table.sequences.num_sequences;
    while (count > 1) {
      const int64_t half = count / 2;
      if (table.first_place(low + half) <= place) {
        low += half;
        count -= half;
      } else {
        count = half;
      }
    }
    segment.sequence = low;
    index = place - table.first_place(low);
  }
  const Sequence sequence = find_sequence(table.sequences, segment.sequence);
  const int64_t chunks = (sequence.length + kRows - 1) / kRows;
  const int64_t length = table.chunks == 0 ? chunks : table.chunks;
  const int64_t first = index * length;
  if (index < 0 || (index > 0 && first >= chunks)) return false;
  const int64_t left = chunks - first;
  segment.first_chunk = first;
  segment.batch = sequence.batch;
  segment.token = sequence.begin + first * kRows;
  segment.slot = sequence.first_slot + first;
  segment.num_chunks = static_cast<int>(left < length ? left : length);
  segment.is_first = index == 0;
  segment.is_last = left <= length;
  const int64_t tokens = sequence.length - first * kRows;
  segment.tail_length = segment.is_last ? static_cast<int>(tokens - (left - 1) * kRows) : kRows;
  return true;
}

// Sequences, those of more chunks first, of equal ones the first first: so that no long one starts when all others have
// ended. By one block, each thread ranking some; their number squared must be small (schedule.h).
__device__ __forceinline__ void order_sequences(int32_t* order, const SequenceTable& sequences) {
  const auto chunks_of = [&](int n) { return (find_sequence(sequences, n).length + kRows - 1) / kRows; };
  const int count = static_cast<int>(sequences.num_sequences);
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < count; n += static_cast<int>(blockDim.x)) {
    const int64_t chunks = chunks_of(n);
    int rank = 0;
#pragma unroll 1
    for (int other = 0; other < count; ++other) {
      const int64_t others = chunks_of(other);
      if (others > chunks || (others == chunks && other < n)) ++rank;
    }
    order[rank] = n;
  }
}

// A state whose share in a later one is below 2^kForgotten of its norm counts for nothing there: unless its norm
// exceeds 4, fp32 has no normal number for that.
inline constexpr float kForgotten = -128.0f;

// How far a boundary between segments looks back for chunks that forget, at least.
inline constexpr int kLookBack = 32;

// The state at a boundary: from how many chunks before it. All of them and the initial state, fewer and zeros if they
// forget what was before, or neither within `limit` chunks.
struct LookBack {
  int chunks;
  bool forgets;
  bool from_start;
};

// The same, known to the compiler as uniform (see Unit), which what votes and shuffles give is not.
__device__ __forceinline__ LookBack uniform(const LookBack& back) {
  const unsigned bits = (back.forgets ? 1u : 0u) | (back.from_start ? 2u : 0u);
  const unsigned all = warp_max(static_cast<unsigned>(back.chunks) << 2 | bits);
  return {static_cast<int>(all >> 2), (all & 1) != 0, (all & 2) != 0};
}

// factors: of the last chunk before the boundary; the one before lies `stride` in front. The bound is rigorous: a
// chunk's transition has at most the norm 2^log2_norm. All lanes of the warp must call.
__device__ __forceinline__ LookBack look_back(const ChunkFactors* factors, int64_t stride, int64_t available,
                                              int limit) {
  const int count = available < limit ? static_cast<int>(available) : limit;
  float after = 0.0f;  // of the chunks behind those of this round
  for (int done = 0; done < count; done += 32) {
    const int back = done + lane_id();
    const float mine = back < count ? factors[-back * stride].log2_norm : 0.0f;
    const float sum = after + warp_inclusive_scan(mine);
    const unsigned forgotten = ballot(back < count && sum <= kForgotten);
    if (forgotten != 0) return uniform({done + __ffs(static_cast<int>(forgotten)), true, false});
    after = shuffle(sum, 31);
  }
  return uniform({count, false, available <= limit});
}

}  // namespace cula::gdn::sm90
