#include "transport/ucx/secure_channel.h"

#include <cstring>

namespace torch_rpc_ext::transport::ucx {

namespace {

base::ConstSpan spanOf(const FrameHeader& header) {
  return {&header, sizeof(header)};
}

} // namespace

SecureChannel::SecureChannel(const SessionKeys& keys, bool opener)
    : sending_(opener ? keys.fromOpener : keys.fromAccepter),
      receiving_(opener ? keys.fromAccepter : keys.fromOpener) {}

base::Result<SecureChannel::Sealed> SecureChannel::seal(
    uint64_t token,
    const FrameHeader& header,
    base::ConstSpan data) {
  Sealed sealed;
  sealed.header.kind = FrameKind::kSealed;
  sealed.header.token = token;
  sealed.header.transfer = next_++;
  const size_t size = sizeof(header) + data.size;
  sealed.data = base::Buffer(size + crypto::kTagBytes);
  std::memcpy(sealed.data.data(), &header, sizeof(header));
  if (data.size != 0) {
    std::memcpy(sealed.data.data() + sizeof(header), data.data, data.size);
  }
  if (base::Error error = sending_.seal(
          sealed.header.transfer,
          spanOf(sealed.header),
          {sealed.data.data(), size},
          sealed.data.data(),
          reinterpret_cast<uint8_t*>(sealed.data.data()) + size)) {
    return error;
  }
  return sealed;
}

base::ConstSpan SecureChannel::Opened::data() const {
  return {
      bytes.data() + sizeof(FrameHeader), bytes.size() - sizeof(FrameHeader)};
}

base::Result<SecureChannel::Opened> SecureChannel::open(
    const FrameHeader& outer,
    base::ConstSpan data) {
  if (data.size < sizeof(FrameHeader) + crypto::kTagBytes) {
    return base::Error{
        base::ErrorKind::kInvalid, "a sealed message is too short"};
  }
  if (!isNew(outer.transfer)) {
    return base::Error{
        base::ErrorKind::kInvalid,
        "a sealed message came a second time, or too late"};
  }
  const size_t size = data.size - crypto::kTagBytes;
  Opened opened;
  opened.bytes = base::Buffer(size);
  if (base::Error error = receiving_.open(
          outer.transfer,
          spanOf(outer),
          {data.data, size},
          static_cast<const uint8_t*>(data.data) + size,
          opened.bytes.data())) {
    return error;
  }
  // Only after the message has proved authentic: otherwise a stranger could use
  // up numbers.
  markSeen(outer.transfer);
  auto header = parseHeader({opened.bytes.data(), sizeof(FrameHeader)});
  if (!header.ok()) {
    return header.error();
  }
  opened.header = header.value();
  return opened;
}

bool SecureChannel::isNew(uint64_t number) const {
  if (number == 0 || newest_ >= number + kWindow) {
    return false;
  }
  return number > newest_ || !seen_.test(number % kWindow);
}

void SecureChannel::markSeen(uint64_t number) {
  if (number > newest_ + kWindow) {
    seen_.reset();
    newest_ = number;
  }
  while (newest_ < number) {
    seen_.reset(++newest_ % kWindow);
  }
  seen_.set(number % kWindow);
}

} // namespace torch_rpc_ext::transport::ucx
