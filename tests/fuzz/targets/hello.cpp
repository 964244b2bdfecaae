// The hello, in which the peer's agent introduces itself.

#include "agent/hello.h"
#include "fuzz/targets/target.h"

using namespace torch_rpc_ext;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto hello = agent::parseHello(fuzz::toString(data, size));
  if (hello.ok()) {
    fuzz::requireSame(
        fuzz::spanOf(agent::encode(hello.value())), data, size, "same hello");
  }
  return 0;
}
