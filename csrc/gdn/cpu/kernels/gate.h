// The decays inside one chunk, made from per-token gates or from a stored running sum.
#pragma once

#include "gdn/cpu/kernels/tile.h"

namespace cula::gdn::cpu::CULA_ISA {

inline constexpr int64_t kMaxChunk = 64;
inline constexpr double kLog2E = 1.44269504088896340736;

inline double softplus(double z) { return (z > 0.0 ? z : 0.0) + std::log1p(std::exp(-std::fabs(z))); }
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// The parameters of the in-kernel gate of one head.
struct GateParameters {
  double A = 0.0;  // exp(A_log)
  double dt_bias = 0.0;

  // A factor that has underflowed to zero wins over an infinite one: the limit of their product is zero.
  double log_decay(double raw) const {
    const double strength = softplus(raw + dt_bias);
    return strength == 0.0 ? 0.0 : -A * strength;
  }
  double derivative(double raw) const {
    const double slope = sigmoid(raw + dt_bias);
    return slope == 0.0 ? 0.0 : -A * slope;
  }
};

// With gamma_i the sum of the log2 gates of rows 0 .. i:
//   decay[i][j] = 2^(gamma_i - gamma_j) for j <= i, else 0       from row j to row i
//   from_start[i] = 2^gamma_i                                    from the state that enters to row i
//   to_end[i] = 2^(gamma_L - gamma_i), L the last row            from row i to the state that leaves
//   total = 2^gamma_L
// A gate of -inf, or so low that it is the same, starts a new segment of rows: everything that crosses its start is
// exactly 0, and gamma restarts at 0. Sums and differences are kept in float64: at strong decay gamma reaches
// thousands, and a difference of float32 sums would have no digits left where the decay matters.
template <class T>
struct ChunkGate {
  Tile<T> decay;  // [C, C]
  T* from_start;  // [C]
  T* to_end;      // [C]
  T total = T(1);
  int64_t segment_start[kMaxChunk];  // first row of the segment that a row belongs to

  ChunkGate(Arena& arena, int64_t chunk_size)
      : decay(take_tile<T>(arena, chunk_size, chunk_size)),
        from_start(arena.take<T>(padded(chunk_size))),
        to_end(arena.take<T>(padded(chunk_size))) {}

  // From natural-log gates, one a row.
  void from_log_gates(const double* gates, int64_t rows) {
    begin();
    double sum = 0.0;
    for (int64_t i = 0; i < rows; ++i) {
      const bool reset = decays_to_nothing(gates[i]);
      sum = reset ? 0.0 : sum + gates[i] * kLog2E;
      add_row_gate(i, sum, reset);
    }
    finish(rows);
  }

  // From a running sum in log2 units that holds -inf where a segment starts.
  void from_running_sum(const double* sums, int64_t rows) {
    begin();
    for (int64_t i = 0; i < rows; ++i) {
      const bool reset = is_reset(sums[i]);
      add_row_gate(i, reset ? 0.0 : sums[i], reset);
    }
    finish(rows);
  }

  void without_gate(int64_t rows) {
    begin();
    for (int64_t i = 0; i < rows; ++i) add_row_gate(i, 0.0, false);
    finish(rows);
  }

  bool resets_at(int64_t row) const { return first_reset_ >= 0 && row >= first_reset_ && segment_start[row] == row; }

  static bool is_reset(double gate) { return std::isinf(gate) && gate < 0.0; }
  // exp(gate) is zero even in float64. Such a gate may be anything down to the lowest number of its type, as masks are
  // written: added to a running sum it would swallow the gates behind it.
  static bool decays_to_nothing(double log_gate) { return log_gate < -746.0; }

 private:
  void begin() { first_reset_ = last_reset_ = -1; }

  void add_row_gate(int64_t row, double sum, bool reset) {
    gamma_[row] = sum;
    if (reset) {
      last_reset_ = row;
      if (first_reset_ < 0) first_reset_ = row;
    }
    segment_start[row] = last_reset_ < 0 ? 0 : last_reset_;
  }

  static void exp2_in_place(T* values, int64_t count) {
    for (int64_t j = 0; j < count; j += kLanes<T>) store(values + j, exp2<T>(load(values + j)));
  }

  void finish(int64_t rows) {
    for (int64_t i = 0; i < padded(rows); ++i) {
      from_start[i] = i < rows ? T(gamma_[i]) : T(0);
      to_end[i] = i < rows ? T(gamma_[rows - 1] - gamma_[i]) : T(0);
    }
    exp2_in_place(from_start, rows);
    exp2_in_place(to_end, rows);
    for (int64_t i = 0; i < rows; ++i) {
      if (first_reset_ >= 0 && i >= first_reset_) from_start[i] = T(0);
      if (i < last_reset_) to_end[i] = T(0);
    }
    total = from_start[rows - 1];

    for (int64_t i = 0; i < rows; ++i) {
      T* row = decay.row(i);
      for (int64_t j = 0; j < padded(rows); ++j) row[j] = j <= i ? T(gamma_[i] - gamma_[j]) : T(0);
      exp2_in_place(row, i + 1);
      for (int64_t j = 0; j < segment_start[i]; ++j) row[j] = T(0);
      for (int64_t j = i + 1; j < padded(rows); ++j) row[j] = T(0);
    }
  }

  double gamma_[kMaxChunk];  // log2 units, from the start of the row's segment or of the chunk
  int64_t first_reset_ = -1;
  int64_t last_reset_ = -1;
};

}  // namespace cula::gdn::cpu::CULA_ISA
