#include "support.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>

#include "gdn/reference/scalar.h"

namespace cula::test {

namespace {

constexpr unsigned char kPoison = 0xff;

int64_t product(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Shape dense_strides(const Shape& shape) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

// Whether the elements lie without gaps in row-major order. The stride of a dimension of one element does not matter.
bool without_gaps(const Shape& shape, const Shape& strides) {
  const Shape expected = dense_strides(shape);
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != 1 && strides[i] != expected[i]) return false;
  }
  return true;
}

// Elements from the first to behind the last.
int64_t span(const Shape& shape, const Shape& strides) {
  if (product(shape) == 0) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < shape.size(); ++i) last += (shape[i] - 1) * strides[i];
  return last + 1;
}

bool is_poison(unsigned char byte) { return byte == kPoison; }

}  // namespace

Buffer::Buffer(size_t bytes) : storage_(2 * kRedZone + 64 + bytes, kPoison), bytes_(bytes) {
  padding_ = -reinterpret_cast<uintptr_t>(storage_.data() + kRedZone) % 64;
}

bool Buffer::red_zones_intact() const {
  const auto begin = storage_.begin() + (data() - storage_.data());
  return std::all_of(storage_.begin(), begin, is_poison) &&
         std::all_of(begin + static_cast<int64_t>(bytes_), storage_.end(), is_poison);
}

Tensor::Tensor(DType dtype, Shape shape) : Tensor(dtype, shape, dense_strides(shape)) {}

Tensor::Tensor(DType dtype, Shape shape, Shape strides) {
  auto buffer = std::make_shared<Buffer>(span(shape, strides) * dtype_size(dtype));
  *this = make(std::move(buffer), dtype, std::move(shape), std::move(strides), 0);
}

Tensor Tensor::make(std::shared_ptr<Buffer> buffer, DType dtype, Shape shape, Shape strides, int64_t offset) {
  Tensor result;
  const bool dense = without_gaps(shape, strides);
  result.view_ =
      std::make_shared<View>(View{std::move(buffer), dtype, std::move(shape), std::move(strides), offset, dense, {}});
  View& view = *result.view_;
  view.dl = {.data = view.buffer->data(),
             .device = {kDLCPU, 0},
             .ndim = static_cast<int32_t>(view.shape.size()),
             .dtype = to_dlpack(dtype),
             .shape = view.shape.data(),
             .strides = view.strides.data(),
             .byte_offset = offset * dtype_size(dtype)};
  return result;
}

int64_t Tensor::numel() const { return product(shape()); }

int64_t Tensor::position(int64_t index) const {
  if (view_->dense) return view_->offset + index;
  int64_t position = view_->offset;
  for (size_t dim = shape().size(); dim-- > 0;) {
    position += index % shape()[dim] * strides()[dim];
    index /= shape()[dim];
  }
  return position;
}

const unsigned char* Tensor::element(int64_t index) const {
  return view_->buffer->data() + position(index) * dtype_size(dtype());
}

double Tensor::at(int64_t index) const {
  return gdn::reference::load_scalar(view_->buffer->data(), dtype(), position(index));
}

void Tensor::set(int64_t index, double value) const {
  gdn::reference::store_scalar(view_->buffer->data(), dtype(), position(index), value);
}

std::vector<double> Tensor::values() const {
  std::vector<double> result(numel());
  for (int64_t i = 0; i < numel(); ++i) result[i] = at(i);
  return result;
}

Tensor Tensor::filled(const std::function<double(int64_t)>& value) const {
  const int64_t count = numel();
  for (int64_t i = 0; i < count; ++i) set(i, value(i));
  return *this;
}

Tensor Tensor::to(DType dtype) const {
  return Tensor(dtype, shape()).filled([this](int64_t i) { return at(i); });
}

Tensor Tensor::view(Shape shape, Shape strides, int64_t offset) const {
  return make(view_->buffer, dtype(), std::move(shape), std::move(strides), view_->offset + offset);
}

Tensor Tensor::slice(int dim, int64_t begin, int64_t end) const {
  Shape sliced = shape();
  sliced[dim] = end - begin;
  return view(sliced, strides(), begin * strides()[dim]);
}

Tensor Tensor::transposed(int dim_a, int dim_b) const {
  Shape new_shape = shape(), new_strides = strides();
  std::swap(new_shape[dim_a], new_shape[dim_b]);
  std::swap(new_strides[dim_a], new_strides[dim_b]);
  return view(new_shape, new_strides);
}

bool Tensor::only_elements_written() const {
  const Buffer& buffer = *view_->buffer;
  if (view_->dense && numel() * dtype_size(dtype()) == buffer.bytes()) return buffer.red_zones_intact();
  std::vector<bool> is_element(buffer.bytes(), false);
  for (int64_t i = 0; i < numel(); ++i) {
    const int64_t begin = position(i) * static_cast<int64_t>(dtype_size(dtype()));
    std::fill_n(is_element.begin() + begin, dtype_size(dtype()), true);
  }
  for (size_t i = 0; i < buffer.bytes(); ++i) {
    if (!is_element[i] && !is_poison(buffer.data()[i])) return false;
  }
  return buffer.red_zones_intact();
}

