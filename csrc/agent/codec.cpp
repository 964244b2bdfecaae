#include "agent/codec.h"

#include "agent/host_storage.h"
#include "agent/integrity.h"
#include "agent/tensor_decoder.h"
#include "agent/wire_dtype.h"
#include "agent/wrapped_message.h"

#include <algorithm>
#include <memory>
#include <numeric>
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

using Block = memory::BufferCache::Block;

Error noMemoryFor(const std::vector<uint64_t>& sizes, const std::string& why) {
  const uint64_t asked = std::accumulate(
      sizes.begin(),
      sizes.end(),
      uint64_t{0}); // below 2^64: see allocateBulk()
  return Error(
      ErrorKind::kOverloaded,
      "no memory to receive " + std::to_string(asked) + " bytes of " +
          std::to_string(memory::physicalMemory()) + ": " + why);
}

// Runs `f`, which may throw; an exception becomes an Error.
template <typename F>
Error asError(const char* what, F&& f) {
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
  return asError("encode", [this]() -> Error {
    for (const auto& tensor : message_->tensors()) {
      if (auto error = tensors_.add(tensor)) {
        return error;
      }
    }
    return tensors_.narrow(options_.dtype, options_.cache);
  });
}

Result<bool> Encoder::depart(
    device::SendingWay* beside,
    device::Launcher* launcher) {
  if (auto error = asError("encode", [&]() -> Error {
        departing_ = tensors_.takeDeparting();
        if (beside != nullptr) {
          const device::MessageKey key{options_.callId, options_.kind};
          if (auto failed = beside->depart(
                  key, {options_.checked}, departing_, departure_)) {
            return failed;
          }
        }
        device::stage(
            departing_,
            // A frame in pieces would leave before all queued work is over.
            {launcher,
             options_.checked,
             options_.inPieces && !departure_.waits},
            staged_);
        return {};
      })) {
    return error;
  }
  return departure_.waits || !staged_.held.empty();
}

