#pragma once

#include <memory>

namespace torch_rpc_ext::bindings {

// For a thread that runs Python now and then: keeps the thread's Python state
// until the result dies, which must happen on the same thread. Without this,
// Python would make and free a state each time the thread takes the GIL, three
// times per call, each with an mmap, a page fault and an munmap. Does not need
// the GIL.
std::shared_ptr<void> keepPythonThreadState();

// Runs the handlers of the signals that have come, if this is Python's main
// thread; throws what a handler raises. Takes the GIL. Lets Ctrl-C end a wait.
void checkInterrupt();

} // namespace torch_rpc_ext::bindings
