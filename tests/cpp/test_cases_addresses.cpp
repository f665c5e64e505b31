// CASES.md 29 and 30: tensors whose elements lie more than 2^31 elements apart.
#include <sys/mman.h>

#include "gdn/reference/scalar.h"
#include "slices.h"

namespace cula::test {
namespace {

// The first stride that is larger than one takes the tensor past 2^31 elements.
Shape far_strides(const Tensor& t) {
  Shape strides = t.strides();
  for (size_t i = 0; i < strides.size(); ++i) {
    if (t.shape()[i] < 2) continue;
    strides[i] = ((int64_t{1} << 31) + 12345) / (t.shape()[i] - 1) + 1;
    break;
  }
  return strides;
}

// A tensor with those strides in address space without memory: only the pages that are touched exist.
class VirtualTensor {
 public:
  explicit VirtualTensor(const Tensor& values) : shape_(values.shape()), strides_(far_strides(values)) {
    int64_t last = 0;
    for (size_t i = 0; i < shape_.size(); ++i) last += (shape_[i] - 1) * strides_[i];
    bytes_ = static_cast<size_t>(last + 1) * dtype_size(values.dtype());
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) return;
    dl_ = *values.dl();
    dl_.data = data_;
    dl_.byte_offset = 0;
    dl_.shape = shape_.data();
    dl_.strides = strides_.data();
    dtype_ = values.dtype();
    for (int64_t i = 0; i < values.numel(); ++i) gdn::reference::store_scalar(data_, dtype_, position(i), values.at(i));
  }
  ~VirtualTensor() {
    if (mapped()) munmap(data_, bytes_);
  }
  VirtualTensor(const VirtualTensor&) = delete;
  VirtualTensor& operator=(const VirtualTensor&) = delete;

  bool mapped() const { return data_ != MAP_FAILED; }
  DLTensor* dl() { return &dl_; }
  Tensor copy() const {
    return Tensor(dtype_, shape_).filled([this](int64_t i) {
      return gdn::reference::load_scalar(data_, dtype_, position(i));
    });
  }

 private:
  int64_t position(int64_t index) const {
    int64_t position = 0;
    for (size_t i = shape_.size(); i-- > 0;) {
      position += index % shape_[i] * strides_[i];
      index /= shape_[i];
    }
    return position;
  }
  void* data_ = MAP_FAILED;
  size_t bytes_ = 0;
  DType dtype_ = DType::kFloat32;
  Shape shape_, strides_;
  DLTensor dl_ = {};
};

TEST(Cases, Case29_OffsetsPastTwoToThe31Large) {
  for (const int64_t batch : {1, 3}) {  // far along the tokens, and along the batch
    const OperatorCase c = make_case(DType::kBFloat16, batch, 70, 1, 2, 16, 16);
    const Operands x = make_operands(c);
    const Results expected = run(c, x), poison = empty_results(c, x, Mode::kTraining);
    VirtualTensor q(x.q), k(x.k), v(x.v), g(x.g), beta(x.beta), dO(x.grad_output), h0(x.initial_state);
    VirtualTensor o(poison.o), ht(poison.final_state), dq(poison.dq), dv(poison.dv), dg(poison.dg);
    for (const VirtualTensor* t : {&q, &k, &v, &g, &beta, &dO, &h0, &o, &dq, &dv, &dg, &ht}) {
      if (!t->mapped()) GTEST_SKIP() << "no address space for sparse tensors";
    }
    const gdn::Plan plan = gdn::Plan::make(c.problem);
    const gdn::SavedTensors saved = saved_tensors(poison);
    gdn::ForwardTensors forward = forward_tensors(x, poison);
    forward.q = q.dl();
    forward.k = k.dl();
    forward.v = v.dl();
    forward.g = g.dl();
    forward.beta = beta.dl();
    forward.initial_state = h0.dl();
    forward.o = o.dl();
    forward.final_state = ht.dl();
    forward.saved = &saved;
    call_forward(plan, forward);
    gdn::BackwardTensors backward = backward_tensors(c, x, poison);
    backward.q = q.dl();
    backward.k = k.dl();
    backward.v = v.dl();
    backward.g = g.dl();
    backward.beta = beta.dl();
    backward.initial_state = h0.dl();
    backward.grad_output = dO.dl();
    backward.dq = dq.dl();
    backward.dv = dv.dl();
    backward.dg = dg.dl();
    backward.saved = &saved;
    call_backward(plan, backward);
    EXPECT_TRUE(same_bits(o.copy(), expected.o));
    EXPECT_TRUE(same_bits(ht.copy(), expected.final_state));
    EXPECT_TRUE(same_bits(dq.copy(), expected.dq));
    EXPECT_TRUE(same_bits(dv.copy(), expected.dv));
    EXPECT_TRUE(same_bits(dg.copy(), expected.dg));
    EXPECT_TRUE(same_bits(poison.dk, expected.dk));
  }
}

TEST(Cases, Case30_StatePoolPastTwoToThe31Large) {
  constexpr int64_t kSequences = 4100;
  OperatorCase c = make_case(DType::kFloat32, 1, kSequences, 1, 2, 16, 16);
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= kSequences; ++n) offsets.push_back(n);
  c.problem.sequence_offsets = offsets;
  const Operands x = make_operands(c);
  fill(x.initial_state.slice(0, 0, kSequences - 1), 0);
  const Results expected = run(c, x, Mode::kForward);
  VirtualTensor pool(x.initial_state);
  if (!pool.mapped()) GTEST_SKIP() << "no address space for sparse tensors";
  const gdn::Plan plan = gdn::Plan::make(c.problem);
  for (const bool recurrent : {false, true}) {
    const Results r = empty_results(c, x, Mode::kForward);
    gdn::ForwardTensors forward = forward_tensors(x, r);
    forward.initial_state = pool.dl();
    if (recurrent) {
      gdn::recurrent_forward(plan, forward);
      expect_same_bits(r, run_recurrent(c, x));
    } else {
      call_forward(plan, forward);
      expect_same_bits(r, expected);
    }
  }
  EXPECT_GT(norm(expected.final_state.slice(0, kSequences - 1, kSequences)), 1);
}

}  // namespace
}  // namespace cula::test
