// UcxAgent, how its messages are written: what the user's options, a call's own
// choice and the peer say about it.

#include "agent/ucx_agent.h"
#include "agent/wire_dtype.h"

namespace torch_rpc_ext::agent {

EncodeOptions UcxAgent::requestOptions(
    uint64_t callId,
    uint32_t timeout,
    const std::string& worker,
    const transport::ConnectionPtr& connection) {
  EncodeOptions options{
      .callId = callId,
      .kind = wire::CallKind::kRequest,
      .inlineThreshold = options_.inlineBytes,
      .answer = callDtype(),
      .timeout = timeout,
      .checked = options_.integrity,
      .inPieces = connection->sendsPieces(),
      .cache = cache_.get()};
  if (!connection->loopsBack()) { // nothing of it travels
    options.dtype = options.answer.value_or(options_.wireDtypes.of(worker));
  }
  keepCacheTidy(options);
  return options;
}

EncodeOptions UcxAgent::answerOptions(const Asker& asker) {
  EncodeOptions options{
      .callId = asker.callId,
      .kind = wire::CallKind::kResponse,
      .inlineThreshold = options_.inlineBytes,
      .checked = asker.checked || options_.integrity,
      .inPieces = asker.connection->sendsPieces(),
      .cache = cache_.get()};
  if (asker.connection->loopsBack()) {
    return options;
  }
  if (asker.dtype) {
    options.dtype = *asker.dtype;
  } else if (options_.wireDtypes.any()) {
    options.dtype =
        options_.wireDtypes.of(peers_.nameOf(asker.connection.get()));
  }
  keepCacheTidy(options);
  return options;
}

void UcxAgent::keepCacheTidy(const EncodeOptions& options) {
  if (options.dtype != wire::WireDtype::kFloat32) {
    trimLater(); // what is narrowed takes memory of the cache
  }
}

} // namespace torch_rpc_ext::agent
