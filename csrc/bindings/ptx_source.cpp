#include "bindings/ptx_source.h"

#include <pybind11/pybind11.h>

#include <tuple>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;

namespace {

base::Result<cuda::Ptx> compile(const std::string& name, int major, int minor) {
  const py::gil_scoped_acquire gil;
  try {
    const py::object kernel =
        py::module_::import("torch_rpc_ext.kernels.ptx")
            .attr("compile_kernel")(name, std::make_tuple(major, minor));
    return cuda::Ptx{
        kernel.attr("ptx").cast<std::string>(),
        kernel.attr("entry").cast<std::string>()};
  } catch (py::error_already_set& error) {
    const py::object missing = py::module_::import("torch_rpc_ext.kernels.ptx")
                                   .attr("MissingCompilerError");
    return base::Error{
        error.matches(missing) ? base::ErrorKind::kUnsupported
                               : base::ErrorKind::kSystem,
        py::str(error.value()).cast<std::string>()};
  }
}

} // namespace

cuda::PtxSource pythonPtxSource() {
  return &compile;
}

} // namespace torch_rpc_ext::bindings
