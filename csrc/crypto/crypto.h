#pragma once

// The few primitives that connections need, from OpenSSL's libcrypto. Nothing
// here is our own cryptography.

#include "base/buffer.h"
#include "base/error.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

namespace torch_rpc_ext::crypto {

constexpr size_t kMacBytes = 32;
constexpr size_t kTagBytes = 16; // of a sealed message

using Mac = std::array<uint8_t, kMacBytes>;

// HMAC-SHA256 over the parts; each counts with its length, so that no two lists
// of parts give the same bytes.
Mac hmac(std::string_view key, std::initializer_list<std::string_view> parts);

// As bytes for keys and messages.
std::string toString(const Mac& mac);

// Takes the same time wherever they differ.
bool equal(std::string_view a, std::string_view b);

// Fresh bytes from the operating system's source. Throws std::runtime_error.
std::string randomBytes(size_t count);

// One side of an X25519 key agreement, made anew for each connection: who
// learns the group's secret later cannot read what was said before.
// Thread: one at a time.
class KeyExchange {
 public:
  static base::Result<std::unique_ptr<KeyExchange>> create();
  virtual ~KeyExchange() = default;

  virtual const std::string& publicKey() const = 0; // 32 bytes
  virtual base::Result<std::string> agree(
      const std::string& publicKeyOfPeer) const = 0;
};

// Authenticated encryption with one key, AES-256-GCM. A nonce must never be
// used twice with one key.
// Owns: its contexts of libcrypto. Thread: one at a time.
class Cipher {
 public:
  explicit Cipher(std::string_view key); // 32 bytes
  ~Cipher();
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  // Writes plain.size bytes to `sealed`, which may be the same memory, and
  // kTagBytes to `tag`. `known` is protected too, but travels as it is.
  base::Error seal(
      uint64_t nonce,
      base::ConstSpan known,
      base::ConstSpan plain,
      void* sealed,
      uint8_t* tag);

  // Fails with kInvalid when anything has been changed; `plain` is then
  // rubbish.
  base::Error open(
      uint64_t nonce,
      base::ConstSpan known,
      base::ConstSpan sealed,
      const uint8_t* tag,
      void* plain);

 private:
  struct Contexts;
  std::unique_ptr<Contexts> contexts_;
};

} // namespace torch_rpc_ext::crypto
