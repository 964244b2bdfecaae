#pragma once

#include "base/error.h"
#include "wire/call_frame.h"

#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace torch_rpc_ext::agent {

// In the text of every kCorrupted, for people: between processes the kind
// travels as a code (failure_message.h).
inline constexpr const char* kChangedOnTheWay = "changed on its way";

// Compares what has arrived, on the host, with the sender's checksums: its
// payload, and the storages that do not travel beside the frame; `bulk` are
// those that came as bulk. Those that `isLater` are left out. Fails with
// kCorrupted, and names what has changed.
base::Error checkSums(
    const wire::CallFrameView& frame,
    base::ConstSpan payload,
    c10::ArrayRef<c10::Storage> bulk,
    const std::function<bool(const wire::StorageView&)>& isLater);

// The same for one storage.
base::Error checkSum(
    const wire::CallFrameView& frame,
    uint32_t storage,
    base::ConstSpan bytes,
    uint64_t sent);

// Comparisons with checksums that devices compute here (device/sums.h), to be
// made once that is over and before anybody is given the message.
//
// Owns: what the devices write to.
// Thread: one at a time.
class PendingSums {
 public:
  // Of a storage: `here` is where the device writes, `sent` the sender's
  // checksum, or where that will be.
  using Other = std::variant<uint64_t, const uint64_t*>;
  void add(
      const wire::CallFrameView& frame,
      uint32_t storage,
      uint64_t bytes,
      const uint64_t* here,
      Other sent);
  // Of a block of several that was copied to a device from the host here, where
  // it had that checksum; or from the sender's device.
  void
  addBlock(c10::Device to, uint64_t bytes, const uint64_t* here, Other there);
  void hold(c10::Storage memory) {
    held_.push_back(std::move(memory));
  }
  bool empty() const {
    return sums_.empty();
  }
  // Fails with kCorrupted, and names the first that has changed.
  base::Error compare() const;

 private:
  struct Sum {
    std::string what;
    std::string where; // the other one was computed
    uint64_t bytes = 0;
    const uint64_t* here = nullptr;
    Other there;
  };

  std::vector<Sum> sums_;
  std::vector<c10::Storage> held_;
};

} // namespace torch_rpc_ext::agent
