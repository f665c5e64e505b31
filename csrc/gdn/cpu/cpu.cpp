// The CPU backend: the kernels of the best instruction set that this processor has.
#include "common/host/cpu_features.h"
#include "gdn/backend.h"

namespace cula::gdn {

namespace cpu {

#define CULA_GDN_DECLARE_TABLE(isa) \
  namespace isa {                   \
  extern const BackendTable kTable; \
  }
CULA_GDN_DECLARE_TABLE(generic)
#if defined(__x86_64__)
CULA_GDN_DECLARE_TABLE(avx2)
CULA_GDN_DECLARE_TABLE(avx512)
CULA_GDN_DECLARE_TABLE(avx512_bf16)
CULA_GDN_DECLARE_TABLE(amx_bf16)
#endif
#undef CULA_GDN_DECLARE_TABLE

}  // namespace cpu

const BackendTable& cpu_backend() {
#if defined(__x86_64__)
  switch (cpu_isa()) {
    case CpuIsa::kAmxBf16:
      return cpu::amx_bf16::kTable;
    case CpuIsa::kAvx512Bf16:
      return cpu::avx512_bf16::kTable;
    case CpuIsa::kAvx512:
      return cpu::avx512::kTable;
    case CpuIsa::kAvx2:
      return cpu::avx2::kTable;
    case CpuIsa::kGeneric:
      break;
  }
#endif
  return cpu::generic::kTable;
}

}  // namespace cula::gdn
