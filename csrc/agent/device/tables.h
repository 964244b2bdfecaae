#pragma once

#include "agent/device/streams.h"
#include "base/error.h"
#include "wire/call_frame.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_rpc_ext::agent::device {

using Map = torch::distributed::rpc::DeviceMap;

// Where the tensors of one message go.
struct Route {
  // This worker's device -> the receiver's. Null: CPU to CPU, and nothing else.
  const Map* map = nullptr;
  const std::string* receiver = nullptr; // its name, for errors
  bool request = true;

  // Fails with kInvalid, in upstream's words, for a device that is not mapped.
  base::Result<wire::DevicePlace> placeOf(c10::Device device) const;
};

// The device that a place of the wire is here.
c10::Device deviceAt(wire::DevicePlace place);

// Whether one of them is on a CUDA device.
bool anyOn(const std::vector<at::Tensor>& tensors);
// Those devices.
std::vector<c10::Device> devicesOf(const std::vector<at::Tensor>& tensors);

// Fails with kInvalid, and says what to do, unless `device` is one of
// `devices`.
base::Error check(c10::Device device, Devices devices);

// The device maps of this worker, and the devices that its RPC uses.
//
// Owns: all tables there ever were, so that what it returned stays valid:
//   torch's futures refer to lists of devices at any time.
// Thread: any.
class Tables {
 public:
  using Maps = std::unordered_map<std::string, Map>;

  Tables() {
    set({}, {}, {});
  }

  void set(Maps maps, Maps reverseMaps, std::vector<c10::Device> devices);

  // Whether there is anything but the CPU, for us or for a peer.
  bool any() const {
    return current()->any;
  }
  const std::vector<c10::Device>& devices() const {
    return current()->devices;
  }
  // For calls to a worker, and for answers to one. Null when there is none.
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
  std::mutex mutex_;
  std::vector<std::unique_ptr<const Table>> all_;
};

} // namespace torch_rpc_ext::agent::device
