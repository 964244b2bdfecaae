#pragma once

// Whether two processes are of one host: proved, because what can be compared
// is equal on different hosts, too. Cloned machines may have one boot id, and
// the first pid namespace of every kernel has the same inode.

#include <cstdint>
#include <string>

namespace torch_rpc_ext::transport::ucx {

// What a process tells others of itself, and what they find if they are of its
// host.
struct ProcessIdentity {
  uint64_t bootId = 0; // hash of the kernel's boot id
  uint64_t pidNamespace = 0; // inode of /proc/self/ns/pid
  int32_t pid = 0;
  uint64_t nonceAddress = 0; // where this process keeps `nonce`
  uint64_t nonce = 0; // also the name of its mark

  bool operator==(const ProcessIdentity&) const = default;
};

// What a process shows, for others of its host to find: a nonce in its memory,
// and a Unix socket with that name in the abstract namespace, which nobody else
// has and which takes no messages.
//
// Owns: the nonce, the socket.
// Thread: any.
// Outlives: nothing; who looks for it later does not find it.
class HostMark {
 public:
  HostMark();
  ~HostMark();
  HostMark(const HostMark&) = delete;
  HostMark& operator=(const HostMark&) = delete;

  const ProcessIdentity& identity() const {
    return identity_;
  }

 private:
  const uint64_t nonce_;
  int socket_ = -1;
  ProcessIdentity identity_;
};

// How near a peer is, as far as has been proved.
struct Nearness {
  bool sameHost = false; // one kernel
  bool samePids = false; // and a pid means the same process to both
  // Empty when this process can read the peer's memory.
  std::string whyNoCma = "another host";
};

// Reads the nonce in the peer's memory: who can has a pid that names the peer,
// and all rights that CMA and mapping its memory need. Without those rights
// (ptrace scope, seccomp, another user) it looks for the socket, which says
// that the kernel is the same, where the network namespace is, too.
Nearness prove(const ProcessIdentity& self, const ProcessIdentity& peer);

} // namespace torch_rpc_ext::transport::ucx
