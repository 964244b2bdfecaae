#include "crypto/crypto.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace torch_rpc_ext::crypto {

namespace {

constexpr size_t kKeyBytes = 32;
constexpr size_t kNonceBytes = 12;
// OpenSSL takes sizes as int, so larger messages go through it in pieces.
constexpr size_t kMaxPiece = size_t{1} << 30;

base::Error failed(const char* what) {
  return {base::ErrorKind::kSystem, std::string("libcrypto: ") + what};
}

struct FreeKey {
  void operator()(EVP_PKEY* key) const {
    EVP_PKEY_free(key);
  }
};
using Key = std::unique_ptr<EVP_PKEY, FreeKey>;

struct FreeKeyContext {
  void operator()(EVP_PKEY_CTX* context) const {
    EVP_PKEY_CTX_free(context);
  }
};
using KeyContext = std::unique_ptr<EVP_PKEY_CTX, FreeKeyContext>;

const unsigned char* bytesOf(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

class X25519 final : public KeyExchange {
 public:
  X25519(Key key, std::string publicKey)
      : key_(std::move(key)), publicKey_(std::move(publicKey)) {}

  const std::string& publicKey() const override {
    return publicKey_;
  }

  base::Result<std::string> agree(const std::string& theirs) const override {
    const Key peer(EVP_PKEY_new_raw_public_key(
        EVP_PKEY_X25519, nullptr, bytesOf(theirs), theirs.size()));
    const KeyContext context(EVP_PKEY_CTX_new(key_.get(), nullptr));
    std::string shared(kKeyBytes, '\0');
    size_t size = shared.size();
    // EVP_PKEY_derive() also fails for the few public keys for which the shared
    // secret would be all zeros.
    if (peer == nullptr || context == nullptr ||
        EVP_PKEY_derive_init(context.get()) != 1 ||
        EVP_PKEY_derive_set_peer(context.get(), peer.get()) != 1 ||
        EVP_PKEY_derive(
            context.get(),
            reinterpret_cast<unsigned char*>(shared.data()),
            &size) != 1 ||
        size != shared.size()) {
      return base::Error{
          base::ErrorKind::kInvalid, "the peer's key share is not valid"};
    }
    return shared;
  }

 private:
  const Key key_;
  const std::string publicKey_;
};

std::array<uint8_t, kNonceBytes> toNonce(uint64_t number) {
  std::array<uint8_t, kNonceBytes> nonce{};
  std::memcpy(nonce.data() + 4, &number, sizeof(number));
  return nonce;
}

} // namespace

Mac hmac(std::string_view key, std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const auto part : parts) {
    const uint64_t size = part.size();
    text.append(reinterpret_cast<const char*>(&size), sizeof(size));
    text.append(part);
  }
  Mac mac{};
  unsigned size = 0;
  if (HMAC(
          EVP_sha256(),
          key.data(),
          static_cast<int>(key.size()),
          bytesOf(text),
          text.size(),
          mac.data(),
          &size) == nullptr ||
      size != mac.size()) {
    throw std::runtime_error("libcrypto: HMAC-SHA256 is not available");
  }
  return mac;
}

std::string toString(const Mac& mac) {
  return {reinterpret_cast<const char*>(mac.data()), mac.size()};
}

