// native.base: the checksum, and throwing at a chosen boundary.

#include "base/boundary.h"
#include "base/checksum.h"
#include "native.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <new>
#include <string>

namespace torch_rpc_ext::native {

namespace py = pybind11;
using base::Boundary;

namespace {

constexpr size_t kBoundaries = static_cast<size_t>(Boundary::kCount);

struct Plan {
  std::atomic<Boundary> where{Boundary::kCount};
  std::atomic<bool> outOfMemory{true};
  std::atomic<bool> isPending{false};
  std::array<std::atomic<uint64_t>, kBoundaries> crossed{};
};
Plan plan;

void onCrossing(Boundary where) {
  plan.crossed[static_cast<size_t>(where)].fetch_add(1);
  if (where != plan.where.load() || !plan.isPending.exchange(false)) {
    return;
  }
  if (plan.outOfMemory.load()) {
    throw std::bad_alloc();
  }
  TORCH_CHECK(false, "injected at ", base::toString(where));
}

void throwAt(const std::string& where, bool outOfMemory) {
  size_t number = 0;
  while (number != kBoundaries &&
         base::toString(static_cast<Boundary>(number)) != where) {
    ++number;
  }
  if (number == kBoundaries) {
    throw py::value_error("no boundary is called " + where);
  }
  plan.isPending.store(false);
  plan.where.store(static_cast<Boundary>(number));
  plan.outOfMemory.store(outOfMemory);
  plan.isPending.store(true);
  base::injector.store(&onCrossing);
}

void stopThrowing() {
  base::injector.store(nullptr);
  plan.isPending.store(false);
  plan.where.store(Boundary::kCount);
}

std::map<std::string, uint64_t> crossed() {
  std::map<std::string, uint64_t> counts;
  for (size_t i = 0; i < kBoundaries; ++i) {
    counts[base::toString(static_cast<Boundary>(i))] = plan.crossed[i].load();
  }
  return counts;
}

uint64_t checksum(const py::buffer& bytes) {
  const py::buffer_info info = bytes.request();
  py::gil_scoped_release release;
  return base::checksum(
      {info.ptr, static_cast<size_t>(info.size * info.itemsize)});
}

} // namespace

void bindBase(py::module_& parent) {
  py::module_ m = parent.def_submodule("base");
  m.def("checksum", &checksum, py::arg("bytes"));
  m.def("throw_at", &throwAt, py::arg("where"), py::arg("out_of_memory"));
  m.def("is_pending", [] { return plan.isPending.load(); });
  m.def("stop_throwing", &stopThrowing);
  m.def("crossed", &crossed);
}

} // namespace torch_rpc_ext::native
