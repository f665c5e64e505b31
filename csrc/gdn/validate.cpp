#include "gdn/validate.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gdn/state_pools.h"

namespace cula::gdn {

namespace {

// The dtype an argument must have.
enum class Kind {
  kOperand,    // Problem::dtype
  kStatistic,  // stat_dtype
  kFloat,      // any float type
};

enum class Presence { kRequired, kOptional };

// Checks arguments one by one against shapes written in the letters of gdn.h.
class Checker {
 public:
  // `summaries`: size of the dimension P of context parallelism, where there is one.
  explicit Checker(const Plan& plan, int64_t summaries = 0)
      : plan_(plan), problem_(plan.problem()), summaries_(summaries) {}

  // `letters`: "B T HV V"; S stands for the two dimensions of a state in the problem's layout, "slots" and "rows" for
  // any number.
  void input(const DLTensor* tensor, const char* name, const char* letters, Kind kind,
             Presence presence = Presence::kRequired) const {
    if (present(tensor, name, presence)) checked(tensor, name, letters, kind);
  }

  void output(const DLTensor* tensor, const char* name, const char* letters, Kind kind,
              Presence presence = Presence::kRequired) const {
    if (present(tensor, name, presence)) check_writable(checked(tensor, name, letters, kind), name);
  }

  // Arguments whose shape is only known to equal another's.
  void like(const DLTensor* tensor, const char* name, const DLTensor* model, const char* model_name, Kind kind,
            bool is_output, int dropped_dims = 0) const {
    if (!present(tensor, name, Presence::kRequired)) return;
    const TensorView view = TensorView::from(tensor, name);
    const TensorView expected = TensorView::from(model, model_name);
    check_kind(view, name, kind);
    check_device(view, name);
    if (view.ndim != expected.ndim - dropped_dims ||
        !std::equal(view.shape.begin(), view.shape.begin() + view.ndim, expected.shape.begin())) {
      throw_value_error(name, ": expected the ", dropped_dims == 0 ? "" : "leading ", "shape of ", model_name, ", ",
                        expected.shape_string(), ", got ", view.shape_string());
    }
    if (is_output) check_writable(view, name);
  }

  // HV elements in any shape.
  void per_head(const DLTensor* tensor, const char* name, Presence presence, bool is_output = false) const {
    if (!present(tensor, name, presence)) return;
    const TensorView view = TensorView::from(tensor, name);
    check_float(view, name);
    check_device(view, name);
    if (view.numel() != problem_.value_heads) {
      throw_value_error(name, ": expected HV = ", problem_.value_heads, " elements, got shape ", view.shape_string());
    }
    if (is_output) check_writable(view, name);
  }

  // `count` integers.
  void indices(const DLTensor* tensor, const char* name, const char* letters, int64_t count) const {
    const TensorView view = TensorView::from(tensor, name);
    if (view.dtype != DType::kInt32 && view.dtype != DType::kInt64) {
      throw_type_error(name, ": expected int32 or int64, got ", dtype_name(view.dtype));
    }
    check_device(view, name);
    check_shape(view, name, letters, {count});
  }

  static void require_absent(bool given, const char* name, const char* why) {
    if (given) throw_value_error(name, ": expected to be absent ", why);
  }

 private:
  static bool present(const DLTensor* tensor, const char* name, Presence presence) {
    if (tensor == nullptr && presence == Presence::kRequired) throw_value_error(name, ": expected a tensor, got none");
    return tensor != nullptr;
  }

  TensorView checked(const DLTensor* tensor, const char* name, const char* letters, Kind kind) const {
    const TensorView view = TensorView::from(tensor, name);
    check_kind(view, name, kind);
    check_letters(view, name, letters);
    check_device(view, name);
    return view;
  }

  void check_kind(const TensorView& view, const char* name, Kind kind) const {
    switch (kind) {
      case Kind::kOperand:
        return check_same_dtype(view, name, from_dlpack(problem_.dtype, "dtype"), "the common dtype of q, k and v");
      case Kind::kStatistic:
        return check_same_dtype(view, name, stat_dtype(problem_), "the accumulators' dtype");
      case Kind::kFloat:
        return check_float(view, name);
    }
  }

  void check_device(const TensorView& view, const char* name) const {
    if (view.device.device_type != problem_.device.device_type || view.device.device_id != problem_.device.device_id) {
      throw_value_error(name, ": expected a tensor on device ", int(problem_.device.device_type), ":",
                        problem_.device.device_id, " (DLPack type:index) as the other arguments, got one on ",
                        int(view.device.device_type), ":", view.device.device_id);
    }
  }

