#pragma once

#include "transport/transport.h"

namespace torch_rpc_ext::unit {

// What a callback was told.
struct Answer {
  int times = 0;
  base::Error error;

  transport::Callback callback() {
    return [this](const base::Error& told) {
      ++times;
      error = told;
    };
  }
};

} // namespace torch_rpc_ext::unit
