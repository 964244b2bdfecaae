#pragma once

// A boundary is where our code is called by code that no exception may pass
// through: the start of a thread (std::terminate), UCX (its frames are C),
// torch's destructors. All code called there runs inside of guarded(), which
// logs an exception and fails the call or the connection that the code served.

#include "base/error.h"

#include <cxxabi.h>
#include <atomic>
#include <cstdint>
#include <utility>

namespace torch_rpc_ext::base {

// All boundaries. For each: the code that runs there, then, after the colon,
// what an exception leads to.
enum class Boundary : uint8_t {
  kEvent, // a Poller's handler: the handler is called again
  kTimer, // a Timer's handler: the handler is called again a little later
  kThread, // what a thread does before its first work: nothing fails
  kTask, // a task of the Executor, outside of the boundaries in it: only logged
  kRequest, // serving a request: its caller gets the error
  kFetch, // fetching bulk: the call gets the error
  kCompletion, // completing a call: its future gets the error
  kAnswer, // answering for an async function: its caller gets the error
  kFuture, // a callback of a future: nothing fails, the call has ended
  kDeviceEvent, // continuing after a device event: its waiter gets the error
  kOperation, // an operation under a UCX worker's lock: only logged
  kSend, // an operation of a connection under that lock: the connection fails
  kDeferred, // what waited for the release of that lock: only logged
  kDelivery, // giving a frame or an end to the agent: the connection fails
  kMessage, // UCX has received an active message: the connection fails
  kSent, // UCX has sent an active message: the connection fails
  kClosed, // UCX has closed an endpoint: nothing fails
  kBroken, // UCX reports a broken endpoint: the code runs once more
  kBulkSent, // UCX has sent a chunk of bulk: the message fails
  kBulkReceived, // UCX has received a chunk of bulk: the message fails
  kBulkSocket, // moving a piece of bulk over a lane: the message fails
  kBulkBroken, // UCX reports a broken bulk endpoint: the code runs once more
  kStorage, // torch frees memory of ours: the code runs once more
  kCount
};

const char* toString(Boundary boundary);

// For tests: guarded() calls the injector at every boundary, and the injector
// may throw. It is null unless a test has set it; null costs one load and a
// branch that is not taken.
using Injector = void (*)(Boundary);
extern std::atomic<Injector> injector;

// Makes an Error of the exception that the enclosing catch block has caught.
// Where there is no memory for its text, the Error says "out of memory".
Error caught() noexcept;
// Logs the error, if there is memory for the line.
void logCaught(Boundary boundary, const Error& error) noexcept;

// Runs `code`. If `code` throws, runs `failed` with the error. Only the forced
// unwinding of a thread passes through: Python ends threads with pthread_exit()
// when the interpreter ends, and this unwinding must not be stopped. The
// unwinding cannot reach C code: callbacks from C are noexcept, and never run
// Python.
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

// As guarded(), for code whose parts all run inside of guarded() already. An
// exception that gets here was expected nowhere, so it is only logged. Does not
// call the injector, because there is no failure handling here to test.
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
