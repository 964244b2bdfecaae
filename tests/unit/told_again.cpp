// A connection breaks at one end only, and the word of that does not reach the
// other end. When the other end sends a message, or probes the connection, the
// other end is told again.
//
// For one end to break alone, the two ends must send over different sockets.
// UCX pairs the endpoints of two workers in the order in which they are made,
// not by connection. So the opener's first endpoint gets a connection that the
// accepter refuses without an endpoint: from then on the accepter sends over
// the socket before the one over which the opener sends.

#include "side.h"

#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

using namespace torch_rpc_ext;
using stress::become;
using stress::require;
using namespace std::chrono_literals;

namespace {

std::mutex mutex;
std::vector<int> sockets; // that UCX has connected, in order
std::atomic<bool> cut{false}; // sockets that UCX connects now break at once
std::atomic<int> broken{0}; // how many of those there were

} // namespace

// UCX calls this and not the system's function.
extern "C" int
connect(int fd, const struct sockaddr* address, socklen_t length) {
  static const auto real =
      reinterpret_cast<decltype(&connect)>(dlsym(RTLD_NEXT, "connect"));
  const int result = real(fd, address, length);
  const int error = errno;
  if (address->sa_family == AF_INET) {
    const std::lock_guard lock(mutex);
    if (cut.load()) {
      pollfd connected{fd, POLLOUT, 0}; // only then can it be shut down
      poll(&connected, 1, /*timeout, ms=*/10000);
      shutdown(fd, SHUT_RDWR);
      broken.fetch_add(1);
    } else {
      sockets.push_back(fd);
    }
  }
  errno = error;
  return result;
}

namespace {

class Counting : public transport::Welcoming {
 public:
  base::Error onAccept(
      const transport::ConnectionPtr& connection,
      const std::string& /*hello*/) override {
    accepted.set_value(connection);
    return {};
  }
  void onFrame(
      const transport::ConnectionPtr& /*connection*/,
      std::unique_ptr<transport::Incoming> /*incoming*/) override {
    frames.fetch_add(1);
  }

  std::promise<transport::ConnectionPtr> accepted;
  std::atomic<int> frames{0};
};

using Side = transport::Side<Counting>;

// Opens a connection that the other end refuses without a word.
void openInVain(const Side& from, const Side& to) {
  auto address = transport::ucx::parseAddress(to.context->address());
  require(address.ok(), "an address");
  address.value().door += 1;
  from.context->connect(
      transport::ucx::encodeAddress(address.value()), "hello");
}

void send(const transport::ConnectionPtr& connection) {
  connection->send(base::copyOf({"frame", 5}), {}, {});
}

void tellAgain(transport::ucx::Encryption encryption, bool probes) {
  using transport::PeerState;
  transport::ucx::Options options;
  options.interfaces = {"lo"};
  options.encryption = encryption;
  Side opener(options);
  Side accepter(options);
  {
    const std::lock_guard lock(mutex);
    sockets.clear();
  }
  openInVain(opener, accepter);
  const auto ours = opener.context->connect(accepter.context->address(), "");
  auto accepted = accepter.accepted.get_future();
  require(accepted.wait_for(20s) == std::future_status::ready, "it opens");
  const auto theirs = accepted.get();
  send(ours);
  become([&] { return accepter.frames.load() == 1; }, "a frame arrives");
  // Takes the opener's socket as its own, so the accepter's next endpoint, over
  // which the accepter tells the opener, gets a new one.
  openInVain(accepter, opener);
  send(theirs);
  become([&] { return opener.frames.load() == 1; }, "a frame comes back");

  {
    const std::lock_guard lock(mutex);
    require(sockets.size() == 2, "two endpoints share a socket");
    cut.store(true);
    shutdown(sockets[0], SHUT_RDWR);
  }
  become([&] { return theirs->peer() == PeerState::kBroken; }, "one end broke");
  become([&] { return broken.exchange(0) != 0; }, "the word is on its way");
  require(ours->peer() == PeerState::kOpen, "the other end does not know");
  cut.store(false);
  if (probes) {
    ours->probe();
  } else {
    send(ours);
  }
  become(
      [&] { return ours->peer() == PeerState::kBroken; },
      "the other end is told again");
}

} // namespace

int main() {
  setenv("UCX_TLS", "tcp", 1);
  setenv("UCX_TCP_MAX_CONN_RETRIES", "1", 1); // no second attempt
  using transport::ucx::Encryption;
  tellAgain(Encryption::kOff, /*probes=*/false);
  tellAgain(Encryption::kOn, /*probes=*/true);
  return 0;
}
