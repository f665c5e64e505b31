// Which hand-overs between threads compute-sanitizer's racecheck follows.
//
// Small kernels hand tiles through shared memory in the ways that the library's kernels do, with the same primitives
// (csrc/common/device). Each way comes correctly synchronised and with a fault: a wait or a barrier left out. What the
// tool reports of the first is no race, and what it does not report of the second it does not see. Every kernel copies
// its input to its output, so that the host sees whether a correct one is.
//
//   racecheck_probe            lists the variants: number, name, fault
//   racecheck_probe NUMBER     runs one alone; run_racecheck_probe.py runs all under the tool
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "common/device/cp_async.cuh"
#include "common/device/ldmatrix.cuh"
#include "common/device/mbarrier.cuh"
#include "common/device/shared.cuh"
#include "common/device/stmatrix.cuh"
#include "common/device/tma.cuh"
#include "common/device/warp.cuh"

namespace cula::probe {

using namespace device;

constexpr int kTileWords = 128;  // 32 rows of 16 bytes, one a lane: what an ldmatrix of four tiles reads
constexpr int kTileBytes = 4 * kTileWords;
constexpr int kSlots = 2;
constexpr int kMaxWarps = 4;
constexpr int kLoopRounds = 6;  // of kernels whose loop stays one

enum class Fault {
  kNone,
  kFull,      // readers do not wait for what is written
  kEmpty,     // writers do not wait for those who read what was there before
  kCopy,      // a thread does not wait for its own cp.async
  kSyncWarp,  // one lane arrives for its warp without the warp's barrier in front
};

struct ProbeArgs {
  CUtensorMap map;     // of `source`, a tile a box
  const uint32_t* in;  // [round][warp that writes][word]
  uint32_t* out;       // [warp that reads][round][warp that writes][word]
  volatile int* pace;  // [kMaxWarps], zeros
  int rounds;
};

struct alignas(128) Tile {
  uint32_t words[kTileWords];
};

// ---- what is handed over -------------------------------------------------------------------------------------------
struct Stores {
  template <Fault>
  __device__ static void put(const Tile& tile, const uint32_t* source) {
    const uint4 x = *reinterpret_cast<const uint4*>(source + 4 * lane_id());
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(&tile.words[4 * lane_id()])), "r"(x.x),
                 "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
};
struct MatrixStores {
  template <Fault>
  __device__ static void put(const Tile& tile, const uint32_t* source) {
    const uint32_t* x = source + lane_id();
    stmatrix_x4(shared_address(&tile.words[4 * lane_id()]), x[0], x[32], x[64], x[96]);
  }
};
struct Copies {
  template <Fault kFault>
  __device__ static void put(Tile& tile, const uint32_t* source) {
    cp_async<16>(&tile.words[4 * lane_id()], source + 4 * lane_id(), true);
    cp_async_commit();
    if constexpr (kFault != Fault::kCopy) cp_async_wait<0>();
  }
};
// The same, but a round's copies are still under way when the warp arrives for those of the round before: as the passes
// over chunks do where shared memory has room for more of them.
struct LaggingCopies {};
// The copies of two rounds begin together, as two groups; each is waited for and announced by itself.
struct PairedCopies {};
template <class Put>
inline constexpr bool kByGroups = std::is_same_v<Put, LaggingCopies> || std::is_same_v<Put, PairedCopies>;
// By the copy engine, which completes the barrier of the slot: BulkCopies a run of bytes, TensorCopies a box.
struct BulkCopies {};
struct TensorCopies {};
template <class Put>
inline constexpr bool kByCopyEngine = std::is_same_v<Put, BulkCopies> || std::is_same_v<Put, TensorCopies>;

struct Loads {
  __device__ static void get(const Tile& tile, uint32_t* target) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      target[32 * i + lane_id()] = load_shared_word(shared_address(&tile.words[32 * i + lane_id()]));
    }
  }
};
struct MatrixLoads {
  __device__ static void get(const Tile& tile, uint32_t* target) {
    uint32_t x[4];
    ldmatrix_x4(x, &tile.words[4 * lane_id()]);
#pragma unroll
    for (int i = 0; i < 4; ++i) target[32 * i + lane_id()] = x[i];
  }
};

