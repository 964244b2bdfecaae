#include "base/boundary.h"

#include "base/log.h"

#include <exception>
#include <new>
#include <string>
#include <string_view>

namespace torch_rpc_ext::base {

std::atomic<Injector> injector{nullptr};

const char* toString(Boundary boundary) {
  switch (boundary) {
    case Boundary::kEvent:
      return "event";
    case Boundary::kTimer:
      return "timer";
    case Boundary::kThread:
      return "thread";
    case Boundary::kTask:
      return "task";
    case Boundary::kRequest:
      return "request";
    case Boundary::kFetch:
      return "fetch";
    case Boundary::kCompletion:
      return "completion";
    case Boundary::kAnswer:
      return "answer";
    case Boundary::kFuture:
      return "future";
    case Boundary::kDeviceEvent:
      return "device event";
    case Boundary::kOperation:
      return "operation";
    case Boundary::kSend:
      return "send";
    case Boundary::kDeferred:
      return "deferred";
    case Boundary::kDelivery:
      return "delivery";
    case Boundary::kMessage:
      return "message";
    case Boundary::kSent:
      return "sent";
    case Boundary::kClosed:
      return "closed";
    case Boundary::kBroken:
      return "broken";
    case Boundary::kBulkSent:
      return "bulk sent";
    case Boundary::kBulkReceived:
      return "bulk received";
    case Boundary::kBulkSocket:
      return "bulk socket";
    case Boundary::kBulkBroken:
      return "bulk broken";
    case Boundary::kStorage:
      return "storage";
    case Boundary::kCount:
      break;
  }
  return "unknown";
}

Error caught() noexcept {
  // Both texts below are short enough for std::string's own buffer: they need
  // no memory.
  Error plain;
  plain.kind = ErrorKind::kOverloaded;
  plain.message = "out of memory";
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return plain;
  } catch (const std::exception& error) {
    try {
      // c10::Error appends a C++ stack trace, which is cut off here.
      const std::string_view text = error.what();
      return {
          ErrorKind::kSystem,
          std::string(text.substr(0, text.find("\nException raised from")))};
    } catch (...) {
      return plain;
    }
  } catch (...) {
    plain.kind = ErrorKind::kSystem;
    plain.message = "unknown error";
    return plain;
  }
}

void logCaught(Boundary boundary, const Error& error) noexcept {
  try {
    log(LogLevel::kError,
        std::string("an exception was caught (") + toString(boundary) +
            "): " + error.message);
  } catch (...) {
    // No memory for the line. What failed reports the error by itself.
  }
}

} // namespace torch_rpc_ext::base
