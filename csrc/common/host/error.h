// Exceptions that reach the user. The kind is the name of the Python exception that a binding raises.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace cula {

class Error : public std::runtime_error {
 public:
  Error(std::string kind, const std::string& message) : std::runtime_error(message), kind_(std::move(kind)) {}
  // "ValueError", "TypeError", "AssertionError" or "RuntimeError".
  const std::string& kind() const { return kind_; }

 private:
  std::string kind_;
};

// Joins its arguments with operator<<: the only formatting that messages need.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <class... Parts>
[[noreturn]] void throw_value_error(const Parts&... parts) {
  throw Error("ValueError", concat(parts...));
}

template <class... Parts>
[[noreturn]] void throw_type_error(const Parts&... parts) {
  throw Error("TypeError", concat(parts...));
}

template <class... Parts>
[[noreturn]] void throw_assertion_error(const Parts&... parts) {
  throw Error("AssertionError", concat(parts...));
}

template <class... Parts>
[[noreturn]] void throw_runtime_error(const Parts&... parts) {
  throw Error("RuntimeError", concat(parts...));
}

}  // namespace cula
