#include "bindings/python_thread.h"

#include <Python.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

// glibc exports these two, and declares them in no header: what a C program
// gets from pthread_cleanup_push() of old.
extern "C" {
void _pthread_cleanup_push(
    _pthread_cleanup_buffer* buffer,
    void (*routine)(void*),
    void* argument);
void _pthread_cleanup_pop(_pthread_cleanup_buffer* buffer, int execute);
}

namespace torch_rpc_ext::bindings {

namespace py = pybind11;

namespace {

bool pythonEnds() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

std::terminate_handler terminateBefore = nullptr;

// Longer than it takes to end a process.
constexpr std::chrono::seconds kUntilTheEnd{60};

// What becomes of a thread that Python ends by unwinding, because Python itself
// ends.
[[noreturn]] void sleepUntilTheEnd() {
  std::this_thread::sleep_for(kUntilTheEnd);
  std::abort();
}

[[noreturn]] void onTerminate() {
  // Python unwinds the thread without a C++ exception, so current_exception()
  // is null. The main thread must not sleep here, because it ends the process.
  // Another thread must not sleep for ever, because the main thread may join
  // it.
  if (pythonEnds() && std::current_exception() == nullptr &&
      ::syscall(SYS_gettid) != ::getpid()) { // gettid() needs glibc 2.30
    sleepUntilTheEnd();
  }
  if (terminateBefore != nullptr) {
    terminateBefore();
  }
  std::abort();
}

// Lives on a thread of the pool as long as the thread runs tasks.
class PoolThread {
 public:
  // PyGILState_Ensure() on this thread will find and use the new state.
  PoolThread()
      : state_(
            PyGILState_GetThisThreadState() == nullptr
                ? PyThreadState_New(PyInterpreterState_Main())
                : nullptr) {
    // pthread_exit() looks before each frame that it unwinds whether the frame
    // lies above `cleanup_` on the stack. `cleanup_` is not on the stack, so
    // the answer is yes at the first frame, and no destructor has run yet.
    _pthread_cleanup_push(&cleanup_, onExit, nullptr);
  }

  ~PoolThread() {
    _pthread_cleanup_pop(&cleanup_, /*execute=*/0);
    // When Python ends, it frees the states itself, and a thread that asks for
    // the GIL never returns.
    if (state_ != nullptr && !pythonEnds()) {
      PyEval_RestoreThread(state_);
      PyThreadState_Clear(state_);
      PyThreadState_DeleteCurrent();
    }
  }

  PoolThread(const PoolThread&) = delete;
  PoolThread& operator=(const PoolThread&) = delete;

 private:
  // Not noexcept: pthread_exit() may go on to unwind from here.
  static void onExit(void*) {
    if (pythonEnds()) {
      sleepUntilTheEnd();
    }
  }

  PyThreadState* const state_;
  _pthread_cleanup_buffer cleanup_{};
};

} // namespace

std::shared_ptr<void> poolThread() {
  return std::make_shared<PoolThread>();
}

void letThreadsOutliveTheInterpreter() {
  static const bool once = [] {
    terminateBefore = std::set_terminate(onTerminate);
    return true;
  }();
  (void)once;
}

void checkInterrupt() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

} // namespace torch_rpc_ext::bindings
