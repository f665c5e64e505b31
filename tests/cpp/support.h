// What the C++ tests share: tensors that own guarded, poisoned memory, deterministic data, and comparisons.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/host/tensor.h"
#include "gdn/gdn.h"

namespace cula::test {

using Shape = std::vector<int64_t>;

// Memory between two red zones. All of it starts as 0xff bytes, which read as NaN in every float type: an element that
// is read without having been written, or read past an end, shows up in the results.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  unsigned char* data() { return storage_.data() + kRedZone + padding_; }
  const unsigned char* data() const { return storage_.data() + kRedZone + padding_; }
  size_t bytes() const { return bytes_; }
  bool red_zones_intact() const;
  const std::vector<unsigned char>& storage() const { return storage_; }

 private:
  static constexpr size_t kRedZone = 256;
  std::vector<unsigned char> storage_;
  size_t bytes_;
  size_t padding_;  // puts data() on a 64-byte boundary
};

// A handle: copies and views share the buffer. A default-constructed tensor is absent and its dl() is null.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, Shape shape);                 // row-major
  Tensor(DType dtype, Shape shape, Shape strides);  // in elements; a buffer of exactly the span of the elements

  explicit operator bool() const { return view_ != nullptr; }
  DLTensor* dl() const { return view_ ? &view_->dl : nullptr; }
  DType dtype() const { return view_->dtype; }
  const Shape& shape() const { return view_->shape; }
  const Shape& strides() const { return view_->strides; }
  int64_t numel() const;
  bool is_dense() const { return view_->dense; }

  // Elements by their number in row-major order.
  double at(int64_t index) const;
  void set(int64_t index, double value) const;
  std::vector<double> values() const;
  Tensor filled(const std::function<double(int64_t)>& value) const;  // fills and returns this tensor

  Tensor to(DType dtype) const;  // a row-major copy
  Tensor contiguous() const { return to(dtype()); }

  // Views of the same memory.
  Tensor view(Shape shape, Shape strides, int64_t offset = 0) const;
  Tensor slice(int dim, int64_t begin, int64_t end) const;
  Tensor transposed(int dim_a, int dim_b) const;

  std::vector<unsigned char> snapshot() const { return view_->buffer->storage(); }  // of the whole buffer
  // Whether every byte of the buffer that is no element of this tensor still has its poison.
  bool only_elements_written() const;
  bool untouched() const;  // all bytes still poison
  const unsigned char* element(int64_t index) const;

 private:
  struct View {
    std::shared_ptr<Buffer> buffer;
    DType dtype;
    Shape shape, strides;
    int64_t offset;  // elements
    bool dense;
    DLTensor dl;
  };
  static Tensor make(std::shared_ptr<Buffer> buffer, DType dtype, Shape shape, Shape strides, int64_t offset);
  int64_t position(int64_t index) const;  // in elements from the start of the buffer
  std::shared_ptr<View> view_;
};

// The same sequence on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  double uniform(double low = 0, double high = 1);
  double normal();

 private:
  uint64_t state_;
};

Tensor normal(Random& random, DType dtype, const Shape& shape, double deviation = 1);
Tensor uniform(Random& random, DType dtype, const Shape& shape, double low, double high);
Tensor unit_rows(Random& random, DType dtype, const Shape& shape);  // normal, divided by their norm
Tensor log_sigmoid_gate(Random& random, DType dtype, const Shape& shape, double divisor = 1);
Tensor constant(DType dtype, const Shape& shape, double value);
void fill(const Tensor& x, double value);
Tensor concatenated(const std::vector<Tensor>& parts, int dim);

// Comparisons ---------------------------------------------------------------------------------------------------------

double norm(const Tensor& x);
// ||actual - expected|| / ||expected||; infinity if an element of either is not finite.
double relative_error(const Tensor& actual, const Tensor& expected);
bool all_finite(const Tensor& x);

// Passes if ||actual - expected|| <= tolerance (||expected|| + floor sqrt(numel)). The floor is for gradients that are
// zero, or nearly so, in exact arithmetic, where relative error has no meaning.
testing::AssertionResult close(const Tensor& actual, const Tensor& expected, double tolerance, double floor = 1e-2);
testing::AssertionResult same_bits(const Tensor& actual, const Tensor& expected);

// CASES: relative L2 error of outputs; gradients may have twice as much.
double output_tolerance(DType dtype);
inline double gradient_tolerance(DType dtype) { return 2 * output_tolerance(dtype); }

// float64 for float64, else float32: the type of states and statistics.
inline DType stat_dtype(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

inline constexpr DType kLowTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};  // all but float64

// Fails unless `call` throws cula::Error of that kind with every part in its message, which is returned.
std::string expect_error(const std::function<void()>& call, const std::string& kind,
                         const std::vector<std::string>& parts);

}  // namespace cula::test
