// native.memory: the cache of receive buffers.

#include "memory/buffer_cache.h"
#include "native.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

namespace torch_rpc_ext::native {

namespace py = pybind11;
using memory::BufferCache;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

namespace {

// A Block with a release() for Python, so that tests need not wait for the
// garbage collector.
struct PyBlock {
  std::optional<BufferCache::Block> block;

  BufferCache::Block& get() {
    if (!block) {
      throw py::value_error("the block has been released");
    }
    return *block;
  }
};

py::dict statsOf(const BufferCache& cache) {
  const auto stats = cache.stats();
  py::dict result;
  result["hits"] = stats.hits;
  result["misses"] = stats.misses;
  result["idle_bytes"] = stats.idleBytes;
  result["idle_blocks"] = stats.idleBlocks;
  result["used_bytes"] = stats.usedBytes;
  result["used_blocks"] = stats.usedBlocks;
  return result;
}

void bindBlock(py::module_& m) {
  py::class_<PyBlock>(m, "Block")
      .def_property_readonly(
          "address",
          [](PyBlock& self) {
            return reinterpret_cast<uintptr_t>(self.get().data());
          })
      .def_property_readonly(
          "size", [](PyBlock& self) { return self.get().size(); })
      .def_property_readonly(
          "capacity", [](PyBlock& self) { return self.get().capacity(); })
      .def_property_readonly(
          "region",
          [](PyBlock& self) {
            const auto region = self.get().region();
            return py::make_tuple(region.id, region.fd);
          })
      .def("discard", [](PyBlock& self) { self.get().discard(); })
      .def("release", [](PyBlock& self) { self.block.reset(); }, ReleaseGil());
}

void bindCache(py::module_& m) {
  py::class_<BufferCache>(m, "BufferCache")
      .def(py::init<size_t>(), py::kw_only(), py::arg("max_idle_bytes"))
      .def(
          "acquire",
          [](BufferCache& self, size_t size) {
            return PyBlock{unwrap(self.acquire(size))};
          },
          py::arg("size"))
      .def("share", &BufferCache::share, py::arg("size"))
      .def(
          "trim",
          [](BufferCache& self, double seconds) {
            return self.trim(
                std::chrono::duration_cast<BufferCache::Clock::duration>(
                    std::chrono::duration<double>(seconds)));
          },
          py::arg("seconds"),
          ReleaseGil())
      .def("close", &BufferCache::close, ReleaseGil())
      .def("stats", &statsOf);
}

} // namespace

void bindMemory(py::module_& parent) {
  py::module_ m = parent.def_submodule("memory");
  m.def("size_class", &memory::sizeClass, py::arg("size"));
  bindBlock(m);
  bindCache(m);
}

} // namespace torch_rpc_ext::native