// ---- exchanges: every warp writes a tile and reads its neighbour's
// ---------------------------------------------------
struct WarpBarrier {
  template <int>
  __device__ static void sync() {
    sync_warp();
  }
};
struct BlockBarrier {
  template <int>
  __device__ static void sync() {
    sync_block();
  }
};
struct NamedBarrier {
  template <int kWarps>
  __device__ static void sync() {
    sync_named(1, 32 * kWarps);
  }
};
struct PairBarrier {  // its id is known at run time alone
  template <int>
  __device__ static void sync() {
    sync_named(2 + warp_id() / 2, 64);
  }
};

// step(r) for each round. kRounds: 0 if the loop is to stay one, and then there are `rounds` of them.
template <int kRounds, class Step>
__device__ __forceinline__ void for_rounds(int rounds, const Step& step) {
  if constexpr (kRounds == 0) {
#pragma unroll 1
    for (int r = 0; r < rounds; ++r) step(r);
  } else {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) step(r);
  }
}

// The first kWarps warps of the block take part. kRounds: see for_rounds.
template <class Before, class After, class Put, class Get, int kWarps, int kRounds, Fault kFault>
__global__ void exchange(const __grid_constant__ ProbeArgs args) {
  __shared__ Tile tiles[kWarps];
  const int warp = warp_id();
  if (warp >= kWarps) return;
  const int other = kWarps == 1 ? 0 : warp ^ 1;
  const auto step = [&](int r) {
    Put::template put<kFault>(tiles[warp], args.in + (r * kWarps + warp) * kTileWords);
    if constexpr (kFault != Fault::kFull) Before::template sync<kWarps>();
    Get::get(tiles[other], args.out + (r * kWarps + other) * kTileWords);
    if constexpr (kFault != Fault::kEmpty) After::template sync<kWarps>();
  };
  for_rounds<kRounds>(args.rounds, step);
  cp_async_wait<0>();
}

// ---- hand-overs: some warps write, others read
// -----------------------------------------------------------------------
struct Shared {
  Tile tiles[kSlots][kMaxWarps];
  uint64_t full[kSlots];
  uint64_t empty[kSlots];

  __device__ uint32_t full_barrier(int round) const { return shared_address(&full[round % kSlots]); }
  __device__ uint32_t empty_barrier(int round) const { return shared_address(&empty[round % kSlots]); }
};
// Of the n-th round in a slot.
__device__ __forceinline__ int parity(int round) { return round / kSlots & 1; }

