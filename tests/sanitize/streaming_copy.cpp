// base::streamingCopy(): copies all bytes and no others, at any alignment.

#include "base/streaming_copy.h"
#include "sanitize/stress.h"

#include <cstring>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;

int main(int count, char** arguments) {
  constexpr size_t kMost = 5000;
  constexpr size_t kOffsets = 200;
  constexpr unsigned char kUntouched = 0xEE;
  Crowd crowd;
  crowd.add(2, [&](Crowd::Source& random) {
    const size_t size = random() % kMost;
    const size_t fromOffset = random() % kOffsets;
    const size_t toOffset = random() % kOffsets;
    // Of exactly this size, so that the sanitizer sees any access beyond the
    // end.
    std::vector<unsigned char> from(fromOffset + size);
    for (auto& byte : from) {
      byte = static_cast<unsigned char>(random());
    }
    std::vector<unsigned char> to(toOffset + size, kUntouched);
    base::streamingCopy(to.data() + toOffset, from.data() + fromOffset, size);
    require(
        size == 0 ||
            std::memcmp(to.data() + toOffset, from.data() + fromOffset, size) ==
                0,
        "copied");
    for (size_t i = 0; i < toOffset; ++i) {
      require(to[i] == kUntouched, "nothing in front of it");
    }
  });
  require(crowd.run(seconds(count, arguments)) > 100, "something was done");
}
