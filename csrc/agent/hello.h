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
  // Which of this name it is: greater than that of any before.
  uint32_t life = 0;
};

std::string encode(const Hello& hello);
base::Result<Hello> parseHello(const std::string& bytes);

} // namespace torch_rpc_ext::agent
