#pragma once

#include "base/error.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace torch_rpc_ext::agent {

// What the futures of failed calls hold; bindings/errors.cpp turns it into the
// class of torch_rpc_ext.errors that belongs to its kind.
class RpcError : public std::runtime_error {
 public:
  RpcError(base::ErrorKind kind, std::string worker, const std::string& text)
      : std::runtime_error(text), kind_(kind), worker_(std::move(worker)) {}

  base::ErrorKind kind() const {
    return kind_;
  }
  // Name of the worker that the call went to.
  const std::string& worker() const {
    return worker_;
  }

 private:
  base::ErrorKind kind_;
  std::string worker_;
};

} // namespace torch_rpc_ext::agent
