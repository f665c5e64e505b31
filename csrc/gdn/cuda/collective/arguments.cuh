// What kernels are told of tensors and sequences.
#pragma once

#include "common/device/numeric.cuh"
#include "common/device/warp.cuh"

namespace cula::gdn::cuda {

using namespace cula::device;

inline constexpr int kRows = 64;  // rows of a tile; a chunk fills the first C of them at most

// A tensor with strides in elements. Token tensors are [batch, token, head, dim]; states [sequence, head, key, value];
// states of chunks [batch, chunk, head, key, value].
struct TensorArg {
  void* data = nullptr;
  int64_t stride[5] = {};
  DType dtype = DType::kFloat32;
  int vector_bytes = 0;  // what every row of the last dimension is aligned to and a multiple of: 16, 4, or 0

  __host__ __device__ explicit operator bool() const { return data != nullptr; }
  __device__ int64_t offset(int64_t batch, int64_t token, int64_t head) const {
    return batch * stride[0] + token * stride[1] + head * stride[2];
  }
  __device__ float load(int64_t index) const { return load_float(data, dtype, index); }
  __device__ void store(int64_t index, float value) const { store_float(data, dtype, index, value); }
};

// Any tensor, seen as rows of its last dimension.
struct RowsArg {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int dims = 0;  // without the last
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};
  int64_t last_stride = 1;

  __device__ int64_t offset(int64_t row) const {
    int64_t at = 0;
    for (int d = dims - 1; d >= 0; --d) {
      const int64_t rest = row / shape[d];
      at += (row - rest * shape[d]) * stride[d];
      row = rest;
    }
    return at;
  }
};

__device__ __forceinline__ int64_t load_index(const void* indices, bool wide, int64_t at) {
  return wide ? static_cast<const int64_t*>(indices)[at] : static_cast<const int32_t*>(indices)[at];
}

// Which matrix of a state tensor is a sequence's: its own, or a slot of a pool.
struct StateSlots {
  const void* indices = nullptr;  // [N], on the device; null: matrix n is sequence n's
  bool wide = false;              // int64
  int64_t stride = 1;             // elements
  int64_t count = 0;              // slots of the pool

  // -1: none. So count slots outside the pool, so that wrong values can not lead outside the tensor.
  __device__ int64_t of(int64_t sequence) const {
    if (indices == nullptr) return sequence;
    const int64_t slot = load_index(indices, wide, sequence * stride);
    return slot < 0 || slot >= count ? -1 : slot;
  }
};

// Where the sequences lie. Chunks are numbered by slots that need no prefix sum over the sequences: chunk i of packed
// sequence n, which starts at token s, is slot floor(s / C) + n + i. Slots never meet, and some stay empty.
struct SequenceTable {
  const void* offsets = nullptr;  // [N + 1], on the device; null: rows of `tokens` tokens
  bool wide = false;              // int64 offsets
  int chunk_size = 64;
  int64_t num_sequences = 0;
  int64_t tokens = 0;  // in a row of the batch
  int64_t slots_per_row = 0;
  // Chunks of a segment; 0: sequences are not split. Segments have places as chunks have slots (gdn/segments.h).
  int64_t segment_chunks = 0;
  int64_t segments_per_row = 1;

  __host__ __device__ int64_t num_slots() const {
    if (num_sequences == 0) return 0;  // there is no offset to look behind
    return offsets ? tokens / chunk_size + num_sequences : num_sequences * slots_per_row;
  }
  __host__ __device__ int64_t num_segment_places() const {
    if (segment_chunks == 0) return num_sequences;
    return offsets ? num_slots() / segment_chunks + num_sequences : num_sequences * segments_per_row;
  }
  // Of packed sequence n, which starts at token `begin`. kChunk: the tokens of a chunk, if the compiler is to know
  // them; otherwise this is a 64-bit division, which is a call. 0: those of the table.
  template <int kChunk = 0>
  __device__ int64_t first_slot(int64_t n, int64_t begin) const {
    if constexpr (kChunk != 0) return static_cast<int64_t>(static_cast<uint64_t>(begin) / kChunk) + n;
    return begin / chunk_size + n;
  }
  // Clamped, so that wrong values on the device can not lead outside the tensors.
  __device__ int64_t boundary(int64_t n) const {
    const int64_t x = load_index(offsets, wide, n);
    return x < 0 ? 0 : (x > tokens ? tokens : x);
  }
};

