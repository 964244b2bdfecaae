#include "transport/ucx/watched_processes.h"

#include "transport/ucx/peer_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace torch_rpc_ext::transport::ucx {

std::shared_ptr<WatchedProcess> WatchedProcess::watch(
    std::shared_ptr<ControlWorker> worker,
    base::Poller& poller,
    base::Descriptor pidFd) {
  std::shared_ptr<WatchedProcess> process(
      new WatchedProcess(std::move(worker), poller, std::move(pidFd)));
  poller.add(process->pidFd_.fd(), [weak = std::weak_ptr(process)] {
    if (const auto self = weak.lock()) {
      self->worker_->post([self](Locked& locked) { self->onEnd(locked); });
    }
  });
  return process;
}

WatchedProcess::~WatchedProcess() {
  poller_.remove(pidFd_.fd());
}

bool WatchedProcess::ended() const {
  pollfd state{pidFd_.fd(), POLLIN, 0};
  return ::poll(&state, 1, 0) == 1;
}

void WatchedProcess::tell(Locked&, std::weak_ptr<PeerWatch> watch) {
  std::erase_if(watches_, [](const auto& other) { return other.expired(); });
  watches_.push_back(std::move(watch));
}

void WatchedProcess::onEnd(Locked& locked) {
  for (const auto& weak : std::exchange(watches_, {})) {
    // A PeerWatch may have lost interest.
    if (const auto watch = weak.lock();
        watch != nullptr && watch->watched(locked)) {
      if (!isOver(watch->state())) {
        // Messages that the peer sent before its process ended count: answers,
        // and its goodbye. So they are taken first.
        locked.progressAll();
      }
      watch->hear(locked, PeerWord::kProcessEnded);
    }
  }
}

std::shared_ptr<WatchedProcess> WatchedProcesses::open(
    Locked&,
    const std::shared_ptr<ControlWorker>& worker,
    base::Poller& poller,
    int32_t pid) {
  if (const auto known = byPid_.find(pid); known != byPid_.end()) {
    // While a process has not ended, no other process gets its pid.
    const auto process = known->second.lock();
    if (process != nullptr && !process->ended()) {
      return process;
    }
    byPid_.erase(known);
  }
  std::erase_if(
      byPid_, [](const auto& entry) { return entry.second.expired(); });
  base::Descriptor pidFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (pidFd.fd() < 0) {
    return nullptr;
  }
  auto process = WatchedProcess::watch(worker, poller, std::move(pidFd));
  byPid_.emplace(pid, process);
  return process;
}

} // namespace torch_rpc_ext::transport::ucx