  static void check_writable(const TensorView& view, const char* name) {
    if (view.numel() == 0 || view.is_contiguous()) return;  // strides of an empty tensor mean nothing
    std::vector<std::pair<int64_t, int>> strides;           // and dimensions
    for (int i = 0; i < view.ndim; ++i) {
      if (view.shape[i] > 1) strides.emplace_back(std::abs(view.stride[i]), i);
    }
    std::sort(strides.begin(), strides.end());
    // Each dimension must step over all that the finer ones reach. Other layouts can have distinct elements too, but
    // nobody slices or transposes his way there.
    int64_t reach = 0;
    for (const auto& [stride, i] : strides) {
      if (stride == 0) {
        throw_value_error(name, ": expected an output whose elements are distinct, got one expanded along dimension ",
                          i);
      }
      if (stride <= reach) {
        throw_value_error(name, ": expected an output whose elements are distinct, got stride ", stride,
                          " along dimension ", i, ", where the finer ones reach ", reach, " elements on");
      }
      reach += stride * (view.shape[i] - 1);
    }
  }

  int64_t size_of(std::string_view letter) const {
    if (letter == "HV") return problem_.value_heads;
    if (letter == "NT") return num_chunks_of_row();
    if (letter == "V+K") return problem_.value_dim + problem_.key_dim;
    switch (letter.front()) {
      case 'B':
        return problem_.batch;
      case 'T':
        return problem_.tokens;
      case 'H':
        return problem_.heads;
      case 'K':
        return problem_.key_dim;
      case 'V':
        return problem_.value_dim;
      case 'C':
        return problem_.chunk_size;
      case 'N':
        return problem_.num_sequences();
      case 'P':
        return summaries_;
      default:
        throw_runtime_error("no size is called ", letter);
    }
  }

  // Packed sequences have one row of the batch.
  int64_t num_chunks_of_row() const {
    if (problem_.sequence_offsets) return plan_.num_chunks();
    return (problem_.tokens + problem_.chunk_size - 1) / problem_.chunk_size;
  }

  static bool is_any(std::string_view letter) { return letter == "slots" || letter == "rows"; }

  // Calls visit(letter) for each dimension.
  template <class Visit>
  void for_letters(std::string_view letters, Visit&& visit) const {
    while (!letters.empty()) {
      const size_t end = std::min(letters.find(' '), letters.size());
      const std::string_view letter = letters.substr(0, end);
      letters.remove_prefix(std::min(end + 1, letters.size()));
      if (letter.front() == 'S') {
        visit(problem_.state_v_first ? "V" : "K");
        visit(problem_.state_v_first ? "K" : "V");
      } else {
        visit(letter);
      }
    }
  }

  void check_letters(const TensorView& view, const char* name, std::string_view letters) const {
    int count = 0;
    bool fits = true;
    for_letters(letters, [&](std::string_view letter) {
      fits = fits && count < view.ndim && (is_any(letter) || view.shape[count] == size_of(letter));
      ++count;
    });
    if (!fits || view.ndim != count) throw_shape_error(view, name, letters);
  }

  [[noreturn]] void throw_shape_error(const TensorView& view, const char* name, std::string_view letters) const {
    std::string shown;
    std::string sizes;
    for_letters(letters, [&](std::string_view letter) {
      const std::string_view separator = shown.empty() ? "" : ", ";
      shown.append(separator).append(letter);
      sizes.append(separator).append(is_any(letter) ? "any" : std::to_string(size_of(letter)));
    });
    throw_value_error(name, ": expected shape [", shown, "] = [", sizes, "], got ", view.shape_string());
  }

  const Plan& plan_;
  const Problem& problem_;
  int64_t summaries_;
};

constexpr Presence kOptional = Presence::kOptional;

void check_offsets(const Problem& problem) {
  const std::vector<int64_t>& offsets = *problem.sequence_offsets;
  if (problem.batch != 1) {
    throw_value_error("cu_seqlens: expected batch size 1 (flatten the batch into one row of packed sequences), got ",
                      problem.batch);
  }
  if (offsets.empty()) throw_value_error("cu_seqlens: expected N + 1 offsets, got none");
  if (offsets.front() != 0) throw_value_error("cu_seqlens: expected to start at 0, got ", offsets.front());
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      throw_value_error("cu_seqlens: expected ascending offsets, got ", offsets[i - 1], " before ", offsets[i],
                        " at position ", i);
    }
  }
  if (offsets.back() > problem.tokens) {
    throw_value_error("cu_seqlens: expected to end at or before T = ", problem.tokens, ", got ", offsets.back());
  }
}

