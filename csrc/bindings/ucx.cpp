#include "base/interfaces.h"
#include "bindings/bindings.h"
#include "transport/ucx/info.h"

#include <pybind11/stl.h>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;

void bindUcx(py::module_& module) {
  using namespace transport::ucx;
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
  module.def("ucx_version", &libraryVersion, "Version of the loaded UCX.");
  module.def(
      "ucx_library_path", &libraryPath, "Path of the libucp that is loaded.");
  module.def(
      "ucx_transports",
      &transports,
      py::call_guard<py::gil_scoped_release>(),
      "(transport, device, kind) of everything UCX can use here.");
}

} // namespace torch_rpc_ext::bindings
