#include "native.h"

PYBIND11_MODULE(_compiled, module) {
  using namespace torch_rpc_ext::native;
  module.doc() = "What only tests use of torch_rpc_ext's core library.";
  bindBase(module);
  bindMemory(module);
  bindCuda(module);
  bindTransport(module);
}