// The operator's tensors, and a state for each chunk in the workspace, must have sizes that 64 bits hold, bytes
// included.
void check_sizes(const Problem& problem) {
  constexpr int64_t kBytes = 8;
  const auto fits = [](std::initializer_list<int64_t> sizes) {
    int64_t product = kBytes;
    for (int64_t size : sizes) {
      if (__builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product)) return false;
    }
    return true;
  };
  if (!fits({problem.batch, problem.tokens, problem.value_heads, problem.key_dim, problem.value_dim}) ||
      !fits({problem.batch, problem.tokens, problem.value_heads, problem.chunk_size}) ||
      !fits({problem.num_sequences(), problem.value_heads, problem.key_dim, problem.value_dim})) {
    throw_value_error("v: expected sizes whose product fits 64 bits, got B = ", problem.batch, ", T = ", problem.tokens,
                      ", HV = ", problem.value_heads, ", K = ", problem.key_dim, ", V = ", problem.value_dim);
  }
}

void check_gate(const Checker& check, const Problem& problem, const DLTensor* A_log, const DLTensor* dt_bias) {
  if (!problem.use_gate) {
    Checker::require_absent(A_log != nullptr, "A_log", "without use_gate_in_kernel");
    Checker::require_absent(dt_bias != nullptr, "dt_bias", "without use_gate_in_kernel");
    return;
  }
  if (A_log == nullptr) throw_assertion_error("A_log: expected a tensor with use_gate_in_kernel, got none");
  check.per_head(A_log, "A_log", Presence::kRequired);
  check.per_head(dt_bias, "dt_bias", kOptional);
}

// What forward, backward and decoding have in common.
template <class Tensors>
void check_inputs(const Checker& check, const Problem& problem, const Tensors& t, bool reads_raw_q_and_k,
                  const char* state_letters = "N HV S") {
  const Presence raw = reads_raw_q_and_k ? Presence::kRequired : kOptional;
  check.input(t.q, "q", "B T H K", Kind::kOperand, raw);
  check.input(t.k, "k", "B T H K", Kind::kOperand, raw);
  check.input(t.v, "v", "B T HV V", Kind::kOperand);
  check.input(t.g, "g", "B T HV", Kind::kFloat);
  check.input(t.beta, "beta", "B T HV", Kind::kFloat);
  check.input(t.initial_state, "initial_state", state_letters, Kind::kFloat, kOptional);
  check_gate(check, problem, t.A_log, t.dt_bias);
}

void check_saved(const Checker& check, const Problem& problem, const SavedTensors& saved) {
  check.output(saved.A, "saved.A", "B T HV C", Kind::kOperand);
  const Presence presence = problem.use_qk_l2norm ? Presence::kRequired : kOptional;
  check.output(saved.q_normalized, "saved.q_normalized", "B T H K", Kind::kOperand, presence);
  check.output(saved.q_rstd, "saved.q_rstd", "B T H", Kind::kStatistic, presence);
  check.output(saved.k_normalized, "saved.k_normalized", "B T H K", Kind::kOperand, presence);
  check.output(saved.k_rstd, "saved.k_rstd", "B T H", Kind::kStatistic, presence);
}

// The slots of a pool, as far as the host knows them.
void check_slots(const Plan& plan, const ForwardTensors& t) {
  if (plan.problem().device.device_type != kDLCPU) return;
  const StateSlots slots(t.state_indices);
  const int64_t count = plan.problem().num_sequences();
  const auto check_range = [&](const DLTensor* pool, const char* name) {
    if (pool == nullptr) return;
    for (int64_t n = 0; n < count; ++n) {
      if (slots.of(n) < -1 || slots.of(n) >= pool->shape[0]) {
        throw_value_error("state_indices: expected -1 (none) or one of the ", pool->shape[0], " slots of ", name,
                          ", got ", slots.of(n), " for sequence ", n);
      }
    }
  };
  check_range(t.initial_state, "initial_state");
  check_range(t.final_state, "final_state (output_state)");
  if (t.final_state == nullptr) return;
  std::vector<bool> taken(static_cast<size_t>(t.final_state->shape[0]));
  for (int64_t n = 0; n < count; ++n) {
    if (slots.of(n) < 0) continue;
    if (taken[slots.of(n)]) {
      throw_value_error("state_indices: expected distinct slots, since final states are written to them, got ",
                        slots.of(n), " twice, the second time for sequence ", n);
    }
    taken[slots.of(n)] = true;
  }
}

