#pragma once

#include <memory>

namespace torch_rpc_ext::bindings {

// For a thread of ours that runs Python now and then; to be kept until the
// thread ends, and destroyed on it. Does not need the GIL.
//
// Keeps the thread's Python state: else Python would make and free a state each
// time the thread takes the GIL, three times per call, each with an mmap, a
// page fault and an munmap.
//
// Lets the thread outlive the interpreter, as from Python 3.14 on: before,
// Python ends a thread that asks for the GIL while the interpreter is taken
// down, by pthread_exit(), which unwinds the thread's stack. On the way,
// libtorch's code around a Python function would release the GIL that by then
// the main thread has. The thread sleeps instead, with its stack as it is; if
// the process has not ended after 60 s, it aborts.
std::shared_ptr<void> poolThread();

// The same for threads of others, as far as possible: these are unwound, but
// where the unwinding meets a destructor, as where a thread comes back from C++
// with pybind11, C++ calls std::terminate(). Once this has been called, such a
// thread sleeps there. Idempotent.
void letThreadsOutliveTheInterpreter();

// Runs the handlers of the signals that have come, if this is Python's main
// thread; throws what a handler raises. Takes the GIL. Lets Ctrl-C end a wait.
void checkInterrupt();

} // namespace torch_rpc_ext::bindings
