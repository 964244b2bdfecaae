#include "agent/codec.h"

#include "agent/device/staging.h"
#include "agent/tensor_decoder.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace torch_rpc_ext::agent {

using base::Error;
using base::ErrorKind;
using base::Result;
using torch::distributed::rpc::Message;
using torch::distributed::rpc::MessageType;

namespace {

// All that rpc::MessageType, an enum without a fixed type, can hold: to make
// one of a larger number is undefined.
constexpr uint16_t kMaxMessageType = 0x3ff;

Error mismatch() {
  return {
      ErrorKind::kInvalid,
      "the bulk that the transport announces is not that of the call frame"};
}

c10::Storage makeStorage(at::DataPtr data, size_t size) {
  // With the allocator, and resizable, as every tensor that is made here: the
  // receiver may resize_() it.
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      size,
      std::move(data),
      c10::GetCPUAllocator(),
      /*resizable=*/true);
}

using Block = memory::BufferCache::Block;

void deleteBlock(void* block) {
  delete static_cast<Block*>(block);
}

c10::Storage adoptBlock(Block block) {
  auto owner = std::make_unique<Block>(std::move(block));
  void* const data = owner->data();
  const size_t size = owner->size();
  at::DataPtr pointer(data, owner.release(), deleteBlock, at::Device(at::kCPU));
  return makeStorage(std::move(pointer), size);
}

void deleteAdopted(void* adopted) {
  delete static_cast<transport::Adopted*>(adopted);
}

c10::Storage adoptMemory(transport::Adopted adopted, size_t size) {
  auto owner = std::make_unique<transport::Adopted>(std::move(adopted));
  void* const data = owner->memory.get();
  at::DataPtr pointer(
      data, owner.release(), deleteAdopted, at::Device(at::kCPU));
  return makeStorage(std::move(pointer), size);
}

// What a storage's memory is, when the storage has but one owner; else null.
template <typename Owner>
Owner* soleOwner(const c10::Storage& storage, void (*deleter)(void*)) {
  if (storage.data_ptr().get_deleter() != deleter) {
    return nullptr;
  }
  const auto one = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      storage.unsafeGetStorageImpl());
  // `one` is the second.
  return one.use_count() == 2 && one.weak_use_count() == 1
      ? static_cast<Owner*>(storage.data_ptr().get_context())
      : nullptr;
}

// Its region, when it came over `to` and can go back there; else 0.
uint64_t returnable(
    const c10::Storage& storage,
    const transport::ConnectionPtr& to) {
  const auto* const adopted =
      soleOwner<transport::Adopted>(storage, deleteAdopted);
  return adopted != nullptr && adopted->home.lock() == to ? adopted->region : 0;
}

// Only for as long as the frame is there.
c10::Storage borrow(base::ConstSpan bytes) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      bytes.size,
      at::DataPtr(const_cast<void*>(bytes.data), at::Device(at::kCPU)));
}

c10::Storage copyInlined(base::ConstSpan bytes) {
  at::DataPtr data = c10::GetCPUAllocator()->allocate(bytes.size);
  if (bytes.size != 0) {
    std::memcpy(data.get(), bytes.data, bytes.size);
  }
  return makeStorage(std::move(data), bytes.size);
}

