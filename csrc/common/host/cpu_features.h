// Which instruction sets this processor and operating system offer.
#pragma once

#include <string>

namespace cula {

// In ascending order; each includes the ones before it.
enum class CpuIsa { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

// Whether this build has kernels for it.
bool built_for(CpuIsa isa);

// The best one that this machine has and this build has kernels for.
CpuIsa best_cpu_isa();

// That, or a lesser one named by the environment variable CULA_CPU_ISA (read once): "generic", "avx2", "avx512",
// "avx512_bf16" or "amx_bf16". A name that is unknown, beyond the machine or not in the build throws cula::Error.
CpuIsa cpu_isa();

const char* cpu_isa_name(CpuIsa isa);
std::string cpu_isa_name();  // of cpu_isa()

// Number of processors that this process may run on.
int hardware_threads();

}  // namespace cula
