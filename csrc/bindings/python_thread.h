#pragma once

#include <memory>

namespace torch_rpc_ext::bindings {

// For a thread that runs Python now and then: keeps the thread's Python state
// until the result dies, which must happen on the same thread. Without this,
// Python would make and free a state each time the thread takes the GIL, three
// times per call, each with an mmap, a page fault and an munmap. Does not need
// the GIL.
std::shared_ptr<void> keepPythonThreadState();

// Before 3.14, Python ends a thread that asks for the GIL while the interpreter
// is taken down, by unwinding the thread's stack. The thread may ask in a
// destructor, as each thread does that comes back from C++ with pybind11, and
// then C++ calls std::terminate(). Once this has been called, such a thread
// sleeps instead, as from 3.14 on, and the process ends as its main thread
// says; if the process has not ended after 10 s, it aborts. Idempotent.
void letThreadsOutliveTheInterpreter();

// Runs the handlers of the signals that have come, if this is Python's main
// thread; throws what a handler raises. Takes the GIL. Lets Ctrl-C end a wait.
void checkInterrupt();

} // namespace torch_rpc_ext::bindings
