// When a sender of bulk gives a lane up: when the receiver's host is silent,
// but not when the host answers and the receiver takes nothing.

#include "sanitize/stress.h"
#include "transport/ucx/lanes/bulk_sender.h"
#include "unit/busy_receiver.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport;
namespace lanes = ucx::lanes;
using stress::require;
using unit::BusyReceiver;

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

constexpr double kKeepalive = 0.1;
constexpr std::chrono::milliseconds kLong{1500};

// One send() of a piece, which no kernel takes whole at the start.
struct Send {
  explicit Send(const BusyReceiver& receiver) {
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

  const std::vector<char> bytes = std::vector<char>(lanes::kPieceBytes, 'b');
  std::promise<base::Error> promise;
  std::future<base::Error> end = promise.get_future();
  lanes::BulkSender sender{kKeepalive, std::make_shared<base::Gate>()};
};

void testAReceiverThatTakesNothingForLong() {
  BusyReceiver receiver;
  {
    Send send(receiver);
    require(!send.endsIn(kLong), "its host answers, so it is not given up");
    require(receiver.takeLane().get(), "then the receiver takes the piece");
    require(send.endsIn(std::chrono::seconds(60)), "so the send ends");
    require(!send.end.get(), "and the piece has been sent");
  }
  receiver.join();
}

void testAHostThatIsSilent() {
  const BusyReceiver receiver;
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
