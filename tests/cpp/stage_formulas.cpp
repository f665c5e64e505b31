#include "stage_formulas.h"

#include <cmath>
#include <limits>
#include <numbers>

namespace cula::test::formulas {

namespace {

struct Matrix {
  int64_t rows, cols;
  std::vector<double> data;

  Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), data(rows * cols, 0.0) {}
  double& operator()(int64_t i, int64_t j) { return data[i * cols + j]; }
  double operator()(int64_t i, int64_t j) const { return data[i * cols + j]; }
};

template <class Value>
Matrix make_matrix(int64_t rows, int64_t cols, Value value) {
  Matrix result(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) result(i, j) = value(i, j);
  }
  return result;
}

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix result(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t k = 0; k < a.cols; ++k) {
      for (int64_t j = 0; j < b.cols; ++j) result(i, j) += a(i, k) * b(k, j);
    }
  }
  return result;
}

Matrix operator+(const Matrix& a, const Matrix& b) {
  return make_matrix(a.rows, a.cols, [&](int64_t i, int64_t j) { return a(i, j) + b(i, j); });
}
Matrix operator-(const Matrix& a, const Matrix& b) {
  return make_matrix(a.rows, a.cols, [&](int64_t i, int64_t j) { return a(i, j) - b(i, j); });
}
Matrix operator*(double factor, const Matrix& a) {
  return make_matrix(a.rows, a.cols, [&](int64_t i, int64_t j) { return factor * a(i, j); });
}
Matrix transposed(const Matrix& a) {
  return make_matrix(a.cols, a.rows, [&](int64_t i, int64_t j) { return a(j, i); });
}
// Elementwise product.
Matrix times(const Matrix& a, const Matrix& b) {
  return make_matrix(a.rows, a.cols, [&](int64_t i, int64_t j) { return a(i, j) * b(i, j); });
}
// diag(d) a
template <class Diagonal>
Matrix scale_rows(Diagonal d, const Matrix& a) {
  return make_matrix(a.rows, a.cols, [&](int64_t i, int64_t j) { return d(i) * a(i, j); });
}
Matrix strictly_lower(const Matrix& a) {
  return make_matrix(a.rows, a.cols, [&](int64_t i, int64_t j) { return i > j ? a(i, j) : 0; });
}
double row_sum(const Matrix& a, int64_t i) {
  double sum = 0;
  for (int64_t j = 0; j < a.cols; ++j) sum += a(i, j);
  return sum;
}
double total(const Matrix& a) {
  double sum = 0;
  for (const double value : a.data) sum += value;
  return sum;
}

// One chunk of one value head: its decay factors, and its rows of the tensors.
class Chunk {
 public:
  Chunk(const gdn::Plan& plan, int64_t number, int64_t head, const Tensor& gamma)
      : plan_(plan), range_(plan.chunks()[number]), number_(number), head_(head), n(range_.length) {
    const gdn::Problem& p = plan.problem();
    for (int64_t i = 0; i < n; ++i) {
      const double value = gamma ? gamma.at((range_.begin + i) * p.value_heads + head) : 0;
      const bool reset = value == -std::numeric_limits<double>::infinity();
      const int before = resets_.empty() ? 0 : resets_.back();
      resets_.push_back(before + (reset ? 1 : 0));
      gamma_.push_back(reset ? 0 : value);  // the sum restarts behind a reset
    }
  }

  // Decay from row j to row i, from the state before the chunk to row i, from row i to the end, over the chunk.
  double E(int64_t i, int64_t j) const { return resets_[i] == resets_[j] ? std::exp2(gamma_[i] - gamma_[j]) : 0; }
  double from_start(int64_t i) const { return resets_[i] == 0 ? std::exp2(gamma_[i]) : 0; }
  double to_end(int64_t i) const { return E(n - 1, i); }
  double over() const { return from_start(n - 1); }

  // tril(E), with the diagonal.
  Matrix decay() const {
    return make_matrix(n, n, [this](int64_t i, int64_t j) { return i >= j ? E(i, j) : 0; });
  }

