#include "argument_checks.h"

namespace cula::test {

const std::vector<Mutation>& all_mutations() {
  static const std::vector<Mutation> mutations = {
      {"a dimension more", "ValueError", false,
       [](DLTensor& t, Shape& shape, Shape& strides) {
         shape.insert(shape.begin(), 2);
         strides.insert(strides.begin(), 0);
         ++t.ndim;
         return true;
       }},
      {"one element less", "ValueError", false,
       [](DLTensor&, Shape& shape, Shape&) {
         shape.back() -= 1;
         return true;
       }},
      {"a negative size", "ValueError", false,
       [](DLTensor&, Shape& shape, Shape&) {
         shape.front() = -1;
         return true;
       }},
      {"first dimension longer", "ValueError", false,
       [](DLTensor&, Shape& shape, Shape&) {
         shape.front() += 1;
         return true;
       }},
      {"an integer type", "TypeError", false,
       [](DLTensor& t, Shape&, Shape&) {
         t.dtype = {kDLInt, 32, 1};
         return true;
       }},
      {"an unknown type", "TypeError", false,
       [](DLTensor& t, Shape&, Shape&) {
         t.dtype = {kDLComplex, 64, 1};
         return true;
       }},
      {"vector lanes", "TypeError", false,
       [](DLTensor& t, Shape&, Shape&) {
         t.dtype.lanes = 2;
         return true;
       }},
      {"another device", "ValueError", false,
       [](DLTensor& t, Shape&, Shape&) {
         t.device = {kDLCUDA, 0};
         return true;
       }},
      {"a null pointer", "ValueError", false,
       [](DLTensor& t, Shape&, Shape&) {
         t.data = nullptr;
         return true;
       }},
      {"elements on top of each other", "ValueError", true,
       [](DLTensor&, Shape& shape, Shape& strides) {
         for (size_t i = 0; i < shape.size(); ++i) {
           if (shape[i] < 2) continue;
           strides[i] = 0;
           return true;
         }
         return false;
       }},
  };
  return mutations;
}

void expect_argument_error(const std::function<void()>& call, const char* kind, const std::string& name) {
  const std::string message = expect_error(call, kind, {});
  EXPECT_TRUE(message.rfind(name + ":", 0) == 0 || message.rfind("saved." + name + ":", 0) == 0)
      << "'" << name << ":' does not begin: " << message;
}

}  // namespace cula::test