// `step`: what the distance of checkpoints must be a multiple of.
void check_checkpoints(const Checker& check, const Plan& plan, const ForwardTensors& t, int64_t step) {
  const bool wanted = t.checkpoint_every_n_tokens != 0;
  Checker::require_absent(!wanted && t.state_checkpoints != nullptr, "state_checkpoints",
                          "without checkpoint_every_n_tokens");
  Checker::require_absent(!wanted && t.checkpoint_cu_starts != nullptr, "checkpoint_cu_starts",
                          "without checkpoint_every_n_tokens");
  if (!wanted) return;
  if (t.checkpoint_every_n_tokens < 0 || t.checkpoint_every_n_tokens % step != 0) {
    throw_value_error("checkpoint_every_n_tokens: expected ", step == 1 ? "a positive number" : "a positive multiple",
                      step == 1 ? std::string() : concat(" of chunk_size ", step), ", got ",
                      t.checkpoint_every_n_tokens);
  }
  check.output(t.state_checkpoints, "state_checkpoints", "rows HV S", Kind::kStatistic);
  const int64_t rows = t.state_checkpoints->shape[0], needed = count_checkpoints(plan, t.checkpoint_every_n_tokens);
  if (t.checkpoint_cu_starts == nullptr) {
    if (rows >= needed) return;
    throw_value_error("state_checkpoints: expected room for the ", needed, " checkpoints of all sequences, got ", rows);
  }
  const int64_t sequences = plan.problem().num_sequences();
  check.indices(t.checkpoint_cu_starts, "checkpoint_cu_starts", "[N + 1]", sequences + 1);
  if (plan.problem().device.device_type != kDLCPU) return;
  const TensorView starts = TensorView::from(t.checkpoint_cu_starts, "checkpoint_cu_starts");
  for (int64_t n = 0; n < sequences; ++n) {
    const int64_t begin = index_at(starts, n), end = index_at(starts, n + 1);
    const int64_t count = count_checkpoints(plan.sequences()[n].length, t.checkpoint_every_n_tokens);
    if (begin < 0 || end < begin || end > rows || end - begin < count) {
      throw_value_error("checkpoint_cu_starts: expected room for the ", count, " checkpoints of sequence ", n,
                        " in the ", rows, " rows of state_checkpoints, got rows ", begin, " to ", end);
    }
  }
}

struct Argument {
  const DLTensor* tensor;
  const char* name;
};

// A result that shares memory with an input, or with another result, would depend on the order of reads and writes.
// may_share: whether a pair may have the same memory, all of it; `hint` then says when.
template <class F>
void check_memory(std::initializer_list<Argument> outputs, std::initializer_list<Argument> inputs, F&& may_share) {
  const auto check_pair = [&](const Argument& output, const Argument& other) {
    const TensorView a = TensorView::from(output.tensor, output.name), b = TensorView::from(other.tensor, other.name);
    const char* hint = "";
    if (!may_overlap(a, b) || may_share(output, other, a, b, hint)) return;
    throw_value_error(output.name, ": expected memory of its own", hint, ", got some of ", other.name, "'s");
  };
  // Pairs are many, and as good as all lie apart.
  struct Placed {
    const Argument* argument;
    ByteRange range;
  };
  std::array<Placed, 32> seen;
  size_t count = 0;
  const auto place = [&](const Argument& argument) -> const Placed& {
    seen[count] = {&argument, byte_range(TensorView::from(argument.tensor, argument.name))};
    return seen[count++];
  };
  for (const Argument& input : inputs) place(input);
  for (const Argument& output : outputs) {
    const Placed& placed = place(output);
    for (const Placed* other = seen.data(); other != &placed; ++other) {
      if (placed.range.meets(other->range)) check_pair(output, *other->argument);
    }
  }
}

void check_forward_memory(const ForwardTensors& t) {
  // A final state may take its initial state's place.
  const auto may_share = [&](const Argument& output, const Argument& other, const TensorView& a, const TensorView& b,
                             const char*& hint) {
    if (output.tensor != t.final_state || other.tensor != t.initial_state) return false;
    hint = " (or, where no gradient is wanted, all of initial_state's)";
    return t.saved == nullptr && a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim && a.shape == b.shape &&
           a.stride == b.stride;
  };
  check_memory(
      {{t.o, "o (output)"}, {t.final_state, "final_state (output_state)"}, {t.state_checkpoints, "state_checkpoints"}},
      {{t.q, "q"},
       {t.k, "k"},
       {t.v, "v"},
       {t.g, "g"},
       {t.beta, "beta"},
       {t.A_log, "A_log"},
       {t.dt_bias, "dt_bias"},
       {t.initial_state, "initial_state"},
       {t.cu_seqlens, "cu_seqlens"},
       {t.state_indices, "state_indices"},
       {t.checkpoint_cu_starts, "checkpoint_cu_starts"}},
      may_share);
}

void check_backward_memory(const BackwardTensors& t) {
  const auto never = [](const Argument&, const Argument&, const TensorView&, const TensorView&, const char*&) {
    return false;
  };
  check_memory({{t.dq, "dq"},
                {t.dk, "dk"},
                {t.dv, "dv"},
                {t.dg, "dg"},
                {t.dbeta, "dbeta"},
                {t.dA_log, "dA_log"},
                {t.ddt_bias, "ddt_bias"},
                {t.dh0, "dh0"}},
               {{t.q, "q"},
                {t.k, "k"},
                {t.v, "v"},
                {t.g, "g"},
                {t.beta, "beta"},
                {t.A_log, "A_log"},
                {t.dt_bias, "dt_bias"},
                {t.initial_state, "initial_state"},
                {t.saved->q_normalized, "saved.q_normalized"},
                {t.saved->q_rstd, "saved.q_rstd"},
                {t.saved->k_normalized, "saved.k_normalized"},
                {t.saved->k_rstd, "saved.k_rstd"},
                {t.saved->A, "saved.A"},
                {t.grad_output, "do"},
                {t.grad_final_state, "dht"},
                {t.cu_seqlens, "cu_seqlens"}},
               never);
}