  // Rows of a [B, T, heads, D] tensor; the key head of this value head where the tensor has only H of them.
  Matrix rows(const Tensor& x, int64_t width = -1) const {
    const int64_t heads = x.shape()[2], D = x.shape()[3];
    const int64_t head = head_ / (plan_.problem().value_heads / heads);
    return make_matrix(n, width < 0 ? D : width,
                       [&](int64_t i, int64_t j) { return x.at(((range_.begin + i) * heads + head) * D + j); });
  }
  // Adds to them: plain storing for value heads, the sum over the group for key heads.
  void add_rows(const Tensor& x, const Matrix& value) const {
    const int64_t heads = x.shape()[2], D = x.shape()[3];
    const int64_t head = head_ / (plan_.problem().value_heads / heads);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < value.cols; ++j) {
        const int64_t index = ((range_.begin + i) * heads + head) * D + j;
        x.set(index, x.at(index) + value(i, j));
      }
    }
  }
  int64_t token(int64_t i) const { return (range_.begin + i) * plan_.problem().value_heads + head_; }
  double token_value(const Tensor& x, int64_t i) const { return x.at(token(i)); }

  // The state of this chunk in h or dh, of this sequence in initial_state and its like; as [K, V].
  Matrix chunk_state(const Tensor& x) const { return load_state(x, number_); }
  void set_chunk_state(const Tensor& x, const Matrix& S) const { store_state(x, number_, S); }
  Matrix sequence_state(const Tensor& x) const { return load_state(x, range_.sequence); }

  static Matrix load_state(const gdn::Problem& p, const Tensor& x, int64_t index) {
    return make_matrix(p.key_dim, p.value_dim,
                       [&](int64_t i, int64_t j) { return x.at(state_element(p, index, i, j)); });
  }
  static void store_state(const gdn::Problem& p, const Tensor& x, int64_t index, const Matrix& S) {
    for (int64_t i = 0; i < S.rows; ++i) {
      for (int64_t j = 0; j < S.cols; ++j) x.set(state_element(p, index, i, j), S(i, j));
    }
  }

 private:
  static int64_t state_element(const gdn::Problem& p, int64_t index, int64_t i, int64_t j) {
    return index * p.key_dim * p.value_dim + (p.state_v_first ? j * p.key_dim + i : i * p.value_dim + j);
  }
  Matrix load_state(const Tensor& x, int64_t which) const {
    return load_state(plan_.problem(), x, which * plan_.problem().value_heads + head_);
  }
  void store_state(const Tensor& x, int64_t which, const Matrix& S) const {
    store_state(plan_.problem(), x, which * plan_.problem().value_heads + head_, S);
  }

  const gdn::Plan& plan_;
  const gdn::ChunkRange range_;
  const int64_t number_, head_;
  std::vector<int> resets_;  // up to and with each row
  std::vector<double> gamma_;

 public:
  const int64_t n;  // rows
};

template <class Visit>
void for_each_chunk(const gdn::Plan& plan, const Tensor& gamma, Visit visit) {
  for (int64_t c = 0; c < static_cast<int64_t>(plan.chunks().size()); ++c) {
    for (int64_t j = 0; j < plan.problem().value_heads; ++j) visit(Chunk(plan, c, j, gamma));
  }
}

Tensor zeros(Shape shape) { return constant(DType::kFloat64, shape, 0); }

Tensor token_zeros(const gdn::Plan& plan, int64_t heads, int64_t width) {
  return zeros({plan.problem().batch, plan.problem().tokens, heads, width});
}

Tensor state_zeros(const gdn::Plan& plan, Shape leading) {
  const gdn::Problem& p = plan.problem();
  leading.push_back(p.value_heads);
  leading.push_back(p.state_v_first ? p.value_dim : p.key_dim);
  leading.push_back(p.state_v_first ? p.key_dim : p.value_dim);
  return zeros(leading);
}

