#pragma once

#include "agent/device/streams.h"
#include "base/error.h"
#include "base/synchronized.h"
#include "wire/call_frame.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent::device {

using Map = torch::distributed::rpc::DeviceMap;

// Where the tensors of one message go.
struct Route {
  // This worker's device -> the receiver's device. Null: only CPU to CPU.
  const Map* map = nullptr;
  const std::string* receiver = nullptr; // its name, for errors
  bool request = true;

  // Fails with kInvalid, in upstream's words, for a device that is not mapped.
  base::Result<wire::DevicePlace> placeOf(c10::Device device) const;
};

// The device of this process that a place in a frame means.
c10::Device deviceAt(wire::DevicePlace place);

// Whether any of the tensors is on a CUDA device.
bool anyOn(const std::vector<at::Tensor>& tensors);
// The CUDA devices that the tensors are on.
std::vector<c10::Device> devicesOf(const std::vector<at::Tensor>& tensors);

// Fails with kInvalid, and says what to do, unless `device` is one of
// `devices`.
base::Error check(c10::Device device, DeviceList devices);

// The device maps of this worker, and the devices that its RPC uses.
//
// Owns: all tables that were ever set, so that every reference that a method
//   has returned stays valid: torch's futures keep references to devices().
// Thread: any.
class Tables {
 public:
  using Maps = std::unordered_map<std::string, Map>;

  Tables() {
    set({}, {}, {});
  }

  void set(Maps maps, Maps reverseMaps, std::vector<c10::Device> devices);

  // Whether there is a device map, to or from this worker, or a device that
  // this worker uses.
  bool any() const {
    return current()->any;
  }
  const std::vector<c10::Device>& devices() const {
    return current()->devices;
  }
  // The map for calls to a worker, and the map for answers to a worker. Null if
  // there is none.
  const Map* mapTo(const std::string& worker) const;
  const Map* mapBackTo(const std::string& worker) const;

 private:
  struct Table {
    Maps maps;
    Maps reverseMaps;
    std::vector<c10::Device> devices;
    bool any = false;
  };

  const Table* current() const {
    return current_.load(std::memory_order_acquire);
  }

  std::atomic<const Table*> current_{nullptr};
  base::Synchronized<std::vector<std::unique_ptr<const Table>>> all_;
};

} // namespace torch_rpc_ext::agent::device
