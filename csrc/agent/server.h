#pragma once

#include "agent/agent_hooks.h"
#include "agent/agent_metrics.h"
#include "agent/agent_options.h"
#include "agent/answers.h"
#include "agent/arrival.h"
#include "agent/creations.h"
#include "agent/devices.h"
#include "agent/executor.h"
#include "agent/group.h"
#include "agent/lost_callers.h"
#include "agent/receive_memory.h"
#include "agent/running_requests.h"
#include "agent/unread_rrefs.h"
#include "agent/waiting_bytes.h"
#include "metrics/call_log.h"
#include "metrics/counters.h"

#include <torch/csrc/distributed/rpc/request_callback.h>

#include <chrono>
#include <cstdint>
#include <memory>

namespace torch_rpc_ext::agent {

// The serving side: runs requests and sends their answers.
//
// Owns: the counts of waiting and running requests, the callbacks for lost
//   callers, the order of RRef creations and deletions, the log of calls
//   served. A waiting request itself is in a task of the Executor.
// Thread: any.
// Outlives: the threads that run requests.
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
      UnreadRRefs& unreadRRefs,
      torch::distributed::rpc::RequestCallback& callback,
      ExceptionEncoder encodeException);

  // A frame of `caller` is still to be fetched. Deletions of RRefs that arrive
  // later wait for it. The result is Incoming::ahead when the frame comes to
  // announced(). To be called in the order of arrival.
  std::shared_ptr<void> frameAhead(Creations::Caller caller);
  // The frame of a request has arrived. To be called in the order of arrival.
  // Returns false if it refuses the request, because too many frames wait
  // already.
  bool announced(Arrival& arrival);
  // All of a request has arrived: serves it when a thread is free.
  void arrived(ArrivalPtr arrival);
  // Counts and logs a request that is not begun because its caller has given
  // up.
  void notBegun(Arrival& arrival);

  Answers& answers() {
    return answers_;
  }
  // The callbacks of running functions that want to hear of a lost caller.
  LostCallers& lostCallers() {
    return lostCallers_;
  }
  // A request has been read, and has to wait for its function to begin: counts
  // its ServedCall::bytes for as long as the result lives. If `mayRefuse`, and
  // such requests take too much memory already, the result is an error, and the
  // function is not to be called.
  base::Result<WaitingBytes::Held> hold(uint64_t bytes, bool mayRefuse);
  // The connection to a caller has ended: runs the callbacks of its requests.
  void lose(const transport::Connection* connection);
  // Adds to the time that this thread has waited for the GIL.
  void addGilWaitTime(std::chrono::microseconds wait);
  // Drops the requests that wait until others have made their RRefs.
  void stop();

  metrics::CallLog& log() {
    return log_;
  }
  void addTo(Metrics& metrics) const;

 private:
  // A request, from when a thread takes it until its answer is sent.
  struct Served;

  void sayThatAllAreBusy(size_t waiting, double seconds);
  // Answers that too many frames wait already.
  void refuse(const Arrival& arrival);
  base::Error overloaded(const WaitingBytes& waiting, const char* what);
  void serveLater(ArrivalPtr arrival);
  void serve(const ArrivalPtr& arrival);
  // Answers that the request could not be decoded.
  void answerDamaged(const Arrival& arrival, const Asker& to);
  // Calls the request's function, or, if the caller has given up, only reads
  // the request. Counts the request as served. `bytes` is what the request took
  // while it waited.
  c10::intrusive_ptr<torch::distributed::rpc::JitFuture>
  begin(Arrival& arrival, Served& served, bool givenUp, uint64_t bytes);
  // Sends the answer now, or when `future` completes.
  void answerWhenDone(
      Served served,
      c10::intrusive_ptr<torch::distributed::rpc::JitFuture> future,
      const device::Streams& streams);
  c10::intrusive_ptr<torch::distributed::rpc::JitFuture> execute(
      c10::intrusive_ptr<torch::distributed::rpc::Message> request,
      device::Streams streams,
      const transport::Connection& from);
  void answer(
      Served served,
      c10::intrusive_ptr<torch::distributed::rpc::Message> response);
  c10::intrusive_ptr<torch::distributed::rpc::Message> responseOf(
      torch::distributed::rpc::JitFuture& future,
      uint64_t callId) const;

  Executor& executor_;
  metrics::Counters& counters_;
  ReceiveMemory& memory_;
  Group& group_;
  Devices& devices_;
  UnreadRRefs& unreadRRefs_;
  torch::distributed::rpc::RequestCallback& callback_;
  const ExceptionEncoder encodeException_;
  WaitingBytes queuedFrames_; // wait for a thread
  WaitingBytes heldCalls_; // wait for their functions to begin
  const std::shared_ptr<Creations> creations_ = Creations::create();
  RunningRequests runningRequests_;
  LostCallers lostCallers_;
  metrics::CallLog log_;
  Answers answers_;
};

} // namespace torch_rpc_ext::agent