Tensor chunk_states(const gdn::Plan& plan) {
  const int64_t B = plan.problem().batch;
  return state_zeros(plan, {B, static_cast<int64_t>(plan.chunks().size()) / B});
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace

Normalized l2norm(const Tensor& x) {
  Shape leading = x.shape();
  const int64_t D = leading.back();
  leading.pop_back();
  Normalized result = {zeros(x.shape()), zeros(leading)};
  for (int64_t row = 0; row < result.rstd.numel(); ++row) {
    double sum = 1e-6;
    for (int64_t i = 0; i < D; ++i) sum += x.at(row * D + i) * x.at(row * D + i);
    result.rstd.set(row, 1 / std::sqrt(sum));
    for (int64_t i = 0; i < D; ++i) result.y.set(row * D + i, x.at(row * D + i) / std::sqrt(sum));
  }
  return result;
}

Tensor l2norm_gradient(const Tensor& y, const Tensor& rstd, const Tensor& dy) {
  const int64_t D = y.shape().back();
  const Tensor dx = zeros(y.shape());
  for (int64_t row = 0; row < rstd.numel(); ++row) {
    double along = 0;
    for (int64_t i = row * D; i < (row + 1) * D; ++i) along += dy.at(i) * y.at(i);
    for (int64_t i = row * D; i < (row + 1) * D; ++i) dx.set(i, rstd.at(row) * (dy.at(i) - y.at(i) * along));
  }
  return dx;
}

Tensor beta_sigmoid(const Tensor& x, double scale) {
  return zeros(x.shape()).filled([&](int64_t i) { return scale * sigmoid(x.at(i)); });
}

Tensor beta_sigmoid_gradient(const Tensor& x, const Tensor& dy, double scale) {
  return zeros(x.shape()).filled([&](int64_t i) { return dy.at(i) * scale * sigmoid(x.at(i)) * sigmoid(-x.at(i)); });
}

namespace {

bool is_padding(const gdn::Plan& plan, int64_t token) {
  const auto& offsets = plan.problem().sequence_offsets;
  return offsets && token >= offsets->back();
}

}  // namespace

Tensor gate(const gdn::Plan& plan, const Tensor& g, const Tensor& A_log, const Tensor& dt_bias) {
  const int64_t HV = g.shape().back();
  return zeros(g.shape()).filled([&](int64_t i) {
    if (is_padding(plan, i / HV)) return 0.0;
    const double z = g.at(i) + (dt_bias ? dt_bias.at(i % HV) : 0);
    return -std::exp(A_log.at(i % HV)) * (z > 30 ? z + std::exp(-z) : std::log1p(std::exp(z)));
  });
}

GateGradients gate_gradients(const gdn::Plan& plan, const Tensor& g, const Tensor& A_log, const Tensor& dt_bias,
                             const Tensor& dyg) {
  const int64_t HV = g.shape().back();
  const Tensor log_decay = gate(plan, g, A_log, dt_bias);
  GateGradients result = {zeros(g.shape()), zeros(A_log.shape()), zeros(A_log.shape())};
  for (int64_t i = 0; i < g.numel(); ++i) {
    const int64_t j = i % HV;
    if (is_padding(plan, i / HV)) continue;
    const double z = g.at(i) + (dt_bias ? dt_bias.at(j) : 0);
    result.dg.set(i, -std::exp(A_log.at(j)) * sigmoid(z) * dyg.at(i));
    result.dA_log.set(j, result.dA_log.at(j) + dyg.at(i) * log_decay.at(i));
    result.ddt_bias.set(j, result.ddt_bias.at(j) + result.dg.at(i));
  }
  return result;
}

Tensor local_cumsum(const gdn::Plan& plan, const Tensor& g, double scale, bool reverse) {
  const int64_t HV = plan.problem().value_heads;
  const Tensor result = zeros(g.shape());
  for (const gdn::ChunkRange& chunk : plan.chunks()) {
    for (int64_t j = 0; j < HV; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < chunk.length; ++i) {
        const int64_t index = (chunk.begin + (reverse ? chunk.length - 1 - i : i)) * HV + j;
        sum += g.at(index);
        result.set(index, scale * sum);
        if (std::isinf(sum)) sum = 0;  // a reset keeps its own row only
      }
    }
  }
  return result;
}

Tensor scaled_dot_kkt(const gdn::Plan& plan, const Tensor& k, const Tensor& gamma, const Tensor& beta) {
  const Tensor L = token_zeros(plan, plan.problem().value_heads, plan.problem().chunk_size);
  for_each_chunk(plan, gamma, [&](const Chunk& c) {
    const Matrix K = c.rows(k);
    const auto B = [&](int64_t i) { return c.token_value(beta, i); };
    c.add_rows(L, strictly_lower(times(scale_rows(B, K * transposed(K)), c.decay())));
  });
  return L;
}

Tensor inverse(const gdn::Plan& plan, const Tensor& L) {
  const Tensor A = token_zeros(plan, plan.problem().value_heads, plan.problem().chunk_size);
  for_each_chunk(plan, Tensor(), [&](const Chunk& c) {
    const Matrix lower = c.rows(L, c.n);
    Matrix X(c.n, c.n);
    for (int64_t i = 0; i < c.n; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        double value = i == j ? 1 : 0;
        for (int64_t m = j; m < i; ++m) value -= lower(i, m) * X(m, j);
        X(i, j) = value;
      }
    }
    c.add_rows(A, X);
  });
  return A;
}