// How the warps tell each other. `from` arrive, `to` wait.
//
// Named barriers: bar.arrive against bar.sync.
struct Arrivals {
  static constexpr bool kMbarriers = false;
  template <int kFrom, int kTo, Fault>
  __device__ static void arrive(const Shared&, bool full, int round) {
    arrive_named((full ? 1 : 1 + kSlots) + round % kSlots, 32 * (kFrom + kTo));
  }
  template <int kFrom, int kTo>
  __device__ static void wait(const Shared&, bool full, int round) {
    sync_named((full ? 1 : 1 + kSlots) + round % kSlots, 32 * (kFrom + kTo));
  }
};
// The same where those who write come late, so that readers have gone on when their arrival is waited for.
struct LateWriters : Arrivals {
  template <int kFrom, int kTo>
  __device__ static void wait(const Shared& shared, bool full, int round) {
    if (!full) __nanosleep(500'000);
    Arrivals::wait<kFrom, kTo>(shared, full, round);
  }
};
// And readers meet among themselves at another barrier: before they read, or when they have arrived.
template <bool kBefore, bool kBehind>
struct ReadersMeet : LateWriters {
  template <int kFrom, int kTo, Fault kFault>
  __device__ static void arrive(const Shared& shared, bool full, int round) {
    Arrivals::arrive<kFrom, kTo, kFault>(shared, full, round);
    if (kBehind && !full) sync_named(7, 32 * kFrom);
  }
  template <int kFrom, int kTo>
  __device__ static void wait(const Shared& shared, bool full, int round) {
    LateWriters::wait<kFrom, kTo>(shared, full, round);
    if (kBefore && full) sync_named(7, 32 * kTo);
  }
};
// Those who write wait too, by bar.sync, for those who read to come for it.
struct Meetings : Arrivals {
  template <int kFrom, int kTo, Fault kFault>
  __device__ static void arrive(const Shared& shared, bool full, int round) {
    if (full) {
      wait<kFrom, kTo>(shared, full, round);
    } else {
      Arrivals::arrive<kFrom, kTo, kFault>(shared, full, round);
    }
  }
};
struct Mbarriers {
  static constexpr bool kMbarriers = true;
  template <int kFrom, int kTo>
  __device__ static void wait(const Shared& shared, bool full, int round) {
    mbarrier_wait(full ? shared.full_barrier(round) : shared.empty_barrier(round), parity(round));
  }
};
// Every lane arrives.
struct AllLanes : Mbarriers {
  template <int kWarps>
  static constexpr int kArrivals = 32 * kWarps;
  template <int kFrom, int, Fault>
  __device__ static void arrive(const Shared& shared, bool full, int round) {
    mbarrier_arrive(full ? shared.full_barrier(round) : shared.empty_barrier(round));
  }
};
// One lane arrives for its warp.
struct OneLane : Mbarriers {
  template <int kWarps>
  static constexpr int kArrivals = kWarps;
  template <int kFrom, int, Fault kFault>
  __device__ static void arrive(const Shared& shared, bool full, int round) {
    if constexpr (kFault != Fault::kSyncWarp) sync_warp();
    if (lane_id() == 0) mbarrier_arrive(full ? shared.full_barrier(round) : shared.empty_barrier(round));
  }
};
// One lane also waits for its warp.
struct OneLaneWaits : OneLane {
  template <int kFrom, int kTo>
  __device__ static void wait(const Shared& shared, bool full, int round) {
    if (lane_id() == 0) Mbarriers::wait<kFrom, kTo>(shared, full, round);
    sync_warp();
  }
};
// The warps of a side meet at a named barrier, and one thread arrives for all.
struct OneThread : Mbarriers {
  template <int>
  static constexpr int kArrivals = 1;
  template <int kFrom, int, Fault>
  __device__ static void arrive(const Shared& shared, bool full, int round) {
    sync_named(full ? 5 : 6, 32 * kFrom);
    if (warp_id() == (full ? 0 : static_cast<int>(blockDim.x / 32) - 1) && lane_id() == 0) {
      mbarrier_arrive(full ? shared.full_barrier(round) : shared.empty_barrier(round));
    }
  }
};

// Where a wait is left out, one side could run ahead by two rounds of a slot, whose phases an mbarrier's parity does
// not tell apart, and wait for ever. A word of global memory, which orders nothing and which racecheck does not look
// at, keeps it behind.
__device__ __forceinline__ void pace_set(const ProbeArgs& args, int warp, int rounds) {
  if (lane_id() == 0) args.pace[warp] = rounds;
}
__device__ __forceinline__ void pace_wait(const ProbeArgs& args, int first, int end, int rounds) {
  for (int w = first; lane_id() == 0 && w < end; ++w) {
    while (args.pace[w] < rounds) {
    }
  }
  sync_warp();
}

template <class Sync, class Put, class Get, int kWriters, int kReaders, int kRounds, Fault kFault>
__global__ void hand_over(const __grid_constant__ ProbeArgs args) {
  static_assert(kWriters + kReaders <= kMaxWarps && (!kByCopyEngine<Put> || kWriters == 1));
  __shared__ Shared shared;
  const int warp = warp_id();
  const int rounds = kRounds == 0 ? args.rounds : kRounds;
  if constexpr (Sync::kMbarriers) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kSlots; ++s) {
        mbarrier_init(shared.full_barrier(s), kByCopyEngine<Put> ? 1 : Sync::template kArrivals<kWriters>);
        mbarrier_init(shared.empty_barrier(s), Sync::template kArrivals<kReaders>);
      }
      mbarrier_init_fence();
    }
    sync_block();
  }

  const auto wait_for_room = [&](int r) {
    if (r >= kSlots && kFault != Fault::kEmpty) Sync::template wait<kReaders, kWriters>(shared, false, r - kSlots);
    if (r >= kSlots && kFault == Fault::kEmpty) pace_wait(args, kWriters, kWriters + kReaders, r - kSlots + 1);
    if constexpr (kFault == Fault::kFull) pace_set(args, warp, r + 1);
  };
  const auto announce = [&](int r) {
    if constexpr (Sync::kMbarriers || kFault != Fault::kFull) {
      Sync::template arrive<kWriters, kReaders, kFault>(shared, true, r);
    }
  };
  const auto write = [&](int r) {
    if constexpr (std::is_same_v<Put, PairedCopies>) {
      if (r % 2 != 0) return;
      for (int i = r; i < r + 2; ++i) {
        wait_for_room(i);
        Copies::put<Fault::kCopy>(shared.tiles[i % kSlots][warp], args.in + (i * kWriters + warp) * kTileWords);
      }
      if constexpr (kFault != Fault::kCopy) cp_async_wait<1>();
      announce(r);
      if constexpr (kFault != Fault::kCopy) cp_async_wait<0>();
      announce(r + 1);
      return;
    }
    wait_for_room(r);
    Tile& tile = shared.tiles[r % kSlots][warp];
    if constexpr (kByCopyEngine<Put>) {
      const uint32_t barrier = shared.full_barrier(r);
      if (lane_id() == 0) {
        mbarrier_arrive_expect(barrier, kTileBytes);
        if constexpr (std::is_same_v<Put, BulkCopies>) {
          bulk_load(shared_address(&tile), args.in + r * kTileWords, kTileBytes, barrier);
        } else {
          tma_load(shared_address(&tile), args.map, {0, 0, r, 0}, barrier);
        }
      }
      if constexpr (kFault == Fault::kFull) mbarrier_wait(barrier, parity(r));  // the writer does, the readers do not
    } else if constexpr (std::is_same_v<Put, LaggingCopies>) {
      Copies::put<Fault::kCopy>(tile, args.in + (r * kWriters + warp) * kTileWords);
      if (r > 0) {
        if constexpr (kFault != Fault::kCopy) cp_async_wait<1>();
        announce(r - 1);
      }
      if (r == rounds - 1) {
        if constexpr (kFault != Fault::kCopy) cp_async_wait<0>();
        announce(r);
      }
    } else if constexpr (!kByGroups<Put>) {
      Put::template put<kFault>(tile, args.in + (r * kWriters + warp) * kTileWords);
      announce(r);
    }
  };
  const auto read = [&](int r) {
    if constexpr (kFault != Fault::kFull) {
      Sync::template wait<kWriters, kReaders>(shared, true, r);
    } else {
      pace_wait(args, 0, kWriters, r + 1);
    }
    if constexpr (kFault == Fault::kEmpty) pace_set(args, warp, r + 1);
    for (int w = 0; w < kWriters; ++w) {
      const int64_t at = ((warp - kWriters) * rounds + r) * kWriters + w;
      Get::get(shared.tiles[r % kSlots][w], args.out + at * kTileWords);
    }
    if (r + kSlots < rounds && (Sync::kMbarriers || kFault != Fault::kEmpty)) {
      Sync::template arrive<kReaders, kWriters, kFault>(shared, false, r);
    }
  };
  if (warp < kWriters) {
    for_rounds<kRounds>(rounds, write);
  } else {
    for_rounds<kRounds>(rounds, read);
  }
  cp_async_wait<0>();
  sync_block();
}

