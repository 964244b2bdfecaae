#pragma once

#include <cstdint>

namespace torch_rpc_ext::base {

// Remembers the process that an object was made in. A fork copies the object,
// but no thread except the one that forks: a lock that another thread held
// stays locked in the child. So in the child the object's destructor must only
// free memory, and take no lock.
//
// Thread: any.
class HomeProcess {
 public:
  HomeProcess();

  // False in a child of that process.
  bool isHere() const noexcept;

 private:
  const uint32_t forks_;
};

} // namespace torch_rpc_ext::base
