// Checks of code that is compiled once for each instruction set. Each returns what is wrong, or nothing.
#pragma once

#include <string>

#include "common/host/simd.h"

namespace cula::CULA_ISA {

std::string check_products();     // every operand form, triangle and size against a plain float64 loop
std::string check_transpose();    // squares of every lane count
std::string check_exponential();  // against the C library, over the whole range

}  // namespace cula::CULA_ISA