struct Sequence {
  int64_t batch;
  int64_t begin;   // first token, in its row of the batch
  int64_t length;  // tokens
  int64_t first_slot;
};

// Chunks [first_chunk, first_chunk + num_chunks) of a sequence.
struct Segment {
  int64_t sequence_index;
  Sequence sequence;
  int64_t first_chunk;
  int num_chunks;
  bool first;  // of its sequence
  bool last;
};

struct Chunk {
  int64_t sequence;
  int64_t batch;
  int64_t index;  // inside the sequence
  int64_t token;  // first, in its row of the batch
  int length;
};

// kChunk: see first_slot.
template <int kChunk = 0>
__device__ __forceinline__ Sequence find_sequence(const SequenceTable& table, int64_t n) {
  if (table.offsets == nullptr) return {n, 0, table.tokens, n * table.slots_per_row};
  const int64_t begin = table.boundary(n);
  const int64_t end = table.boundary(n + 1);
  return {0, begin, end > begin ? end - begin : 0, table.template first_slot<kChunk>(n, begin)};
}

// The last of `count` sequences whose first place is at or before this one: 32 probes a round. All lanes must call.
template <class FirstPlace>
__device__ __forceinline__ int64_t find_owner(int64_t count, int64_t place, const FirstPlace& first_place) {
  int64_t low = 0;
  while (count > 1) {
    const int64_t step = (count + 31) / 32;
    const int64_t probe = lane_id() * step;
    const bool reached = probe < count && first_place(low + probe) <= place;
    const int last = 31 - __clz(static_cast<int>(ballot(reached) | 1u));
    low += last * step;
    count = count - last * step < step ? count - last * step : step;
  }
  return low;
}

// The chunk of a slot that belongs to packed tokens [begin, end), or to none; false if it is empty.
template <int kChunk>
__device__ __forceinline__ bool chunk_at(const SequenceTable& table, int64_t slot, int64_t sequence, int64_t begin,
                                         int64_t end, Chunk& chunk) {
  chunk.sequence = sequence;
  chunk.batch = 0;
  chunk.index = slot - table.template first_slot<kChunk>(sequence, begin);
  const int64_t done = chunk.index * table.chunk_size;
  chunk.token = begin + done;
  if (chunk.index < 0 || chunk.token >= end) return false;
  const int64_t left = end - chunk.token;
  chunk.length = static_cast<int>(left < table.chunk_size ? left : table.chunk_size);
  return true;
}

// Finds the chunk of a slot; false if the slot is empty. All lanes of the warp must call. kChunk: see first_slot.
template <int kChunk = 0>
__device__ __forceinline__ bool find_chunk(const SequenceTable& table, int64_t slot, Chunk& chunk) {
  if (table.offsets == nullptr) {
    // Slots number less than 2^32, as blocks do; a 64-bit division is a call.
    chunk.sequence = chunk.batch = static_cast<uint32_t>(slot) / static_cast<uint32_t>(table.slots_per_row);
    chunk.index = slot - chunk.batch * table.slots_per_row;
    chunk.token = chunk.index * table.chunk_size;
    const int64_t left = table.tokens - chunk.token;
    chunk.length = static_cast<int>(left < table.chunk_size ? left : table.chunk_size);
    return true;
  }
  const int64_t owner = find_owner(table.num_sequences, slot,
                                   [&](int64_t n) { return table.template first_slot<kChunk>(n, table.boundary(n)); });
  return chunk_at<kChunk>(table, slot, owner, table.boundary(owner), table.boundary(owner + 1), chunk);
}

// The same for many slots: of fewer than 32 packed sequences each lane keeps a boundary, so that no search waits for
// memory. All lanes of the warp must call, the constructor too.
template <int kChunk>
class ChunkFinder {
 public:
  __device__ __forceinline__ explicit ChunkFinder(const SequenceTable& table) : table_(table) {
    const int64_t lane = lane_id();
    if (keeps()) boundary_ = table.boundary(lane < table.num_sequences ? lane : table.num_sequences);
  }

