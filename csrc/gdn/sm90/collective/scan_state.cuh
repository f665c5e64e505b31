// What the consumers of both scans share: the state in registers, its way in and out, products.
#pragma once

#include "gdn/sm90/collective/scan_pipeline.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, ScanKind kKind, bool kAdjoint>
struct ScanState {
  using Shared = ScanShared<kKeyDim, kAdjoint>;
  static constexpr int kStateRegisters = kKeyDim / 2;
  static constexpr int kKeyTiles = Shared::kKeyTiles;

  const ScanArgs& args;
  const ScanUnit& unit;
  typename Shared::Map shared;

  // Row (value) and column (key) of s[4 i + j] are first_row() + 8 (j / 2) and first_column() + 8 i + j % 2.
  __device__ __forceinline__ int first_row() const {
    return 64 * unit.value_tile + 16 * (warpgroup_thread() / 32) + lane_id() / 4;
  }
  __device__ __forceinline__ int first_column() const { return 2 * (lane_id() & 3); }
  __device__ __forceinline__ int64_t state_offset(const TensorArg& x) const {
    return unit.sequence * x.stride[0] + unit.head * x.stride[1] + first_row() * x.stride[3] +
           first_column() * x.stride[2];
  }
  // f(register, offset from state_offset)
  template <class F>
  __device__ __forceinline__ void for_each_element(const TensorArg& x, F&& f) const {
#pragma unroll
    for (int i = 0; i < kStateRegisters; ++i) {
      f(i, (8 * (i / 4) + i % 2) * x.stride[2] + 8 * (i / 2 % 2) * x.stride[3]);
    }
  }
  template <class F>
  __device__ __forceinline__ static void with_state_type(DType dtype, F&& f) {
    switch (dtype) {
      case DType::kBFloat16:
        return f(bf16{});
      case DType::kFloat16:
        return f(fp16{});
      case DType::kFloat64:
        return f(double{});
      default:
        return f(float{});
    }
  }
  __device__ __forceinline__ void load_state(float (&s)[kStateRegisters], const TensorArg& x) const {
    if (!x) {
#pragma unroll
      for (int i = 0; i < kStateRegisters; ++i) {
        const bool diagonal = first_row() + 8 * (i / 2 % 2) == first_column() + 8 * (i / 4) + i % 2;
        s[i] = unit.is_transition && diagonal ? 1.0f : 0.0f;
      }
      return;
    }
    with_state_type(x.dtype, [&](auto element) {
      const auto* p = static_cast<const decltype(element)*>(x.data) + state_offset(x);
      for_each_element(x, [&](int i, int64_t at) { s[i] = static_cast<float>(p[at]); });
    });
  }
  __device__ __forceinline__ void store_state(const float (&s)[kStateRegisters], const TensorArg& x) const {
    if (!x) return;
    with_state_type(x.dtype, [&](auto element) {
      auto* p = static_cast<decltype(element)*>(x.data) + state_offset(x);
      for_each_element(x, [&](int i, int64_t at) { p[at] = static_cast<decltype(element)>(s[i]); });
    });
  }

