// The two passes over a sequence that the gradients need, in 64 value columns of one value head each:
//
//   recompute  forward in time: the state S that enters each chunk, and V'
//   adjoint    backward in time: the gradient D of the state that leaves each chunk, and dW, the gradient of
//              W = beta (V - decay K S)
//
// Both keep their state transposed in registers, as the forward pass does. One warpgroup advances it, one more loads
// chunks by TMA and, for the adjoint, makes P. Who waits for whom:
//
//   full[s]     the loads of stage s have landed              feeder -> consumer
//   empty[s]    the consumer has left the chunk of stage s    consumer -> feeder
//   scored[b]   P lies in buffer b                            feeder -> consumer
//   trimmed     the rows of the last chunk past its length have been zeroed in its tiles
//
// What a pass writes are images of tiles as they lie in shared memory, so that the gradient kernel loads them as plain
// runs of bytes: states [slot][HV][V / 64][K / 64], rows being value columns; V' and dW [slot][HV][V / 64], rows being
// tokens, those past the chunk's length zero.
#pragma once

#include "gdn/sm90/collective/pipeline.cuh"

namespace cula::gdn::sm90 {

inline constexpr int kScanThreads = 2 * kWarpgroupThreads;

struct BackwardMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap A;
  CUtensorMap grad_output;
  CUtensorMap dq;
  CUtensorMap dk;
};

// The backward pass goes through the slots of chunks in windows, the last one first, so that what the scans leave for
// the gradients is bounded. All windows are equally long, but for the first.
struct SlotWindow {
  int begin;
  int end;
  int length;  // of a full window
  int total;   // slots

  __host__ __device__ int slots() const { return end - begin; }
  // Whether a window starts at a slot, and which: counted from the last, 0 being its own.
  __device__ bool starts_at(int slot) const { return (total - slot) % length == 0; }
  __device__ int number(int slot) const { return (total - slot) / length - 1; }
};

struct ScanArgs {
  BackwardMaps maps;
  SequenceTable sequences;
  SlotWindow window;
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
  SwizzledTile* dW;
  // Of the sequence that a window's start parts, fp32, [HV, V, K]. States: one for each start, kept by the pass over
  // the last of the sequence's windows.
  float* kept_states;
  float* carried;  // gradient of the state; two, by turns, since a window may take one over and leave another
};

// Seen as a state of the only sequence.
__device__ __forceinline__ TensorArg dense_states(float* data, int value_dim, int key_dim) {
  TensorArg x;
  x.data = data;
  x.stride[1] = static_cast<int64_t>(value_dim) * key_dim;
  x.stride[2] = 1;
  x.stride[3] = key_dim;
  return x;
}
__device__ __forceinline__ TensorArg kept_state(const ScanArgs& args, int number, int key_dim) {
  const int64_t size = args.value_heads * args.value_tiles * 64 * key_dim;
  return dense_states(args.kept_states + number * size, 64 * args.value_tiles, key_dim);
}
__device__ __forceinline__ TensorArg carried_state(const ScanArgs& args, int start, int key_dim) {
  const int64_t size = args.value_heads * args.value_tiles * 64 * key_dim;
  return dense_states(args.carried + (args.window.number(start) & 1) * size, 64 * args.value_tiles, key_dim);
}

struct ScanUnit {
  int batch;
  int token;  // first, in its row of the batch
  int slot;   // first
  int head;
  int key_head;
  int value_tile;
  int num_chunks;
  int tail_length;   // of the last chunk; 64 if it is full
  int first_stored;  // chunks in front of this one are gone through for the state alone
  int64_t sequence;
  TensorArg enters;  // the state, or its gradient; seen as [sequence, head, key, value]
  TensorArg leaves;
};

