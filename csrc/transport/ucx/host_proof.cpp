#include "transport/ucx/host_proof.h"

#include "base/host.h"
#include "transport/ucx/protocol.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>

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
  if (why.empty()) {
    return {true, true, {}};
  }
  if (findMark(peer.nonce)) {
    return {true, equalPids, std::move(why)};
  }
  return {false, false, "not proved to be of this host: " + why};
}

} // namespace torch_rpc_ext::transport::ucx
