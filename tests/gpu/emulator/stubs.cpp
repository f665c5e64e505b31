// What the emulator's library has no use for, but whose names it needs.
#include <cuda_runtime.h>

#include "common/host/error.h"
#include "gdn/backend.h"

namespace cula::gdn {

const BackendTable& cpu_backend() { throw_runtime_error("the emulator's library has no CPU backend"); }

}  // namespace cula::gdn

// The emulator's tensor maps are made without the driver.
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return cudaErrorUnknown;
}
