#pragma once

// Where our code is called by code that no exception may pass through: a thread
// (std::terminate), UCX (its frames are C), torch's destructors. Everything
// that is called so runs inside of guarded(): an exception fails the call, or
// the connection, that it was about, and is logged.

#include "base/error.h"

#include <cxxabi.h>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace torch_rpc_ext::base {

// What crosses it, and what fails when that throws.
enum class Boundary : uint8_t {
  kEvent, // a Poller's handler: is called again
  kTimer, // a Timer's handler: is called again, a little later
  kThread, // what a thread does before its first work: nothing fails
  kTask, // of the Executor: what no other boundary inside has taken
  kRequest, // serving a request: its caller gets the error
  kFetch, // bringing bulk here: the call gets the error
  kCompletion, // of a call: its future gets the error
  kAnswer, // of a function that answers later: its caller gets the error
  kFuture, // a callback of a future: nothing fails, the call has ended
  kDeviceEvent, // going on once a device is done: who waits gets the error
  kOperation, // under a UCX worker's lock: what no other has taken
  kSend, // the same, of a connection: the connection
  kDeferred, // after that lock: what no other boundary inside has taken
  kDelivery, // of a frame or an end to the agent: the connection
  kMessage, // UCX: an active message has come: the connection
  kSent, // UCX: one has left: the connection
  kClosed, // UCX: an endpoint is closed: nothing fails
  kBroken, // UCX: an endpoint broke: is tried once more
  kBulkSent, // UCX: a chunk has left: the message
  kBulkReceived, // UCX: a chunk has come: the message
  kBulkBroken, // UCX: an endpoint of bulk broke: is tried once more
  kStorage, // torch frees memory of ours: is tried once more
  kCount
};

const char* toString(Boundary boundary);

// For tests: called at each crossing, may throw. Null, and thus one load and a
// branch that is never taken, unless setInjector() has been called.
using Injector = void (*)(Boundary);
extern std::atomic<Injector> injector;

// In a catch block: what was caught. Takes memory for long texts only, and
// does without where there is none.
Error caught() noexcept;
// Says it in the log, if there is memory for that.
void logCaught(Boundary boundary, const Error& error) noexcept;

// Runs `code`. If that throws, runs `failed` with what was thrown. Only the end
// of the thread itself goes through (Python ends threads by pthread_exit() when
// the interpreter ends, which unwinds them and must not be stopped): the
// callers that are C code, which never runs Python, are noexcept.
template <typename Code, typename Failed>
void guarded(Boundary boundary, Code&& code, Failed&& failed) {
  try {
    if (const Injector inject = injector.load(std::memory_order_relaxed)) {
      inject(boundary);
    }
    std::forward<Code>(code)();
  } catch (abi::__forced_unwind&) {
    throw;
  } catch (...) {
    const Error error = caught();
    logCaught(boundary, error);
    try {
      std::forward<Failed>(failed)(error);
    } catch (abi::__forced_unwind&) {
      throw;
    } catch (...) {
      logCaught(boundary, caught());
    }
  }
}

template <typename Code>
void guarded(Boundary boundary, Code&& code) {
  guarded(boundary, std::forward<Code>(code), [](const Error&) {});
}

// The same for code whose every part runs inside of guarded() already: what
// this one catches was nowhere else expected, and fails nothing. Without the
// injector, which would find only that.
template <typename Code>
void caughtHere(Boundary boundary, Code&& code) {
  try {
    std::forward<Code>(code)();
  } catch (abi::__forced_unwind&) {
    throw;
  } catch (...) {
    logCaught(boundary, caught());
  }
}

} // namespace torch_rpc_ext::base
