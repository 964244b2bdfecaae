#pragma once

#include "agent/agent_metrics.h"
#include "agent/agent_options.h"
#include "agent/answers.h"
#include "agent/arrival.h"
#include "agent/creations.h"
#include "agent/devices.h"
#include "agent/executor.h"
#include "agent/group.h"
#include "agent/lost_callers.h"
#include "agent/queued_frames.h"
#include "agent/receive_memory.h"
#include "agent/running_requests.h"
#include "metrics/call_log.h"
#include "metrics/counters.h"

#include <torch/csrc/distributed/rpc/request_callback.h>

#include <chrono>
#include <cstdint>

namespace torch_rpc_ext::agent {

// The serving side: from a request to its answer.
//
// Owns: what waits to be served and what runs, who wants to hear that a caller
//   is lost, the log of calls served.
// Thread: any.
// Outlives: the threads that serve.
class Server {
 public:
  // The references outlive it.
  Server(
      const AgentOptions& options,
      Executor& executor,
      metrics::Counters& counters,
      ReceiveMemory& memory,
      Group& group,
      Devices& devices,
      torch::distributed::rpc::RequestCallback& callback);

  // The frame of a request is here, in the order of arrival. False when too
  // many wait already: then its caller is told so.
  bool announced(Arrival& arrival);
  // All of it is here: it is served when a thread is free.
  void arrived(ArrivalPtr arrival);
  // Takes note of a request whose caller has given up.
  void notBegun(Arrival& arrival);

  Answers& answers() {
    return answers_;
  }
  // What is to be done when the callers of running functions are lost.
  LostCallers& lostCallers() {
    return lostCallers_;
  }
  // The connection to a caller has ended.
  void lose(const transport::Connection* connection);
  // Of this thread.
  void addGilWaitTime(std::chrono::microseconds wait);
  // No request waits for another one any more.
  void stop();

  metrics::CallLog& log() {
    return log_;
  }
  void addTo(Metrics& metrics) const;

 private:
  // A request from when a thread takes it until its answer.
  struct Served;

  void sayThatAllAreBusy(size_t waiting, double seconds);
  // Answers that too many wait already.
  void refuse(const Arrival& arrival);
  void serveLater(ArrivalPtr arrival);
  void serve(const ArrivalPtr& arrival);
  c10::intrusive_ptr<torch::distributed::rpc::JitFuture> execute(
      c10::intrusive_ptr<torch::distributed::rpc::Message> request,
      device::Streams streams);
  void answer(
      Served served,
      c10::intrusive_ptr<torch::distributed::rpc::Message> response);
  static c10::intrusive_ptr<torch::distributed::rpc::Message> responseOf(
      torch::distributed::rpc::JitFuture& future,
      uint64_t callId);

  Executor& executor_;
  metrics::Counters& counters_;
  ReceiveMemory& memory_;
  Group& group_;
  Devices& devices_;
  torch::distributed::rpc::RequestCallback& callback_;
  QueuedFrames queuedFrames_;
  Creations creations_;
  RunningRequests runningRequests_;
  LostCallers lostCallers_;
  metrics::CallLog log_;
  Answers answers_;
};

} // namespace torch_rpc_ext::agent
