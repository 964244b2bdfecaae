#pragma once

#include "sanitize/stress.h"
#include "transport/ucx/lanes/socket.h"
#include "transport/ucx/lanes/wire.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_rpc_ext::unit {

namespace lanes = transport::ucx::lanes;

// A receiver of bulk over lanes, which takes nothing before takeLane(). One
// connection at a time can wait to be accepted. Those beyond it open a second
// later, when the kernel tries again.
class BusyReceiver {
 public:
  BusyReceiver() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(at);
    auto* const name = reinterpret_cast<sockaddr*>(&at);
    setPatience(listener_);
    stress::require(::bind(listener_, name, size) == 0, "bind");
    stress::require(::listen(listener_, /*backlog=*/0) == 0, "listen");
    stress::require(getsockname(listener_, name, &size) == 0, "getsockname");
    address = lanes::encode(
        {{{"127.0.0.1", ntohs(at.sin_port)}},
         std::string(lanes::kKeyBytes, 'k')});
  }
  ~BusyReceiver() {
    close(listener_);
  }

  // Takes all that the next lane says; true if it begins with a right Hello.
  std::future<bool> takeLane() {
    const int lane = ::accept(listener_, nullptr, nullptr);
    stress::require(lane >= 0, "the lane is opened");
    setPatience(lane);
    std::promise<bool> isKnown;
    auto future = isKnown.get_future();
    threads_.emplace_back([lane, isKnown = std::move(isKnown)]() mutable {
      lanes::Hello hello;
      isKnown.set_value(
          read(lane, &hello, sizeof(hello)) && hello.magic == lanes::kMagic);
      lanes::PieceHeader header;
      std::vector<char> piece(lanes::kPieceBytes);
      while (read(lane, &header, sizeof(header)) &&
             read(lane, piece.data(), header.size)) {
        (void)!::send(lane, "t", 1, MSG_NOSIGNAL);
      }
      close(lane);
    });
    return future;
  }
  // To be called when the sender has ended.
  void join() {
    for (auto& thread : threads_) {
      thread.join();
    }
  }

  std::string address;

 private:
  static void setPatience(int fd) {
    const timeval patience{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  static bool read(int fd, void* into, size_t size) {
    return ::recv(fd, into, size, MSG_WAITALL) == static_cast<ssize_t>(size);
  }

  const int listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::vector<std::thread> threads_;
};

} // namespace torch_rpc_ext::unit
