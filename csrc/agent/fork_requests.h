#pragma once

#include "agent/caller.h"
#include "agent/executor.h"
#include "agent/group.h"
#include "base/synchronized.h"
#include "base/timer.h"

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <chrono>
#include <map>
#include <memory>

namespace torch_rpc_ext::agent {

// The messages RREF_FORK_REQUEST, by which a worker that got an RRef from
// another user asks the RRef's owner to count this worker as a user, too. Until
// the owner has confirmed that, torch does not begin the function that got the
// RRef. If all attempts of torch fail, torch's callback throws; and because
// Caller::send() fails a call to a lost worker before it returns, the callback
// would run on torch's retry thread, where nothing catches the exception: the
// process would end. Therefore the future of such a message never holds an
// error. An owner that is gone has nothing to count: the function begins, and
// using the RRef raises an error that says what happened to the owner.
//
// Owns: the requests that wait for their next attempt, and a timer.
// Thread: any.
// Outlives: the transport's callbacks.
class ForkRequests {
 public:
  using WorkerInfo = torch::distributed::rpc::WorkerInfo;
  using Message = torch::distributed::rpc::Message;
  using JitFuture = torch::distributed::rpc::JitFuture;

  // The references outlive it.
  ForkRequests(Executor& executor, Group& group, Caller& caller);

  // The future is completed when the owner has confirmed, or when this worker
  // learns that the owner is gone, or after as many attempts as torch would
  // have made. An attempt that gets no answer ends after `timeout`.
  c10::intrusive_ptr<JitFuture> send(
      const WorkerInfo& owner,
      const c10::intrusive_ptr<Message>& message,
      std::chrono::milliseconds timeout);
  // Makes no further attempt: the futures of requests that wait for one are
  // never completed.
  void stop();

 private:
  using Clock = base::Timer::Clock;
  struct Request {
    WorkerInfo owner;
    c10::intrusive_ptr<Message> message;
    std::chrono::milliseconds timeout;
    c10::intrusive_ptr<JitFuture> future;
    int failures = 0; // changed by the one thread that has the request
  };
  using RequestPtr = std::shared_ptr<Request>;
  struct State {
    std::multimap<Clock::time_point, RequestPtr> waiting;
    bool stopped = false;
  };

  bool ownerIsGone(const Request& request) const;
  void attempt(const RequestPtr& request);
  void failed(const RequestPtr& request);
  void onTimer();

  Executor& executor_;
  Group& group_;
  Caller& caller_;
  base::Synchronized<State> state_;
  base::Timer timer_; // last: its handler uses the others
};

} // namespace torch_rpc_ext::agent
