// _C.boundaries, for tests only: throws at a chosen boundary.

#include "base/boundary.h"
#include "bindings/bindings.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <new>
#include <string>

namespace torch_rpc_ext::bindings {

namespace py = pybind11;
using base::Boundary;

namespace {

constexpr size_t kBoundaries = static_cast<size_t>(Boundary::kCount);

struct Plan {
  std::atomic<Boundary> where{Boundary::kCount};
  std::atomic<bool> outOfMemory{true};
  std::atomic<int> left{0};
  std::array<std::atomic<uint64_t>, kBoundaries> crossed{};
};
Plan plan;

void onCrossing(Boundary where) {
  plan.crossed[static_cast<size_t>(where)].fetch_add(1);
  if (where != plan.where.load() || plan.left.fetch_sub(1) <= 0) {
    return;
  }
  if (plan.outOfMemory.load()) {
    throw std::bad_alloc();
  }
  TORCH_CHECK(false, "injected at ", base::toString(where));
}

void throwAt(const std::string& where, bool outOfMemory, int times) {
  size_t number = 0;
  while (number != kBoundaries &&
         base::toString(static_cast<Boundary>(number)) != where) {
    ++number;
  }
  if (number == kBoundaries) {
    throw py::value_error("no boundary is called " + where);
  }
  plan.left.store(0);
  plan.where.store(static_cast<Boundary>(number));
  plan.outOfMemory.store(outOfMemory);
  plan.left.store(times);
  base::injector.store(&onCrossing);
}

} // namespace

void bindBoundaries(py::module_& parent) {
  py::module_ m = parent.def_submodule("boundaries", "For tests only.");
  m.def(
      "throw_at",
      &throwAt,
      py::arg("where"),
      py::arg("out_of_memory"),
      py::arg("times"));
  m.def("stop", [] {
    base::injector.store(nullptr);
    plan.where.store(Boundary::kCount);
  });
  // How many boundaries have still to throw.
  m.def("left", [] { return std::max(0, plan.left.load()); });
  m.def("crossed", [] {
    std::map<std::string, uint64_t> crossed;
    for (size_t i = 0; i < kBoundaries; ++i) {
      crossed[base::toString(static_cast<Boundary>(i))] =
          plan.crossed[i].load();
    }
    return crossed;
  });
}

} // namespace torch_rpc_ext::bindings
