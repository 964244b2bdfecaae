#include "transport/ucx/handshake.h"

#include <cstring>
#include <string_view>

namespace torch_rpc_ext::transport::ucx {

namespace {

// Part of all proofs and keys, so that they are valid in no other protocol.
constexpr std::string_view kPurpose = "torch_rpc_ext 3";

std::string_view bytesOf(const uint64_t& number) {
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

} // namespace

std::string groupKey(const std::string& secret) {
  return crypto::toString(crypto::hmac(secret, {kPurpose, "group"}));
}

std::string
proof(const std::string& key, int number, const Transcript& transcript) {
  return crypto::toString(
      crypto::hmac(
          key,
          {kPurpose,
           "proof " + std::to_string(number),
           bytesOf(transcript.door),
           transcript.opener,
           transcript.accepter}));
}

base::Buffer withProof(const std::string& preamble, const std::string& proof) {
  base::Buffer bytes(preamble.size() + proof.size());
  std::memcpy(bytes.data(), preamble.data(), preamble.size());
  std::memcpy(bytes.data() + preamble.size(), proof.data(), proof.size());
  return bytes;
}

base::Result<Signed> parseSigned(base::ConstSpan bytes) {
  if (bytes.size < crypto::kMacBytes) {
    return base::Error{
        base::ErrorKind::kInvalid, "the introduction of a peer has no proof"};
  }
  const std::string_view all(static_cast<const char*>(bytes.data), bytes.size);
  const size_t size = bytes.size - crypto::kMacBytes;
  return Signed{
      std::string(all.substr(0, size)), std::string(all.substr(size))};
}

SessionKeys deriveKeys(
    const std::string& key,
    const Transcript& transcript,
    const std::string& shared) {
  const std::string root = crypto::toString(
      crypto::hmac(
          key,
          {kPurpose,
           "session",
           shared,
           bytesOf(transcript.door),
           transcript.opener,
           transcript.accepter}));
  const auto derive = [&root](std::string_view what) {
    return crypto::toString(crypto::hmac(root, {kPurpose, what}));
  };
  return {
      derive("opener"),
      derive("accepter"),
      derive("bulk opener"),
      derive("bulk accepter")};
}

} // namespace torch_rpc_ext::transport::ucx
