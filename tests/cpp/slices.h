// Parts of tensors, operands and results: some tokens, one head, one packed sequence. All are views of the same memory.
#pragma once

#include "operator_case.h"

namespace cula::test {

inline Tensor head(const Tensor& t, int64_t j) { return t.slice(2, j, j + 1); }
inline Tensor head_of_state(const Tensor& t, int64_t j) { return t.slice(1, j, j + 1); }
inline Tensor tokens(const Tensor& t, int64_t begin, int64_t end) { return t.slice(1, begin, end); }

Operands tokens_of(const Operands& x, int64_t begin, int64_t end);
Results head_of(const Results& r, int64_t j);  // with as many heads as value heads

// Packed sequence n: its results without the sums over all sequences, the case that computes it alone, and what that
// gives.
Results sequence_of(const Results& r, const std::vector<int64_t>& offsets, int64_t n);
OperatorCase case_of_sequence(const OperatorCase& c, int64_t n);
Results run_sequence_alone(const OperatorCase& c, const Operands& x, int64_t n);

}  // namespace cula::test
