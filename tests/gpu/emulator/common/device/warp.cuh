// Warp and block co-operation on the emulator.
#pragma once

#include "emulator.h"

namespace cula::device {

inline int thread_index_anew() { return static_cast<int>(threadIdx.x); }
inline int lane_id() { return emulator::current().lane; }
// A shuffle on a GPU, so all lanes must meet here too.
inline int warp_id() {
  emulator::meet_warp("warp_id", nullptr, [](void* const*) {});
  return emulator::current().warp;
}

template <class T>
struct EmulatedShuffle {
  T value;
  int source;
  T result;
};

template <class T>
inline T emulated_shuffle(T value, int source) {
  EmulatedShuffle<T> mine = {value, source, value};
  emulator::meet_warp("shfl", &mine, [](void* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      auto& m = *static_cast<EmulatedShuffle<T>*>(lanes[lane]);
      if (m.source >= 0 && m.source < 32) m.result = static_cast<EmulatedShuffle<T>*>(lanes[m.source])->value;
    }
  });
  return mine.result;
}

template <class T>
inline T shuffle(T value, int lane) {
  return emulated_shuffle(value, lane & 31);
}
template <class T>
inline T shuffle_up(T value, int delta) {
  return emulated_shuffle(value, lane_id() - delta);
}
template <class T>
inline T shuffle_down(T value, int delta) {
  return emulated_shuffle(value, lane_id() + delta);
}
template <class T>
inline T shuffle_xor(T value, int mask) {
  return emulated_shuffle(value, lane_id() ^ mask);
}

inline unsigned ballot(bool predicate) {
  struct Vote {
    bool predicate;
    unsigned result;
  } mine = {predicate, 0};
  emulator::meet_warp("vote", &mine, [](void* const* lanes) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= unsigned{static_cast<Vote*>(lanes[lane])->predicate} << lane;
    for (int lane = 0; lane < 32; ++lane) static_cast<Vote*>(lanes[lane])->result = bits;
  });
  return mine.result;
}

inline void sync_warp() {
  emulator::meet_warp("bar.warp", nullptr, [](void* const*) {});
}
inline void sync_block() { emulator::meet_block(0, static_cast<int>(blockDim.x)); }
inline void sync_named(int id, int threads) { emulator::meet_block(id, threads); }
inline void arrive_named(int id, int threads) { emulator::arrive_block(id, threads); }

template <class T>
inline T warp_sum(T value) {
  for (int mask = 16; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}

inline unsigned warp_max(unsigned value) {
  for (int mask = 16; mask > 0; mask >>= 1) value = std::max(value, shuffle_xor(value, mask));
  return value;
}

template <int kWidth, class T>
inline T group_sum(T value) {
  for (int mask = kWidth / 2; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}

template <class T>
inline T warp_inclusive_scan(T value) {
  for (int delta = 1; delta < 32; delta <<= 1) {
    const T below = shuffle_up(value, delta);
    if (lane_id() >= delta) value += below;
  }
  return value;
}

template <class T>
inline T warp_reverse_inclusive_scan(T value) {
  for (int delta = 1; delta < 32; delta <<= 1) {
    const T above = shuffle_down(value, delta);
    if (lane_id() + delta < 32) value += above;
  }
  return value;
}

}  // namespace cula::device
