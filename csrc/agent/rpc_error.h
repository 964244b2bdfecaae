#pragma once

#include "base/error.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace torch_rpc_ext::agent {

// The error in the futures of failed calls. bindings/errors.cpp turns it into
// the class of torch_rpc_ext.errors for its kind.
class RpcError : public std::runtime_error {
 public:
  RpcError(base::ErrorKind kind, std::string worker, const std::string& text)
      : std::runtime_error(text), kind_(kind), worker_(std::move(worker)) {}

  base::ErrorKind kind() const {
    return kind_;
  }
  // Name of the worker that was called.
  const std::string& worker() const {
    return worker_;
  }

 private:
  base::ErrorKind kind_;
  std::string worker_;
};

// This worker does not run a request. The answer carries the kind of a Refusal,
// so that the caller can tell it from other errors in the request's function,
// of which the answer carries only the text.
class Refusal : public RpcError {
 public:
  using RpcError::RpcError;
};

} // namespace torch_rpc_ext::agent
