// native.cuda: the driver, CUDA IPC and launches of kernels.

#include "base/bytes.h"
#include "bindings/ptx_source.h"
#include "cuda/driver.h"
#include "cuda/ipc_export.h"
#include "cuda/ipc_import.h"
#include "cuda/kernels.h"
#include "cuda/probe.h"
#include "native.h"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace torch_rpc_ext::native {

namespace py = pybind11;
using DriverPtr = std::shared_ptr<cuda::Driver>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

namespace {

// Converts a value to its bytes on the wire, and back.
template <typename T>
py::bytes toWire(const T& value, size_t size) {
  base::Buffer buffer(size);
  base::ByteWriter writer(buffer);
  value.write(writer);
  return toBytes(buffer.data(), buffer.size());
}

template <typename T>
T fromWire(const std::string& bytes) {
  base::ByteReader reader({bytes.data(), bytes.size()});
  return unwrap(T::read(reader));
}

cuda::StreamHandle toStream(uintptr_t stream) {
  return reinterpret_cast<cuda::StreamHandle>(stream);
}

void bindDriver(py::module_& m) {
  py::class_<cuda::Device>(m, "Device")
      .def_property_readonly(
          "uuid",
          [](const cuda::Device& self) {
            return toBytes(self.uuid.bytes.data(), self.uuid.bytes.size());
          })
      .def_readonly("is_mig", &cuda::Device::isMig)
      .def_readonly("major", &cuda::Device::major)
      .def_readonly("minor", &cuda::Device::minor);
  py::class_<cuda::Driver, DriverPtr>(m, "Driver")
      .def_property_readonly("version", &cuda::Driver::version)
      .def_property_readonly("devices", &cuda::Driver::devices);
  m.def(
      "load",
      [](const std::optional<std::string>& library) {
        return unwrap(
            library ? cuda::Driver::load(*library) : cuda::Driver::load());
      },
      py::arg("library") = py::none(),
      ReleaseGil());
  m.def(
      "copy",
      [](cuda::Driver& driver,
         int device,
         uint64_t destination,
         uint64_t source,
         uint64_t size,
         uintptr_t stream) {
        check(
            cuda::copyAsync(
                driver, device, destination, source, size, toStream(stream)));
      },
      py::arg("driver"),
      py::arg("device"),
      py::arg("destination"),
      py::arg("source"),
      py::arg("size"),
      py::arg("stream"),
      ReleaseGil());
}

// A mapping with a release() for Python, so that tests need not wait for the
// garbage collector.
struct PyMapping {
  std::shared_ptr<const cuda::Mapping> mapping;
};

void bindExport(py::module_& m) {
  py::class_<cuda::MemoryExporter>(m, "MemoryExporter")
      .def(py::init<DriverPtr>())
      .def(
          "export",
          [](cuda::MemoryExporter& self,
             int device,
             uint64_t address,
             uint64_t bytes) {
            const auto run = unwrap(self.exportMemory(device, address, bytes));
            return toWire(run, cuda::MemoryExport::kWireBytes);
          },
          py::arg("device"),
          py::arg("address"),
          py::arg("bytes"));
  m.def("describe_export", [](const std::string& bytes) {
    const auto run = fromWire<cuda::MemoryExport>(bytes);
    py::dict fields;
    fields["base"] = run.base;
    fields["size"] = run.size;
    fields["buffer_id"] = run.bufferId;
    fields["offset"] = run.offset;
    fields["bytes"] = run.bytes;
    return fields;
  });
}

void bindImport(py::module_& m) {
  using cuda::MemoryImporter;
  py::class_<PyMapping>(m, "Mapping")
      .def_property_readonly(
          "address",
          [](const PyMapping& self) { return self.mapping->address(); })
      .def(
          "release",
          [](PyMapping& self) { self.mapping.reset(); },
          ReleaseGil());
  py::class_<MemoryImporter>(m, "MemoryImporter")
      .def(
          py::init<DriverPtr, size_t>(),
          py::arg("driver"),
          py::arg("max_open") = 512)
      .def(
          "open",
          [](MemoryImporter& self,
             uint64_t peer,
             int device,
             const std::string& exported) {
            return PyMapping{unwrap(self.open(
                peer, device, fromWire<cuda::MemoryExport>(exported)))};
          },
          py::arg("peer"),
          py::arg("device"),
          py::arg("exported"),
          ReleaseGil())
      .def(
          "forget",
          [](MemoryImporter& self, uint64_t peer) { self.forget(peer); },
          py::arg("peer"),
          ReleaseGil())
      .def(
          "trim",
          [](MemoryImporter& self, double seconds) {
            return self.trim(
                std::chrono::duration_cast<MemoryImporter::Clock::duration>(
                    std::chrono::duration<double>(seconds)));
          },
          py::arg("seconds"),
          ReleaseGil())
      .def("stats", [](const MemoryImporter& self) {
        const auto stats = self.stats();
        py::dict fields;
        fields["hits"] = stats.hits;
        fields["opened"] = stats.opened;
        fields["stale"] = stats.stale;
        fields["open"] = stats.open;
        return fields;
      });
}

void bindProbe(py::module_& m) {
  m.def("identify", [](const cuda::Driver& driver) {
    const cuda::Identity self = cuda::identify(driver);
    return toWire(self, self.wireBytes());
  });
  m.def(
      "why_no_ipc",
      [](const std::string& self, const std::string& peer, size_t device) {
        return cuda::whyNoIpc(
            fromWire<cuda::Identity>(self),
            fromWire<cuda::Identity>(peer),
            device);
      },
      py::arg("self"),
      py::arg("peer"),
      py::arg("device"));
  py::class_<cuda::Trial>(m, "Trial")
      .def(
          py::init([](const DriverPtr& driver, int device, uint64_t nonce) {
            return unwrap(cuda::Trial::create(driver, device, nonce));
          }),
          py::arg("driver"),
          py::arg("device"),
          py::arg("nonce"))
      .def_property_readonly("exported", [](const cuda::Trial& self) {
        return toWire(self.exported(), cuda::MemoryExport::kWireBytes);
      });
  m.def(
      "attempt",
      [](const DriverPtr& driver,
         cuda::MemoryImporter& importer,
         uint64_t peer,
         int device,
         const std::string& exported,
         uint64_t nonce) {
        return cuda::Trial::attempt(
            driver,
            importer,
            peer,
            device,
            fromWire<cuda::MemoryExport>(exported),
            nonce);
      },
      py::arg("driver"),
      py::arg("importer"),
      py::arg("peer"),
      py::arg("device"),
      py::arg("exported"),
      py::arg("nonce"),
      ReleaseGil());
}

// What layout_of() in torch_rpc_ext/kernels/plan.py returns, but with the size
// of an element in place of the dtype.
using PyLayout =
    std::tuple<uint64_t, uint64_t, std::vector<int64_t>, std::vector<int64_t>>;

cuda::Layout toLayout(const PyLayout& layout) {
  return {
      std::get<0>(layout),
      std::get<1>(layout),
      std::get<2>(layout),
      std::get<3>(layout)};
}

cuda::Cast toCast(const std::string& name) {
  using cuda::Cast;
  for (const Cast cast :
       {Cast::kNone,
        Cast::kFloat32ToBfloat16,
        Cast::kFloat32ToFloat16,
        Cast::kBfloat16ToFloat32,
        Cast::kFloat16ToFloat32}) {
    if (name == cuda::toString(cast)) {
      return cast;
    }
  }
  throw py::value_error("there is no cast " + name);
}

void bindKernels(py::module_& m) {
  using cuda::Kernels;
  py::class_<Kernels>(m, "Kernels")
      .def(py::init([](const DriverPtr& driver) {
        return std::make_unique<Kernels>(driver, bindings::pythonPtxSource());
      }))
      .def(
          "prepare",
          [](Kernels& self, int device, const std::string& kernel) {
            check(self.prepare(device, kernel));
          },
          py::arg("device"),
          py::arg("kernel") = "segments",
          ReleaseGil())
      .def(
          "segments",
          [](Kernels& self,
             int device,
             uintptr_t stream,
             const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& runs,
             const std::string& cast) {
            std::vector<cuda::Segment> segments;
            for (const auto& [source, destination, elements] : runs) {
              segments.push_back({source, destination, elements});
            }
            check(self.segments(
                device, toStream(stream), segments, toCast(cast)));
          },
          py::arg("device"),
          py::arg("stream"),
          py::arg("segments"),
          py::arg("cast") = "",
          ReleaseGil())
      .def(
          "strided",
          [](Kernels& self,
             int device,
             uintptr_t stream,
             const PyLayout& source,
             const PyLayout& destination,
             const std::string& cast) {
            const auto copy = unwrap(
                cuda::planStrided(
                    toLayout(source), toLayout(destination), toCast(cast)));
            check(self.strided(device, toStream(stream), copy, toCast(cast)));
          },
          py::arg("device"),
          py::arg("stream"),
          py::arg("source"),
          py::arg("destination"),
          py::arg("cast") = "",
          ReleaseGil())
      .def(
          "checksum",
          [](Kernels& self,
             int device,
             uintptr_t stream,
             uint64_t source,
             uint64_t bytes,
             uint64_t result) {
            check(
                self.checksum(device, toStream(stream), source, bytes, result));
          },
          py::arg("device"),
          py::arg("stream"),
          py::arg("source"),
          py::arg("bytes"),
          py::arg("result"),
          ReleaseGil());
  m.def(
      "plan_strided",
      [](const PyLayout& source,
         const PyLayout& destination,
         const std::string& cast) {
        const auto copy = unwrap(
            cuda::planStrided(
                toLayout(source), toLayout(destination), toCast(cast)));
        return py::make_tuple(
            copy.elements,
            copy.sizes,
            copy.sourceStrides,
            copy.destinationStrides,
            copy.width);
      },
      py::arg("source"),
      py::arg("destination"),
      py::arg("cast") = "");
}

} // namespace

void bindCuda(py::module_& parent) {
  py::module_ m = parent.def_submodule("cuda");
  bindDriver(m);
  bindExport(m);
  bindImport(m);
  bindProbe(m);
  bindKernels(m);
}

} // namespace torch_rpc_ext::native
