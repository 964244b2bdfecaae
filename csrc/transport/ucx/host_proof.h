#pragma once

// Proves whether two processes run on one host. A comparison is not enough,
// because different hosts may have equal values: cloned machines may have one
// boot id, and the first pid namespace of every kernel has the same inode.

#include "base/descriptor.h"

#include <cstdint>
#include <string>

namespace torch_rpc_ext::transport::ucx {

// What a process tells others about itself, and what others can find if they
// run on its host.
struct ProcessIdentity {
  uint64_t bootId = 0; // hash of the kernel's boot id
  uint64_t pidNamespace = 0; // inode of /proc/self/ns/pid
  int32_t pid = 0;
  uint64_t nonceAddress = 0; // where this process keeps `nonce`
  uint64_t nonce = 0; // also the name of the HostMark's socket
  // Hash of what decides whose files the kernel lets this process open: users
  // and groups, user namespace, capabilities.
  uint64_t rights = 0;

  bool operator==(const ProcessIdentity&) const = default;
};

// What a process shows so that others on its host can find it: a nonce in its
// memory, and a Unix socket in the abstract namespace, named by the nonce. No
// other socket has that name, and the socket takes no messages.
//
// Owns: the nonce, the socket.
// Thread: any.
// Outlives: nothing; once this is destroyed, no process finds the mark.
class HostMark {
 public:
  HostMark();
  HostMark(const HostMark&) = delete;
  HostMark& operator=(const HostMark&) = delete;

  const ProcessIdentity& identity() const {
    return identity_;
  }

 private:
  const uint64_t nonce_;
  const base::Descriptor socket_;
  ProcessIdentity identity_;
};

// How near a peer is, as far as has been proved.
struct Nearness {
  bool sameHost = false; // both run on one kernel
  bool samePids = false; // a pid means the same process to both
  // Each can open the shared memory of the other. With memory that only one of
  // them can open, UCX connects one way and finds no way back.
  bool sameRights = false;
  // Empty when this process can read the peer's memory.
  std::string whyNoCma = "another host";
};

// Tries to read the nonce in the peer's memory. If that works, the pid names
// the peer, and this process has all rights that CMA and mapping the peer's
// memory need. Without those rights (ptrace scope, seccomp, another user) this
// looks for the peer's socket: if it is found, both run on one kernel. The
// socket can only be found from the same network namespace.
Nearness prove(const ProcessIdentity& self, const ProcessIdentity& peer);

} // namespace torch_rpc_ext::transport::ucx