template <int kKeyDim>
struct ScanShared {
  static constexpr int kKeyTiles = kKeyDim / 64;
  struct Stage {
    SwizzledTile k[kKeyTiles];
    SwizzledTile values;  // V, or dO
    SwizzledTile A;
    SwizzledTile q[kKeyTiles];  // of the adjoint alone
  };
  Stage stages[kStages];
  SwizzledTile scores[kScoreBuffers];
  SwizzledTile state[kKeyTiles];  // on their way out
  SwizzledTile rows;
  ChunkFactors factors[kStages];
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t scored[kScoreBuffers];
  uint64_t trimmed;
  ScanUnit unit;

  struct Map {
    uint32_t base;
    __device__ uint32_t stage(int s) const { return base + s * static_cast<uint32_t>(sizeof(Stage)); }
    __device__ uint32_t score(int b) const { return at(offsetof(ScanShared, scores)) + b * kTileBytes; }
    __device__ uint32_t state() const { return at(offsetof(ScanShared, state)); }
    __device__ uint32_t rows() const { return at(offsetof(ScanShared, rows)); }
    __device__ uint32_t factor(int s) const {
      return at(offsetof(ScanShared, factors)) + s * static_cast<uint32_t>(sizeof(ChunkFactors));
    }
    __device__ uint32_t full_barrier(int s) const { return at(offsetof(ScanShared, full)) + 8 * s; }
    __device__ uint32_t empty_barrier(int s) const { return at(offsetof(ScanShared, empty)) + 8 * s; }
    __device__ uint32_t scored_barrier(int b) const { return at(offsetof(ScanShared, scored)) + 8 * b; }
    __device__ uint32_t trimmed_barrier() const { return at(offsetof(ScanShared, trimmed)); }

   private:
    __device__ uint32_t at(size_t offset) const { return base + static_cast<uint32_t>(offset); }
  };
  // Offsets of tiles inside a stage.
  static constexpr int kValues = kKeyTiles * kTileBytes;
  static constexpr int kA = kValues + kTileBytes;
  static constexpr int kQ = kA + kTileBytes;
};

// The warpgroup that feeds the consumer.
template <class T, int kKeyDim, bool kAdjoint>
struct ScanFeeder {
  using Shared = ScanShared<kKeyDim>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;
  static constexpr int kTilesUsed = kAdjoint ? 2 * kKeyTiles + 2 : kKeyTiles + 2;

  const ScanArgs& args;
  const ScanUnit& unit;
  typename Shared::Map shared;

  // Chunks count in the order of the pass.
  __device__ __forceinline__ int chunk_at(int step) const { return kAdjoint ? unit.num_chunks - 1 - step : step; }

