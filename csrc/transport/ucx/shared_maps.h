#pragma once

#include "memory/shared_map.h"
#include "transport/ucx/protocol.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace torch_rpc_ext::transport::ucx {

// Regions of other processes' shared memory that are mapped here, kept for
// their next use: the pages of a map that is new have to be faulted in again.
//
// Owns: the maps that nobody uses; one in use belongs to its users. A region
// that is still in use is mapped once: its owner may have it back, and lend it
// again, before this process has let go of what it returned.
// Thread: any.
// Outlives: nothing; maps in use outlive it.
class SharedMaps {
 public:
  SharedMaps();
  ~SharedMaps();
  SharedMaps(const SharedMaps&) = delete;
  SharedMaps& operator=(const SharedMaps&) = delete;

  // The memory of a region of process `pid`; null if it cannot be had, or is
  // not what a peer of ours would offer, or if too many are in use.
  std::shared_ptr<memory::SharedMap> map(int32_t pid, const BulkEntry& entry);

  // Unmaps what is unused of a process.
  void forget(int32_t pid);
  // Unmaps what has not been used for `age`: its owner may be done with it.
  // Returns how many maps are left, those in use too.
  size_t trim(std::chrono::steady_clock::duration age);

 private:
  class State;
  std::shared_ptr<State> state_;
};

} // namespace torch_rpc_ext::transport::ucx