Result<Encoded> Encoder::finish() {
  Encoded encoded;
  if (auto error = asError("encode", [&] { return write(encoded); })) {
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
  frame.header.answer = options_.answer;
  frame.header.timeout = options_.timeout;
  frame.payload = {payload.data(), payload.size()};
  frame.payloadBulk = payload.size() > options_.inlineThreshold;
  frame.storages = tensors_.storages();
  frame.records = tensors_.records();
  frame.dims = tensors_.dims();
  frame.note = {departure_.note.data(), departure_.note.size()};
  const std::vector<uint64_t> sums = sumsOf(frame);
  frame.sums = sums;
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
  auto filled = staged_.filled.begin(); // in the order of the storages
  for (const auto& storage : frame.storages) {
    if (storage.bulk) {
      encoded.bulk.push_back({storage.bytes});
      if (filled != staged_.filled.end() && filled->entry == &storage) {
        encoded.bulk.back().whenFilled =
            [filling = staged_.filling, offset = filled++->offset](
                uint64_t bytes, transport::Callback then) {
              filling->whenFilled(offset + bytes, std::move(then));
            };
      }
      encoded.totalBytes += storage.bytes.size;
      encoded.mappable = encoded.mappable && storage.place == wire::kHostPlace;
    }
  }
  encoded.storages = tensors_.takeOwners();
  encoded.storages.insert(
      encoded.storages.end(), staged_.held.begin(), staged_.held.end());
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
  std::vector<std::shared_ptr<memory::SharedMap>> maps;
  bool shared = !bulk.empty();
  for (const auto& span : bulk) {
    const auto storage =
        std::find_if(storages.begin(), storages.end(), [&](const auto& other) {
          return other.data() == span.data && other.nbytes() == span.size;
        });
    if (storage == storages.end()) {
      // The transport would hold this bulk until the receiver returns the rest.
      return false;
    }
    maps.push_back(giveable(*storage, to));
    if (maps.back() == nullptr) {
      const Block* const block = soleBlock(*storage);
      if (block == nullptr) {
        return false;
      }
      cache.share(block->size());
      shared = false;
    }
  }
  if (!shared) {
    return false;
  }
  // A fork from here on changes nothing: nobody writes to the memory here any
  // more, and the child cannot reach it.
  for (size_t i = 0; i < bulk.size(); ++i) {
    bulk[i].map = std::move(maps[i]);
  }
  return true;
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
    device::DeviceList devices,
    const Adopt& adopt) {
  std::vector<base::MutableSpan> spans;
  if (view_.hasDevices()) {
    wire::StorageView storage;
    for (auto cursor = view_.storages(); cursor.next(storage);) {
      if (!wire::isOnDevice(storage.place)) {
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
  } catch (const c10::Error& error) {
    return noMemoryFor(announced, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return noMemoryFor(announced, error.what());
  }
  cache_ = &cache;
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
    if (storage.dtype != wire::WireDtype::kFloat32) {
      total += storage.sizeHere(); // of the float32 copy, made by finish()
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
    if (wire::isOnDevice(storage.place)) {
      bulk_.push_back(device::pinned(storage.size));
      spans.push_back({bulk_.back().mutable_data(), storage.size});
      continue;
    }
    if (auto adopted =
            adopt ? adopt(spans.size(), storage.size) : c10::Storage()) {
      bulk_.push_back(std::move(adopted));
      spans.push_back({nullptr, storage.size});
      continue;
    }
    auto memory = allocateOnHost(&cache, storage.size);
    if (!memory.ok()) {
      return memory.error();
    }
    bulk_.push_back(std::move(memory.value()));
    spans.push_back({bulk_.back().mutable_data(), storage.size});
  }
  return {};
}

void Decoder::landOn(std::shared_ptr<device::Landing> landing) {
  wire::StorageView storage;
  auto bulk = bulk_.begin();
  for (auto cursor = view_.storages(); cursor.next(storage);) {
    if (!storage.bulk) {
      continue;
    }
    const c10::Storage& host = *bulk++;
    if (wire::isOnDevice(storage.place) &&
        storage.dtype == wire::WireDtype::kFloat32 &&
        storage.size >= device::kPieceBytes) {
      landing->add(host, device::deviceAt(storage.place));
    }
  }
  landing_ = landing->empty() ? nullptr : std::move(landing);
}

Result<c10::Storage> Decoder::hostStorageOf(
    const wire::StorageView& storage,
    c10::Storage bulk) {
  if (storage.place == wire::kMetaPlace) {
    return metaStorage(storage.size);
  }
  if (storage.dtype == wire::WireDtype::kFloat32) {
    return storage.bulk ? std::move(bulk) : copyBytesOf(storage.bytes);
  }
  auto memory = allocateOnHost(cache_, storage.sizeHere());
  if (memory.ok()) {
    widen(
        storage.bulk ? base::ConstSpan{bulk.data(), bulk.nbytes()}
                     : storage.bytes,
        storage.dtype,
        {memory.value().mutable_data(), memory.value().nbytes()});
  }
  return memory;
}

Error Decoder::takeStorages(Storages& storages) {
  wire::StorageView storage;
  auto bulk = bulk_.begin();
  for (auto cursor = view_.storages(); cursor.next(storage);) {
    auto taken = hostStorageOf(
        storage, storage.bulk ? std::move(*bulk++) : c10::Storage());
    if (!taken.ok()) {
      return taken.error();
    }
    storages.push_back(std::move(taken.value()));
  }
  return {};
}

// `onHost` gets the storages on the CPU, and for each storage for a device a
// storage on the CPU with the same bytes: decodeTensors() checks the indices of
// sparse tensors there, so no thread waits for the device. What came beside the
// frame has no bytes on the CPU.
Error Decoder::placeStorages(
    device::ReceivingWay* beside,
    device::Launcher* launcher,
    Storages& storages,
    Storages& onHost) {
  storages.resize(view_.storageCount());
  onHost.resize(view_.storageCount());
  std::vector<device::Arriving> arriving;
  std::vector<size_t> arrivingAt;
  // Only the parts of sparse tensors are checked on the host.
  const bool hasParts = view_.recordCount() != view_.tensorCount();
  wire::StorageView storage;
  auto bulk = bulk_.begin();
  auto cursor = view_.storages();
  for (size_t i = 0; cursor.next(storage); ++i) {
    if (storage.beside) {
      continue;
    }
    if (!wire::isOnDevice(storage.place)) {
      auto taken = hostStorageOf(
          storage, storage.bulk ? std::move(*bulk++) : c10::Storage());
      if (!taken.ok()) {
        return taken.error();
      }
      storages[i] = onHost[i] = std::move(taken.value());
      continue;
    }
    const c10::Storage host =
        storage.bulk ? std::move(*bulk++) : borrow(storage.bytes);
    arriving.push_back(
        {device::deviceAt(storage.place),
         host,
         storage.bulk,
         landing_ && storage.bulk ? landing_->take(host) : c10::Storage(),
         storage.dtype});
    arrivingAt.push_back(i);
    if (storage.dtype == wire::WireDtype::kFloat32) {
      onHost[i] = host;
    } else if (hasParts) {
      auto taken = hostStorageOf(storage, host);
      if (!taken.ok()) {
        return taken.error();
      }
      onHost[i] = std::move(taken.value());
    }
  }
  landing_.reset();
  device::Sums sums(view_.hasSums() ? launcher : nullptr, arriving.size());
  auto placed =
      device::unstage(arriving, {launcher, view_.hasSums() ? &sums : nullptr});
  pending_.hold(sums.memory());
  if (auto error = compareLater(placed, arriving, arrivingAt, launcher)) {
    return error;
  }
  for (size_t i = 0; i < placed.storages.size(); ++i) {
    storages[arrivingAt[i]] = std::move(placed.storages[i]);
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
      expected.push_back(
          {device::deviceAt(storage.place), storage.size, storage.dtype});
      places.push_back(i);
    }
  }
  auto arrived =
      beside->arrive({header().callId, header().kind}, view_.note(), expected);
  if (!arrived.ok()) {
    return arrived.error();
  }
  for (size_t i = 0; i < places.size(); ++i) {
    storages[places[i]] = std::move(arrived.value().storages[i]);
  }
  compareLater(arrived.value(), expected, places);
  return {};
}

Result<c10::intrusive_ptr<Message>> Decoder::finish(
    device::ReceivingWay* beside,
    device::Launcher* launcher) {
  if (cache_ == nullptr) {
    return Error(ErrorKind::kInvalid, "finish() before allocate()");
  }
  c10::intrusive_ptr<Message> message;
  if (auto error = asError(
          "decode", [&] { return decode(beside, launcher, message); })) {
    return error;
  }
  return message;
}

c10::intrusive_ptr<Message> Decoder::withoutTensors(
    const Error& failure) const {
  if (view_.payloadBulk() || failure.kind == ErrorKind::kCorrupted) {
    return nullptr;
  }
  const auto* bytes = static_cast<const char*>(view_.payload().data);
  return c10::make_intrusive<Message>(
      std::vector<char>(bytes, bytes + view_.payloadSize()),
      std::vector<at::Tensor>(view_.tensorCount()),
      static_cast<MessageType>(view_.header().messageType));
}

Error Decoder::decode(
    device::ReceivingWay* beside,
    device::Launcher* launcher,
    c10::intrusive_ptr<Message>& message) {
  if (!view_.payloadBulk() && view_.payloadSize() != 0) {
    const auto* bytes = static_cast<const char*>(view_.payload().data);
    payload_.assign(bytes, bytes + view_.payloadSize());
  }
  if (auto error = checkSums(
          view_,
          {payload_.data(), payload_.size()},
          bulk_,
          [&](const wire::StorageView& storage) {
            return isSummedLater(storage, launcher);
          })) {
    return error;
  }
  Storages storages;
  Storages onHost;
  storages.reserve(view_.storageCount());
  if (auto error = view_.hasDevices()
          ? placeStorages(beside, launcher, storages, onHost)
          : takeStorages(storages)) {
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
  return checkWrappers(*message);
}

} // namespace torch_rpc_ext::agent