bool equal(std::string_view a, std::string_view b) {
  return a.size() == b.size() &&
      CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string randomBytes(size_t count) {
  std::string bytes(count, '\0');
  if (RAND_bytes(
          reinterpret_cast<unsigned char*>(bytes.data()),
          static_cast<int>(count)) != 1) {
    throw std::runtime_error("libcrypto: no random bytes");
  }
  return bytes;
}

base::Result<std::unique_ptr<KeyExchange>> KeyExchange::create() {
  const KeyContext context(EVP_PKEY_CTX_new_id(EVP_PKEY_X25519, nullptr));
  EVP_PKEY* made = nullptr;
  if (context == nullptr || EVP_PKEY_keygen_init(context.get()) != 1 ||
      EVP_PKEY_keygen(context.get(), &made) != 1) {
    return failed("X25519 is not available");
  }
  Key key(made);
  std::string publicKey(kKeyBytes, '\0');
  size_t size = publicKey.size();
  if (EVP_PKEY_get_raw_public_key(
          key.get(),
          reinterpret_cast<unsigned char*>(publicKey.data()),
          &size) != 1 ||
      size != publicKey.size()) {
    return failed("X25519 has no public key");
  }
  return std::unique_ptr<KeyExchange>(
      std::make_unique<X25519>(std::move(key), std::move(publicKey)));
}

struct Cipher::Contexts {
  // The key is set once; each message only sets its nonce.
  EVP_CIPHER_CTX* const sealing = EVP_CIPHER_CTX_new();
  EVP_CIPHER_CTX* const opening = EVP_CIPHER_CTX_new();
  bool usable = false;

  ~Contexts() {
    EVP_CIPHER_CTX_free(sealing);
    EVP_CIPHER_CTX_free(opening);
  }
};

Cipher::Cipher(std::string_view key) : contexts_(std::make_unique<Contexts>()) {
  auto& c = *contexts_;
  c.usable = key.size() == kKeyBytes && c.sealing != nullptr &&
      c.opening != nullptr &&
      EVP_EncryptInit_ex(
          c.sealing, EVP_aes_256_gcm(), nullptr, bytesOf(key), nullptr) == 1 &&
      EVP_DecryptInit_ex(
          c.opening, EVP_aes_256_gcm(), nullptr, bytesOf(key), nullptr) == 1;
}

Cipher::~Cipher() = default;

base::Error Cipher::seal(
    uint64_t number,
    base::ConstSpan known,
    base::ConstSpan plain,
    void* sealed,
    uint8_t* tag) {
  auto* const context = contexts_->sealing;
  const auto nonce = toNonce(number);
  int n = 0;
  if (!contexts_->usable ||
      EVP_EncryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()) !=
          1 ||
      EVP_EncryptUpdate(
          context,
          nullptr,
          &n,
          static_cast<const unsigned char*>(known.data),
          static_cast<int>(known.size)) != 1) {
    return failed("AES-256-GCM is not available");
  }
  for (size_t at = 0; at < plain.size; at += kMaxPiece) {
    if (EVP_EncryptUpdate(
            context,
            static_cast<unsigned char*>(sealed) + at,
            &n,
            static_cast<const unsigned char*>(plain.data) + at,
            static_cast<int>(std::min(kMaxPiece, plain.size - at))) != 1) {
      return failed("sealing failed");
    }
  }
  unsigned char rest[kTagBytes];
  if (EVP_EncryptFinal_ex(context, rest, &n) != 1 ||
      EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag) !=
          1) {
    return failed("sealing failed");
  }
  return {};
}

base::Error Cipher::open(
    uint64_t number,
    base::ConstSpan known,
    base::ConstSpan sealed,
    const uint8_t* tag,
    void* plain) {
  auto* const context = contexts_->opening;
  const auto nonce = toNonce(number);
  int n = 0;
  if (!contexts_->usable ||
      EVP_DecryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()) !=
          1 ||
      EVP_DecryptUpdate(
          context,
          nullptr,
          &n,
          static_cast<const unsigned char*>(known.data),
          static_cast<int>(known.size)) != 1) {
    return failed("AES-256-GCM is not available");
  }
  for (size_t at = 0; at < sealed.size; at += kMaxPiece) {
    if (EVP_DecryptUpdate(
            context,
            static_cast<unsigned char*>(plain) + at,
            &n,
            static_cast<const unsigned char*>(sealed.data) + at,
            static_cast<int>(std::min(kMaxPiece, sealed.size - at))) != 1) {
      return failed("opening failed");
    }
  }
  unsigned char rest[kTagBytes];
  if (EVP_CIPHER_CTX_ctrl(
          context,
          EVP_CTRL_AEAD_SET_TAG,
          kTagBytes,
          const_cast<uint8_t*>(tag)) != 1 ||
      EVP_DecryptFinal_ex(context, rest, &n) != 1) {
    return {base::ErrorKind::kInvalid, "a sealed message has been changed"};
  }
  return {};
}

} // namespace torch_rpc_ext::crypto