// `step`: of checkpoints.
void check_forward(const Plan& plan, const ForwardTensors& t, int64_t step) {
  const Checker check(plan);
  const char* state_letters = t.state_indices != nullptr ? "slots HV S" : "N HV S";
  check_inputs(check, plan.problem(), t, true, state_letters);
  check.output(t.o, "o", "B T HV V", Kind::kOperand);
  check.output(t.final_state, "final_state", state_letters, Kind::kFloat, kOptional);
  if (t.saved != nullptr) {
    Checker::require_absent(t.state_indices != nullptr, "state_indices", "where gradients are wanted");
    Checker::require_absent(t.checkpoint_every_n_tokens != 0, "checkpoint_every_n_tokens",
                            "where gradients are wanted");
    check_saved(check, plan.problem(), *t.saved);
  }
  if (t.state_indices != nullptr) {
    if (t.initial_state == nullptr && t.final_state == nullptr) {
      throw_value_error("state_indices: expected a pool with them (initial_state, or output_state), got none");
    }
    check.indices(t.state_indices, "state_indices", "[N]", plan.problem().num_sequences());
    check_slots(plan, t);
  }
  check_checkpoints(check, plan, t, step);
  check_forward_memory(t);
}

// Indices must lie in [0, count).
void check_indices(const std::vector<int64_t>& indices, const char* name, int64_t count, const char* of_what) {
  for (const int64_t index : indices) {
    if (index < 0 || index >= count) {
      throw_value_error(name, ": expected indices of ", count, " ", of_what, ", got ", index);
    }
  }
}

// What the two summaries have in common: the inputs of their recurrence, the sequences and the result.
template <class Tensors>
void check_summary(const Checker& check, const Plan& plan, const Tensors& t) {
  const Problem& problem = plan.problem();
  const Presence raw = problem.use_qk_l2norm ? kOptional : Presence::kRequired;
  const Presence normalized = problem.use_qk_l2norm ? Presence::kRequired : kOptional;
  if (t.saved == nullptr) throw_value_error("saved: expected what prepare saved, got none");
  check_indices(t.sequences, "sequences", problem.num_sequences(), "sequences");
  check.input(t.k, "k", "B T H K", Kind::kOperand, raw);
  check.input(t.g, "g", "B T HV", Kind::kFloat);
  check.input(t.beta, "beta", "B T HV", Kind::kFloat);
  check_gate(check, problem, t.A_log, t.dt_bias);
  check.output(t.saved->A, "saved.A", "B T HV C", Kind::kOperand);
  check.output(t.saved->k_normalized, "saved.k_normalized", "B T H K", Kind::kOperand, normalized);
  check.output(t.summary, "summary", "P HV K V+K", Kind::kStatistic);
}

}  // namespace

