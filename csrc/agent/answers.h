#pragma once

#include "agent/agent_options.h"
#include "agent/codec.h"
#include "agent/devices.h"
#include "agent/executor.h"
#include "agent/group.h"
#include "agent/receive_memory.h"
#include "agent/unread_rrefs.h"
#include "metrics/counters.h"
#include "transport/transport.h"

#include <torch/csrc/distributed/rpc/message.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace torch_rpc_ext::agent {

// Whom an answer goes to, and how the request asked for it.
struct Asker {
  transport::ConnectionPtr connection;
  uint64_t callId = 0;
  std::optional<wire::WireDtype> dtype = std::nullopt;
  bool checked = false; // whether the request had checksums
};

// How answers to requests are sent: as one frame, with the memory of the result
// given away or lent where the caller can map it. The RRefs in an answer that
// cannot be sent, or that the caller refuses, are released.
//
// Owns: nothing; what is sent holds its memory until the caller has taken it.
// Thread: any.
// Outlives: what it has sent, once the transport is stopped.
class Answers {
 public:
  // The references outlive it.
  Answers(
      const AgentOptions& options,
      Executor& executor,
      metrics::Counters& counters,
      ReceiveMemory& memory,
      const Group& group,
      UnreadRRefs& unreadRRefs,
      Devices& devices);

  void send(
      const Asker& asker,
      c10::intrusive_ptr<torch::distributed::rpc::Message> message);
  // Sends the error `why` in place of a result that cannot be sent.
  void sendError(
      const transport::ConnectionPtr& connection,
      uint64_t callId,
      const base::Error& why);

 private:
  EncodeOptions encodeOptions(const Asker& asker);
  void sendFromDevices(
      const transport::ConnectionPtr& connection,
      const EncodeOptions& options,
      const c10::intrusive_ptr<torch::distributed::rpc::Message>& message,
      const device::Route& route);
  void release(const std::shared_ptr<const std::string>& rrefs);
  // `rrefs`: payloadWithRRefs() of the answer.
  void sendFrame(
      const transport::ConnectionPtr& connection,
      uint64_t callId,
      Encoded encoded,
      std::shared_ptr<const std::string> rrefs);
  void sendFrameNow(
      const transport::ConnectionPtr& connection,
      uint64_t callId,
      Encoded encoded,
      std::shared_ptr<const std::string> rrefs);

  const AgentOptions& options_;
  Executor& executor_;
  metrics::Counters& counters_;
  ReceiveMemory& memory_;
  const Group& group_;
  UnreadRRefs& unreadRRefs_;
  Devices& devices_;
};

} // namespace torch_rpc_ext::agent