  __device__ __forceinline__ bool find(int64_t slot, Chunk& chunk) const {
    if (!keeps()) return find_chunk<kChunk>(table_, slot, chunk);
    const int lane = lane_id();
    const bool reached = lane < table_.num_sequences && table_.template first_slot<kChunk>(lane, boundary_) <= slot;
    const int owner = 31 - __clz(static_cast<int>(ballot(reached) | 1u));
    return chunk_at<kChunk>(table_, slot, owner, shuffle(boundary_, owner), shuffle(boundary_, owner + 1), chunk);
  }

 private:
  __device__ __forceinline__ bool keeps() const { return table_.offsets != nullptr && table_.num_sequences < 32; }

  const SequenceTable& table_;
  int64_t boundary_ = 0;  // in front of the sequence that the lane counts, or behind the last
};

__device__ __forceinline__ int64_t first_segment_place(const SequenceTable& table, int64_t n) {
  if (table.segment_chunks == 0) return n;
  if (table.offsets == nullptr) return n * table.segments_per_row;
  return table.first_slot(n, table.boundary(n)) / table.segment_chunks + n;
}

__device__ __forceinline__ int64_t count_segments(const SequenceTable& table, const Sequence& sequence) {
  const int64_t chunks = (sequence.length + table.chunk_size - 1) / table.chunk_size;
  if (table.segment_chunks == 0 || chunks == 0) return 1;
  return (chunks + table.segment_chunks - 1) / table.segment_chunks;
}

// Finds the segment of a place; false if the place is empty. All lanes of the warp must call.
__device__ __forceinline__ bool find_segment(const SequenceTable& table, int64_t place, Segment& segment) {
  int64_t owner = place;
  if (table.segment_chunks != 0) {
    owner = table.offsets == nullptr
                ? place / table.segments_per_row
                : find_owner(table.num_sequences, place, [&](int64_t n) { return first_segment_place(table, n); });
  }
  segment.sequence_index = owner;
  segment.sequence = find_sequence(table, owner);
  const int64_t index = place - first_segment_place(table, owner);
  const int64_t count = count_segments(table, segment.sequence);
  if (index < 0 || index >= count) return false;
  const int64_t chunks = (segment.sequence.length + table.chunk_size - 1) / table.chunk_size;
  segment.first_chunk = index * table.segment_chunks;
  const int64_t left = chunks - segment.first_chunk;
  segment.num_chunks =
      static_cast<int>(table.segment_chunks != 0 && left > table.segment_chunks ? table.segment_chunks : left);
  segment.first = index == 0;
  segment.last = index == count - 1;
  return true;
}

// Position of a chunk in tensors that hold the chunks of all sequences one behind the other. All lanes must call.
__device__ __forceinline__ int64_t dense_chunk_index(const SequenceTable& table, int64_t sequence, int64_t index) {
  if (table.offsets == nullptr) return index;
  int64_t before = 0;
  for (int64_t m = lane_id(); m < sequence; m += 32) {
    before += (find_sequence(table, m).length + table.chunk_size - 1) / table.chunk_size;
  }
  return warp_sum(before) + index;
}

// Where the states behind every so many tokens go.
struct CheckpointArgs {
  TensorArg states;  // [rows, HV, K, V] fp32; absent: they are not wanted
  int64_t rows = 0;
  int64_t every = 0;             // tokens
  const void* starts = nullptr;  // [N + 1], on the device: first rows; null: sequences one behind the other
  bool wide = false;             // int64
  int64_t stride = 1;            // elements

  // Row of the state behind the first `tokens` of a sequence, a multiple of `every`; -1 if there is no room for it. All
  // lanes of the warp must call.
  __device__ int64_t row(const SequenceTable& table, int64_t sequence, int64_t tokens) const {
    int64_t first = 0;
    int64_t end = rows;
    if (starts != nullptr) {
      first = load_index(starts, wide, sequence * stride);
      const int64_t next = load_index(starts, wide, (sequence + 1) * stride);
      end = next < end ? next : end;
    } else if (table.offsets == nullptr) {
      first = sequence * (table.tokens / every);
    } else {
      for (int64_t m = lane_id(); m < sequence; m += 32) first += find_sequence(table, m).length / every;
      first = warp_sum(first);
    }
    const int64_t count = tokens / every;  // up to here
    return first < 0 || first >= end || count > end - first ? -1 : first + count - 1;
  }
};

}  // namespace cula::gdn::cuda
