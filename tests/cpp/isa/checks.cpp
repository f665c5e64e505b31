#include "isa/checks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <vector>

#include "common/host/matmul.h"

namespace cula::CULA_ISA {

namespace {

// A fixed sequence in (-1, 1).
class Numbers {
 public:
  double next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state_ >> 11) / 4503599627370496.0 - 1.0;
  }

 private:
  uint64_t state_ = 12345;
};

[[maybe_unused]] float round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Case {
  int64_t m, n, k;
  bool transposed_a, accumulate;
  Triangle triangle;
};

// The error of one product in units of the accumulator's rounding times the sum of absolute products.
template <class Policy>
double product_error(const Case& c, Numbers& numbers) {
  using T = typename Policy::Scalar;
  constexpr bool kPairs = std::is_same_v<Policy, Bf16Pairs>;
  const int64_t a_outer = c.transposed_a ? c.k : c.m, a_inner = c.transposed_a ? c.m : c.k;
  const int64_t a_stride = padded(a_inner) + kColumnPadding, b_stride = padded(c.n) + kColumnPadding;
  std::vector<T> a(static_cast<size_t>(a_outer * a_stride)), b(static_cast<size_t>(c.k * b_stride));
  std::vector<T> to(static_cast<size_t>(c.m * b_stride));
  for (T& value : a) value = T(numbers.next());
  for (T& value : b) value = T(numbers.next());
  for (T& value : to) value = T(numbers.next());
  const int64_t a_row = c.transposed_a ? 1 : a_stride, a_col = c.transposed_a ? a_stride : 1;
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t p = 0; p < c.k; ++p) {
      const bool zero = (c.triangle == Triangle::kLowerA && p > i) || (c.triangle == Triangle::kUpperA && p < i);
      if (zero) a[static_cast<size_t>(i * a_row + p * a_col)] = T(0);
    }
  }
  const std::vector<T> before = to;
  std::vector<uint32_t> scratch(static_cast<size_t>(pair_scratch_elements(c.m, c.n, c.k)));
  const T alpha = T(-0.75);
  matmul<Policy>({.m = c.m,
                  .n = c.n,
                  .k = c.k,
                  .a = a.data(),
                  .a_row = a_row,
                  .a_col = a_col,
                  .b = b.data(),
                  .b_row = b_stride,
                  .c = to.data(),
                  .c_row = b_stride,
                  .alpha = alpha,
                  .accumulate = c.accumulate,
                  .triangle = c.triangle},
                 scratch.data());
  double worst = 0.0;
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t j = 0; j < (c.triangle == Triangle::kLowerC ? std::min(c.n, i + 1) : c.n); ++j) {
      const auto index = static_cast<size_t>(i * b_stride + j);
      double sum = 0.0, magnitude = 0.0;
      for (int64_t p = 0; p < c.k; ++p) {
        T left = a[static_cast<size_t>(i * a_row + p * a_col)], right = b[static_cast<size_t>(p * b_stride + j)];
        if constexpr (kPairs) {
          left = round_to_bf16(left);
          right = round_to_bf16(right);
        }
        sum += static_cast<double>(left) * static_cast<double>(right);
        magnitude += std::fabs(static_cast<double>(left) * static_cast<double>(right));
      }
      const double base = c.accumulate ? static_cast<double>(before[index]) : 0.0;
      const double expected = base + static_cast<double>(alpha) * sum;
      const double unit = std::numeric_limits<T>::epsilon() * (magnitude + std::fabs(base) + 1e-30);
      const double error = std::fabs(static_cast<double>(to[index]) - expected) / unit;
      worst = std::isnan(error) ? 1e300 : std::max(worst, error);
    }
  }
  return worst;
}

template <class Policy>
void check_policy(const char* name, std::ostringstream& wrong) {
  constexpr int64_t kSizes[] = {1, 2, 7, 15, 16, 17, 33, 60, 64, 130};
  constexpr double kAllowed = 8.0;  // a chain of k roundings stays far below k units; more is a wrong element
  Numbers numbers;
  for (int64_t m : kSizes) {
    for (int64_t n : kSizes) {
      for (int64_t k : kSizes) {
        for (int form = 0; form < 4; ++form) {
          for (Triangle triangle : {Triangle::kNone, Triangle::kLowerA, Triangle::kUpperA, Triangle::kLowerC}) {
            const Case c = {m, n, k, (form & 1) != 0, (form & 2) != 0, triangle};
            const double error = product_error<Policy>(c, numbers);
            if (error <= kAllowed) continue;
            wrong << name << " " << m << "x" << n << "x" << k << " form " << form << " triangle "
                  << static_cast<int>(triangle) << ": " << error << " units\n";
          }
        }
      }
    }
  }
}

template <class T>
bool transposes() {
  constexpr int kSize = kLanes<T>;
  Vec<T> rows[kSize];
  for (int i = 0; i < kSize; ++i) {
    for (int j = 0; j < kSize; ++j) rows[i][j] = T(i * kSize + j);
  }
  transpose_square<T>(rows);
  for (int i = 0; i < kSize; ++i) {
    for (int j = 0; j < kSize; ++j) {
      if (rows[i][j] != T(j * kSize + i)) return false;
    }
  }
  return true;
}

// The largest error of exp2 in units in the last place, for results in the normal range.
template <class T>
double worst_exponential() {
  const double lowest = std::numeric_limits<T>::min_exponent, highest = std::numeric_limits<T>::max_exponent - 1;
  double worst = 0.0;
  for (int step = 0; step <= 20000; ++step) {
    const T x = T(lowest + (highest - lowest) * step / 20000.0);
    const double expected = std::exp2(static_cast<double>(x));
    const double actual = static_cast<double>(exp2<T>(broadcast(x))[0]);
    worst = std::max(worst, std::fabs(actual - expected) / (std::numeric_limits<T>::epsilon() * expected));
  }
  return worst;
}

template <class T>
bool exponential_edges() {
  const T infinity = std::numeric_limits<T>::infinity();
  const T bound = T(std::numeric_limits<T>::max_exponent);
  const auto value = [](T x) { return exp2<T>(broadcast(x))[0]; };
  return value(-infinity) == T(0) && value(T(-1e30)) == T(0) && value(infinity) == infinity &&
         value(bound) == infinity && value(T(0)) == T(1) && std::isnan(value(std::numeric_limits<T>::quiet_NaN()));
}

}  // namespace

std::string check_products() {
  std::ostringstream wrong;
  check_policy<Float32>("float32", wrong);
  check_policy<Float64>("float64", wrong);
#if defined(__AVX512BF16__)
  check_policy<Bf16Pairs>("bf16 pairs", wrong);
#endif
  return wrong.str();
}

std::string check_transpose() {
  if (!transposes<float>()) return "float";
  if (!transposes<double>()) return "double";
  return "";
}

std::string check_exponential() {
  constexpr double kAllowedUlp = 2.0;
  std::ostringstream wrong;
  if (const double ulp = worst_exponential<float>(); !(ulp <= kAllowedUlp)) wrong << "float: " << ulp << " ulp\n";
  if (const double ulp = worst_exponential<double>(); !(ulp <= kAllowedUlp)) wrong << "double: " << ulp << " ulp\n";
  if (!exponential_edges<float>()) wrong << "float: edges\n";
  if (!exponential_edges<double>()) wrong << "double: edges\n";
  return wrong.str();
}

}  // namespace cula::CULA_ISA