  __device__ __forceinline__ void load(int step, int stage) const {
    const int chunk = chunk_at(step);
    const uint32_t barrier = shared.full_barrier(stage);
    mbarrier_arrive_expect(barrier, kTilesUsed * kTileBytes + static_cast<int>(sizeof(ChunkFactors)));
    const uint32_t tiles = shared.stage(stage);
    BoxOrigin at = {0, unit.key_head, unit.token + chunk * kRows, unit.batch};
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      at.column = 64 * i;
      tma_load(tiles + i * kTileBytes, args.maps.k, at, barrier);
      if constexpr (kAdjoint) tma_load(tiles + Shared::kQ + i * kTileBytes, args.maps.q, at, barrier);
    }
    at.head = unit.head;
    at.column = 0;
    tma_load(tiles + Shared::kA, args.maps.A, at, barrier);
    at.column = 64 * unit.value_tile;
    tma_load(tiles + Shared::kValues, kAdjoint ? args.maps.grad_output : args.maps.v, at, barrier);
    bulk_load(shared.factor(stage),
              args.factors + static_cast<int64_t>(unit.slot + chunk) * args.value_heads + unit.head,
              sizeof(ChunkFactors), barrier);
  }

  // Zeroes the rows past the sequence's end, which hold tokens of the next one.
  __device__ __forceinline__ void trim(int stage, int thread) const {
    const int pieces = (kRows - unit.tail_length) * 8;
#pragma unroll 1
    for (int tile = 0; tile < kTilesUsed; ++tile) {
      const uint32_t rows = shared.stage(stage) + tile * kTileBytes + unit.tail_length * 128;
#pragma unroll 1
      for (int i = thread; i < pieces; i += kWarpgroupThreads) {
        clear_shared_vector(rows + 16 * i);
      }
    }
    fence_async_shared();
    sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
    if (thread == 0) mbarrier_arrive(shared.trimmed_barrier());
  }

  // P = scale Q K^T o decay, on and below the diagonal, of the chunk in `stage`.
  __device__ __forceinline__ void make_scores(uint32_t tiles, uint32_t factors, uint32_t target, int warp) const {
    const int lane = lane_id();
    const int row = warp * 16 + lane / 4;
    const int column = 2 * (lane & 3);
    float p[32];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeyDim / 16; ++k) {
      const int at = (k / 4) * kTileBytes + (k % 4) * 32;
      const uint64_t q_step = wgmma_descriptor(tiles, Shared::kQ + at);
      const uint64_t k_step = wgmma_descriptor(tiles, at);
      if (k == 0) {
        wgmma_ss_n64_first<T>(p, q_step, k_step);
      } else {
        wgmma_ss_n64<T>(p, q_step, k_step);
      }
    }
    wgmma_commit();
    const uint32_t gammas = factors + static_cast<uint32_t>(offsetof(ChunkFactors, gamma));
    const uint32_t firsts = factors + static_cast<uint32_t>(offsetof(ChunkFactors, first));
    const float gamma0 = load_shared(gammas + 4 * row);
    const float gamma1 = load_shared(gammas + 4 * row + 32);
    const int first0 = load_shared_byte(firsts + row);
    const int first1 = load_shared_byte(firsts + row + 8);
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > warp) continue;
#pragma unroll
      for (int i = 2 * j; i < 2 * j + 2; ++i) {
        const int at = 8 * i + column;
        const float2 gamma = load_shared_pair(gammas + 4 * at);
        const auto gate = [&](int e, int first, int last, float difference, int col) {
          const float x = p[4 * i + e] * args.scale * exp2_approx(difference);
          p[4 * i + e] = col >= first && col <= last ? x : 0.0f;
        };
        gate(0, first0, row, gamma0 - gamma.x, at);
        gate(1, first0, row, gamma0 - gamma.y, at + 1);
        gate(2, first1, row + 8, gamma1 - gamma.x, at);
        gate(3, first1, row + 8, gamma1 - gamma.y, at + 1);
      }
      stmatrix_x4(target + (((2 * j + (lane >> 4)) ^ (lane & 7)) * 16), pack2<T>(p[8 * j], p[8 * j + 1]),
                  pack2<T>(p[8 * j + 2], p[8 * j + 3]), pack2<T>(p[8 * j + 4], p[8 * j + 5]),
                  pack2<T>(p[8 * j + 6], p[8 * j + 7]));
    }
  }

  __device__ __forceinline__ void run() const {
    const int thread = warpgroup_thread();
    const int lane = lane_id();
    const int warp = warp_id() & 3;
    const int n = unit.num_chunks;
    if constexpr (kAdjoint) {  // above the diagonal blocks the buffers stay zero
      for (int i = thread; i < kScoreBuffers * kTileBytes / 16; i += kWarpgroupThreads) {
        clear_shared_vector(shared.score(0) + 16 * i);
      }
    }
    if (thread == 0) {
      for (int c = 0; c < kStages - 1 && c < n; ++c) load(c, c);
    }
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t store_row = (warp * 16 + (lane & 7) + ((lane >> 3) & 1) * 8) * 128;
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (chunk_at(c) == n - 1 && unit.tail_length < kRows) trim(stage, thread);
      if constexpr (kAdjoint) {
        make_scores(operand + stage * (sizeof(typename Shared::Stage) / 16), shared.factor(stage),
                    shared.score(c & 1) + store_row, warp);
        fence_async_shared();
        sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
      }
      if (thread == 0) {
        if (kAdjoint) mbarrier_arrive(shared.scored_barrier(c & 1));
        const int ahead = c + kStages - 1;
        const int next = stage == 0 ? kStages - 1 : stage - 1;  // the stage of chunk c - 1, and of chunk c + 2
        if (c >= 1) mbarrier_wait(shared.empty_barrier(next), ((c - 1) / kStages) & 1);
        if (ahead < n) load(ahead, next);
      }
      // The scores of chunk c + 1 go where those of chunk c - 1 were: nobody goes on before these are read.
      sync_named(static_cast<int>(NamedBarrier::kLoader), kWarpgroupThreads);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

// What both consumers share: the state in registers, its way in and out, products.
template <class T, int kKeyDim>
struct ScanState {
  using Shared = ScanShared<kKeyDim>;
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
      for (int i = 0; i < kStateRegisters; ++i) s[i] = 0.0f;
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
  __device__ __forceinline__ static void pack(uint32_t (&operand)[kStateRegisters / 2],
                                              const float (&s)[kStateRegisters]) {
#pragma unroll
    for (int i = 0; i < kStateRegisters / 2; ++i) operand[i] = pack_operand<T>(s[2 * i], s[2 * i + 1]);
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
    const bool leader = warpgroup_thread() == 0;
    if (leader) tma_store_wait_read();
    sync_group();  // the tiles are free again, and all warps have left the chunk before
    if (leader && step > 0) mbarrier_arrive(shared.empty_barrier(previous));
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
  // Sends what was put: the state of `chunk` and the rows of `rows_chunk`, if that is one.
  __device__ __forceinline__ void send(SwizzledTile* states, int chunk, SwizzledTile* rows, int rows_chunk) const {
    fence_async_shared();
    sync_group();
    if (warpgroup_thread() != 0 || chunk < unit.first_stored) return;
    bulk_store(states + image(chunk) * kKeyTiles, shared.state(), kKeyTiles * kTileBytes);
    if (rows_chunk >= unit.first_stored && rows_chunk < unit.num_chunks)
      bulk_store(rows + image(rows_chunk), shared.rows(), kTileBytes);
    tma_store_commit();
  }
  __device__ __forceinline__ void send_last_rows(SwizzledTile* rows, int rows_chunk, const uint32_t (&packed)[16],
                                                 uint32_t value_at) const {
    const bool leader = warpgroup_thread() == 0;
    if (leader) tma_store_wait_read();
    sync_group();
    put_rows(packed, value_at);
    fence_async_shared();
    sync_group();
    if (!leader) return;
    bulk_store(rows + image(rows_chunk), shared.rows(), kTileBytes);
    tma_store_commit();
    tma_store_wait_read();
  }
};

template <class T, int kKeyDim>
struct RecomputeConsumer : ScanState<T, kKeyDim> {
  using State = ScanState<T, kKeyDim>;
  using State::args, State::unit, State::shared;
  using typename State::Shared;

  __device__ __forceinline__ void run() const {
    const int lane = lane_id();
    const int n = unit.num_chunks;
    const bool has_tail = unit.tail_length < kRows;
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t value_at = State::value_offset();
    float s[State::kStateRegisters];
    uint32_t s_operand[State::kStateRegisters / 2];
    float u[32];
    uint32_t rows[16] = {};
    State::load_state(s, unit.enters);
    State::pack(s_operand, s);
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      const uint32_t tiles = operand + stage * (sizeof(typename Shared::Stage) / 16);
      const uint32_t factors = shared.factor(stage) + 8 * (lane & 3);
      uint32_t w[16];
      uint32_t x[16];
      float2 b[8];
      float2 e[8];
      const auto load_factors = [&](float2(&f)[8], size_t which) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = load_shared_pair(factors + static_cast<uint32_t>(which) + 32 * j);
      };
      if (c > 0 && c <= unit.first_stored && args.window.starts_at(unit.slot + c)) {
        State::store_state(s, kept_state(args, args.window.number(unit.slot + c), kKeyDim));
      }
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (has_tail && c == n - 1) mbarrier_wait(shared.trimmed_barrier(), 0);

      wgmma_fence();
      State::template multiply<kKeyDim / 16>(u, s_operand, tiles, 0);  // U' = S' K'
      wgmma_commit();
      State::put(s_operand, rows, value_at, c, stage == 0 ? kStages - 1 : stage - 1);
      State::load_values(x, shared.stage(stage) + Shared::kValues, value_at);
      load_factors(b, offsetof(ChunkFactors, beta));
      load_factors(e, offsetof(ChunkFactors, beta_decay));
      wgmma_wait<0>();  // U

#pragma unroll
      for (int j = 0; j < 8; ++j) {  // W' = beta V' - beta decay U'
        const float2 v0 = unpack2<T>(x[2 * j]);
        const float2 v1 = unpack2<T>(x[2 * j + 1]);
        w[2 * j] = pack_operand<T>(b[j].x * v0.x - e[j].x * u[4 * j], b[j].y * v0.y - e[j].y * u[4 * j + 1]);
        w[2 * j + 1] = pack_operand<T>(b[j].x * v1.x - e[j].x * u[4 * j + 2], b[j].y * v1.y - e[j].y * u[4 * j + 3]);
      }
      wgmma_fence();
      State::template multiply<kRows / 16>(u, w, tiles, Shared::kA);  // V'' = W' A'
      wgmma_commit();
      const float chunk_decay = load_shared(shared.factor(stage) + offsetof(ChunkFactors, chunk_decay));
      load_factors(b, offsetof(ChunkFactors, to_end));
      State::send(args.S, c, args.residual, c - 1);
#pragma unroll
      for (int i = 0; i < State::kStateRegisters; ++i) s[i] *= chunk_decay;
      wgmma_wait<0>();  // V''

#pragma unroll
      for (int j = 0; j < 8; ++j) {
        w[2 * j] = pack_operand<T>(b[j].x * u[4 * j], b[j].y * u[4 * j + 1]);
        w[2 * j + 1] = pack_operand<T>(b[j].x * u[4 * j + 2], b[j].y * u[4 * j + 3]);
        rows[2 * j] = pack_operand<T>(u[4 * j], u[4 * j + 1]);
        rows[2 * j + 1] = pack_operand<T>(u[4 * j + 2], u[4 * j + 3]);
      }
      wgmma_fence();
      State::update(s, w, tiles, 0);  // S' += (to_end V'') K
      wgmma_commit();
      wgmma_wait<0>();
      State::pack(s_operand, s);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (n > 0) State::send_last_rows(args.residual, n - 1, rows, value_at);
  }
};

//   X' = (D' K') to_end + dO' P        dW' = X' A
//   D' <- chunk_decay D' + (out_decay dO)' Q - (beta decay dW)' K
template <class T, int kKeyDim>
struct AdjointConsumer : ScanState<T, kKeyDim> {
  using State = ScanState<T, kKeyDim>;
  using State::args, State::unit, State::shared;
  using typename State::Shared;

  __device__ __forceinline__ void run() const {
    const int lane = lane_id();
    const int n = unit.num_chunks;
    const bool has_tail = unit.tail_length < kRows;
    const uint32_t operand = wgmma_operand(shared.base);
    const uint32_t score_operand = wgmma_operand(shared.score(0));
    const uint32_t value_at = State::value_offset();
    float d[State::kStateRegisters];
    uint32_t d_operand[State::kStateRegisters / 2];
    float x[32];
    uint32_t rows[16] = {};
    State::load_state(d, unit.enters);
    State::pack(d_operand, d);
    int stage = 0;
    int phase = 0;
#pragma unroll 1
    for (int c = 0; c < n; ++c) {
      const uint32_t tiles = operand + stage * (sizeof(typename Shared::Stage) / 16);
      const uint32_t factors = shared.factor(stage) + 8 * (lane & 3);
      uint32_t w[16];
      uint32_t o[16];
      uint32_t y[16];
      float2 f[8];
      const auto load_factors = [&](size_t which) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = load_shared_pair(factors + static_cast<uint32_t>(which) + 32 * j);
      };
      mbarrier_wait(shared.full_barrier(stage), phase);
      if (has_tail && c == 0) mbarrier_wait(shared.trimmed_barrier(), 0);

      wgmma_fence();
      State::template multiply<kKeyDim / 16>(x, d_operand, tiles, 0);  // X' = D' K'
      wgmma_commit();
      State::put(d_operand, rows, value_at, c, stage == 0 ? kStages - 1 : stage - 1);
      State::load_values(o, shared.stage(stage) + Shared::kValues, value_at);
      load_factors(offsetof(ChunkFactors, out_decay));
      const float chunk_decay = load_shared(shared.factor(stage) + offsetof(ChunkFactors, chunk_decay));
#pragma unroll
      for (int i = 0; i < State::kStateRegisters; ++i) d[i] *= chunk_decay;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 o0 = unpack2<T>(o[2 * j]);
        const float2 o1 = unpack2<T>(o[2 * j + 1]);
        y[2 * j] = pack_operand<T>(f[j].x * o0.x, f[j].y * o0.y);
        y[2 * j + 1] = pack_operand<T>(f[j].x * o1.x, f[j].y * o1.y);
      }
      load_factors(offsetof(ChunkFactors, to_end));
      wgmma_wait<0>();  // X

#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[4 * j] *= f[j].x;
        x[4 * j + 1] *= f[j].y;
        x[4 * j + 2] *= f[j].x;
        x[4 * j + 3] *= f[j].y;
      }
      mbarrier_wait(shared.scored_barrier(c & 1), (c >> 1) & 1);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {  // X' += dO' P
        wgmma_rs_n64_transposed<T>(x, o + 4 * k,
                                   wgmma_descriptor(score_operand + (c & 1) * (kTileBytes / 16), k * 2048));
      }
      wgmma_commit();
      State::update(d, y, tiles, Shared::kQ);  // D' += (out_decay dO)' Q
      wgmma_commit();
      State::send(args.D, n - 1 - c, args.dW, n - c);
      wgmma_wait<1>();  // X
#pragma unroll
      for (int i = 0; i < 16; ++i) w[i] = pack_operand<T>(x[2 * i], x[2 * i + 1]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k) {  // dW' = X' A
        const uint64_t a = wgmma_descriptor(tiles, Shared::kA + k * 2048);
        if (k == 0) {
          wgmma_rs_n64_transposed_first<T>(x, w + 4 * k, a);
        } else {
          wgmma_rs_n64_transposed<T>(x, w + 4 * k, a);
        }
      }
      wgmma_commit();
      load_factors(offsetof(ChunkFactors, beta_decay));
      wgmma_wait<0>();  // dW, D
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        y[2 * j] = pack_operand<T>(-f[j].x * x[4 * j], -f[j].y * x[4 * j + 1]);
        y[2 * j + 1] = pack_operand<T>(-f[j].x * x[4 * j + 2], -f[j].y * x[4 * j + 3]);
        rows[2 * j] = pack_operand<T>(x[4 * j], x[4 * j + 1]);
        rows[2 * j + 1] = pack_operand<T>(x[4 * j + 2], x[4 * j + 3]);
      }
      wgmma_fence();
      State::update(d, y, tiles, 0);  // D' -= (beta decay dW)' K
      wgmma_commit();
      wgmma_wait<0>();
      State::pack(d_operand, d);
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (n > 0) State::send_last_rows(args.dW, 0, rows, value_at);
    State::store_state(d, unit.leaves);
  }
};

}  // namespace cula::gdn::sm90
