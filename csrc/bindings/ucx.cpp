#include "base/interfaces.h"
#include "bindings/bindings.h"
#include "transport/ucx/info.h"

#include <pybind11/stl.h>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;

void bindUcx(py::module_& module) {
  module.def(
      "interfaces",
      [] {
        py::dict table;
        for (const auto& [name, interface] : base::networkInterfaces()) {
          table[py::str(name)] =
              py::make_tuple(interface.up, py::cast(interface.addresses));
        }
        return table;
      },
      "Network interfaces of this host: name -> (up, addresses).");
  module.def(
      "ucx_transports",
      &transport::ucx::transports,
      py::call_guard<py::gil_scoped_release>(),
      "(transport, device, kind) of everything UCX can use here.");
}

} // namespace torch_rpc_ext::bindings
