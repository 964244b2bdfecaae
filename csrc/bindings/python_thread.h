#pragma once

#include <memory>

namespace torch_rpc_ext::bindings {

// For a thread that runs Python now and then: keeps its Python thread state
// until the result dies, on the same thread. Otherwise each piece of Python
// would make one and free it, which costs an mmap, a page fault and an munmap
// every time, three times per call. Does not need the GIL.
std::shared_ptr<void> keepPythonThreadState();

} // namespace torch_rpc_ext::bindings
