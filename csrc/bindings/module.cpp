#include "bindings/bindings.h"
#include "bindings/call_future.h"
#include "bindings/remote_exception.h"
#include "wire/call_frame.h"

PYBIND11_MODULE(_C, module) {
  using namespace torch_rpc_ext::bindings;
  module.doc() = "The C++ agent of torch_rpc_ext; use the package instead.";
  module.attr("WIRE_VERSION") = static_cast<int>(torch_rpc_ext::wire::kVersion);
  bindErrors(module);
  bindRemoteException(module);
  bindUcx(module);
  bindAgent(module);
  bindRRefs(module);
  bindCallFuture(module);
  bindCalls(module);
  bindCurrentCall(module);
  bindThreadState(module);
  bindWorkerEvents(module);
  bindWire(module);
}
