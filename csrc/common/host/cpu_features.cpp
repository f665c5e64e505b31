#include "common/host/cpu_features.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "common/host/error.h"

// Which instruction sets this build has kernels for: one bit each, in the order of CpuIsa.
#ifndef CULA_ISA_MASK
#define CULA_ISA_MASK 0x1f
#endif

namespace cula {

namespace {

constexpr CpuIsa kAllIsas[] = {CpuIsa::kGeneric, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Bf16, CpuIsa::kAmxBf16};

#if defined(__x86_64__)
// Linux gives a process the large tile state only when asked to.
bool may_use_matrix_tiles() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

CpuIsa detect_processor() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return CpuIsa::kGeneric;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return CpuIsa::kAvx2;
  if (!__builtin_cpu_supports("avx512bf16")) return CpuIsa::kAvx512;
  const bool amx = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && may_use_matrix_tiles();
  return amx ? CpuIsa::kAmxBf16 : CpuIsa::kAvx512Bf16;
#else
  return CpuIsa::kGeneric;
#endif
}

}  // namespace

bool built_for(CpuIsa isa) { return (CULA_ISA_MASK >> static_cast<int>(isa) & 1) != 0; }

CpuIsa best_cpu_isa() {
  static const CpuIsa best = [] {
    CpuIsa isa = detect_processor();
    while (!built_for(isa)) isa = static_cast<CpuIsa>(static_cast<int>(isa) - 1);  // generic is always there
    return isa;
  }();
  return best;
}

namespace {

CpuIsa choose() {
  const CpuIsa best = best_cpu_isa();
  const char* wanted = std::getenv("CULA_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return best;
  for (CpuIsa isa : kAllIsas) {
    if (std::strcmp(wanted, cpu_isa_name(isa)) != 0) continue;
    if (!built_for(isa)) throw_value_error("CULA_CPU_ISA: this build has no kernels for ", wanted);
    if (isa > best) {
      throw_value_error("CULA_CPU_ISA: ", wanted, " is beyond this processor, whose best is ", cpu_isa_name(best));
    }
    return isa;
  }
  throw_value_error("CULA_CPU_ISA: expected generic, avx2, avx512, avx512_bf16 or amx_bf16, got ", wanted);
}

}  // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = choose();
  return isa;
}

const char* cpu_isa_name(CpuIsa isa) {
  constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
  return kNames[static_cast<int>(isa)];
}

std::string cpu_isa_name() { return cpu_isa_name(cpu_isa()); }

int hardware_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

}  // namespace cula
