// Read by clang-tidy alone, before every file: a builtin of GCC that the CPU kernels use and clang does not know.
#pragma once

#if defined(__clang__)
template <class V, class Mask>
V __builtin_shuffle(V first, V second, Mask mask) {  // NOLINT(bugprone-reserved-identifier)
  constexpr int kLanes = sizeof(V) / sizeof(first[0]);
  V result = first;
  for (int i = 0; i < kLanes; ++i) result[i] = mask[i] < kLanes ? first[mask[i]] : second[mask[i] - kLanes];
  return result;
}
template <class V, class Mask>
V __builtin_shuffle(V vector, Mask mask) {  // NOLINT(bugprone-reserved-identifier)
  return __builtin_shuffle(vector, vector, mask);
}
#endif
