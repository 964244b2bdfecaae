#include "bindings/python_thread.h"

#include <Python.h>

namespace torch_rpc_ext::bindings {

namespace {

bool pythonEnds() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

void release(void* state) {
  // Once Python ends it frees the states itself, and a thread that asks for
  // the GIL then does not come back.
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
  // It becomes what PyGILState_Ensure() finds on this thread.
  PyThreadState* state = PyGILState_GetThisThreadState() == nullptr
      ? PyThreadState_New(PyInterpreterState_Main())
      : nullptr;
  return {state, release};
}

} // namespace torch_rpc_ext::bindings