  __device__ __forceinline__ static void sync_group() {
    sync_named(static_cast<int>(NamedBarrier::kConsumer0), kWarpgroupThreads);
  }
  // d = a (rows of the K-major tiles at `offset`)^T, the first step writing d.
  template <int kSteps>
  __device__ __forceinline__ static void multiply(float (&d)[32], const uint32_t* a, uint32_t tiles, int offset) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint64_t b = wgmma_descriptor(tiles, offset + (k / 4) * kTileBytes + (k % 4) * 32);
      if (k == 0) {
        wgmma_rs_n64_first<T>(d, a + 4 * k, b);
      } else {
        wgmma_rs_n64<T>(d, a + 4 * k, b);
      }
    }
  }
  // s += a (rows of tokens at `offset`)
  __device__ __forceinline__ static void update(float (&s)[kStateRegisters], const uint32_t* a, uint32_t tiles,
                                                int offset) {
    constexpr uint32_t kTransposed = ((kTileBytes >> 4) - 1) << 16;  // an operand wider than one tile
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
      if constexpr (kKeyDim == 128) {
        wgmma_rs_n128_transposed<T>(s, a + 4 * k, wgmma_descriptor(tiles + kTransposed, offset + k * 2048));
      } else {
        wgmma_rs_n64_transposed<T>(s, a + 4 * k, wgmma_descriptor(tiles, offset + k * 2048));
      }
    }
  }

  // This lane's row in transposed 16 x 16 steps through a tile whose rows are tokens: 16 tokens further on at + 2048.
  __device__ __forceinline__ static uint32_t value_offset() {
    const int lane = lane_id();
    const int warp = warpgroup_thread() / 32;
    return swizzled((lane & 7) + ((lane >> 4) & 1) * 8, warp * 2 + ((lane >> 3) & 1));
  }
  __device__ __forceinline__ static void load_values(uint32_t (&x)[16], uint32_t tile, uint32_t value_at) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ldmatrix_x4_trans(reinterpret_cast<uint32_t(&)[4]>(x[4 * j]), tile + value_at + j * 2048);
    }
  }

  // Puts the rounded state, and the rows of the chunk before, where copies leave from. Leaves the stage of the chunk
  // before, `previous`, to the feeder. step: 0 has no chunk before it.
  __device__ __forceinline__ void put(const uint32_t (&operand)[kStateRegisters / 2], const uint32_t (&rows)[16],
                                      uint32_t value_at, int step, int previous) const {
    if (kKind == ScanKind::kImages && warpgroup_thread() == 0) tma_store_wait_read();
    sync_group();  // the tiles are free again, and all warps have left the chunk before
    if (step > 0) mbarrier_arrive_group(shared.empty_barrier(previous));
    if constexpr (kKind == ScanKind::kSummary) return;
    const int lane = lane_id();
    const uint32_t state_row =
        shared.state() + (16 * (warpgroup_thread() / 32) + (lane & 7) + ((lane >> 3) & 1) * 8) * 128;
#pragma unroll
    for (int i = 0; i < kKeyDim / 8; i += 2) {
      stmatrix_x4(state_row + (i / 8) * kTileBytes + (((i % 8 + (lane >> 4)) ^ (lane & 7)) * 16), operand[2 * i],
                  operand[2 * i + 1], operand[2 * i + 2], operand[2 * i + 3]);
    }
    put_rows(rows, value_at);
  }
  __device__ __forceinline__ void put_rows(const uint32_t (&rows)[16], uint32_t value_at) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      stmatrix_x4_trans(shared.rows() + value_at + j * 2048, rows[4 * j], rows[4 * j + 1], rows[4 * j + 2],
                        rows[4 * j + 3]);
    }
  }
  __device__ __forceinline__ int64_t image(int chunk) const {
    return (static_cast<int64_t>(unit.slot + chunk - args.window.begin) * args.value_heads + unit.head) *
               args.value_tiles +
           unit.value_tile;
  }
  // Sends what was put in a step: the state of `chunk`, and by send_rows(rows_chunk, leader), which all threads call,
  // the rows of the chunk of the step before, if that is of the segment.
  template <class F>
  __device__ __forceinline__ void send(int step, SwizzledTile* states, int chunk, int rows_chunk, F&& send_rows) const {
    if constexpr (kKind == ScanKind::kSummary) return;
    fence_async_shared();
    sync_group();
    if (step < unit.skipped) return;
    const bool leader = warpgroup_thread() == 0;
    if (leader) bulk_store(states + image(chunk) * kKeyTiles, shared.state(), kKeyTiles * kTileBytes);
    if (step > unit.skipped) send_rows(rows_chunk, leader);
    if (leader) tma_store_commit();
  }
  template <class F>
  __device__ __forceinline__ void send_last_rows(int rows_chunk, const uint32_t (&packed)[16], uint32_t value_at,
                                                 F&& send_rows) const {
    if constexpr (kKind == ScanKind::kSummary) return;
    const bool leader = warpgroup_thread() == 0;
    if (leader) tma_store_wait_read();
    sync_group();
    put_rows(packed, value_at);
    fence_async_shared();
    sync_group();
    send_rows(rows_chunk, leader);
    if (!leader) return;
    tma_store_commit();
    tma_store_wait_read();
  }
};

}  // namespace cula::gdn::sm90
