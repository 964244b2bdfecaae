// When a sender of bulk gives a lane up: when the receiver's host is silent,
// but not when the host answers and the receiver takes nothing.

#include "sanitize/stress.h"
#include "transport/ucx/lanes/bulk_sender.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport;
namespace lanes = ucx::lanes;
using stress::require;

namespace {

// What the kernel says of every connection while this is set: data was sent
// just now, and the last acknowledgement came a minute ago.
std::atomic<bool> isHostSilent{false};

} // namespace

extern "C" int getsockopt(
    int fd,
    int level,
    int option,
    void* value,
    socklen_t* size) noexcept {
  const auto result =
      static_cast<int>(syscall(SYS_getsockopt, fd, level, option, value, size));
  if (result == 0 && level == IPPROTO_TCP && option == TCP_INFO &&
      isHostSilent.load()) {
    auto* const info = static_cast<tcp_info*>(value);
    info->tcpi_last_data_sent = 0;
    info->tcpi_last_ack_recv = 60'000;
  }
  return result;
}

namespace {

using Bytes = std::vector<char>;
constexpr double kKeepalive = 0.1;
constexpr std::chrono::milliseconds kLong{1500};

// A receiver that takes nothing before takeAll().
class Receiver {
 public:
  Receiver() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    auto* const name = reinterpret_cast<sockaddr*>(&at);
    require(::bind(listener_, name, size) == 0, "bind");
    require(::listen(listener_, /*backlog=*/8) == 0, "listen");
    require(getsockname(listener_, name, &size) == 0, "getsockname");
    address = lanes::encode(
        {{{"127.0.0.1", ntohs(at.sin_port)}},
         std::string(lanes::kKeyBytes, 'k')});
  }
  ~Receiver() {
    close(listener_);
  }

  // Answers all pieces of one lane, until the sender ends.
  Bytes takeAll() const {
    const int lane = ::accept(listener_, nullptr, nullptr);
    lanes::Hello hello;
    require(read(lane, &hello, sizeof(hello)), "a Hello comes first");
    lanes::PieceHeader header;
    Bytes all;
    while (read(lane, &header, sizeof(header))) {
      Bytes piece(header.size);
      require(read(lane, piece.data(), piece.size()), "a whole piece");
      all.insert(all.end(), piece.begin(), piece.end());
      (void)!::send(lane, "t", 1, MSG_NOSIGNAL);
    }
    close(lane);
    return all;
  }

  std::string address;

 private:
  static bool read(int fd, void* into, size_t size) {
    return ::recv(fd, into, size, MSG_WAITALL) == static_cast<ssize_t>(size);
  }

  const int listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
};

// One send() of a piece, which no kernel takes whole at the start.
struct Send {
  explicit Send(const Receiver& receiver) {
    sender.send(
        receiver.address,
        7,
        {{bytes.data(), bytes.size()}},
        [this](const base::Error& error) { promise.set_value(error); });
  }
  ~Send() {
    sender.stop();
  }
  bool endsIn(std::chrono::milliseconds time) const {
    return end.wait_for(time) == std::future_status::ready;
  }

  const Bytes bytes = Bytes(lanes::kPieceBytes, 'b');
  std::promise<base::Error> promise;
  std::future<base::Error> end = promise.get_future();
  lanes::BulkSender sender{kKeepalive, std::make_shared<base::Gate>()};
};

void testAReceiverThatTakesNothingForLong() {
  const Receiver receiver;
  std::future<Bytes> taken;
  {
    Send send(receiver);
    require(!send.endsIn(kLong), "its host answers, so it is not given up");
    taken = std::async(std::launch::async, [&] { return receiver.takeAll(); });
    require(send.endsIn(std::chrono::seconds(60)), "then it takes the piece");
    require(!send.end.get(), "and the piece has been sent");
  }
  require(taken.get() == Bytes(lanes::kPieceBytes, 'b'), "all of it");
}

void testAHostThatIsSilent() {
  const Receiver receiver;
  isHostSilent.store(true);
  const auto begin = std::chrono::steady_clock::now();
  Send send(receiver);
  require(send.endsIn(std::chrono::seconds(60)), "the send ends");
  const base::Error error = send.end.get();
  isHostSilent.store(false);
  require(error.kind == base::ErrorKind::kPeerLost, "the host is lost");
  require(error.message.find("timed out") != error.message.npos, "so it says");
  require(
      std::chrono::steady_clock::now() - begin >=
          std::chrono::duration<double>(lanes::kPatience * kKeepalive),
      "but not before its time");
}

} // namespace

int main() {
  testAReceiverThatTakesNothingForLong();
  testAHostThatIsSilent();
  return 0;
}
