// Cuts a workspace into arrays. Run over a null workspace it only counts, so that the size that is asked for and the
// arrays that are used come from the same lines.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cula::gdn::cuda {

class WorkspaceCutter {
 public:
  explicit WorkspaceCutter(void* data) : data_(static_cast<char*>(data)) {}

  template <class T>
  T* take(int64_t elements) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(elements) * sizeof(T)));
  }
  void* take_bytes(size_t bytes) {
    constexpr size_t kAlignment = 64;
    void* result = data_ == nullptr ? nullptr : data_ + used_;
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return result;
  }
  size_t used() const { return used_; }

 private:
  char* data_;
  size_t used_ = 0;
};

}  // namespace cula::gdn::cuda
