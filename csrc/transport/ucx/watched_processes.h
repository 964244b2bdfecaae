#pragma once

#include "base/descriptor.h"
#include "base/poller.h"
#include "transport/ucx/worker.h"

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

class PeerWatch;

// Notices the end of one process of this host, for all connections to it.
//
// Owns: the pidfd.
// Thread: any.
// Outlives: nothing; each PeerWatch that waits for the end keeps it.
class WatchedProcess : public std::enable_shared_from_this<WatchedProcess> {
 public:
  static std::shared_ptr<WatchedProcess> watch(
      std::shared_ptr<ControlWorker> worker,
      base::Poller& poller,
      base::Descriptor pidFd);
  ~WatchedProcess();
  WatchedProcess(const WatchedProcess&) = delete;
  WatchedProcess& operator=(const WatchedProcess&) = delete;

  // Whether the process has ended; a zombie has ended, too.
  bool ended() const;
  // `watch` hears PeerWord::kProcessEnded, unless it does not watch any more.
  void tell(Locked&, std::weak_ptr<PeerWatch> watch);

 private:
  WatchedProcess(
      std::shared_ptr<ControlWorker> worker,
      base::Poller& poller,
      base::Descriptor pidFd)
      : worker_(std::move(worker)), poller_(poller), pidFd_(std::move(pidFd)) {}
  void onEnd(Locked& locked);

  const std::shared_ptr<ControlWorker> worker_;
  base::Poller& poller_;
  const base::Descriptor pidFd_;
  std::vector<std::weak_ptr<PeerWatch>> watches_;
};

// The processes of this host that connections of a context lead to. Several
// connections may lead to one process: two workers have two if both began to
// connect at the same time. They share one descriptor, because a descriptor for
// each connection would be too many in a group of hundreds.
//
// Thread: any.
class WatchedProcesses {
 public:
  // Null if pidfd_open() fails: there is no such process, the kernel has no
  // pidfds, or this process has no descriptor left.
  std::shared_ptr<WatchedProcess> open(
      Locked&,
      const std::shared_ptr<ControlWorker>& worker,
      base::Poller& poller,
      int32_t pid);

 private:
  std::unordered_map<int32_t, std::weak_ptr<WatchedProcess>> byPid_;
};

} // namespace torch_rpc_ext::transport::ucx