WU recompute_w_u(const gdn::Plan& plan, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& A,
                 const Tensor& gamma) {
  const gdn::Problem& p = plan.problem();
  WU result = {token_zeros(plan, p.value_heads, p.key_dim), token_zeros(plan, p.value_heads, p.value_dim)};
  for_each_chunk(plan, gamma, [&](const Chunk& c) {
    const Matrix A_rows = c.rows(A, c.n);
    c.add_rows(result.u, A_rows * scale_rows([&](int64_t i) { return c.token_value(beta, i); }, c.rows(v)));
    c.add_rows(result.w,
               A_rows * scale_rows([&](int64_t i) { return c.token_value(beta, i) * c.from_start(i); }, c.rows(k)));
  });
  return result;
}

States forward_states(const gdn::Plan& plan, const Tensor& k, const Tensor& w, const Tensor& u, const Tensor& gamma,
                      const Tensor& initial_state) {
  const gdn::Problem& p = plan.problem();
  States result = {chunk_states(plan), token_zeros(plan, p.value_heads, p.value_dim),
                   state_zeros(plan, {p.num_sequences()})};
  for (int64_t n = 0; n < p.num_sequences(); ++n) {
    const gdn::SequenceRange& sequence = plan.sequences()[n];
    for (int64_t j = 0; j < p.value_heads; ++j) {
      Matrix S(p.key_dim, p.value_dim);
      if (initial_state) S = Chunk::load_state(p, initial_state, n * p.value_heads + j);
      for (int64_t index = 0; index < sequence.num_chunks; ++index) {
        const Chunk c(plan, sequence.first_chunk + index, j, gamma);
        c.set_chunk_state(result.h, S);
        const Matrix Y = c.rows(u) - c.rows(w) * S;
        c.add_rows(result.v_new, Y);
        S = c.over() * S + transposed(c.rows(k)) * scale_rows([&](int64_t i) { return c.to_end(i); }, Y);
      }
      Chunk::store_state(p, result.final_state, n * p.value_heads + j, S);
    }
  }
  return result;
}

Tensor output(const gdn::Plan& plan, const Tensor& q, const Tensor& k, const Tensor& v_new, const Tensor& h,
              const Tensor& gamma) {
  const Tensor o = token_zeros(plan, plan.problem().value_heads, plan.problem().value_dim);
  for_each_chunk(plan, gamma, [&](const Chunk& c) {
    const Matrix Q = c.rows(q);
    const Matrix across = scale_rows([&](int64_t i) { return c.from_start(i); }, Q * c.chunk_state(h));
    const Matrix inside = times(Q * transposed(c.rows(k)), c.decay()) * c.rows(v_new);
    c.add_rows(o, plan.scale() * (across + inside));
  });
  return o;
}

Tensor local_value_gradient(const gdn::Plan& plan, const Tensor& q, const Tensor& k, const Tensor& gamma,
                            const Tensor& grad_output) {
  const Tensor dv = token_zeros(plan, plan.problem().value_heads, plan.problem().value_dim);
  for_each_chunk(plan, gamma, [&](const Chunk& c) {
    const Matrix P = plan.scale() * times(c.rows(q) * transposed(c.rows(k)), c.decay());
    c.add_rows(dv, transposed(P) * c.rows(grad_output));
  });
  return dv;
}

StateGradients backward_states(const gdn::Plan& plan, const Tensor& q, const Tensor& k, const Tensor& w,
                               const Tensor& gamma, const Tensor& dht, const Tensor& grad_output, const Tensor& dv) {
  const gdn::Problem& p = plan.problem();
  StateGradients result = {chunk_states(plan), state_zeros(plan, {p.num_sequences()}),
                           token_zeros(plan, p.value_heads, p.value_dim)};
  for (int64_t n = 0; n < p.num_sequences(); ++n) {
    const gdn::SequenceRange& sequence = plan.sequences()[n];
    for (int64_t j = 0; j < p.value_heads; ++j) {
      Matrix D(p.key_dim, p.value_dim);
      if (dht) D = Chunk::load_state(p, dht, n * p.value_heads + j);
      for (int64_t index = sequence.num_chunks - 1; index >= 0; --index) {
        const Chunk c(plan, sequence.first_chunk + index, j, gamma);
        c.set_chunk_state(result.dh, D);
        const Matrix X = scale_rows([&](int64_t i) { return c.to_end(i); }, c.rows(k) * D) + c.rows(dv);
        c.add_rows(result.dv2, X);
        const Matrix Q = scale_rows([&](int64_t i) { return plan.scale() * c.from_start(i); }, c.rows(q));
        D = c.over() * D + transposed(Q) * c.rows(grad_output) - transposed(c.rows(w)) * X;
      }
      Chunk::store_state(p, result.dh0, n * p.value_heads + j, D);
    }
  }
  return result;
}

