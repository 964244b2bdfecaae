#pragma once

#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace torch_rpc_ext::base {

// Returns what the system call named `call` has returned. Throws
// std::system_error if that is negative, which means that the call has failed.
inline int checked(int result, const char* call) {
  if (result < 0) {
    throw std::system_error(errno, std::generic_category(), call);
  }
  return result;
}

// A file descriptor that is closed with this object.
//
// Owns: the descriptor.
// Thread: fd(): any; the rest: one at a time.
class Descriptor {
 public:
  Descriptor() = default;
  // Takes over `fd`. If it is negative, this object has no descriptor.
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }

  // Negative if there is none.
  int fd() const {
    return fd_;
  }

 private:
  int fd_ = -1;
};

} // namespace torch_rpc_ext::base
