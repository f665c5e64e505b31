// Vectors, products and matrix tiles of one instruction set, CULA_ISA. A program of its own for each: the code that
// asks whether the processor has it must not be linked with library templates that were compiled for it.
#include <cstdio>
#include <iterator>

#include "common/host/cpu_features.h"
#include "isa/checks.h"

int main() {
  constexpr int kSkipped = 77;
  if (cula::best_cpu_isa() < cula::CpuIsa::CULA_NEEDED_ISA) {
    std::puts("skipped: this processor does not have the instruction set");
    return kSkipped;
  }
  using Check = std::string (*)();
  struct Row {
    const char* name;
    Check check;
  };
  constexpr Row kRows[] = {{"products", cula::CULA_ISA::check_products},
                           {"transpose", cula::CULA_ISA::check_transpose},
                           {"exponential", cula::CULA_ISA::check_exponential}};
  int failed = 0;
  for (const Row& row : kRows) {
    const std::string wrong = row.check();
    if (wrong.empty()) continue;
    ++failed;
    std::printf("%s:\n%s\n", row.name, wrong.c_str());
  }
  std::printf("%d passed, %d failed\n", static_cast<int>(std::size(kRows)) - failed, failed);
  return failed == 0 ? 0 : 1;
}