DType stat_dtype(const Problem& problem) {
  return from_dlpack(problem.dtype, "dtype") == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void validate_problem(const Problem& problem) {
  if (problem.batch < 0) throw_value_error("batch: expected B >= 0, got ", problem.batch);
  if (problem.tokens < 0) throw_value_error("tokens: expected T >= 0, got ", problem.tokens);
  if (problem.heads < 1) throw_value_error("q: expected at least one head, got H = ", problem.heads);
  if (problem.value_heads < problem.heads || problem.value_heads % problem.heads != 0) {
    throw_value_error("v: expected a number of value heads HV that is a multiple of the number of query heads H = ",
                      problem.heads, ", got HV = ", problem.value_heads);
  }
  if (problem.chunk_size != 16 && problem.chunk_size != 32 && problem.chunk_size != 64) {
    throw_value_error("chunk_size: expected 16, 32 or 64, got ", problem.chunk_size);
  }
  if (problem.sequence_offsets) check_offsets(problem);
  if (problem.allow_neg_eigval && !problem.use_beta_sigmoid) {
    throw_value_error("allow_neg_eigval: expected use_beta_sigmoid_in_kernel with it, got it alone");
  }
  if (problem.key_dim < 1) throw_value_error("k: expected a key dimension K of at least 1, got ", problem.key_dim);
  if (problem.value_dim < 1) {
    throw_value_error("v: expected a value dimension V of at least 1, got ", problem.value_dim);
  }
  if (problem.key_dim > kMaxKeyDim) {
    throw_assertion_error("k: expected a key dimension K of at most ", kMaxKeyDim, ", got ", problem.key_dim);
  }
  check_sizes(problem);
  if (problem.num_threads < 0) {
    throw_value_error("num_threads: expected 0 (all) or more, got ", problem.num_threads);
  }
  const DType dtype = from_dlpack(problem.dtype, "dtype");
  if (!is_float(dtype)) {
    throw_type_error("q: expected float64, float32, bfloat16 or float16, got ", dtype_name(dtype));
  }
}

void validate_forward(const Plan& plan, const ForwardTensors& t) { check_forward(plan, t, plan.problem().chunk_size); }

void validate_recurrent(const Plan& plan, const ForwardTensors& t) {
  if (t.saved != nullptr) throw_value_error("saved: expected none (the recurrence has no backward), got tensors");
  check_forward(plan, t, 1);
}

void validate_backward(const Plan& plan, const BackwardTensors& t) {
  const Problem& problem = plan.problem();
  const Checker check(plan);
  if (t.saved == nullptr) throw_value_error("saved: expected what forward saved, got none");
  check_inputs(check, problem, t, !problem.use_qk_l2norm);
  check_saved(check, problem, *t.saved);
  check.input(t.grad_output, "do", "B T HV V", Kind::kFloat);
  check.input(t.grad_final_state, "dht", "N HV S", Kind::kFloat, kOptional);
  check.output(t.dq, "dq", "B T H K", Kind::kFloat, kOptional);
  check.output(t.dk, "dk", "B T H K", Kind::kFloat, kOptional);
  check.output(t.dv, "dv", "B T HV V", Kind::kFloat, kOptional);
  check.output(t.dg, "dg", "B T HV", Kind::kFloat, kOptional);
  check.output(t.dbeta, "dbeta", "B T HV", Kind::kFloat, kOptional);
  check.output(t.dh0, "dh0", "N HV S", Kind::kFloat, kOptional);
  if (!problem.use_gate) Checker::require_absent(t.dA_log != nullptr, "dA_log", "without use_gate_in_kernel");
  if (t.dt_bias == nullptr) Checker::require_absent(t.ddt_bias != nullptr, "ddt_bias", "without dt_bias");
  check.per_head(t.dA_log, "dA_log", kOptional, true);
  check.per_head(t.ddt_bias, "ddt_bias", kOptional, true);
  check_backward_memory(t);
}

void validate_split_forward(const Plan& plan, const ForwardTensors& t) {
  if (t.saved == nullptr) throw_value_error("saved: expected tensors for what prepare leaves to advance, got none");
  validate_forward(plan, t);
}

void validate_summary(const Plan& plan, const cp::Summary& t) {
  const Checker check(plan, static_cast<int64_t>(t.sequences.size()));
  check_summary(check, plan, t);
  check.input(t.v, "v", "B T HV V", Kind::kOperand);
  check.input(t.initial_state, "initial_state", "P HV S", Kind::kFloat, kOptional);
}

void validate_adjoint_summary(const Plan& plan, const cp::AdjointSummary& t) {
  const Checker check(plan, static_cast<int64_t>(t.sequences.size()));
  const bool normalized = plan.problem().use_qk_l2norm;
  check_summary(check, plan, t);
  check.input(t.q, "q", "B T H K", Kind::kOperand, normalized ? kOptional : Presence::kRequired);
  check.output(t.saved->q_normalized, "saved.q_normalized", "B T H K", Kind::kOperand,
               normalized ? Presence::kRequired : kOptional);
  check.input(t.grad_output, "do", "B T HV V", Kind::kFloat);
  check.input(t.grad_final_state, "dht", "P HV S", Kind::kFloat, kOptional);
  check.input(t.transition, "transition", "P HV K K", Kind::kFloat, kOptional);
}

void validate_merge(const Plan& plan, const cp::Merge& t) {
  const int64_t count = t.summaries != nullptr && t.summaries->ndim > 0 ? t.summaries->shape[0] : 0;
  const Checker check(plan, count);
  check.input(t.summaries, "summaries", "P HV K V+K", Kind::kFloat);
  check_indices(t.order, "order", count, "summaries");
  check.output(t.state, "state", "HV S", Kind::kFloat);
}

void validate_workspace(Workspace workspace, size_t needed) {
  constexpr uintptr_t kAlignment = 64;
  if (workspace.bytes < needed || (needed != 0 && workspace.data == nullptr)) {
    throw_value_error("workspace: expected ", needed, " bytes, got ", workspace.data == nullptr ? 0 : workspace.bytes);
  }
  if (reinterpret_cast<uintptr_t>(workspace.data) % kAlignment != 0) {
    throw_value_error("workspace: expected an address aligned to ", kAlignment, " bytes");
  }
}

void validate(const Plan& plan, const stages::L2NormForward& t) {
  const Checker check(plan);
  check.like(t.x, "x", t.x, "x", Kind::kFloat, false);
  if (t.x->ndim < 1) throw_value_error("x: expected at least one dimension, got a scalar");
  check.like(t.y, "y", t.x, "x", Kind::kFloat, true);
  check.like(t.rstd, "rstd", t.x, "x", Kind::kFloat, true, 1);
}

void validate(const Plan& plan, const stages::L2NormBackward& t) {
  const Checker check(plan);
  check.like(t.y, "y", t.y, "y", Kind::kFloat, false);
  if (t.y->ndim < 1) throw_value_error("y: expected at least one dimension, got a scalar");
  check.like(t.rstd, "rstd", t.y, "y", Kind::kFloat, false, 1);
  check.like(t.dy, "dy", t.y, "y", Kind::kFloat, false);
  check.like(t.dx, "dx", t.y, "y", Kind::kFloat, true);
}

void validate(const Plan& plan, const stages::BetaSigmoidForward& t) {
  const Checker check(plan);
  check.like(t.x, "x", t.x, "x", Kind::kFloat, false);
  check.like(t.y, "y", t.x, "x", Kind::kFloat, true);
}

void validate(const Plan& plan, const stages::BetaSigmoidBackward& t) {
  const Checker check(plan);
  check.like(t.x, "x", t.x, "x", Kind::kFloat, false);
  check.like(t.dy, "dy", t.x, "x", Kind::kFloat, false);
  check.like(t.dx, "dx", t.x, "x", Kind::kFloat, true);
}

void validate(const Plan& plan, const stages::LocalCumsum& t) {
  const Checker check(plan);
  check.input(t.g, "g", "B T HV", Kind::kFloat);
  check.output(t.out, "out", "B T HV", Kind::kFloat);
}

void validate(const Plan& plan, const stages::GateForward& t) {
  const Checker check(plan);
  check.input(t.g, "g", "B T HV", Kind::kFloat);
  check.per_head(t.A_log, "A_log", Presence::kRequired);
  check.per_head(t.dt_bias, "dt_bias", kOptional);
  check.output(t.out, "out", "B T HV", Kind::kFloat);
}

void validate(const Plan& plan, const stages::GateCumsum& t) {
  validate(plan, stages::GateForward{t.g, t.A_log, t.dt_bias, t.out});
}

void validate(const Plan& plan, const stages::GateBackward& t) {
  const Checker check(plan);
  check.input(t.g, "g", "B T HV", Kind::kFloat);
  check.per_head(t.A_log, "A_log", Presence::kRequired);
  check.per_head(t.dt_bias, "dt_bias", kOptional);
  check.input(t.dyg, "dyg", "B T HV", Kind::kFloat);
  check.output(t.dg, "dg", "B T HV", Kind::kFloat);
  check.per_head(t.dA_log, "dA_log", Presence::kRequired, true);
  check.per_head(t.ddt_bias, "ddt_bias", kOptional, true);
  Checker::require_absent(t.ddt_bias != nullptr && t.dt_bias == nullptr, "ddt_bias", "without dt_bias");
}

void validate(const Plan& plan, const stages::ScaledDotKkt& t) {
  const Checker check(plan);
  check.input(t.k, "k", "B T H K", Kind::kOperand);
  check.input(t.g, "g", "B T HV", Kind::kFloat, kOptional);
  check.input(t.beta, "beta", "B T HV", Kind::kFloat);
  check.output(t.L, "L", "B T HV C", Kind::kFloat);
}

void validate(const Plan& plan, const stages::SolveTril& t) {
  const Checker check(plan);
  check.input(t.L, "L", "B T HV C", Kind::kFloat);
  check.output(t.A, "A", "B T HV C", Kind::kFloat);
}

void validate(const Plan& plan, const stages::Intra& t) {
  const Checker check(plan);
  check.output(t.A, "A", "B T HV C", Kind::kOperand);
  validate(plan, stages::RecomputeWU{t.k, t.v, t.beta, t.A, t.g, t.w, t.u});
}

void validate(const Plan& plan, const stages::RecomputeWU& t) {
  const Checker check(plan);
  check.input(t.k, "k", "B T H K", Kind::kOperand);
  check.input(t.v, "v", "B T HV V", Kind::kOperand);
  check.input(t.beta, "beta", "B T HV", Kind::kFloat);
  check.input(t.A, "A", "B T HV C", Kind::kOperand);
  check.input(t.g, "g", "B T HV", Kind::kFloat, kOptional);
  check.output(t.w, "w", "B T HV K", Kind::kOperand);
  check.output(t.u, "u", "B T HV V", Kind::kOperand);
}

void validate(const Plan& plan, const stages::StateForward& t) {
  const Checker check(plan);
  check.input(t.k, "k", "B T H K", Kind::kOperand);
  check.input(t.w, "w", "B T HV K", Kind::kOperand);
  check.input(t.u, "u", "B T HV V", Kind::kOperand);
  check.input(t.g, "g", "B T HV", Kind::kFloat, kOptional);
  check.input(t.initial_state, "initial_state", "N HV S", Kind::kFloat, kOptional);
  check.output(t.h, "h", "B NT HV S", Kind::kOperand);
  check.output(t.v_new, "v_new", "B T HV V", Kind::kOperand, kOptional);
  check.output(t.final_state, "final_state", "N HV S", Kind::kStatistic, kOptional);
}

void validate(const Plan& plan, const stages::OutputForward& t) {
  const Checker check(plan);
  check.input(t.q, "q", "B T H K", Kind::kOperand);
  check.input(t.k, "k", "B T H K", Kind::kOperand);
  check.input(t.v, "v", "B T HV V", Kind::kOperand);
  check.input(t.h, "h", "B NT HV S", Kind::kOperand);
  check.input(t.g, "g", "B T HV", Kind::kFloat, kOptional);
  check.output(t.o, "o", "B T HV V", Kind::kOperand);
}

void validate(const Plan& plan, const stages::LocalValueGradient& t) {
  const Checker check(plan);
  check.input(t.q, "q", "B T H K", Kind::kOperand);
  check.input(t.k, "k", "B T H K", Kind::kOperand);
  check.input(t.g, "g", "B T HV", Kind::kFloat, kOptional);
  check.input(t.grad_output, "do", "B T HV V", Kind::kFloat);
  check.output(t.dv, "dv", "B T HV V", Kind::kFloat);
}

void validate(const Plan& plan, const stages::StateBackward& t) {
  const Checker check(plan);
  check.input(t.q, "q", "B T H K", Kind::kOperand);
  check.input(t.k, "k", "B T H K", Kind::kOperand);
  check.input(t.w, "w", "B T HV K", Kind::kOperand);
  check.input(t.g, "g", "B T HV", Kind::kFloat, kOptional);
  check.input(t.dht, "dht", "N HV S", Kind::kFloat, kOptional);
  check.input(t.grad_output, "do", "B T HV V", Kind::kFloat);
  check.input(t.dv, "dv", "B T HV V", Kind::kFloat);
  check.output(t.dh, "dh", "B NT HV S", Kind::kOperand);
  check.output(t.dh0, "dh0", "N HV S", Kind::kStatistic, kOptional);
  check.output(t.dv2, "dv2", "B T HV V", Kind::kFloat);
}

void validate(const Plan& plan, const stages::OperandGradients& t) {
  const Checker check(plan);
  check.input(t.q, "q", "B T H K", Kind::kOperand);
  check.input(t.k, "k", "B T H K", Kind::kOperand);
  check.input(t.v, "v", "B T HV V", Kind::kOperand);
  check.input(t.w, "w", "B T HV K", Kind::kOperand, kOptional);
  check.input(t.g, "g", "B T HV", Kind::kFloat, kOptional);
  check.input(t.h, "h", "B NT HV S", Kind::kOperand);
  check.input(t.dv, "dv", "B T HV V", Kind::kFloat);
  check.input(t.grad_output, "do", "B T HV V", Kind::kFloat);
  check.input(t.dh, "dh", "B NT HV S", Kind::kOperand);
  check.output(t.dq, "dq", "B T H K", Kind::kOperand);
  check.output(t.dk, "dk", "B T H K", Kind::kOperand);
  check.output(t.dw, "dw", "B T HV K", Kind::kOperand);
  check.output(t.dg, "dg", "B T HV", Kind::kStatistic, kOptional);
  Checker::require_absent(t.dg != nullptr && t.g == nullptr, "dg", "without g");
}

void validate(const Plan& plan, const stages::WyBackward& t) {
  const Checker check(plan);
  check.input(t.k, "k", "B T H K", Kind::kOperand);
  check.input(t.v, "v", "B T HV V", Kind::kOperand);
  check.input(t.beta, "beta", "B T HV", Kind::kFloat);
  check.input(t.g, "g", "B T HV", Kind::kFloat, kOptional);
  check.input(t.A, "A", "B T HV C", Kind::kOperand);
  check.input(t.dw, "dw", "B T HV K", Kind::kFloat);
  check.input(t.du, "du", "B T HV V", Kind::kFloat);
  check.output(t.dk, "dk", "B T H K", Kind::kOperand);
  check.output(t.dv, "dv", "B T HV V", Kind::kOperand);
  check.output(t.db, "db", "B T HV", Kind::kFloat);
  check.output(t.dg, "dg", "B T HV", Kind::kStatistic, kOptional);
  Checker::require_absent(t.dg != nullptr && t.g == nullptr, "dg", "without g");
}

}  // namespace cula::gdn
