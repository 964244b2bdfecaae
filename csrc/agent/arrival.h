#pragma once

#include "agent/admission.h"
#include "agent/call_label.h"
#include "agent/codec.h"
#include "agent/creations.h"
#include "agent/pending_calls.h"
#include "agent/waiting_bytes.h"
#include "transport/transport.h"

#include <memory>
#include <optional>
#include <string_view>

namespace torch_rpc_ext::agent {

namespace rpc = torch::distributed::rpc;

// A message that arrives: first its frame, then its bulk, then the decoded
// message, until a request is served or a response completes its call. The
// parts of the agent pass it on; one part has it at a time.
//
// Owns: the received bytes until they are decoded, then the message.
// Thread: one at a time.
struct Arrival {
  transport::ConnectionPtr connection;
  std::unique_ptr<transport::Incoming> incoming;
  std::optional<Decoder> decoder;
  // Brings the tensors that travel beside the frame; null where there are none.
  std::shared_ptr<device::ReceivingWay> beside;
  // The streams in whose order the tensors for devices are copied and used;
  // empty until streams are chosen.
  device::Streams streams;
  Admission::Room room; // of a request with bulk, until it is served
  WaitingBytes::Held frame; // of a request, until it is served
  // Of a request that may make an RRef.
  std::shared_ptr<Creations::Begun> creation;
  base::Error error; // why the bulk could not be received
  PendingCall::Clock::time_point at; // when all of a request had arrived
  // Of a request: when its caller stops waiting.
  PendingCall::Clock::time_point deadline =
      PendingCall::Clock::time_point::max();
  std::optional<PendingCall> call; // of a response
  // Made by Devices::decode(), on `streams`.
  std::optional<base::Result<c10::intrusive_ptr<rpc::Message>>> message;

  const wire::CallHeader& header() const {
    return decoder->header();
  }
  bool isRequest() const {
    return header().kind != wire::CallKind::kResponse;
  }
  // Whether only the caller waits for anything that this request brings about.
  // Other workers may wait for the value of an RRef that a request makes; and
  // the sender of an RRef waits until the request that contains it has been
  // read.
  bool isForItsCaller() const {
    const auto type = static_cast<rpc::MessageType>(header().messageType);
    return isRequest() &&
        (type == rpc::MessageType::PYTHON_CALL ||
         type == rpc::MessageType::SCRIPT_CALL) &&
        !mayPassRRefs();
  }
  // A payload that has not been fetched yet may hold anything.
  bool mayPassRRefs() const {
    return decoder->payloadIsBulk() || mayHoldRRefs(decoder->payload());
  }
  // Whether the call of this answer can be completed in a few microseconds, and
  // without Python, which would run the handlers of signals. True for a result
  // of TorchScript, and for None and a tensor in their short forms
  // (torch_rpc_ext/_upstream/payloads.py).
  bool isPlainAnswer() const {
    if (isRequest() || !incoming->bulkSizes().empty()) {
      return false;
    }
    if (header().messageType == rpc::MessageType::SCRIPT_RET) {
      return true;
    }
    const auto payload = decoder->payload();
    const std::string_view text(
        static_cast<const char*>(payload.data), payload.size);
    return text.starts_with("\x01Tensor") || text.starts_with("\x01None");
  }
  // Whether nobody needs the tensors of this request, because its caller has
  // given up.
  bool isForNobody() const {
    return givenUp(PendingCall::Clock::now()) && isForItsCaller();
  }
  // Of a request: whether its caller no longer waits for the answer.
  bool givenUp(PendingCall::Clock::time_point now) const {
    return now >= deadline || connection->closed();
  }
};

using ArrivalPtr = std::shared_ptr<Arrival>;

} // namespace torch_rpc_ext::agent
