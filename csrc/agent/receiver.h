#pragma once

#include "agent/admission.h"
#include "agent/arrival.h"
#include "agent/caller.h"
#include "agent/devices.h"
#include "agent/group.h"
#include "agent/group_shutdown.h"
#include "agent/receive_memory.h"
#include "agent/server.h"
#include "base/task.h"
#include "metrics/counters.h"
#include "transport/transport.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace torch_rpc_ext::agent {

// Receives messages: looks at the frame, waits for room, fetches the bulk, and
// then passes the message on: an answer to the Caller, a request to the Server,
// messages of message_types.h to GroupShutdown and to Devices.
//
// Owns: nothing; a message that arrives belongs to its Arrival.
// Thread: any.
// Outlives: the callbacks of what it fetches, once the transport is stopped.
class Receiver {
 public:
  // The references outlive it.
  Receiver(
      base::TaskRunner& runner,
      metrics::Counters& counters,
      ReceiveMemory& memory,
      Group& group,
      Devices& devices,
      Caller& caller,
      Server& server,
      GroupShutdown& shutdown);

  void onFrame(
      const transport::ConnectionPtr& connection,
      std::unique_ptr<transport::Incoming> incoming);
  // The callers whose requests wait here for room, by name.
  std::map<std::string, Admission::Load> waitingCallers() const;

 private:
  // Fetches the bulk of a request when there is room for it.
  void fetchWhenAdmitted(ArrivalPtr arrival, uint64_t bytes);
  void fetchBulk(ArrivalPtr arrival);
  void dispatch(ArrivalPtr arrival);

  base::TaskRunner& runner_;
  metrics::Counters& counters_;
  ReceiveMemory& memory_;
  Group& group_;
  Devices& devices_;
  Caller& caller_;
  Server& server_;
  GroupShutdown& shutdown_;
};

} // namespace torch_rpc_ext::agent
