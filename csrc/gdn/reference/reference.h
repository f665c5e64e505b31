// The operator as its definition reads, token by token, in float64: what every other implementation is checked
// against. Not fast, not chunked. It shares the sequence table, tensor views and validation with the backends, but no
// arithmetic.
#pragma once

#include "gdn/gdn.h"

namespace cula::gdn::reference {

// Same meaning as cula::gdn::forward; inputs of any float type, results are rounded once to the output's type.
// `saved` must be absent. Reads the sizes, lengths and flags of the problem; its dtype, chunk size and backend do not
// matter. Runs on the CPU.
void forward(const Problem& problem, const ForwardTensors& tensors);

// The exact adjoint of the recurrence (reverse-mode by hand). Same meaning as cula::gdn::backward, but q and k are
// always the raw inputs and `saved` must be absent.
void backward(const Problem& problem, const BackwardTensors& tensors);

}  // namespace cula::gdn::reference
