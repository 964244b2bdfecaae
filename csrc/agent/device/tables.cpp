#include "agent/device/tables.h"

#include <algorithm>
#include <limits>
#include <sstream>

namespace torch_rpc_ext::agent::device {

using base::Error;
using base::ErrorKind;

namespace {

// The text of pytorch's tensorpipe_agent.cpp, and one more sentence at its end.
Error notMapped(const Route& route, c10::Device device) {
  std::ostringstream text;
  text << "TensorPipe RPC backend only supports CPU tensors by default, please "
          "move your tensors to CPU before sending them over RPC, or call "
          "`set_device_map` on `TensorPipeRpcBackendOptions` to explicitly "
          "configure device mapping. "
       << (route.request ? "Request" : "Response")
       << " device mapping is not available for destination " << *route.receiver
       << " for device " << device << " but received a tensor on that device. ";
  if (route.request) {
    text << "Before init_rpc: UcxRpcBackendOptions(...).set_device_map(\""
         << *route.receiver << "\", {\"" << device << "\": \"" << device
         << "\"})";
  } else {
    text << "On " << *route.receiver
         << ", before init_rpc: UcxRpcBackendOptions(...).set_device_map(name "
            "of this worker, {a device there: \""
         << device << "\"})";
  }
  return {ErrorKind::kInvalid, text.str()};
}

// The encoder decides about devices of other kinds: it describes tensors of the
// meta device, and refuses the rest.
bool isOnCuda(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

const Map* find(const Tables::Maps& maps, const std::string& worker) {
  const auto found = maps.find(worker);
  return found == maps.end() ? nullptr : &found->second;
}

} // namespace

base::Result<wire::DevicePlace> Route::placeOf(c10::Device device) const {
  const auto found = map == nullptr ? Map::const_iterator() : map->find(device);
  if (map == nullptr || found == map->end()) {
    if (device.is_cpu()) {
      return wire::kHostPlace;
    }
    return notMapped(*this, device);
  }
  const c10::Device target = found->second;
  if (target.is_cpu()) {
    return wire::kHostPlace;
  }
  // Python checks its device maps, but C++ code may have set an invalid one.
  if (target.type() != kType || target.index() < 0) {
    return Error(
        ErrorKind::kInvalid,
        "tensors on " + device.str() + " are mapped to " + target.str() +
            " of worker \"" + *receiver +
            "\": device maps take cpu and cuda devices with an index");
  }
  return static_cast<wire::DevicePlace>(target.index() + 1);
}

c10::Device deviceAt(wire::DevicePlace place) {
  // A place too large for a DeviceIndex becomes the largest index, which no
  // machine has: check() then refuses the device.
  const int index =
      std::min<int>(place - 1, std::numeric_limits<c10::DeviceIndex>::max());
  return place == wire::kHostPlace
      ? c10::Device(c10::kCPU)
      : c10::Device(kType, static_cast<c10::DeviceIndex>(index));
}

bool anyOn(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return isOnCuda(tensor);
  });
}

std::vector<c10::Device> devicesOf(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const auto& tensor : tensors) {
    if (isOnCuda(tensor) &&
        std::find(devices.begin(), devices.end(), tensor.device()) ==
            devices.end()) {
      devices.push_back(tensor.device());
    }
  }
  return devices;
}

Error check(c10::Device device, DeviceList devices) {
  if (std::find(devices.begin(), devices.end(), device) != devices.end()) {
    return {};
  }
  std::ostringstream text;
  text << "a tensor is meant for " << device
       << ", which RPC does not use here (it uses ";
  for (const auto& one : devices) {
    text << one << ", ";
  }
  text << "cpu): name it in a device map, or in the option devices of this "
          "worker";
  return {ErrorKind::kInvalid, text.str()};
}

void Tables::set(
    Maps maps,
    Maps reverseMaps,
    std::vector<c10::Device> devices) {
  auto table = std::make_unique<Table>();
  table->any = !maps.empty() || !reverseMaps.empty() || !devices.empty();
  table->maps = std::move(maps);
  table->reverseMaps = std::move(reverseMaps);
  table->devices = std::move(devices);
  auto all = all_.lock();
  current_.store(table.get(), std::memory_order_release);
  all->push_back(std::move(table));
}

const Map* Tables::mapTo(const std::string& worker) const {
  return find(current()->maps, worker);
}

const Map* Tables::mapBackTo(const std::string& worker) const {
  return find(current()->reverseMaps, worker);
}

} // namespace torch_rpc_ext::agent::device