// ---- the variants
// ----------------------------------------------------------------------------------------------------
struct Variant {
  std::string name;
  Fault fault;
  void (*kernel)(ProbeArgs);
  int threads;
  int rounds;
  int writers;
  int readers;  // copies of the output
};

const char* fault_name(Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return "correct";
    case Fault::kFull:
      return "no wait for data";
    case Fault::kEmpty:
      return "no wait for room";
    case Fault::kCopy:
      return "no wait for cp.async";
    case Fault::kSyncWarp:
      return "no __syncwarp";
  }
  return "";
}

// `Faults`: those that come besides the correct one.
template <class Before, class After, class Put, class Get, int kWarps, int kRounds, Fault... kFaults>
void add_exchange(std::vector<Variant>& variants, const std::string& name, int threads = 32 * kWarps) {
  constexpr int kLength = kRounds == 0 ? kLoopRounds : kRounds;
  variants.push_back({name, Fault::kNone, exchange<Before, After, Put, Get, kWarps, kRounds, Fault::kNone>, threads,
                      kLength, kWarps, 1});
  (variants.push_back(
       {name, kFaults, exchange<Before, After, Put, Get, kWarps, kRounds, kFaults>, threads, kLength, kWarps, 1}),
   ...);
}
template <class Sync, class Put, class Get, int kWriters, int kReaders, int kRounds, Fault... kFaults>
void add_hand_over(std::vector<Variant>& variants, const std::string& name) {
  constexpr int kLength = kRounds == 0 ? kLoopRounds : kRounds;
  constexpr int kThreads = 32 * (kWriters + kReaders);
  variants.push_back({name, Fault::kNone, hand_over<Sync, Put, Get, kWriters, kReaders, kRounds, Fault::kNone>,
                      kThreads, kLength, kWriters, kReaders});
  (variants.push_back({name, kFaults, hand_over<Sync, Put, Get, kWriters, kReaders, kRounds, kFaults>, kThreads,
                       kLength, kWriters, kReaders}),
   ...);
}

