#include "transport/ucx/host_proof.h"

#include "base/host.h"
#include "transport/ucx/protocol.h"

#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>

namespace torch_rpc_ext::transport::ucx {

namespace {

struct MarkAddress {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit MarkAddress(uint64_t nonce) {
    address.sun_family = AF_UNIX;
    // The first byte stays 0: the abstract namespace.
    const int size = snprintf(
        address.sun_path + 1,
        sizeof(address.sun_path) - 1,
        "torch_rpc_ext.%016" PRIx64,
        nonce);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  }
  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&address);
  }
};

base::Descriptor openSocket() {
  return base::Descriptor(
      ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// UCX opens a peer's shared memory by /proc/pid/fd.
// Source: ptrace(2), "Ptrace access mode checking"
uint64_t rightsOfThisProcess() {
  uid_t users[3] = {};
  gid_t groups[3] = {};
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct capabilities[2] = {};
  getresuid(&users[0], &users[1], &users[2]);
  getresgid(&groups[0], &groups[1], &groups[2]);
  syscall(SYS_capget, &header, capabilities);
  std::string text = std::to_string(base::namespaceOf("user"));
  if (prctl(PR_GET_DUMPABLE) != 1) {
    // Processes with the same users may not open the files of this one.
    text += " pid " + std::to_string(getpid());
  }
  for (int i = 0; i < 3; ++i) {
    text += " " + std::to_string(users[i]) + " " + std::to_string(groups[i]);
  }
  for (const auto& half : capabilities) {
    text += " " + std::to_string(half.permitted) + " " +
        std::to_string(half.effective);
  }
  return std::hash<std::string>{}(text);
}

bool findMark(uint64_t nonce) {
  const base::Descriptor socket = openSocket();
  const MarkAddress mark(nonce);
  return ::connect(socket.fd(), mark.get(), mark.length) == 0;
}

// Empty if the peer's nonce can be read at the peer's address.
std::string whyNotReadable(const ProcessIdentity& peer) {
  uint64_t seen = 0;
  iovec local{&seen, sizeof(seen)};
  iovec remote{reinterpret_cast<void*>(peer.nonceAddress), sizeof(seen)};
  const ssize_t n = process_vm_readv(peer.pid, &local, 1, &remote, 1, 0);
  if (n == sizeof(seen)) {
    return seen == peer.nonce ? "" : "the pid names another process";
  }
  if (n < 0 && errno == EPERM) {
    return "no permission to read the peer's memory (ptrace scope, seccomp, "
           "another user)";
  }
  return std::string("process_vm_readv: ") + std::strerror(errno);
}

} // namespace

HostMark::HostMark() : nonce_(randomToken()), socket_(openSocket()) {
  identity_.bootId = base::bootId();
  identity_.pidNamespace = base::namespaceOf("pid");
  identity_.pid = getpid();
  identity_.nonceAddress = reinterpret_cast<uint64_t>(&nonce_);
  identity_.nonce = nonce_;
  identity_.rights = rightsOfThisProcess();
  // If the socket cannot be opened or bound, the nonce in memory is the only
  // proof.
  const MarkAddress mark(nonce_);
  if (socket_.fd() >= 0) {
    (void)::bind(socket_.fd(), mark.get(), mark.length);
    ::shutdown(socket_.fd(), SHUT_RD);
  }
}

Nearness prove(const ProcessIdentity& self, const ProcessIdentity& peer) {
  if (self.bootId != peer.bootId) {
    return {};
  }
  const bool equalPids =
      self.pidNamespace == peer.pidNamespace && self.pidNamespace != 0;
  std::string why = equalPids
      ? whyNotReadable(peer)
      : "another pid namespace (containers: share it, e.g. --pid=host)";
  const bool sameRights = self.rights == peer.rights;
  if (why.empty()) {
    return {true, true, sameRights, {}};
  }
  if (findMark(peer.nonce)) {
    return {true, equalPids, sameRights, std::move(why)};
  }
  return {false, false, false, "not proved to be of this host: " + why};
}

} // namespace torch_rpc_ext::transport::ucx
