#include "bindings/python_thread.h"

#include <Python.h>
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

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
constexpr std::chrono::seconds kUntilTheEnd{10};

[[noreturn]] void onTerminate() {
  // Python unwinds the thread without a C++ exception, so current_exception()
  // is null. The main thread must not sleep here, because it ends the process.
  // Another thread must not sleep for ever, because the main thread may join
  // it.
  if (pythonEnds() && std::current_exception() == nullptr &&
      ::syscall(SYS_gettid) != ::getpid()) { // gettid() needs glibc 2.30
    std::this_thread::sleep_for(kUntilTheEnd);
  }
  if (terminateBefore != nullptr) {
    terminateBefore();
  }
  std::abort();
}

void release(void* state) {
  // When Python ends, it frees the states itself, and a thread that asks for
  // the GIL never returns.
  if (state == nullptr || pythonEnds()) {
    return;
  }
  auto* own = static_cast<PyThreadState*>(state);
  PyEval_RestoreThread(own);
  PyThreadState_Clear(own);
  PyThreadState_DeleteCurrent();
}

} // namespace

std::shared_ptr<void> keepPythonThreadState() {
  // PyGILState_Ensure() on this thread will find and use the new state.
  PyThreadState* state = PyGILState_GetThisThreadState() == nullptr
      ? PyThreadState_New(PyInterpreterState_Main())
      : nullptr;
  return {state, release};
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