std::vector<Variant> all_variants() {
  constexpr Fault kFull = Fault::kFull;
  constexpr Fault kEmpty = Fault::kEmpty;
  constexpr Fault kCopy = Fault::kCopy;
  constexpr Fault kSyncWarp = Fault::kSyncWarp;
  using Warp = WarpBarrier;
  using Block = BlockBarrier;
  using Named = NamedBarrier;
  using Pair = PairBarrier;
  std::vector<Variant> v;

  add_exchange<Block, Block, Stores, Loads, 2, 1, kFull>(v, "1 stores, __syncthreads, once");
  add_exchange<Block, Block, Stores, Loads, 2, 0, kFull, kEmpty>(v, "1 stores, __syncthreads, loop");

  add_exchange<Named, Named, Stores, Loads, 2, 1, kFull>(v, "2 stores, bar.sync of the block, once");
  add_exchange<Named, Named, Stores, Loads, 2, 0, kFull, kEmpty>(v, "2 stores, bar.sync of the block, loop");
  add_exchange<Named, Named, Stores, Loads, 2, 0, kFull, kEmpty>(v, "2 stores, bar.sync of half the block, loop", 128);
  add_exchange<Pair, Pair, Stores, Loads, 4, 0, kFull, kEmpty>(v, "2 stores, bar.sync by pairs, loop");
  add_exchange<Pair, Named, Stores, Loads, 4, 0, kFull, kEmpty>(v, "2 stores, bar.sync by pairs then block, loop");

  add_hand_over<Arrivals, Stores, Loads, 1, 1, 1, kFull>(v, "3 stores, bar.arrive/sync 1:1, once");
  add_hand_over<Arrivals, Stores, Loads, 1, 1, 0, kFull, kEmpty>(v, "3 stores, bar.arrive/sync 1:1, ring");
  add_hand_over<Arrivals, Stores, Loads, 1, 1, 4, kFull, kEmpty>(v, "3 stores, bar.arrive/sync 1:1, unrolled");
  add_hand_over<Arrivals, Stores, Loads, 2, 2, 0, kFull, kEmpty>(v, "3 stores, bar.arrive/sync 2:2, ring");
  add_hand_over<Meetings, Stores, Loads, 1, 1, 0, kFull>(v, "3 stores, bar.sync/sync 1:1, ring");

  add_exchange<Block, Block, Copies, MatrixLoads, 2, 0, kFull, kEmpty, kCopy>(v, "4 cp.async, __syncthreads, loop");
  add_exchange<Named, Named, Copies, MatrixLoads, 2, 0, kFull, kEmpty, kCopy>(v, "4 cp.async, bar.sync, loop");
  add_hand_over<Arrivals, Copies, Loads, 1, 1, 1, kFull, kCopy>(v, "4 cp.async, bar.arrive/sync 1:1, once");
  add_hand_over<Arrivals, Copies, MatrixLoads, 1, 1, 1, kFull, kCopy>(
      v, "4 cp.async to ldmatrix, bar.arrive/sync 1:1, once");
  add_hand_over<Arrivals, Copies, MatrixLoads, 1, 1, 0, kFull, kEmpty, kCopy>(
      v, "4 cp.async to ldmatrix, bar.arrive/sync 1:1, ring");
  add_hand_over<Arrivals, Copies, MatrixLoads, 1, 2, 0, kFull, kEmpty>(
      v, "4 cp.async to ldmatrix, bar.arrive/sync 1:2, ring");
  add_hand_over<Meetings, Copies, MatrixLoads, 1, 1, 0, kFull>(v, "4 cp.async to ldmatrix, bar.sync/sync 1:1, ring");

  add_hand_over<Arrivals, LaggingCopies, MatrixLoads, 1, 1, 0, kFull, kEmpty, kCopy>(
      v, "4 cp.async to ldmatrix, the next under way, bar.arrive/sync 1:1, ring");
  add_hand_over<Arrivals, LaggingCopies, MatrixLoads, 2, 2, 0, kFull, kEmpty, kCopy>(
      v, "4 cp.async to ldmatrix, the next under way, bar.arrive/sync 2:2, ring");
  add_hand_over<Arrivals, PairedCopies, MatrixLoads, 1, 1, 0, kFull, kEmpty, kCopy>(
      v, "4 cp.async to ldmatrix, two groups, bar.arrive/sync 1:1, ring");
  add_hand_over<Arrivals, PairedCopies, MatrixLoads, 2, 2, 0, kFull, kEmpty, kCopy>(
      v, "4 cp.async to ldmatrix, two groups, bar.arrive/sync 2:2, ring");
  add_hand_over<AllLanes, LaggingCopies, MatrixLoads, 1, 1, 0, kFull, kEmpty, kCopy>(
      v, "4 cp.async to ldmatrix, the next under way, mbarrier all lanes 1:1, ring");

  add_hand_over<LateWriters, Copies, MatrixLoads, 2, 2, 0, kFull, kEmpty>(
      v, "4 cp.async to ldmatrix, late, bar.arrive/sync 2:2, ring");
  add_hand_over<ReadersMeet<false, true>, Copies, MatrixLoads, 2, 2, 0, kFull, kEmpty>(
      v, "4 cp.async to ldmatrix, late, readers meet behind, bar.arrive/sync 2:2, ring");
  add_hand_over<ReadersMeet<true, false>, Copies, MatrixLoads, 2, 2, 0, kFull, kEmpty>(
      v, "4 cp.async to ldmatrix, late, readers meet before, bar.arrive/sync 2:2, ring");
  add_hand_over<ReadersMeet<true, true>, LaggingCopies, MatrixLoads, 2, 2, 0, kFull, kEmpty>(
      v, "4 cp.async to ldmatrix, the next under way, late, readers meet, bar.arrive/sync 2:2, ring");
  add_hand_over<ReadersMeet<true, true>, Stores, Loads, 2, 2, 0, kFull, kEmpty>(
      v, "4 stores, late, readers meet, bar.arrive/sync 2:2, ring");

  add_hand_over<AllLanes, Stores, Loads, 1, 1, 1, kFull>(v, "5 stores, mbarrier all lanes 1:1, once");
  add_hand_over<AllLanes, Stores, Loads, 1, 1, 0, kFull, kEmpty>(v, "5 stores, mbarrier all lanes 1:1, ring");
  add_hand_over<AllLanes, Stores, Loads, 1, 1, 4, kFull, kEmpty>(v, "5 stores, mbarrier all lanes 1:1, unrolled");
  add_hand_over<AllLanes, Stores, MatrixLoads, 2, 2, 0, kFull, kEmpty>(
      v, "5 stores to ldmatrix, mbarrier all lanes 2:2, ring");

  add_hand_over<AllLanes, BulkCopies, Loads, 1, 1, 1, kFull>(v, "6 bulk copy, mbarrier all lanes 1:1, once");
  add_hand_over<AllLanes, BulkCopies, Loads, 1, 1, 0, kFull, kEmpty>(v, "6 bulk copy, mbarrier all lanes 1:1, ring");
  add_hand_over<AllLanes, BulkCopies, Loads, 1, 1, 4, kFull, kEmpty>(v,
                                                                     "6 bulk copy, mbarrier all lanes 1:1, unrolled");
  add_hand_over<OneLane, BulkCopies, Loads, 1, 2, 0, kFull, kEmpty, kSyncWarp>(
      v, "6 bulk copy, mbarrier one lane 1:2, ring");
  add_hand_over<OneLaneWaits, BulkCopies, MatrixLoads, 1, 2, 0, kFull, kEmpty>(
      v, "6 bulk copy to ldmatrix, mbarrier one lane waits 1:2, ring");
  add_hand_over<AllLanes, TensorCopies, Loads, 1, 1, 1, kFull>(v, "6 tensor copy, mbarrier all lanes 1:1, once");
  add_hand_over<AllLanes, TensorCopies, Loads, 1, 1, 0, kFull, kEmpty>(v,
                                                                       "6 tensor copy, mbarrier all lanes 1:1, ring");
  add_hand_over<OneLane, TensorCopies, MatrixLoads, 1, 2, 0, kFull, kEmpty, kSyncWarp>(
      v, "6 tensor copy to ldmatrix, mbarrier one lane 1:2, ring");

  add_hand_over<OneLane, Stores, Loads, 1, 1, 1, kFull, kSyncWarp>(v, "7 stores, mbarrier one lane 1:1, once");
  add_hand_over<OneLane, Stores, Loads, 1, 1, 0, kFull, kEmpty, kSyncWarp>(v, "7 stores, mbarrier one lane 1:1, ring");
  add_hand_over<OneLane, Stores, Loads, 2, 2, 0, kFull, kEmpty, kSyncWarp>(v, "7 stores, mbarrier one lane 2:2, ring");
  add_hand_over<OneLaneWaits, Stores, Loads, 2, 1, 0, kFull, kEmpty>(v, "7 stores, mbarrier one lane waits 2:1, ring");
  add_hand_over<OneThread, Stores, Loads, 2, 2, 0, kFull, kEmpty>(
      v, "7 stores, bar.sync then mbarrier one thread 2:2, ring");

  add_exchange<Warp, Warp, Stores, Loads, 1, 1, kFull>(v, "8 stores, __syncwarp, once");
  add_exchange<Warp, Warp, Stores, Loads, 1, 0, kFull, kEmpty>(v, "8 stores, __syncwarp, loop");
  add_exchange<Warp, Warp, Stores, MatrixLoads, 1, 0, kFull, kEmpty>(v, "8 stores to ldmatrix, __syncwarp, loop");
  add_exchange<Warp, Warp, MatrixStores, MatrixLoads, 1, 0, kFull, kEmpty>(v, "8 stmatrix to ldmatrix, __syncwarp");
  add_exchange<Warp, Warp, Copies, MatrixLoads, 1, 0, kFull, kEmpty, kCopy>(v, "8 cp.async to ldmatrix, __syncwarp");
  return v;
}

