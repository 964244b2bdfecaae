#pragma once

#include "memory/shared_map.h"
#include "transport/ucx/protocol.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace torch_rpc_ext::transport::ucx::bulk {

// Regions of other processes' shared memory that are mapped here, kept for
// their next use, because the pages of a new map have to be faulted in again.
//
// A region can come again while it is in use here, because this process may
// have returned the region without having let go of it. Then map() gives the
// same map again.
//
// Owns: the maps that nobody uses; a map in use belongs to its users.
// Thread: any.
// Outlives: nothing; maps in use outlive this object.
class SharedMaps {
 public:
  SharedMaps();
  ~SharedMaps();
  SharedMaps(const SharedMaps&) = delete;
  SharedMaps& operator=(const SharedMaps&) = delete;

  // The memory of a region of process `pid`. Null if the region cannot be
  // mapped, is not what a peer of ours would offer, or if too many maps are in
  // use.
  std::shared_ptr<memory::SharedMap> map(int32_t pid, const BulkEntry& entry);

  // Unmaps the unused regions of process `pid`.
  void forget(int32_t pid);
  // Unmaps regions that have not been used for `age`, because their owners may
  // have no use for them any more. Returns how many maps are left, those in use
  // included.
  size_t trim(std::chrono::steady_clock::duration age);

 private:
  class State;
  std::shared_ptr<State> state_;
};

} // namespace torch_rpc_ext::transport::ucx::bulk
