#pragma once

#include "base/error.h"

#include <cstdint>
#include <string>

namespace torch_rpc_ext::agent {

// How a worker introduces itself when a connection opens.
struct Hello {
  std::string group;
  int32_t workerId = -1;
  std::string name;
  // Counts how often the worker of this name has been started again: each life
  // has a greater number than those before.
  uint32_t life = 0;
};

std::string encode(const Hello& hello);
base::Result<Hello> parseHello(const std::string& bytes);

} // namespace torch_rpc_ext::agent
