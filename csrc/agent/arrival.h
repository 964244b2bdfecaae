#pragma once

#include "agent/admission.h"
#include "agent/call_label.h"
#include "agent/codec.h"
#include "agent/creations.h"
#include "agent/pending_calls.h"
#include "agent/queued_frames.h"
#include "transport/transport.h"

#include <memory>
#include <optional>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

// A message on its way in, from its frame until it is served, or completes a
// call. The parts of the agent pass it on: one has it at a time.
//
// Owns: what arrives until it is decoded, then the message.
// Thread: one at a time.
struct Arrival {
  transport::ConnectionPtr connection;
  std::unique_ptr<transport::Incoming> incoming;
  std::optional<Decoder> decoder;
  std::shared_ptr<device::ReceivingWay> beside; // of tensors beside the frame
  device::Streams streams; // for its devices, once chosen
  Admission::Room room; // of a request with bulk, until it is served
  QueuedFrames::Held frame; // of a request, until it is served
  Creations::Begun creation; // of a request that may make an RRef
  base::Error error; // of the bulk
  PendingCall::Clock::time_point at; // of a request: all of it is here
  // Of a request: from here on its caller does not wait.
  PendingCall::Clock::time_point deadline =
      PendingCall::Clock::time_point::max();
  std::optional<PendingCall> call; // of a response
  // Made by Devices::decode(), on the streams.
  std::optional<base::Result<c10::intrusive_ptr<rpc::Message>>> message;

  const wire::CallHeader& header() const {
    return decoder->header();
  }
  bool isRequest() const {
    return header().kind != wire::CallKind::kResponse;
  }
  // A request that nobody but its caller waits for. Others may wait for the
  // value of an RRef, or of a call within another message; and who sends an
  // RRef waits until the call has been read.
  bool isForItsCaller() const {
    const auto type = static_cast<rpc::MessageType>(header().messageType);
    return isRequest() &&
        (type == rpc::MessageType::PYTHON_CALL ||
         type == rpc::MessageType::SCRIPT_CALL) &&
        !decoder->payloadIsBulk() && !mayHoldRRefs(decoder->payload());
  }
  // A request whose tensors nobody needs: its caller has given up.
  bool isForNobody() const {
    return givenUp(PendingCall::Clock::now()) && isForItsCaller();
  }
  // Of a request: nobody waits for its answer any more.
  bool givenUp(PendingCall::Clock::time_point now) const {
    return now >= deadline || connection->closed();
  }
};

using ArrivalPtr = std::shared_ptr<Arrival>;

} // namespace torch_rpc_ext::agent
