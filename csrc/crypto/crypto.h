#pragma once

// The few primitives that connections need, as thin wrappers of OpenSSL's
// libcrypto. No algorithm is implemented here.

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
constexpr size_t kTagBytes = 16; // of a message sealed by Cipher

using Mac = std::array<uint8_t, kMacBytes>;

// HMAC-SHA256 over the parts, each with its length before it, so that two
// different lists of parts never give the same input.
Mac hmac(std::string_view key, std::initializer_list<std::string_view> parts);

// The 32 raw bytes, to be used as a key or in a message.
std::string toString(const Mac& mac);

// Compares two strings. For strings of one length, takes the same time wherever
// they differ.
bool equal(std::string_view a, std::string_view b);

// Random bytes from OpenSSL's generator, which the operating system seeds.
// Throws std::runtime_error.
std::string randomBytes(size_t count);

// One side of an X25519 key agreement. Each connection makes a new one, so that
// an attacker who learns the group's secret later cannot decrypt traffic that
// he recorded before. Thread: one at a time.
class KeyExchange {
 public:
  static base::Result<std::unique_ptr<KeyExchange>> create();
  virtual ~KeyExchange() = default;

  virtual const std::string& publicKey() const = 0; // 32 bytes
  // The shared secret, 32 bytes. Fails with kInvalid for a bad public key.
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

  // Encrypts `plain` to plain.size bytes at `sealed`, which may be the same
  // memory, and writes kTagBytes to `tag`. The tag also authenticates `known`,
  // which is not encrypted.
  base::Error seal(
      uint64_t nonce,
      base::ConstSpan known,
      base::ConstSpan plain,
      void* sealed,
      uint8_t* tag);

  // Decrypts `sealed` to `plain`, which may be the same memory. Fails with
  // kInvalid if `sealed`, `known` or the tag was changed; then `plain` must not
  // be used.
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
