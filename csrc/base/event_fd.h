#pragma once

#include "base/descriptor.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

namespace torch_rpc_ext::base {

// Wakes a thread that waits for descriptors: this one has input from raise()
// until take(). Neither blocks.
//
// Owns: the descriptor, an eventfd.
// Thread: any.
class EventFd {
 public:
  // Throws std::system_error if the system gives no descriptor.
  EventFd()
      : descriptor_(
            checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {}

  int fd() const {
    return descriptor_.fd();
  }
  // Several calls before take() count as one, except that an edge-triggered
  // epoll reports each of them.
  void raise() {
    const uint64_t one = 1;
    (void)!::write(fd(), &one, sizeof(one));
  }
  void take() {
    uint64_t count = 0;
    (void)!::read(fd(), &count, sizeof(count));
  }

 private:
  const Descriptor descriptor_;
};

} // namespace torch_rpc_ext::base
