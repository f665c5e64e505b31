// What is the same for the arguments of every call: each of them absent, or changed in each of the ways that a tensor
// can be wrong, is rejected by name before anything is written.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "support.h"

namespace cula::test {

// One argument of a call whose arguments are the struct T. Setting goes through const DLTensor* for inputs and outputs
// alike.
template <class T>
struct Argument {
  const char* name;         // as messages name it
  const char* absent_kind;  // of the exception when it is absent; null for an optional one
  bool output;
  std::function<const DLTensor*(const T&)> get;
  std::function<void(T&, const DLTensor*)> set;
};

template <auto kMember>
struct MemberTypes;
template <class T, class Pointer, Pointer T::*kMember>
struct MemberTypes<kMember> {
  using Struct = T;
  using Type = Pointer;
};

template <auto kMember>
auto required(const char* name, const char* absent_kind = "ValueError") {
  using T = typename MemberTypes<kMember>::Struct;
  using Pointer = typename MemberTypes<kMember>::Type;
  return Argument<T>{name, absent_kind, std::is_same_v<Pointer, DLTensor*>,
                     [](const T& t) -> const DLTensor* { return t.*kMember; },
                     [](T& t, const DLTensor* value) { t.*kMember = const_cast<Pointer>(value); }};
}

template <auto kMember>
auto optional(const char* name) {
  return required<kMember>(name, nullptr);
}

// A way in which a tensor is wrong.
struct Mutation {
  const char* name;
  const char* kind;  // of the exception
  bool outputs_only;
  // A copy of the tensor with a shape and strides of its own; false if the tensor can not be wrong in this way.
  bool (*apply)(DLTensor& tensor, Shape& shape, Shape& strides);
};
const std::vector<Mutation>& all_mutations();

// Messages begin with the argument that is wrong.
void expect_argument_error(const std::function<void()>& call, const char* kind, const std::string& name);

// Every argument of `valid` in turn absent or changed in each way: the right kind of exception, naming the argument.
template <class T>
void check_arguments(const T& valid, const std::vector<Argument<T>>& arguments,
                     const std::function<void(const T&)>& call, const std::function<bool()>& untouched) {
  for (const Argument<T>& a : arguments) {
    const DLTensor* original = a.get(valid);
    ASSERT_NE(original, nullptr) << a.name;
    if (a.absent_kind != nullptr) {
      SCOPED_TRACE(concat(a.name, " absent"));
      T t = valid;
      a.set(t, nullptr);
      expect_argument_error([&] { call(t); }, a.absent_kind, a.name);
    }
    for (const Mutation& mutation : all_mutations()) {
      if (mutation.outputs_only && !a.output) continue;
      SCOPED_TRACE(concat(a.name, " with ", mutation.name));
      DLTensor changed = *original;
      Shape shape(original->shape, original->shape + original->ndim);
      Shape strides(original->strides, original->strides + original->ndim);
      if (!mutation.apply(changed, shape, strides)) continue;
      changed.shape = shape.data();
      changed.strides = strides.data();
      T t = valid;
      a.set(t, &changed);
      expect_argument_error([&] { call(t); }, mutation.kind, a.name);
    }
    EXPECT_TRUE(untouched()) << a.name;
  }
}

}  // namespace cula::test
