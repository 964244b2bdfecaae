#pragma once

#include "transport/transport.h"
#include "transport/ucx/bulk/exchange.h"
#include "transport/ucx/protocol.h"

#include <memory>
#include <vector>

namespace torch_rpc_ext::transport::ucx {

// A frame that has arrived over a UcxConnection, whose bulk is `bulk`.
//
// Owns: the bytes of the frame (its head starts at `headOffset`).
class UcxIncoming final : public Incoming {
 public:
  UcxIncoming(
      std::shared_ptr<bulk::Exchange> bulk,
      uint64_t transfer,
      uint32_t firstSpan,
      std::vector<BulkEntry> entries,
      base::Buffer bytes,
      size_t headOffset);
  ~UcxIncoming() override;

  base::ConstSpan head() const override {
    return {bytes_.data() + headOffset_, bytes_.size() - headOffset_};
  }
  const std::vector<uint64_t>& bulkSizes() const override {
    return sizes_;
  }
  uint64_t bytesToCopy() const override;
  void refuse(const base::Error& why) override;
  std::shared_ptr<memory::SharedMap> map(size_t index) override;
  void receive(
      std::vector<base::MutableSpan> into,
      Callback callback,
      Arrived arrived) override;

 private:
  class Lease;

  const std::shared_ptr<bulk::Exchange> bulk_;
  const uint64_t transfer_; // 0: the sender lends no memory
  const uint32_t firstSpan_;
  const std::vector<BulkEntry> entries_;
  const base::Buffer bytes_;
  const size_t headOffset_;
  std::vector<uint64_t> sizes_;
  bool answered_ = false;
  std::shared_ptr<Lease> lease_; // null until a span is mapped
};

// Turns the data of a kFrame (the table of spans, then the head) into an
// Incoming.
base::Result<std::unique_ptr<Incoming>> makeIncoming(
    std::shared_ptr<bulk::Exchange> bulk,
    uint64_t transfer,
    uint32_t firstSpan,
    uint32_t count,
    base::Buffer data,
    uint64_t maxBytes);

} // namespace torch_rpc_ext::transport::ucx
