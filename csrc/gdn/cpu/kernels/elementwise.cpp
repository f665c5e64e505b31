// The stages that work row by row or value by value: normalisation, beta, gate and its running sum.
#include "gdn/cpu/kernels/elementwise.h"

#include <limits>

#include "gdn/cpu/kernels/kernels.h"

namespace cula::gdn::cpu::CULA_ISA {

namespace {

// Calls body with the accumulator type of a problem.
template <class Body>
void with_scalar(const Problem& problem, Body&& body) {
  if (from_dlpack(problem.dtype, "dtype") == DType::kFloat64) return body(double{});
  return body(float{});
}

// Calls body(chunk, head) for each chunk and value head, in parallel.
template <class Body>
void for_chunks_and_heads(const Plan& plan, Body&& body) {
  const int64_t heads = plan.problem().value_heads;
  parallel_for(plan.num_chunks() * heads, plan.num_threads(),
               [&](int64_t unit, int) { body(plan.chunks()[unit / heads], unit % heads); });
}

// A gate below this leaves no digits of the gates behind it in a float32 running sum; it is stored as the -inf that it
// is for all that reads the sum.
constexpr double kLowestSummedGate = -1e5;

// The running sum of a chunk's gates. Forward, -inf marks the start of a segment (see stages.h); in reverse it is a
// plain sum, as gradients need it.
void running_sum(const double* gates, int64_t rows, double scale, bool reverse, double* sums) {
  double sum = 0.0;
  for (int64_t step = 0; step < rows; ++step) {
    const int64_t i = reverse ? rows - 1 - step : step;
    const bool reset = !reverse && gates[i] < kLowestSummedGate;
    sum = reset ? 0.0 : sum + gates[i];
    sums[i] = reset ? -std::numeric_limits<double>::infinity() : sum * scale;
  }
}

}  // namespace

void l2norm_fwd(const Plan& plan, const stages::L2NormForward& t, Stream) {
  with_scalar(plan.problem(), [&](auto scalar) {
    normalize_rows<decltype(scalar)>(TensorView::from(t.x, "x"), TensorView::from(t.y, "y"),
                                     TensorView::from(t.rstd, "rstd"), plan.num_threads());
  });
}

void l2norm_bwd(const Plan& plan, const stages::L2NormBackward& t, Stream) {
  with_scalar(plan.problem(), [&](auto scalar) {
    using T = decltype(scalar);
    const TensorView y = TensorView::from(t.y, "y"), rstd = TensorView::from(t.rstd, "rstd"),
                     dy = TensorView::from(t.dy, "dy"), dx = TensorView::from(t.dx, "dx");
    const int64_t columns = y.shape[y.ndim - 1];
    parallel_blocks(columns == 0 ? 0 : y.numel() / columns, plan.num_threads(), [&](int64_t index) {
      alignas(64) T y_piece[kPiece + kColumnPadding], dy_piece[kPiece + kColumnPadding];
      const Tile<T> y_tile = {y_piece, kPiece}, dy_tile = {dy_piece, kPiece};
      const auto for_pieces = [&](auto&& body) {
        for (int64_t j = 0; j < columns; j += kPiece) {
          const int64_t width = std::min(kPiece, columns - j);
          load_tile(row_at(y, index).columns_from(j), 1, width, y_tile);
          load_tile(row_at(dy, index).columns_from(j), 1, width, dy_tile);
          body(j, width);
        }
      };
      T product = T(0);
      for_pieces([&](int64_t, int64_t width) { product += dot_row(y_piece, dy_piece, width); });
      const T factor = load_scalar<T>(rstd, index);
      for_pieces([&](int64_t j, int64_t width) {
        add_row(-product, y_piece, padded(width), dy_piece);
        scale_row(factor, padded(width), dy_piece);
        store_tile(dy_tile, 1, width, row_at(dx, index).columns_from(j));
      });
    });
  });
}

void fused_beta_sigmoid_fwd(const Plan& plan, const stages::BetaSigmoidForward& t, Stream) {
  const TensorView x = TensorView::from(t.x, "x"), y = TensorView::from(t.y, "y");
  parallel_blocks(x.numel(), plan.num_threads(),
                  [&](int64_t i) { store_scalar(y, i, t.scale * sigmoid(load_scalar<double>(x, i))); });
}

void fused_beta_sigmoid_bwd(const Plan& plan, const stages::BetaSigmoidBackward& t, Stream) {
  const TensorView x = TensorView::from(t.x, "x"), dy = TensorView::from(t.dy, "dy"), dx = TensorView::from(t.dx, "dx");
  parallel_blocks(x.numel(), plan.num_threads(), [&](int64_t i) {
    const double s = sigmoid(load_scalar<double>(x, i));
    store_scalar(dx, i, load_scalar<double>(dy, i) * t.scale * s * (1.0 - s));
  });
}

void chunk_local_cumsum(const Plan& plan, const stages::LocalCumsum& t, Stream) {
  const Problem& p = plan.problem();
  const TensorView g = TensorView::from(t.g, "g"), out = TensorView::from(t.out, "out");
  for_chunks_and_heads(plan, [&](const ChunkRange& chunk, int64_t head) {
    double gates[kMaxChunk], sums[kMaxChunk];
    load_column(rows_of(g, p, chunk.begin, head), chunk.length, gates);
    running_sum(gates, chunk.length, t.scale, t.reverse, sums);
    store_column(sums, chunk.length, rows_of(out, p, chunk.begin, head));
  });
  zero_padding_rows(out, plan);
}

namespace {

// Both forward gate stages: the log decays of a chunk, then `finish(gates, rows)` in place.
template <class Finish>
void gate_forward(const Plan& plan, const stages::GateForward& t, Finish&& finish) {
  const Problem& p = plan.problem();
  const TensorView g = TensorView::from(t.g, "g"), A_log = TensorView::from(t.A_log, "A_log"),
                   dt_bias = TensorView::from(t.dt_bias, "dt_bias"), out = TensorView::from(t.out, "out");
  for_chunks_and_heads(plan, [&](const ChunkRange& chunk, int64_t head) {
    const GateParameters parameters = gate_parameters(A_log, dt_bias, head);
    double gates[kMaxChunk];
    load_log_gates(rows_of(g, p, chunk.begin, head), &parameters, chunk.length, gates);
    finish(gates, chunk.length);
    store_column(gates, chunk.length, rows_of(out, p, chunk.begin, head));
  });
  zero_padding_rows(out, plan);
}

}  // namespace

void gdn_gate_fwd(const Plan& plan, const stages::GateForward& t, Stream) {
  gate_forward(plan, t, [](double*, int64_t) {});
}

void gdn_gate_chunk_cumsum(const Plan& plan, const stages::GateCumsum& t, Stream) {
  gate_forward(plan, {t.g, t.A_log, t.dt_bias, t.out},
               [&](double* gates, int64_t rows) { running_sum(gates, rows, t.scale, false, gates); });
}

void gdn_gate_bwd(const Plan& plan, const stages::GateBackward& t, Stream) {
  const Problem& p = plan.problem();
  const TensorView g = TensorView::from(t.g, "g"), A_log = TensorView::from(t.A_log, "A_log"),
                   dt_bias = TensorView::from(t.dt_bias, "dt_bias"), dyg = TensorView::from(t.dyg, "dyg"),
                   dg = TensorView::from(t.dg, "dg"), dA_log = TensorView::from(t.dA_log, "dA_log"),
                   ddt_bias = TensorView::from(t.ddt_bias, "ddt_bias");
  zero_padding_rows(dg, plan);
  // One unit a head: its sums then have one order.
  parallel_for(p.value_heads, plan.num_threads(), [&](int64_t head, int) {
    const GateParameters parameters = gate_parameters(A_log, dt_bias, head);
    GateSums total;
    for (const ChunkRange& chunk : plan.chunks()) {
      double raw[kMaxChunk], gradient[kMaxChunk];
      load_column(rows_of(g, p, chunk.begin, head), chunk.length, raw);
      load_column(rows_of(dyg, p, chunk.begin, head), chunk.length, gradient);
      total += backward_through_gate(parameters, raw, chunk.length, gradient);
      store_column(gradient, chunk.length, rows_of(dg, p, chunk.begin, head));
    }
    store_scalar(dA_log, head, total.dA_log);
    if (ddt_bias) store_scalar(ddt_bias, head, total.ddt_bias);
  });
}

}  // namespace cula::gdn::cpu::CULA_ISA
