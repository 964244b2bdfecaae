#pragma once

#include "base/error.h"
#include "transport/ucx/options.h"

#include <ucp/api/ucp.h>

#include <atomic>
#include <memory>

namespace torch_rpc_ext::transport::ucx {

// Owns: a ucp_context_h made from Options and the UCX_* environment variables,
//   which win over our defaults, but not over the ports and interfaces that the
//   user has given as options.
// Outlives: every Worker made from it.
class UcpContext {
 public:
  static base::Result<std::shared_ptr<UcpContext>> create(const Options&);
  ~UcpContext();
  UcpContext(const UcpContext&) = delete;
  UcpContext& operator=(const UcpContext&) = delete;

  ucp_context_h get() const {
    return context_;
  }

  // For a worker that cannot be destroyed: keeps UCX's context until the
  // process ends.
  void keep() {
    kept_ = true;
  }

 private:
  explicit UcpContext(ucp_context_h context) : context_(context) {}

  ucp_context_h context_;
  std::atomic<bool> kept_{false};
};

} // namespace torch_rpc_ext::transport::ucx
