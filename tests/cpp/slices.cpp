#include "slices.h"

namespace cula::test {

Operands tokens_of(const Operands& x, int64_t begin, int64_t end) {
  Operands part = x;
  for (Tensor* t : {&part.q, &part.k, &part.v, &part.g, &part.beta, &part.grad_output}) *t = tokens(*t, begin, end);
  return part;
}

Results head_of(const Results& r, int64_t j) {
  Results part = r;
  for (Tensor* t : {&part.o, &part.dq, &part.dk, &part.dv, &part.dg, &part.dbeta}) {
    if (*t) *t = head(*t, j);
  }
  for (Tensor* t : {&part.final_state, &part.dh0}) {
    if (*t) *t = head_of_state(*t, j);
  }
  for (Tensor* t : {&part.dA_log, &part.ddt_bias}) {
    if (*t) *t = t->slice(0, j, j + 1);
  }
  return part;
}

Results sequence_of(const Results& r, const std::vector<int64_t>& offsets, int64_t n) {
  Results part = r;
  for (Tensor* t : {&part.o, &part.dq, &part.dk, &part.dv, &part.dg, &part.dbeta}) {
    if (*t) *t = tokens(*t, offsets[n], offsets[n + 1]);
  }
  for (Tensor* t : {&part.final_state, &part.dh0}) {
    if (*t) *t = t->slice(0, n, n + 1);
  }
  part.dA_log = part.ddt_bias = Tensor();
  return part;
}

OperatorCase case_of_sequence(const OperatorCase& c, int64_t n) {
  OperatorCase one = c;
  one.problem.sequence_offsets.reset();
  one.problem.tokens = (*c.problem.sequence_offsets)[n + 1] - (*c.problem.sequence_offsets)[n];
  return one;
}

Results run_sequence_alone(const OperatorCase& c, const Operands& x, int64_t n) {
  Results r = run(case_of_sequence(c, n), operands_of_sequence(c, x, n));
  r.dA_log = r.ddt_bias = Tensor();
  return r;
}

}  // namespace cula::test
