#pragma once

#include <cstdint>

namespace torch_rpc_ext::base {

// The process that an object was made in. A fork copies the object, but neither
// the threads that it relies on nor those that were holding its locks: in the
// child its destructor must touch nothing but memory.
//
// Thread: any.
class HomeProcess {
 public:
  HomeProcess();

  // False in a child.
  bool isHere() const noexcept;

 private:
  const uint32_t forks_;
};

} // namespace torch_rpc_ext::base
