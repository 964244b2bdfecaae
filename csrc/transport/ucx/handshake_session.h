#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "crypto/crypto.h"
#include "transport/ucx/handshake.h"
#include "transport/ucx/host_proof.h"
#include "transport/ucx/protocol.h"
#include "transport/ucx/secure_channel.h"

#include <cstdint>
#include <memory>
#include <string>

namespace torch_rpc_ext::transport::ucx {

// What the two ends of a connection know of each other after the handshake.
struct Agreement {
  Preamble peer;
  Nearness nearness; // as both ends have proved
  std::unique_ptr<SecureChannel> channel; // null without encryption
  std::string bulkSendKey; // both keys: empty without encryption
  std::string bulkReceiveKey;
};

// One end of one handshake (handshake.h has the three messages and what they
// prove). The opener calls open(), confirm() and takeAgreement(), the accepter
// answer(), takeAgreement() and finish(). A step out of this order fails with
// kInvalid and changes nothing. confirm() and finish() may be called again with
// the same message, because what is done with their results may fail.
//
// Owns: the transcript and the key exchange.
// Thread: any, but only one at a time.
class HandshakeSession {
 public:
  // What this end knows and says of itself.
  struct Self {
    std::string groupKey;
    Encryption encryption = Encryption::kOff;
    uint64_t token = 0; // what the peer must put on its messages
    ProcessIdentity process;
    WorkerAddress address;
  };

  // A first message with a valid proof.
  struct Opening {
    uint64_t door = 0;
    std::string bytes; // the preamble, encoded
    Preamble preamble;
  };
  // Checks the data of a kOpen. The error completes the sentence "the other end
  // ...".
  static base::Result<Opening>
  check(const std::string& groupKey, uint64_t door, base::ConstSpan data);

  // The opener's end. `found`: how near the accepter is, as far as this end can
  // prove.
  HandshakeSession(Self self, const ContextAddress& accepter, Nearness found);
  // The accepter's end; `found` is about the opener.
  HandshakeSession(Self self, Opening opening, Nearness found);

  // The data of kOpen, of the answer kOpened, and of kConfirm. `hello` is for
  // the Handler at the other end.
  base::Result<base::Buffer> open(const std::string& hello);
  base::Result<base::Buffer> answer(const std::string& hello);
  base::Result<base::Buffer> confirm(base::ConstSpan answer);
  // Checks the data of kConfirm.
  base::Error finish(base::ConstSpan confirmation);

  // Whether a message of this kind is the next to come from the peer.
  bool awaits(FrameKind kind) const {
    return (kind == FrameKind::kOpened && step_ == Step::kAwaitsAnswer) ||
        (kind == FrameKind::kConfirm && step_ == Step::kAwaitsConfirmation);
  }

  // The opener knows the peer and the final nearness after confirm(), the
  // accepter from the beginning.
  const Preamble& peer() const {
    return agreement_.peer;
  }
  const Nearness& nearness() const {
    return agreement_.nearness;
  }
  // To be called once. The accepter takes it before the opener has confirmed
  // that it has the same keys, because the opener may use them at once.
  Agreement takeAgreement();

 private:
  enum class Step : uint8_t {
    kOpens, // the opener's first step
    kAwaitsAnswer,
    kOver, // the opener has the agreement
    kAnswers, // the accepter's first step
    kAwaitsConfirmation,
  };

  base::Error require(Step step) const;
  bool proves(int number, const std::string& proof) const;
  base::Result<std::string> introduce(const std::string& hello);
  void partWays();
  base::Error agreeOnEncryption();

  const Self self_;
  const bool isOpener_;
  const ProcessIdentity found_; // the process that `found` is about
  Step step_;
  Transcript transcript_;
  std::unique_ptr<crypto::KeyExchange> keyExchange_; // null without encryption
  Agreement agreement_;
};

} // namespace torch_rpc_ext::transport::ucx
