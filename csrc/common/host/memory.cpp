#include "common/host/memory.h"

#include <sys/mman.h>

#include <cstdint>

namespace cula {

void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const size_t to_boundary = (kPage - address % kPage) % kPage;
  if (bytes < to_boundary + kPage) return;
  madvise(static_cast<char*>(data) + to_boundary, (bytes - to_boundary) / kPage * kPage, MADV_HUGEPAGE);
#endif
}

}  // namespace cula
