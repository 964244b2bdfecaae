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

// This worker refuses a request. Its answer tells the caller the kind; of any
// other error, such as that of a call which the request has made, it tells the
// text.
class Refusal : public RpcError {
 public:
  Refusal(std::string worker, const std::string& text)
      : RpcError(base::ErrorKind::kRefused, std::move(worker), text) {}
};

} // namespace torch_rpc_ext::agent
