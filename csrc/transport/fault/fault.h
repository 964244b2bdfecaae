#pragma once

#include "transport/transport.h"

#include <functional>
#include <memory>
#include <string>

namespace torch_rpc_ext::transport::fault {

// What happens to one frame when it is sent.
struct Fault {
  enum class Kind {
    kNone,
    kFail, // nothing is sent, the callback gets kPeerLost
    kLose, // lose(), the callback gets kPeerLost
    kCorrupt, // one bit is changed
    kForge // bulk claims to be memory that the receiver has lent
  };
  Kind kind = Kind::kNone;
  double delaySeconds = 0;
  std::string message = "failed by injection"; // for kFail and kLose
};

// Is called for every frame that is sent, with the frame's head, from any
// thread.
using Rule = std::function<Fault(base::ConstSpan head)>;

// A transport that passes everything on to `inner`, except that it does to each
// sent frame what `rule` says. So faults can be tested with the code that runs
// in production.
std::shared_ptr<Context> wrap(std::shared_ptr<Context> inner, Rule rule);

} // namespace torch_rpc_ext::transport::fault
