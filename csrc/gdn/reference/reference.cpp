#include "gdn/reference/reference.h"

#include <atomic>
#include <cmath>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/host/cpu_features.h"
#include "common/host/tensor.h"
#include "gdn/reference/scalar.h"

namespace cula::gdn::reference {

namespace {

using Vector = std::vector<double>;
using Index = std::vector<int64_t>;

// Arithmetic ----------------------------------------------------------------------------------------------------------

// Eight partial sums, so that the compiler may use vector registers without changing the order of additions.
double dot(const double* a, const double* b, int64_t n) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < n; ++i) lanes[0] += a[i] * b[i];
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// y += alpha x
void add_scaled(double alpha, const double* x, double* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += alpha * x[i];
}

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

// Far below zero softplus(x) is e^x to the last bit, and underflows where its logarithm does not.
double log_softplus(double x) { return x < -40 ? x : std::log(softplus(x)); }

// Tensors -------------------------------------------------------------------------------------------------------------

int64_t offset_of(const TensorView& x, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  int dim = 0;
  for (const int64_t i : index) offset += i * x.stride[dim++];
  return offset;
}

double load(const TensorView& x, std::initializer_list<int64_t> index) {
  return load_scalar(x.data, x.dtype, offset_of(x, index));
}

void store(const TensorView& x, std::initializer_list<int64_t> index, double value) {
  store_scalar(x.data, x.dtype, offset_of(x, index), value);
}

// The last dimension at (b, t, head).
void load_row(const TensorView& x, int64_t b, int64_t t, int64_t head, double* row) {
  const int64_t offset = offset_of(x, {b, t, head});
  for (int64_t i = 0; i < x.shape[3]; ++i) row[i] = load_scalar(x.data, x.dtype, offset + i * x.stride[3]);
}

void store_row(const TensorView& x, int64_t b, int64_t t, int64_t head, const double* row) {
  if (!x) return;
  const int64_t offset = offset_of(x, {b, t, head});
  for (int64_t i = 0; i < x.shape[3]; ++i) store_scalar(x.data, x.dtype, offset + i * x.stride[3], row[i]);
}

// Element number `index` in row-major order, whatever the shape: A_log and dt_bias may have any with HV elements.
int64_t flat_offset(const TensorView& x, int64_t index) {
  int64_t offset = 0;
  for (int dim = x.ndim - 1; dim >= 0; --dim) {
    offset += index % x.shape[dim] * x.stride[dim];
    index /= x.shape[dim];
  }
  return offset;
}

double load_flat(const TensorView& x, int64_t index) { return load_scalar(x.data, x.dtype, flat_offset(x, index)); }

void store_flat(const TensorView& x, int64_t index, double value) {
  if (x) store_scalar(x.data, x.dtype, flat_offset(x, index), value);
}

// Calls visit(element offset, position in a row-major [K, V]) for the state of sequence n and value head j.
template <class Visit>
void for_each_state_element(const Problem& problem, const TensorView& x, int64_t n, int64_t j, Visit visit) {
  const int64_t K = problem.key_dim, V = problem.value_dim;
  const int64_t key_stride = x.stride[problem.state_v_first ? 3 : 2];
  const int64_t value_stride = x.stride[problem.state_v_first ? 2 : 3];
  const int64_t base = offset_of(x, {n, j});
  for (int64_t i = 0; i < K * V; ++i) visit(base + i / V * key_stride + i % V * value_stride, i);
}

// Row-major [K, V]; zeros if x is absent.
Vector load_state(const Problem& problem, const TensorView& x, int64_t n, int64_t j) {
  Vector S(problem.key_dim * problem.value_dim, 0.0);
  if (x) {
    for_each_state_element(problem, x, n, j,
                           [&](int64_t offset, int64_t i) { S[i] = load_scalar(x.data, x.dtype, offset); });
  }
  return S;
}

// Rounded to the type of x; nothing if x is absent.
void store_state(const Problem& problem, const TensorView& x, int64_t n, int64_t j, const Vector& S) {
  if (!x) return;
  for_each_state_element(problem, x, n, j,
                         [&](int64_t offset, int64_t i) { store_scalar(x.data, x.dtype, offset, S[i]); });
}

// Problem -------------------------------------------------------------------------------------------------------------

// The operands that forward and backward share.
struct Inputs {
  TensorView q, k, v, g, beta, A_log, dt_bias, initial_state;
};

template <class Tensors>
Inputs views_of(const Tensors& t) {
  return {.q = TensorView::from(t.q, "q"),
          .k = TensorView::from(t.k, "k"),
          .v = TensorView::from(t.v, "v"),
          .g = TensorView::from(t.g, "g"),
          .beta = TensorView::from(t.beta, "beta"),
          .A_log = TensorView::from(t.A_log, "A_log"),
          .dt_bias = TensorView::from(t.dt_bias, "dt_bias"),
          .initial_state = TensorView::from(t.initial_state, "initial_state")};
}

// Problem plus what follows from it; also the one place that knows which shape each argument has.
struct Setup {
  Problem problem;
  double scale;
  std::vector<SequenceRange> sequences;

