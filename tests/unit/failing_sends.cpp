// How sends and fetches end that fail before anything is sent.

#include "sanitize/stress.h"
#include "transport/fault/fault.h"
#include "transport/loopback/loopback.h"
#include "transport/ucx/bulk/chunks.h"
#include "unit/exchange_scene.h"

#include <dlfcn.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport;
using namespace torch_rpc_ext::transport::ucx;
using stress::require;
using unit::Answer;
using unit::AtOnce;
using unit::plain;

namespace {

bool nextCipherThrows = false;

} // namespace

// Is called by crypto::Cipher, and replaces libcrypto's in this program.
extern "C" void* EVP_CIPHER_CTX_new() {
  if (std::exchange(nextCipherThrows, false)) {
    throw std::runtime_error("no cipher");
  }
  static const auto original =
      reinterpret_cast<void* (*)()>(dlsym(RTLD_NEXT, "EVP_CIPHER_CTX_new"));
  return original();
}

namespace {

// Moves everything at once.
class AtOnceChannel final : public bulk::Channel {
 public:
  base::Result<std::string> addressFor(const bulk::Peer&) override {
    return std::string("here");
  }
  uint64_t receive(
      uint64_t,
      std::vector<base::MutableSpan>,
      Callback callback,
      Incoming::Arrived) override {
    callback({});
    return 1;
  }
  void cancel(uint64_t, base::Error) override {}
  void send(
      const std::string&,
      uint64_t,
      std::vector<base::ConstSpan>,
      Callback callback) override {
    callback({});
  }
  void stop() override {}
};

void testCiphersThatThrow() {
  AtOnce runner;
  const std::string key(32, 'k');
  const auto chunks = bulk::sealedChunks(runner, key, key);
  const auto channel = std::make_shared<AtOnceChannel>();
  std::string bytes(3u << 20, 'b');
  Answer sent;
  nextCipherThrows = true;
  chunks->send(
      channel,
      {.bulkAddress = "here"},
      {plain(bytes)},
      [] { return false; },
      sent.callback());
  require(sent.times == 1 && sent.error.message == "no cipher", "a send ends");
  Answer received;
  nextCipherThrows = true;
  chunks->receive(
      *channel,
      /*firstTag=*/1,
      {{bytes.data(), bytes.size()}},
      received.callback(),
      /*arrived=*/nullptr);
  require(
      received.times == 1 && received.error.message == "no cipher",
      "a fetch ends");
}

void testADelayedSendAfterTheEnd() {
  const auto context = fault::wrap(
      loopback::makeContext(),
      [](base::ConstSpan) { return fault::Fault{.delaySeconds = 60}; });
  const auto connection = context->connect(context->address(), "");
  context->stop();
  Answer answer;
  connection->send(base::Buffer(1), {}, answer.callback());
  require(answer.times == 1 && answer.error, "it fails at once");
}

} // namespace

int main() {
  testCiphersThatThrow();
  testADelayedSendAfterTheEnd();
  return 0;
}
