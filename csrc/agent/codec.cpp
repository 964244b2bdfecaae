#include "agent/codec.h"

#include "agent/tensor_decoder.h"
#include "agent/tensor_encoder.h"

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

c10::Storage adoptMemory(std::shared_ptr<void> memory, size_t size) {
  using Owner = std::shared_ptr<void>;
  void* const data = memory.get();
  at::DataPtr pointer(
      data,
      new Owner(std::move(memory)),
      [](void* owner) { delete static_cast<Owner*>(owner); },
      at::Device(at::kCPU));
  return makeStorage(std::move(pointer), size);
}

// The receive buffer that a storage is, when the storage has but one owner.
Block* soleBlock(const c10::Storage& storage) {
  if (storage.data_ptr().get_deleter() != deleteBlock) {
    return nullptr;
  }
  const auto one = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      storage.unsafeGetStorageImpl());
  // `one` is the second.
  return one.use_count() == 2 && one.weak_use_count() == 1
      ? static_cast<Block*>(storage.data_ptr().get_context())
      : nullptr;
}

c10::Storage copyInlined(base::ConstSpan bytes) {
  at::DataPtr data = c10::GetCPUAllocator()->allocate(bytes.size);
  if (bytes.size != 0) {
    std::memcpy(data.get(), bytes.data, bytes.size);
  }
  return makeStorage(std::move(data), bytes.size);
}

} // namespace

Result<Encoded> encode(
    const c10::intrusive_ptr<Message>& message,
    uint64_t callId,
    wire::CallKind kind,
    uint64_t inlineThreshold,
    uint32_t flags) {
  try {
    const auto& payload = message->payload();
    wire::CallFrame frame;
    frame.header.kind = kind;
    frame.header.messageType = static_cast<uint16_t>(message->type());
    frame.header.flags = flags;
    frame.header.callId = callId;
    frame.payload = {payload.data(), payload.size()};
    frame.payloadBulk = payload.size() > inlineThreshold;

    TensorEncoder tensors(inlineThreshold);
    for (const auto& tensor : message->tensors()) {
      if (auto error = tensors.add(tensor)) {
        return error;
      }
    }
    frame.storages = tensors.storages();
    frame.records = tensors.records();
    frame.dims = tensors.dims();
    auto head = wire::encode(frame);
    if (!head.ok()) {
      return head.error();
    }

    Encoded encoded;
    encoded.head = std::move(head.value());
    encoded.totalBytes = encoded.head.size();
    if (frame.payloadBulk) {
      encoded.message = message;
      encoded.bulk.push_back({frame.payload, {}});
      encoded.totalBytes += frame.payload.size;
    }
    for (const auto& storage : frame.storages) {
      if (storage.bulk) {
        encoded.bulk.push_back({storage.bytes, {}});
        encoded.totalBytes += storage.bytes.size;
      }
    }
    encoded.storages = tensors.takeOwners();
    return encoded;
  } catch (const c10::Error& e) {
    return Error(ErrorKind::kInvalid, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return Error(ErrorKind::kOverloaded, "no memory to encode a message");
  } catch (const std::exception& e) {
    return Error(ErrorKind::kInvalid, e.what());
  }
}

bool Encoded::giveAway(memory::BufferCache& cache) {
  std::vector<Block*> blocks;
  for (const auto& span : bulk) {
    const auto storage =
        std::find_if(storages.begin(), storages.end(), [&span](const auto& s) {
          return s.data() == span.data && s.nbytes() == span.size;
        });
    Block* const block =
        storage == storages.end() ? nullptr : soleBlock(*storage);
    if (block == nullptr) {
      return false; // what stays here must not wait for what goes
    }
    blocks.push_back(block);
  }
  bool shared = !blocks.empty();
  for (const Block* block : blocks) {
    if (block->region().id == 0) {
      cache.share(block->size());
      shared = false;
    }
  }
  for (size_t i = 0; shared && i < blocks.size(); ++i) {
    bulk[i].region = blocks[i]->region();
  }
  return shared;
}

void Encoded::discard() {
  for (const auto& storage : storages) {
    if (storage.data_ptr().get_deleter() == deleteBlock) {
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
    const Adopt& adopt) {
  std::vector<base::MutableSpan> spans;
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
    if (auto memory = adopt ? adopt(spans.size()) : nullptr) {
      bulk_.push_back(adoptMemory(std::move(memory), storage.size));
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

Result<c10::intrusive_ptr<Message>> Decoder::finish() {
  if (!allocated_) {
    return Error(ErrorKind::kInvalid, "finish() before allocate()");
  }
  try {
    if (!view_.payloadBulk() && view_.payloadSize() != 0) {
      const auto* bytes = static_cast<const char*>(view_.payload().data);
      payload_.assign(bytes, bytes + view_.payloadSize());
    }

    c10::SmallVector<c10::Storage, 8> storages;
    storages.reserve(view_.storageCount());
    wire::StorageView storage;
    auto bulk = bulk_.begin();
    for (auto cursor = view_.storages(); cursor.next(storage);) {
      storages.push_back(
          storage.bulk ? std::move(*bulk++) : copyInlined(storage.bytes));
    }

    std::vector<at::Tensor> tensors;
    if (auto error = decodeTensors(view_, storages, tensors)) {
      return error;
    }
    return c10::make_intrusive<Message>(
        std::move(payload_),
        std::move(tensors),
        static_cast<MessageType>(view_.header().messageType),
        static_cast<int64_t>(view_.header().callId));
  } catch (const c10::Error& e) {
    return Error(ErrorKind::kInvalid, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return Error(ErrorKind::kOverloaded, "no memory to decode a message");
  } catch (const std::exception& e) {
    return Error(ErrorKind::kInvalid, e.what());
  }
}

} // namespace torch_rpc_ext::agent