  explicit Setup(const Problem& given) : problem(given) {
    // Of the plan only the checks, the sequences and the default scale matter here.
    problem.dtype = to_dlpack(DType::kFloat64);
    problem.chunk_size = 64;
    problem.backend = Backend::kCpu;
    problem.device = {kDLCPU, 0};
    const Plan plan = Plan::make(problem);
    scale = plan.scale();
    sequences = plan.sequences();
  }

  void check(const TensorView& x, const char* name, const char* letters, Index shape, bool required) const {
    if (!x) {
      if (required) throw_value_error(name, ": expected a tensor ", letters, ", got none");
      return;
    }
    check_float(x, name);
    if (x.device.device_type != kDLCPU) {
      throw_value_error(name, ": expected a CPU tensor, got device type ", int(x.device.device_type));
    }
    if (shape.size() == 1) {
      if (x.numel() != shape[0]) {
        throw_value_error(name, ": expected ", shape[0], " elements, got shape ", x.shape_string());
      }
    } else if (shape.size() == 3) {
      check_shape(x, name, letters, {shape[0], shape[1], shape[2]});
    } else {
      check_shape(x, name, letters, {shape[0], shape[1], shape[2], shape[3]});
    }
  }

  void check_qk(const TensorView& x, const char* name, bool required) const {
    check(x, name, "[B, T, H, K]", {problem.batch, problem.tokens, problem.heads, problem.key_dim}, required);
  }
  void check_value(const TensorView& x, const char* name, bool required) const {
    check(x, name, "[B, T, HV, V]", {problem.batch, problem.tokens, problem.value_heads, problem.value_dim}, required);
  }
  void check_token(const TensorView& x, const char* name, bool required) const {
    check(x, name, "[B, T, HV]", {problem.batch, problem.tokens, problem.value_heads}, required);
  }
  void check_head(const TensorView& x, const char* name, bool required) const {
    check(x, name, "[HV]", {problem.value_heads}, required);
  }
  void check_state(const TensorView& x, const char* name) const {
    const int64_t N = problem.num_sequences(), HV = problem.value_heads, K = problem.key_dim, V = problem.value_dim;
    if (problem.state_v_first) {
      check(x, name, "[N, HV, V, K]", {N, HV, V, K}, false);
    } else {
      check(x, name, "[N, HV, K, V]", {N, HV, K, V}, false);
    }
  }
  void check_inputs(const Inputs& x) const {
    check_qk(x.q, "q", true);
    check_qk(x.k, "k", true);
    check_value(x.v, "v", true);
    check_token(x.g, "g", true);
    check_token(x.beta, "beta", true);
    if (problem.use_gate) {
      if (!x.A_log) throw_assertion_error("A_log: expected a tensor with use_gate, got none");
    } else if (x.A_log || x.dt_bias) {
      throw_value_error("A_log, dt_bias: expected none without use_gate, got a tensor");
    }
    check_head(x.A_log, "A_log", false);
    check_head(x.dt_bias, "dt_bias", false);
    check_state(x.initial_state, "initial_state");
  }