// ---- running
// ---------------------------------------------------------------------------------------------------------
void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}

CUtensorMap make_map(uint32_t* tiles, int count) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  const auto rows = static_cast<cuuint64_t>(count);
  const cuuint64_t sizes[] = {kTileWords, 1, rows, 1};
  const cuuint64_t strides[] = {kTileBytes, kTileBytes, rows * kTileBytes};
  const cuuint32_t box[] = {kTileWords, 1, 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 4, tiles, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", static_cast<int>(result));
    std::exit(2);
  }
  return map;
}

bool run(const Variant& variant) {
  const int tiles = variant.rounds * variant.writers;
  const size_t bytes = static_cast<size_t>(tiles) * kTileBytes;
  std::vector<uint32_t> in(bytes / 4);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint32_t>(2654435761u * (i + 1));
  std::vector<uint32_t> out(in.size() * variant.readers);
  uint32_t* device_in = nullptr;
  ProbeArgs args = {};
  args.rounds = variant.rounds;
  void* pace = nullptr;
  check(cudaMalloc(&device_in, bytes), "cudaMalloc");
  check(cudaMalloc(&args.out, bytes * variant.readers), "cudaMalloc");
  check(cudaMalloc(&pace, kMaxWarps * sizeof(int)), "cudaMalloc");
  check(cudaMemcpy(device_in, in.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaMemset(args.out, 0, bytes * variant.readers), "cudaMemset");
  check(cudaMemset(pace, 0, kMaxWarps * sizeof(int)), "cudaMemset");
  args.map = make_map(device_in, tiles);
  args.in = device_in;
  args.pace = static_cast<volatile int*>(pace);
  variant.kernel<<<1, variant.threads>>>(args);
  check(cudaGetLastError(), "launch");
  check(cudaMemcpy(out.data(), args.out, bytes * variant.readers, cudaMemcpyDeviceToHost), "kernel");
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] != in[i % in.size()]) return false;
  }
  return true;
}

}  // namespace cula::probe

// 0: it ran, and if it is a correct one, its output is right.
int main(int argc, char** argv) {
  using namespace cula::probe;
  const std::vector<Variant> variants = all_variants();
  const int number = argc == 2 ? std::atoi(argv[1]) : -1;
  if (argc == 1) {
    for (size_t i = 0; i < variants.size(); ++i) {
      std::printf("%zu\t%s\t%s\n", i, variants[i].name.c_str(), fault_name(variants[i].fault));
    }
    return 0;
  }
  if (number < 0 || number >= static_cast<int>(variants.size())) {
    std::fprintf(stderr, "usage: %s [number below %zu]\n", argv[0], variants.size());
    return 2;
  }
  const bool right = run(variants[number]);
  std::printf("values: %s\n", right ? "right" : "wrong");
  return right || variants[number].fault != Fault::kNone ? 0 : 1;
}
