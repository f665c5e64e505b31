// One call of a stage: sizes, inputs that are drawn for that stage alone, and every stage beside its formula.
#pragma once

#include <array>
#include <span>
#include <string>
#include <vector>

#include "gdn/stages.h"
#include "operator_case.h"

namespace cula::test {

enum class Gate { kAbsent, kOrdinary, kResets };

struct StageCase {
  DType dtype = DType::kFloat32;
  int64_t chunk_size = 64;
  bool packed = false;
  Gate gate = Gate::kOrdinary;
  bool state_v_first = false;
  int64_t H = 2, HV = 4, K = 20, V = 12;
  int64_t B = 2, T = 65;
};
std::string case_name(const StageCase& s);
void PrintTo(const StageCase& s, std::ostream* stream);
OperatorCase operator_case(const StageCase& s);

// What all stages together read. Each is drawn on its own, so that a stage is tested without the others; only A must be
// a triangular inverse.
struct StageInputs {
  Tensor q, k, v, beta, gamma, raw_gate, log_decay, A_log, dt_bias;
  Tensor L, A, w, u, v_new, h, initial_state;
  Tensor grad_output, dht, dv, dh, dw, du, dyg, rstd, dy;

  std::vector<Tensor*> all();
};
StageInputs make_inputs(const gdn::Plan& plan, Gate gate);

// How the outputs of a stage lie in memory.
using Allocate = Tensor (*)(DType, const Shape&);
Tensor row_major(DType dtype, const Shape& shape);
Tensor reversed_with_gaps(DType dtype, const Shape& shape);  // dimensions reversed, an element between any two

struct StageCall {
  const gdn::Plan& plan;
  Allocate allocate;
  Tensor x(const Shape& shape) const;     // an output in the type of the operands
  Tensor stat(const Shape& shape) const;  // an output in the type of states and statistics
};

// One stage of the library and its formula, which give their outputs in the same order; the gradient of an absent gate
// is an absent tensor.
struct Stage {
  const char* name;
  std::array<const char*, 4> outputs;  // their names, null behind the last
  bool has_gradients;
  std::vector<Tensor> (*run)(const StageCall&, const StageInputs&);
  std::vector<Tensor> (*expected)(const gdn::Plan&, const StageInputs&);
};
void PrintTo(const Stage& stage, std::ostream* stream);
std::span<const Stage> all_stages();
const Stage& stage_named(const std::string& name);

// Runs the library's stage; fails the test if an input changed or something beside the outputs was written.
std::vector<Tensor> run_stage(const Stage& stage, const gdn::Plan& plan, StageInputs inputs, Allocate allocate);

// Where the expected value is -inf (gamma of a reset), so must be the actual one; the rest is compared as usual.
void expect_stage_close(const Stage& stage, DType dtype, const std::vector<Tensor>& actual,
                        const std::vector<Tensor>& expected);

}  // namespace cula::test
