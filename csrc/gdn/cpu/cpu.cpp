// The CPU backend: the kernels of the best instruction set that this processor has.
#include "common/host/cpu_features.h"
#include "gdn/backend.h"

// As in cpu_features.cpp.
#ifndef CULA_ISA_MASK
#define CULA_ISA_MASK 0x1f
#endif

namespace cula::gdn {

namespace cpu {

#define CULA_GDN_DECLARE_TABLE(isa) \
  namespace isa {                   \
  extern const BackendTable kTable; \
  }
CULA_GDN_DECLARE_TABLE(generic)
CULA_GDN_DECLARE_TABLE(avx2)
CULA_GDN_DECLARE_TABLE(avx512)
CULA_GDN_DECLARE_TABLE(avx512_bf16)
CULA_GDN_DECLARE_TABLE(amx_bf16)
#undef CULA_GDN_DECLARE_TABLE

}  // namespace cpu

const BackendTable& cpu_backend() {
  switch (cpu_isa()) {
#if CULA_ISA_MASK & 16
    case CpuIsa::kAmxBf16:
      return cpu::amx_bf16::kTable;
#endif
#if CULA_ISA_MASK & 8
    case CpuIsa::kAvx512Bf16:
      return cpu::avx512_bf16::kTable;
#endif
#if CULA_ISA_MASK & 4
    case CpuIsa::kAvx512:
      return cpu::avx512::kTable;
#endif
#if CULA_ISA_MASK & 2
    case CpuIsa::kAvx2:
      return cpu::avx2::kTable;
#endif
    default:
      return cpu::generic::kTable;
  }
}

}  // namespace cula::gdn
