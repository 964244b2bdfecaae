#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "crypto/crypto.h"
#include "transport/ucx/handshake.h"
#include "transport/ucx/protocol.h"

#include <bitset>
#include <cstdint>

namespace torch_rpc_ext::transport::ucx {

// Seals and opens the messages of one encrypted connection. Each message has a
// number, which is its nonce. A number that comes a second time is refused, and
// so is a number that is too old to tell.
// Thread: any, but only one thread at a time.
class SecureChannel {
 public:
  SecureChannel(const SessionKeys& keys, bool opener);

  // A kSealed message for `token` that contains `header` and `data`.
  struct Sealed {
    FrameHeader header;
    base::Buffer data;
  };
  base::Result<Sealed>
  seal(uint64_t token, const FrameHeader& header, base::ConstSpan data);

  struct Opened {
    FrameHeader header;
    base::Buffer bytes; // the header, then the data
    base::ConstSpan data() const;
  };
  base::Result<Opened> open(const FrameHeader& outer, base::ConstSpan data);

 private:
  bool isNew(uint64_t number) const;
  void markSeen(uint64_t number);

  // How far a message may be overtaken. UCX delivers almost in order, so this
  // is plenty.
  static constexpr size_t kWindow = 4096;

  crypto::Cipher sending_;
  crypto::Cipher receiving_;
  uint64_t next_ = 1;
  uint64_t newest_ = 0;
  std::bitset<kWindow> seen_; // by number modulo kWindow
};

} // namespace torch_rpc_ext::transport::ucx
