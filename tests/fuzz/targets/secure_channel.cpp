// An encrypted connection under attack: an attacker changes, cuts, repeats,
// reorders and makes up messages, and a peer that knows the keys lies. The
// input is a script: a byte for each act, and further bytes for its details.

#include "transport/ucx/secure_channel.h"
#include "base/bytes.h"
#include "fuzz/targets/target.h"

#include <algorithm>
#include <set>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport::ucx;

namespace {

constexpr uint64_t kToken = 77;
constexpr size_t kMaxActs = 64;
// The window of SecureChannel: a message this far behind the newest may be
// refused.
constexpr uint64_t kWindow = 4096;

struct Message {
  FrameHeader outer;
  std::string data;
  std::string plain;
};

SessionKeys makeKeys() {
  return {
      std::string(32, 'a'),
      std::string(32, 'b'),
      std::string(32, 'c'),
      std::string(32, 'd')};
}

class Scene {
 public:
  explicit Scene(base::ConstSpan script) : script_(script) {}

  void play() {
    for (size_t i = 0; i < kMaxActs && script_.remaining() != 0; ++i) {
      act(script_.u8());
    }
  }

 private:
  void act(uint8_t what) {
    switch (what % 8) {
      case 0:
        return seal();
      case 1:
        return deliver();
      case 2:
        return change();
      case 3:
        return cut();
      case 4:
        return changeHeader();
      case 5:
        return makeUp();
      case 6:
        return lie(script_.u16());
      default:
        return lie(script_.u64());
    }
  }

  void seal() {
    const base::ConstSpan plain =
        script_.bytes(std::min<size_t>(script_.u8(), script_.remaining()));
    FrameHeader inner;
    inner.count = script_.u8();
    inner.transfer = inner.count; // bulk has a number
    auto sealed = sender_.seal(kToken, inner, plain);
    fuzz::require(sealed.ok(), "sealing");
    const base::Buffer& data = sealed.value().data;
    messages_.push_back(
        {sealed.value().header,
         {reinterpret_cast<const char*>(data.data()), data.size()},
         {static_cast<const char*>(plain.data), plain.size}});
  }

  void deliver() {
    const Message* message = choose();
    if (message == nullptr) {
      return;
    }
    const uint64_t number = message->outer.transfer;
    const bool fresh = opened_.count(number) == 0;
    const bool recent = number + kWindow > newestOpened_;
    auto opened = receiver_.open(message->outer, fuzz::spanOf(message->data));
    fuzz::require(opened.ok() == (fresh && recent), "opens once");
    if (opened.ok()) {
      const base::ConstSpan data = opened.value().data();
      fuzz::require(
          std::string(static_cast<const char*>(data.data), data.size) ==
              message->plain,
          "the content of the message");
      note(number);
    }
  }

  void change() {
    if (const Message* message = choose()) {
      std::string data = message->data;
      data[script_.u16() % data.size()] ^=
          static_cast<char>(1 << (script_.u8() % 8));
      refused(message->outer, data, "changed data");
    }
  }

  void cut() {
    if (const Message* message = choose()) {
      refused(
          message->outer,
          message->data.substr(0, script_.u16() % message->data.size()),
          "cut data");
    }
  }

  void changeHeader() {
    if (const Message* message = choose()) {
      FrameHeader outer = message->outer;
      auto* bytes = reinterpret_cast<uint8_t*>(&outer);
      bytes[script_.u8() % sizeof(outer)] ^= 1 << (script_.u8() % 8);
      refused(outer, message->data, "a changed header");
    }
  }

  void makeUp() {
    FrameHeader outer;
    outer.kind = FrameKind::kSealed;
    outer.token = kToken;
    outer.transfer = script_.u64();
    const base::ConstSpan data =
        script_.bytes(std::min<size_t>(script_.u8(), script_.remaining()));
    refused(
        outer,
        {static_cast<const char*>(data.data), data.size},
        "made-up data");
  }

  // The peer seals with any number, and anything in place of a header.
  void lie(uint64_t number) {
    FrameHeader outer;
    outer.kind = FrameKind::kSealed;
    outer.token = kToken;
    outer.transfer = number;
    const base::ConstSpan plain =
        script_.bytes(std::min<size_t>(script_.u8(), script_.remaining()));
    std::string data(plain.size + crypto::kTagBytes, '\0');
    fuzz::require(
        !liar_.seal(
            outer.transfer,
            {&outer, sizeof(outer)},
            plain,
            data.data(),
            reinterpret_cast<uint8_t*>(data.data()) + plain.size),
        "sealing");
    auto opened = receiver_.open(outer, fuzz::spanOf(data));
    if (opened.ok()) {
      fuzz::require(plain.size >= sizeof(FrameHeader), "a header");
    }
    if (opened.ok() || !opened.error().message.starts_with("a sealed")) {
      note(outer.transfer);
    }
  }

  void
  refused(const FrameHeader& outer, const std::string& data, const char* what) {
    fuzz::require(!receiver_.open(outer, fuzz::spanOf(data)).ok(), what);
  }

  const Message* choose() {
    return messages_.empty() ? nullptr
                             : &messages_[script_.u8() % messages_.size()];
  }

  void note(uint64_t number) {
    fuzz::require(opened_.insert(number).second, "no number counts twice");
    newestOpened_ = std::max(newestOpened_, number);
  }

  base::ByteReader script_;
  SecureChannel sender_{makeKeys(), /*opener=*/true};
  SecureChannel receiver_{makeKeys(), /*opener=*/false};
  crypto::Cipher liar_{makeKeys().fromOpener};
  std::vector<Message> messages_;
  std::set<uint64_t> opened_; // numbers of accepted messages
  uint64_t newestOpened_ = 0;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Scene({data, size}).play();
  return 0;
}
