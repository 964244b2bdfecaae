#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace torch_rpc_ext::base {

// The kinds of errors, sorted by what the caller can do. Inside csrc an error
// is a value. transport/ucx/status.cpp maps UCX statuses to kinds, and
// bindings/errors.cpp maps kinds to the Python classes that users catch.
enum class ErrorKind : uint8_t {
  kNone = 0,
  kPeerLost, // the peer died or became unreachable: reconnect or give up
  kTimedOut, // no answer in time: retry if the call is idempotent
  kRefused, // the peer or this worker refused the request: fix the request
  kOverloaded, // a limit was reached: back off, then retry
  kShutDown, // this worker or the peer is shutting down: give up
  kInvalid, // malformed bytes or arguments: a bug, or an attack
  kSystem, // the operating system, UCX or CUDA failed: see the message
  kUnsupported, // this machine cannot do it: take another way
  kCorrupted, // bytes changed on their way: retry, check the hardware
  // The last kind that travels, in an answer or a goodbye, is kCorrupted.
  kNotInGroup, // no such worker now: wait until it joins, or fix the name
};

const char* toString(ErrorKind kind);

// A possible failure. Default-constructed means success.
struct [[nodiscard]] Error {
  ErrorKind kind = ErrorKind::kNone;
  std::string message;
  // Of a frame that was to be sent: nothing of the frame has left.
  bool notSent = false;

  Error() = default;
  Error(ErrorKind k, std::string text) : kind(k), message(std::move(text)) {}

  explicit operator bool() const {
    return kind != ErrorKind::kNone;
  }
};

// The same error, of a frame of which nothing has left.
inline Error notSent(Error error) {
  error.notSent = true;
  return error;
}

// Either a value or an Error.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}
  Result(Error error) : state_(std::move(error)) {}

  bool ok() const {
    return std::holds_alternative<T>(state_);
  }
  T& value() {
    return std::get<T>(state_);
  }
  const Error& error() const {
    return std::get<Error>(state_);
  }

 private:
  std::variant<T, Error> state_;
};

} // namespace torch_rpc_ext::base
