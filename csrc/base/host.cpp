#include "base/host.h"

#include <sys/stat.h>

#include <fstream>
#include <functional>
#include <string>

namespace torch_rpc_ext::base {

uint64_t bootId() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  return std::hash<std::string>{}(text);
}

uint64_t namespaceOf(const char* kind) {
  struct stat info{};
  const std::string path = std::string("/proc/self/ns/") + kind;
  return stat(path.c_str(), &info) == 0 ? info.st_ino : 0;
}

} // namespace torch_rpc_ext::base
