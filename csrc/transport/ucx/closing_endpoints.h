#pragma once

#include "transport/ucx/worker.h"

#include <ucp/api/ucp.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

class UcxConnection;

// The endpoints of a context that are being closed. UCX flushes some of them
// first, which does not end while a peer takes nothing.
//
// Owns: the connections whose endpoints are being flushed.
// Thread: any.
class ClosingEndpoints {
 public:
  using Endpoints =
      std::unordered_map<ucp_ep_h, std::shared_ptr<UcxConnection>>;

  // To be called before anything is done to close an endpoint, and when UCX has
  // closed that endpoint.
  void begin(Locked&) {
    ++count_;
  }
  void end(Locked&) {
    --count_;
  }
  bool none(Locked&) const {
    return count_ == 0;
  }

  void flushBegins(
      Locked&,
      ucp_ep_h endpoint,
      std::shared_ptr<UcxConnection> connection) {
    flushing_.emplace(endpoint, std::move(connection));
  }
  // Whether the endpoint is still to be closed.
  bool flushEnded(Locked&, ucp_ep_h endpoint) {
    return flushing_.erase(endpoint) != 0;
  }
  // The endpoints that are being flushed: the caller closes them.
  Endpoints takeFlushing(Locked&) {
    return std::exchange(flushing_, {});
  }

 private:
  size_t count_ = 0;
  Endpoints flushing_;
};

} // namespace torch_rpc_ext::transport::ucx
