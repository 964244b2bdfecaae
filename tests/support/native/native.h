#pragma once

// The binding of what only tests use of the core library: one submodule for
// each layer of csrc, in a file of the layer's name.

#include "base/error.h"

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

namespace torch_rpc_ext::native {

void bindBase(pybind11::module_& parent);
void bindMemory(pybind11::module_& parent);
void bindCuda(pybind11::module_& parent);
void bindTransport(pybind11::module_& parent);

// Raises an error as a ValueError: "kind: message". Does not need the GIL.
inline void check(const base::Error& error) {
  if (error) {
    throw pybind11::value_error(
        std::string(base::toString(error.kind)) + ": " + error.message);
  }
}

// Returns the value, or raises the error.
template <typename T>
T unwrap(base::Result<T> result) {
  if (!result.ok()) {
    check(result.error());
  }
  return std::move(result.value());
}

inline pybind11::bytes toBytes(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
}

} // namespace torch_rpc_ext::native