bool Tensor::untouched() const {
  const auto& storage = view_->buffer->storage();
  return std::all_of(storage.begin(), storage.end(), is_poison);
}

double Random::uniform(double low, double high) {
  // splitmix64
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  z ^= z >> 31;
  return low + (high - low) * static_cast<double>(z >> 11) * 0x1p-53;
}

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(2 * std::numbers::pi * uniform());
}

Tensor normal(Random& random, DType dtype, const Shape& shape, double deviation) {
  return Tensor(dtype, shape).filled([&](int64_t) { return deviation * random.normal(); });
}

Tensor uniform(Random& random, DType dtype, const Shape& shape, double low, double high) {
  return Tensor(dtype, shape).filled([&](int64_t) { return random.uniform(low, high); });
}

Tensor unit_rows(Random& random, DType dtype, const Shape& shape) {
  const int64_t width = shape.back();
  const Tensor result(dtype, shape);
  std::vector<double> row(width);
  for (int64_t begin = 0; begin < result.numel(); begin += width) {
    for (double& value : row) value = random.normal();
    const double length = std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
    for (int64_t i = 0; i < width; ++i) result.set(begin + i, row[i] / length);
  }
  return result;
}

Tensor log_sigmoid_gate(Random& random, DType dtype, const Shape& shape, double divisor) {
  return Tensor(dtype, shape).filled([&](int64_t) { return -std::log1p(std::exp(-random.normal())) / divisor; });
}

Tensor constant(DType dtype, const Shape& shape, double value) {
  return Tensor(dtype, shape).filled([=](int64_t) { return value; });
}

void fill(const Tensor& x, double value) {
  x.filled([=](int64_t) { return value; });
}

Tensor concatenated(const std::vector<Tensor>& parts, int dim) {
  Shape shape = parts.front().shape();
  shape[dim] = 0;
  for (const Tensor& part : parts) shape[dim] += part.shape()[dim];
  const Tensor result(parts.front().dtype(), shape);
  int64_t begin = 0;
  for (const Tensor& part : parts) {
    const int64_t end = begin + part.shape()[dim];
    result.slice(dim, begin, end).filled([&](int64_t i) { return part.at(i); });
    begin = end;
  }
  return result;
}

double norm(const Tensor& x) {
  double sum = 0;
  for (const double value : x.values()) sum += value * value;
  return std::sqrt(sum);
}

bool all_finite(const Tensor& x) {
  const int64_t count = x.numel();
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(x.at(i))) return false;
  }
  return true;
}

namespace {

double distance(const Tensor& actual, const Tensor& expected) {
  double sum = 0;
  for (int64_t i = 0; i < expected.numel(); ++i) {
    const double difference = actual.at(i) - expected.at(i);
    if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

}  // namespace

double relative_error(const Tensor& actual, const Tensor& expected) {
  const double difference = distance(actual, expected);
  return difference == 0 ? 0 : difference / norm(expected);
}

testing::AssertionResult close(const Tensor& actual, const Tensor& expected, double tolerance, double floor) {
  if (actual.shape() != expected.shape()) return testing::AssertionFailure() << "shapes differ";
  const double difference = distance(actual, expected);
  const double scale = norm(expected);
  if (difference <= tolerance * (scale + floor * std::sqrt(static_cast<double>(expected.numel())))) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "error " << difference << " of norm " << scale << " (relative "
                                     << difference / scale << "), tolerance " << tolerance;
}

testing::AssertionResult same_bits(const Tensor& actual, const Tensor& expected) {
  if (actual.shape() != expected.shape()) return testing::AssertionFailure() << "shapes differ";
  if (actual.dtype() != expected.dtype()) return testing::AssertionFailure() << "dtypes differ";
  const int64_t count = expected.numel();
  if (actual.is_dense() && expected.is_dense() && count > 0 &&
      std::memcmp(actual.element(0), expected.element(0), count * dtype_size(actual.dtype())) == 0) {
    return testing::AssertionSuccess();
  }
  for (int64_t i = 0; i < count; ++i) {
    if (std::memcmp(actual.element(i), expected.element(i), dtype_size(actual.dtype())) != 0) {
      return testing::AssertionFailure() << "element " << i << " of " << expected.numel() << " is " << actual.at(i)
                                         << ", expected the bits of " << expected.at(i);
    }
  }
  return testing::AssertionSuccess();
}

double output_tolerance(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-11;
    case DType::kFloat32:
      return 1e-5;
    case DType::kFloat16:
      return 3e-3;
    default:
      return 1e-2;
  }
}

std::string expect_error(const std::function<void()>& call, const std::string& kind,
                         const std::vector<std::string>& parts) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is not in the message: " << error.what();
    }
    return error.what();
  }
  ADD_FAILURE() << "no error, expected " << kind;
  return "";
}

}  // namespace cula::test