  // Rows of a flattened token axis that belong to no sequence, as (b, t).
  template <class Visit>
  void for_each_padding_token(Visit visit) const {
    if (!problem.sequence_offsets) return;
    for (int64_t t = problem.sequence_offsets->back(); t < problem.tokens; ++t) visit(0, t);
  }
};

// Runs job(0) .. job(count - 1) on several threads. Jobs write disjoint results, so their order does not matter.
void run_jobs(int64_t count, int num_threads, const std::function<void(int64_t)>& job) {
  if (num_threads <= 0) num_threads = hardware_threads();
  std::atomic<int64_t> next = 0;
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&] {
    try {
      for (int64_t i = next++; i < count; i = next++) job(i);
    } catch (...) {
      const std::lock_guard lock(failure_mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::jthread> helpers;  // joined even if one fails to start
  for (int64_t i = 1; i < std::min<int64_t>(num_threads, count); ++i) helpers.emplace_back(work);
  work();
  for (std::jthread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

// Token ---------------------------------------------------------------------------------------------------------------

// What the recurrence sees of one token and one value head, and the derivatives of the transforms before it.
struct Token {
  Vector q, k, v;  // [K], [K], [V]; q and k normalised if asked for
  double q_rstd = 1, k_rstd = 1;
  double log_decay = 0;       // g of the recurrence
  double log_decay_by_g = 1;  // its derivative by the argument g; by dt_bias too
  double beta = 0;
  double beta_by_logit = 1;  // derivative by the argument beta
};

// In place; returns what it multiplied by.
double normalize(Vector& x) {
  const double rstd = 1 / std::sqrt(dot(x.data(), x.data(), static_cast<int64_t>(x.size())) + kL2NormEpsilon);
  for (double& value : x) value *= rstd;
  return rstd;
}

// Token t of batch row b as value head j sees it.
Token load_token(const Problem& problem, const Inputs& inputs, int64_t b, int64_t t, int64_t j) {
  Token x{.q = Vector(problem.key_dim), .k = Vector(problem.key_dim), .v = Vector(problem.value_dim)};
  const int64_t key_head = j / (problem.value_heads / problem.heads);
  load_row(inputs.q, b, t, key_head, x.q.data());
  load_row(inputs.k, b, t, key_head, x.k.data());
  load_row(inputs.v, b, t, j, x.v.data());
  if (problem.use_qk_l2norm) {
    x.q_rstd = normalize(x.q);
    x.k_rstd = normalize(x.k);
  }
  x.log_decay = load(inputs.g, {b, t, j});
  if (problem.use_gate) {
    const double z = x.log_decay + (inputs.dt_bias ? load_flat(inputs.dt_bias, j) : 0.0);
    const double A_log = load_flat(inputs.A_log, j);
    // Sums of logarithms: exp(A_log) may overflow while softplus underflows, and their product be harmless.
    x.log_decay = -std::exp(A_log + log_softplus(z));
    x.log_decay_by_g = -std::exp(A_log - softplus(-z));  // softplus(-z) = -log sigmoid(z)
  }
  x.beta = load(inputs.beta, {b, t, j});
  if (problem.use_beta_sigmoid) {
    const double logit = x.beta;
    const double height = problem.allow_neg_eigval ? 2 : 1;
    x.beta = height * sigmoid(logit);
    x.beta_by_logit = height * sigmoid(logit) * sigmoid(-logit);
  }
  return x;
}

// State ---------------------------------------------------------------------------------------------------------------

bool resets(const Token& x) { return x.log_decay == -std::numeric_limits<double>::infinity(); }

// S <- e^g S. A reset forgets the state even if it holds inf or NaN.
void decay(const Token& x, Vector& S) {
  const double factor = std::exp(x.log_decay);
  for (double& value : S) value = resets(x) ? 0 : value * factor;
}

// v - S^T k for the decayed S: what the state does not yet say about k.
Vector residual(const Token& x, const double* S) {
  Vector read(x.v.size(), 0.0);
  const int64_t K = static_cast<int64_t>(x.k.size()), V = static_cast<int64_t>(x.v.size());
  for (int64_t i = 0; i < K; ++i) add_scaled(x.k[i], S + i * V, read.data(), V);
  Vector result = x.v;
  for (int64_t i = 0; i < V; ++i) result[i] -= read[i];
  return result;
}

// S <- S + k (beta residual)^T for the decayed S.
void write(const Token& x, Vector& S) {
  const Vector missing = residual(x, S.data());
  const int64_t V = static_cast<int64_t>(x.v.size());
  for (size_t i = 0; i < x.k.size(); ++i) add_scaled(x.k[i] * x.beta, missing.data(), S.data() + i * V, V);
}

// scale S^T q
Vector output(const Token& x, const Vector& S, double scale) {
  Vector o(x.v.size(), 0.0);
  const int64_t V = static_cast<int64_t>(x.v.size());
  for (size_t i = 0; i < x.q.size(); ++i) add_scaled(scale * x.q[i], S.data() + i * V, o.data(), V);
  return o;
}

// Gradients by what Token holds.
struct TokenGradient {
  Vector dq, dk, dv;
  double dlog_decay = 0, dbeta = 0;
};

// One step backward. S is the decayed state of this token; D comes in as the gradient of the state behind the token
// and leaves as the gradient of the state before it.
TokenGradient adjoint_step(const Token& x, const double* S, const Vector& dO, double scale, Vector& D) {
  const int64_t K = static_cast<int64_t>(x.k.size()), V = static_cast<int64_t>(x.v.size());
  TokenGradient d{.dq = Vector(K), .dk = Vector(K), .dv = Vector(V)};
  const Vector missing = residual(x, S);
  Vector r = missing;
  for (double& value : r) value *= x.beta;

  // o = scale (S + k r^T)^T q: the output reads the state behind the update.
  const double r_dO = dot(r.data(), dO.data(), V);
  for (int64_t i = 0; i < K; ++i) {
    d.dq[i] = scale * (dot(S + i * V, dO.data(), V) + x.k[i] * r_dO);
    add_scaled(scale * x.q[i], dO.data(), D.data() + i * V, V);
  }
  // Update S + k r^T with r = beta (v - S^T k). dr = D^T k; dv = beta dr; the residual's own S loses k dv^T.
  Vector dr(V, 0.0);
  for (int64_t i = 0; i < K; ++i) add_scaled(x.k[i], D.data() + i * V, dr.data(), V);
  d.dbeta = dot(dr.data(), missing.data(), V);
  for (int64_t i = 0; i < V; ++i) d.dv[i] = x.beta * dr[i];
  for (int64_t i = 0; i < K; ++i) {
    double* D_row = D.data() + i * V;
    d.dk[i] = dot(D_row, r.data(), V) - dot(S + i * V, d.dv.data(), V);
    add_scaled(-x.k[i], d.dv.data(), D_row, V);
  }
  // S = e^g S_before: the derivative by g is the decayed state itself, which a reset makes zero.
  d.dlog_decay = resets(x) ? 0 : dot(D.data(), S, K * V);
  decay(x, D);
  return d;
}

// Walks the tokens of one sequence and value head backward, handing each its decayed state. States are recomputed in
// segments of about sqrt(length) tokens, so that 2 sqrt(length) of them are alive instead of all.
template <class LoadToken, class Visit>
void walk_backward(int64_t length, Vector S, LoadToken load_token_at, Visit visit) {
  const auto segment = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(length))));
  std::vector<Vector> starts;
  for (int64_t t = 0; t < length; ++t) {
    if (t % segment == 0) starts.push_back(S);
    const Token x = load_token_at(t);
    decay(x, S);
    write(x, S);
  }
  for (; !starts.empty(); starts.pop_back()) {
    const int64_t begin = (static_cast<int64_t>(starts.size()) - 1) * segment;
    const int64_t end = std::min(begin + segment, length);
    std::vector<Vector> decayed;
    S = starts.back();
    for (int64_t t = begin; t < end; ++t) {
      const Token x = load_token_at(t);
      decay(x, S);
      decayed.push_back(S);
      write(x, S);
    }
    for (int64_t t = end - 1; t >= begin; --t) visit(t, load_token_at(t), decayed[t - begin].data());
  }
}

// x was divided by its norm: dx = rstd (dy - y <dy, y>).
void normalize_adjoint(const Vector& y, double rstd, double* dy) {
  const auto n = static_cast<int64_t>(y.size());
  const double along = dot(dy, y.data(), n);
  for (int64_t i = 0; i < n; ++i) dy[i] = rstd * (dy[i] - y[i] * along);
}

}  // namespace

void forward(const Problem& given, const ForwardTensors& tensors) {
  const Setup setup(given);
  const Problem& problem = setup.problem;
  const Inputs inputs = views_of(tensors);
  const TensorView o = TensorView::from(tensors.o, "o");
  const TensorView final_state = TensorView::from(tensors.final_state, "final_state");
  setup.check_inputs(inputs);
  setup.check_value(o, "o", true);
  setup.check_state(final_state, "final_state");
  if (tensors.saved != nullptr) throw_value_error("saved: the reference keeps nothing for backward, expected none");

  const int64_t jobs = problem.num_sequences() * problem.value_heads;
  run_jobs(jobs, problem.num_threads, [&](int64_t job) {
    const int64_t n = job / problem.value_heads, j = job % problem.value_heads;
    const SequenceRange& sequence = setup.sequences[n];
    Vector S = load_state(problem, inputs.initial_state, n, j);
    for (int64_t row = sequence.begin; row < sequence.begin + sequence.length; ++row) {
      const int64_t b = row / problem.tokens, t = row % problem.tokens;
      const Token x = load_token(problem, inputs, b, t, j);
      decay(x, S);
      write(x, S);
      store_row(o, b, t, j, output(x, S, setup.scale).data());
    }
    store_state(problem, final_state, n, j, S);
  });
  const Vector zeros(problem.value_dim, 0.0);
  setup.for_each_padding_token([&](int64_t b, int64_t t) {
    for (int64_t j = 0; j < problem.value_heads; ++j) store_row(o, b, t, j, zeros.data());
  });
}

void backward(const Problem& given, const BackwardTensors& tensors) {
  const Setup setup(given);
  const Problem& problem = setup.problem;
  const Inputs inputs = views_of(tensors);
  const TensorView dO = TensorView::from(tensors.grad_output, "do");
  const TensorView dht = TensorView::from(tensors.grad_final_state, "dht");
  const TensorView dq = TensorView::from(tensors.dq, "dq"), dk = TensorView::from(tensors.dk, "dk");
  const TensorView dv = TensorView::from(tensors.dv, "dv"), dg = TensorView::from(tensors.dg, "dg");
  const TensorView dbeta = TensorView::from(tensors.dbeta, "dbeta");
  const TensorView dA_log = TensorView::from(tensors.dA_log, "dA_log");
  const TensorView ddt_bias = TensorView::from(tensors.ddt_bias, "ddt_bias");
  const TensorView dh0 = TensorView::from(tensors.dh0, "dh0");
  setup.check_inputs(inputs);
  setup.check_value(dO, "do", true);
  setup.check_state(dht, "dht");
  setup.check_qk(dq, "dq", false);
  setup.check_qk(dk, "dk", false);
  setup.check_value(dv, "dv", false);
  setup.check_token(dg, "dg", false);
  setup.check_token(dbeta, "dbeta", false);
  setup.check_head(dA_log, "dA_log", false);
  setup.check_head(ddt_bias, "ddt_bias", false);
  setup.check_state(dh0, "dh0");
  if (tensors.saved != nullptr) throw_value_error("saved: the reference keeps nothing for backward, expected none");
  if (!problem.use_gate && (dA_log || ddt_bias)) {
    throw_value_error("dA_log, ddt_bias: expected none without use_gate, got a tensor");
  }
  if (ddt_bias && !inputs.dt_bias) throw_value_error("ddt_bias: expected none without dt_bias, got a tensor");

  const int64_t HV = problem.value_heads, group = HV / problem.heads, K = problem.key_dim, V = problem.value_dim;
  // Gradients of A_log and dt_bias by sequence and value head, summed in that order at the end.
  Vector dA_log_parts(problem.num_sequences() * HV, 0.0), ddt_bias_parts(problem.num_sequences() * HV, 0.0);

  // A job is one sequence and key head, so that the sum over the group needs no other thread.
  run_jobs(problem.num_sequences() * problem.heads, problem.num_threads, [&](int64_t job) {
    const int64_t n = job / problem.heads, h = job % problem.heads;
    const SequenceRange& sequence = setup.sequences[n];
    const auto batch_and_token = [&](int64_t i) {
      const int64_t row = sequence.begin + i;
      return std::pair(row / problem.tokens, row % problem.tokens);
    };
    // Over the value heads of the group, kept in float64 until the one rounding of the store.
    Vector dq_sum(sequence.length * K, 0.0), dk_sum(sequence.length * K, 0.0);
    for (int64_t j = h * group; j < (h + 1) * group; ++j) {
      Vector D = load_state(problem, dht, n, j);
      const auto load_token_at = [&](int64_t i) {
        const auto [b, t] = batch_and_token(i);
        return load_token(problem, inputs, b, t, j);
      };
      const auto visit = [&](int64_t i, const Token& x, const double* S) {
        const auto [b, t] = batch_and_token(i);
        Vector dO_row(V);
        load_row(dO, b, t, j, dO_row.data());
        const TokenGradient d = adjoint_step(x, S, dO_row, setup.scale, D);
        add_scaled(1, d.dq.data(), dq_sum.data() + i * K, K);
        add_scaled(1, d.dk.data(), dk_sum.data() + i * K, K);
        store_row(dv, b, t, j, d.dv.data());
        // No gradient flows through a reset, not even where the slope of the gate is infinite.
        const double dg_value = d.dlog_decay == 0 ? 0 : d.dlog_decay * x.log_decay_by_g;
        if (dg) store(dg, {b, t, j}, dg_value);
        if (dbeta) store(dbeta, {b, t, j}, d.dbeta * x.beta_by_logit);
        ddt_bias_parts[n * HV + j] += dg_value;
        dA_log_parts[n * HV + j] += d.dlog_decay == 0 ? 0 : d.dlog_decay * x.log_decay;
      };
      walk_backward(sequence.length, load_state(problem, inputs.initial_state, n, j), load_token_at, visit);
      store_state(problem, dh0, n, j, D);
    }
    for (int64_t i = 0; i < sequence.length; ++i) {
      const auto [b, t] = batch_and_token(i);
      if (problem.use_qk_l2norm) {
        // All value heads of the group see the same normalised rows.
        const Token x = load_token(problem, inputs, b, t, h * group);
        normalize_adjoint(x.q, x.q_rstd, dq_sum.data() + i * K);
        normalize_adjoint(x.k, x.k_rstd, dk_sum.data() + i * K);
      }
      store_row(dq, b, t, h, dq_sum.data() + i * K);
      store_row(dk, b, t, h, dk_sum.data() + i * K);
    }
  });

  for (int64_t j = 0; j < HV; ++j) {
    double dA_log_sum = 0, ddt_bias_sum = 0;
    for (int64_t n = 0; n < problem.num_sequences(); ++n) {
      dA_log_sum += dA_log_parts[n * HV + j];
      ddt_bias_sum += ddt_bias_parts[n * HV + j];
    }
    store_flat(dA_log, j, dA_log_sum);
    store_flat(ddt_bias, j, ddt_bias_sum);
  }
  const Vector zeros(std::max(K, V), 0.0);
  setup.for_each_padding_token([&](int64_t b, int64_t t) {
    for (int64_t h = 0; h < problem.heads; ++h) {
      store_row(dq, b, t, h, zeros.data());
      store_row(dk, b, t, h, zeros.data());
    }
    for (int64_t j = 0; j < HV; ++j) {
      store_row(dv, b, t, j, zeros.data());
      if (dg) store(dg, {b, t, j}, 0);
      if (dbeta) store(dbeta, {b, t, j}, 0);
    }
  });
}

}  // namespace cula::gdn::reference