OperandGradients operand_gradients(const gdn::Plan& plan, const OperandGradientInputs& x) {
  const gdn::Problem& p = plan.problem();
  OperandGradients result = {token_zeros(plan, p.heads, p.key_dim), token_zeros(plan, p.heads, p.key_dim),
                             token_zeros(plan, p.value_heads, p.key_dim), zeros({p.batch, p.tokens, p.value_heads})};
  for_each_chunk(plan, x.gamma, [&](const Chunk& c) {
    const Matrix Q = c.rows(x.q), K = c.rows(x.k), Y = c.rows(x.v_new), dO = c.rows(x.grad_output);
    const Matrix S = c.chunk_state(x.h), D = c.chunk_state(x.dh);
    const Matrix dS = plan.scale() * times(dO * transposed(Y), c.decay());
    const Matrix across = scale_rows([&](int64_t i) { return plan.scale() * c.from_start(i); }, dO * transposed(S));
    const Matrix dq = across + dS * K;
    const Matrix dk_in = scale_rows([&](int64_t i) { return c.to_end(i); }, Y * transposed(D));
    const Matrix dk = dk_in + transposed(dS) * Q;
    c.add_rows(result.dq, dq);
    c.add_rows(result.dk, dk);
    c.add_rows(result.dw, -1 * (c.rows(x.dv2) * transposed(S)));
    const Matrix by_row = times(dq, Q) - times(dk, K);
    for (int64_t i = 0; i < c.n; ++i) result.dg.set(c.token(i), row_sum(by_row, i));
    const double at_end = c.over() * total(times(S, D)) + total(times(dk_in, K));
    result.dg.set(c.token(c.n - 1), result.dg.at(c.token(c.n - 1)) + at_end);
  });
  return result;
}

WyGradients wy_gradients(const gdn::Plan& plan, const WyGradientInputs& x) {
  const gdn::Problem& p = plan.problem();
  const Shape token = {p.batch, p.tokens, p.value_heads};
  WyGradients result = {token_zeros(plan, p.heads, p.key_dim), token_zeros(plan, p.value_heads, p.value_dim),
                        zeros(token), zeros(token)};
  for_each_chunk(plan, x.gamma, [&](const Chunk& c) {
    const Matrix K = c.rows(x.k), V = c.rows(x.v), A = c.rows(x.A, c.n), dW = c.rows(x.dw), dU = c.rows(x.du);
    const auto beta = [&](int64_t i) { return c.token_value(x.beta, i); };
    const auto beta_decay = [&](int64_t i) { return beta(i) * c.from_start(i); };
    const Matrix Z_w = transposed(A) * dW, Z_u = transposed(A) * dU;
    const Matrix dA = strictly_lower(dW * transposed(scale_rows(beta_decay, K)) + dU * transposed(scale_rows(beta, V)));
    const Matrix dL = -1 * strictly_lower(transposed(A) * dA * transposed(A));
    const Matrix dP = times(dL, c.decay());
    const Matrix M = scale_rows(beta, K * transposed(K));
    const Matrix dP_K = dP * K;
    c.add_rows(result.dk, scale_rows(beta_decay, Z_w) + scale_rows(beta, dP_K) + transposed(dP) * scale_rows(beta, K));
    c.add_rows(result.dv, scale_rows(beta, Z_u));
    const Matrix Z_w_K = times(Z_w, K), Z_u_V = times(Z_u, V), dP_K_K = times(dP_K, K), dP_M = times(dP, M);
    const Matrix dP_M_columns = transposed(dP_M);
    for (int64_t i = 0; i < c.n; ++i) {
      result.db.set(c.token(i), c.from_start(i) * row_sum(Z_w_K, i) + row_sum(Z_u_V, i) + row_sum(dP_K_K, i));
      result.dg.set(c.token(i), beta_decay(i) * row_sum(Z_w_K, i) + row_sum(dP_M, i) - row_sum(dP_M_columns, i));
    }
  });
  return result;
}

}  // namespace cula::test::formulas
