// Runs the kernels of the cuda backend on the CPU, a block at a time, each thread of a block as a fiber: their logic
// and fragment layouts can be tested on a machine without a GPU. The headers beside this one take the place of
// csrc/common/device; all else is the library's own source, compiled as C++.
//
// It is stricter than a GPU where that finds faults: shared memory starts as NaN, cp.async copies nothing before it is
// waited for, the lanes of a warp must meet in the same operation, and warps are held up at random, so that a missing
// barrier shows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#undef __shared__
#undef __grid_constant__
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other
#define __grid_constant__

namespace cula::emulator {

struct Index {
  unsigned x;
};

// The thread that runs.
struct Thread {
  Index thread;
  int lane;
  int warp;
  void* stack_pointer;
  bool done;
  std::vector<std::vector<std::function<void()>>> copies;  // cp.async by group; the last is open
};

Thread& current();
Index block_index();
Index block_size();
Index grid_size();
unsigned char* shared_memory();

void yield();
// All lanes of the warp meet; `combine` sees what each brought.
void meet_warp(const char* operation, void* mine, const std::function<void(void* const*)>& combine);
void meet_block(int barrier, int threads);
void arrive_block(int barrier, int threads);  // is counted in and goes on
void meet_warpgroup(void* mine, const std::function<void(void* const*)>& combine);
[[noreturn]] void fault(const char* what, const char* operation);
void run_grid(int64_t blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel);

inline float uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

}  // namespace cula::emulator

#define threadIdx (cula::emulator::current().thread)
#define blockIdx (cula::emulator::block_index())
#define blockDim (cula::emulator::block_size())
#define gridDim (cula::emulator::grid_size())

using std::max;
using std::min;
inline double __hiloint2double(int high, int low) {
  const uint64_t bits = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) { return cula::emulator::uint_as_float(bits); }
