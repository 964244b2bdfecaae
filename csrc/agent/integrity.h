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

// Part of the text of every kCorrupted, for people to read. Programs go by the
// kind of the error, which travels as a code (failure_message.h).
inline constexpr const char* kChangedOnTheWay = "changed on its way";

// Compares a received message, on the host, with the sender's checksums: the
// payload and the storages, except storages beside the frame and those for
// which `isLater` is true. `bulk` has the storages that came as bulk, in their
// order. Fails with kCorrupted and names what has changed.
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

// Checksums that this worker's devices are still computing (device/sums.h), and
// the sender's. compare() is to be called when the devices are done, before
// anybody gets the message.
//
// Owns: the memory that the devices write to.
// Thread: one at a time.
class PendingSums {
 public:
  // A checksum, or the address at which it will arrive.
  using Other = std::variant<uint64_t, const uint64_t*>;
  // Adds the checksum of a storage. The device writes its checksum to `here`;
  // `sent` is the sender's.
  void add(
      const wire::CallFrameView& frame,
      uint32_t storage,
      uint64_t bytes,
      const uint64_t* here,
      Other sent);
  // Adds the checksum of a block of several storages on device `to`. `there` is
  // the block's checksum before its last copy: on the host here, or at the
  // sender.
  void
  addBlock(c10::Device to, uint64_t bytes, const uint64_t* here, Other there);
  void hold(c10::Storage memory) {
    held_.push_back(std::move(memory));
  }
  bool empty() const {
    return sums_.empty();
  }
  // Fails with kCorrupted and names the first storage or block that has
  // changed.
  base::Error compare() const;

 private:
  struct Sum {
    std::string what;
    std::string where; // where `there` was computed
    uint64_t bytes = 0;
    const uint64_t* here = nullptr;
    Other there;
  };

  std::vector<Sum> sums_;
  std::vector<c10::Storage> held_;
};

} // namespace torch_rpc_ext::agent