// Runs code that may throw.
template <typename F>
Error guarded(const char* what, F&& f) {
  try {
    return f();
  } catch (const c10::OutOfMemoryError& e) {
    return Error(ErrorKind::kOverloaded, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    return Error(ErrorKind::kInvalid, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return Error(
        ErrorKind::kOverloaded,
        std::string("no memory to ") + what + " a message");
  } catch (const std::exception& e) {
    return Error(ErrorKind::kInvalid, e.what());
  }
}

} // namespace

Error Encoder::describe() {
  return guarded("encode", [this]() -> Error {
    for (const auto& tensor : message_->tensors()) {
      if (auto error = tensors_.add(tensor)) {
        return error;
      }
    }
    return {};
  });
}

Result<bool> Encoder::depart(device::SendingWay* beside) {
  if (auto error = guarded("encode", [this, beside]() -> Error {
        departing_ = tensors_.takeDeparting();
        if (beside != nullptr) {
          const device::MessageKey key{options_.callId, options_.kind};
          if (auto failed = beside->depart(key, departing_, departure_)) {
            return failed;
          }
        }
        device::stage(departing_, staged_);
        return {};
      })) {
    return error;
  }
  return !staged_.empty();
}

Result<Encoded> Encoder::finish() {
  Encoded encoded;
  if (auto error = guarded("encode", [&] { return write(encoded); })) {
    return error;
  }
  return encoded;
}

Error Encoder::write(Encoded& encoded) {
  const auto& payload = message_->payload();
  wire::CallFrame frame;
  frame.header.kind = options_.kind;
  frame.header.messageType = static_cast<uint16_t>(message_->type());
  frame.header.callId = options_.callId;
  frame.payload = {payload.data(), payload.size()};
  frame.payloadBulk = payload.size() > options_.inlineThreshold;
  frame.storages = tensors_.storages();
  frame.records = tensors_.records();
  frame.dims = tensors_.dims();
  frame.note = {departure_.note.data(), departure_.note.size()};
  auto head = wire::encode(frame);
  if (!head.ok()) {
    return head.error();
  }

  encoded.head = std::move(head.value());
  encoded.totalBytes = encoded.head.size();
  if (frame.payloadBulk) {
    encoded.message = message_;
    encoded.bulk.push_back({frame.payload});
    encoded.totalBytes += frame.payload.size;
  }
  encoded.mappable = !frame.payloadBulk;
  for (const auto& storage : frame.storages) {
    if (storage.bulk) {
      encoded.bulk.push_back({storage.bytes});
      encoded.totalBytes += storage.bytes.size;
      encoded.mappable = encoded.mappable && storage.place == wire::kHostPlace;
    }
  }
  encoded.storages = tensors_.takeOwners();
  encoded.storages.insert(
      encoded.storages.end(), staged_.begin(), staged_.end());
  encoded.parcel = std::move(departure_.parcel);
  departing_.clear();
  return {};
}

Result<Encoded> encode(
    const c10::intrusive_ptr<Message>& message,
    const EncodeOptions& options,
    const device::Route& route) {
  Encoder encoder(message, options, route);
  if (auto error = encoder.describe()) {
    return error;
  }
  return encoder.finish();
}

bool Encoded::giveAway(
    memory::BufferCache& cache,
    const transport::ConnectionPtr& to) {
  std::vector<transport::BulkSpan> spans = bulk;
  bool shared = !spans.empty();
  for (auto& span : spans) {
    const auto storage =
        std::find_if(storages.begin(), storages.end(), [&span](const auto& s) {
          return s.data() == span.data && s.nbytes() == span.size;
        });
    if (storage == storages.end()) {
      return false; // what stays here must not wait for what goes
    }
    if (const uint64_t region = returnable(*storage, to)) {
      span.region.id = region;
      span.returned = true;
      continue;
    }
    const auto* const block = soleOwner<Block>(*storage, deleteBlock);
    if (block == nullptr) {
      return false;
    }
    if (block->region().id == 0) {
      cache.share(block->size());
      shared = false;
    }
    span.region = block->region();
  }
  if (shared) {
    bulk = std::move(spans);
    given = true;
  }
  return given;
}

void Encoded::discard() {
  for (const auto& block : lent) {
    block->discard();
  }
  for (const auto& storage : storages) {
    if (given && storage.data_ptr().get_deleter() == deleteBlock) {
      static_cast<Block*>(storage.data_ptr().get_context())->discard();
    }
  }
}

Result<Decoder> Decoder::parse(base::ConstSpan head) {
  auto view = wire::CallFrameView::parse(head);
  if (!view.ok()) {
    return view.error();
  }
  const uint16_t messageType = view.value().header().messageType;
  if (messageType > kMaxMessageType) {
    return Error(
        ErrorKind::kInvalid,
        "call frame: unknown message type " + std::to_string(messageType));
  }
  return Decoder(view.value());
}

Result<std::vector<base::MutableSpan>> Decoder::allocate(
    memory::BufferCache& cache,
    const std::vector<uint64_t>& announced,
    device::Devices devices,
    const Adopt& adopt) {
  std::vector<base::MutableSpan> spans;
  if (view_.hasDevices()) {
    wire::StorageView storage;
    for (auto cursor = view_.storages(); cursor.next(storage);) {
      if (storage.place == wire::kHostPlace) {
        continue;
      }
      if (auto error =
              device::check(device::deviceAt(storage.place), devices)) {
        return error;
      }
    }
  }
  try {
    if (auto error = allocateBulk(cache, announced, adopt, spans)) {
      return error;
    }
  } catch (const std::exception&) {
    uint64_t asked = 0;
    for (const uint64_t size : announced) {
      asked += size;
    }
    return Error(
        ErrorKind::kOverloaded,
        "no memory to receive " + std::to_string(asked) + " bytes of " +
            std::to_string(memory::physicalMemory()));
  }
  allocated_ = true;
  return spans;
}

Error Decoder::allocateBulk(
    memory::BufferCache& cache,
    const std::vector<uint64_t>& announced,
    const Adopt& adopt,
    std::vector<base::MutableSpan>& spans) {
  // Everything is compared before anything is allocated.
  uint64_t total = 0;
  size_t count = 0;
  const auto matches = [&](uint64_t size) {
    total += size; // the limits keep the sum of all sizes below 2^64
    return count < announced.size() && announced[count++] == size;
  };
  if (view_.payloadBulk() && !matches(view_.payloadSize())) {
    return mismatch();
  }
  wire::StorageView storage;
  for (auto cursor = view_.storages(); cursor.next(storage);) {
    if (storage.bulk && !matches(storage.size)) {
      return mismatch();
    }
  }
  if (count != announced.size()) {
    return mismatch();
  }
  if (count == 0) {
    return {};
  }
  if (total > memory::physicalMemory()) {
    return {
        ErrorKind::kOverloaded,
        "a message of " + std::to_string(total) + " bytes is more than the " +
            std::to_string(memory::physicalMemory()) +
            " bytes of memory of this machine"};
  }

  spans.reserve(count);
  if (view_.payloadBulk()) {
    payload_.resize(view_.payloadSize());
    spans.push_back({payload_.data(), payload_.size()});
  }
  bulk_.reserve(count);
  for (auto cursor = view_.storages(); cursor.next(storage);) {
    if (!storage.bulk) {
      continue;
    }
    if (storage.place != wire::kHostPlace) {
      bulk_.push_back(device::pinned(storage.size));
      spans.push_back({bulk_.back().mutable_data(), storage.size});
      continue;
    }
    if (auto adopted = adopt ? adopt(spans.size()) : transport::Adopted();
        adopted.memory != nullptr) {
      bulk_.push_back(adoptMemory(std::move(adopted), storage.size));
      spans.push_back({nullptr, storage.size});
      continue;
    }
    if (storage.size >= memory::kMinBlockBytes) {
      auto block = cache.acquire(storage.size);
      if (!block.ok()) {
        return block.error();
      }
      bulk_.push_back(adoptBlock(std::move(block.value())));
    } else {
      bulk_.push_back(makeStorage(
          c10::GetCPUAllocator()->allocate(storage.size), storage.size));
    }
    spans.push_back({bulk_.back().mutable_data(), storage.size});
  }
  return {};
}

void Decoder::takeStorages(Storages& storages) {
  wire::StorageView storage;
  auto bulk = bulk_.begin();
  for (auto cursor = view_.storages(); cursor.next(storage);) {
    storages.push_back(
        storage.bulk ? std::move(*bulk++) : copyInlined(storage.bytes));
  }
}

// `onHost` gets the bytes of those that go to a device: to be looked at here,
// where it costs no wait for the device. None for what came beside the frame.
Error Decoder::placeStorages(
    device::ReceivingWay* beside,
    Storages& storages,
    Storages& onHost) {
  storages.resize(view_.storageCount());
  onHost.resize(view_.storageCount());
  std::vector<device::Arriving> arriving;
  std::vector<size_t> arrivingAt;
  wire::StorageView storage;
  auto bulk = bulk_.begin();
  auto cursor = view_.storages();
  for (size_t i = 0; cursor.next(storage); ++i) {
    if (storage.beside) {
      continue;
    }
    if (storage.bulk) {
      onHost[i] = std::move(*bulk++);
    } else if (storage.place == wire::kHostPlace) {
      onHost[i] = copyInlined(storage.bytes);
    } else {
      onHost[i] = borrow(storage.bytes);
    }
    storages[i] = onHost[i];
    if (storage.place != wire::kHostPlace) {
      arriving.push_back(
          {device::deviceAt(storage.place), onHost[i], storage.bulk});
      arrivingAt.push_back(i);
    }
  }
  auto placed = device::unstage(arriving);
  for (size_t i = 0; i < placed.size(); ++i) {
    storages[arrivingAt[i]] = std::move(placed[i]);
  }
  return view_.hasBeside() ? placeBeside(beside, storages) : Error();
}

Error Decoder::placeBeside(device::ReceivingWay* beside, Storages& storages) {
  if (beside == nullptr) {
    return {
        ErrorKind::kInvalid,
        "call frame: its tensors travel beside it, and this connection has no "
        "such way"};
  }
  std::vector<device::Expected> expected;
  std::vector<size_t> places;
  wire::StorageView storage;
  auto cursor = view_.storages();
  for (size_t i = 0; cursor.next(storage); ++i) {
    if (storage.beside) {
      expected.push_back({device::deviceAt(storage.place), storage.size});
      places.push_back(i);
    }
  }
  auto arrived =
      beside->arrive({header().callId, header().kind}, view_.note(), expected);
  if (!arrived.ok()) {
    return arrived.error();
  }
  for (size_t i = 0; i < places.size(); ++i) {
    storages[places[i]] = std::move(arrived.value()[i]);
  }
  return {};
}

Result<c10::intrusive_ptr<Message>> Decoder::finish(
    device::ReceivingWay* beside) {
  if (!allocated_) {
    return Error(ErrorKind::kInvalid, "finish() before allocate()");
  }
  c10::intrusive_ptr<Message> message;
  if (auto error = guarded("decode", [&] { return decode(beside, message); })) {
    return error;
  }
  return message;
}

Error Decoder::decode(
    device::ReceivingWay* beside,
    c10::intrusive_ptr<Message>& message) {
  if (!view_.payloadBulk() && view_.payloadSize() != 0) {
    const auto* bytes = static_cast<const char*>(view_.payload().data);
    payload_.assign(bytes, bytes + view_.payloadSize());
  }
  Storages storages;
  Storages onHost;
  if (!view_.hasDevices()) {
    storages.reserve(view_.storageCount());
    takeStorages(storages);
  } else if (auto error = placeStorages(beside, storages, onHost)) {
    return error;
  }
  std::vector<at::Tensor> tensors;
  const bool isTrusted = beside != nullptr && beside->isTrusted();
  if (auto error = decodeTensors(view_, storages, onHost, isTrusted, tensors)) {
    return error;
  }
  message = c10::make_intrusive<Message>(
      std::move(payload_),
      std::move(tensors),
      static_cast<MessageType>(view_.header().messageType),
      static_cast<int64_t>(view_.header().callId));
  return {};
}

} // namespace torch_rpc_ext::agent
