#include "agent/host_storage.h"

#include "compat/torch_compat.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <memory>
#include <utility>

namespace torch_rpc_ext::agent {

using Block = memory::BufferCache::Block;

namespace {

c10::Storage makeStorage(at::DataPtr data, size_t size) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      size,
      std::move(data),
      c10::GetCPUAllocator(),
      /*resizable=*/true);
}

// What a storage owns: the memory, and the hold that tells a fork that tensors
// lie in it.
template <typename T>
struct HeldMemory {
  T memory;
  memory::SharedMap::Hold hold; // destroyed before `memory`
};

template <typename T>
void deleteHeld(void* held) {
  delete static_cast<HeldMemory<T>*>(held);
}

// A storage that owns `owner`, whose memory begins at `data`.
template <typename T>
c10::Storage
makeOwningStorage(T owner, memory::SharedMap* shared, void* data, size_t size) {
  auto* const held =
      new HeldMemory<T>{std::move(owner), memory::SharedMap::Hold(shared)};
  return makeStorage(
      at::DataPtr(data, held, deleteHeld<T>, at::Device(at::kCPU)), size);
}

// The memory that makeOwningStorage() has given the storage; null for a storage
// that owns something else.
template <typename T>
T* memoryOf(const c10::Storage& storage) {
  const at::DataPtr& pointer = storage.data_ptr();
  return pointer.get_deleter() == &deleteHeld<T>
      ? &static_cast<HeldMemory<T>*>(pointer.get_context())->memory
      : nullptr;
}

// Memory that came mapped over a connection.
struct Mapped {
  std::shared_ptr<memory::SharedMap> map;
  // Where the memory can be given back; null if it is this process's own, which
  // has come back.
  std::weak_ptr<transport::Connection> home;
};

bool hasOneOwner(const c10::Storage& storage) {
  const auto one = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      storage.unsafeGetStorageImpl());
  // `one` itself is the second reference.
  return one.use_count() == 2 && one.weak_use_count() == 1;
}

} // namespace

base::Result<c10::Storage> allocateOnHost(
    memory::BufferCache* cache,
    size_t size) {
  if (size < memory::kMinBlockBytes || cache == nullptr) {
    return makeStorage(c10::GetCPUAllocator()->allocate(size), size);
  }
  auto acquired = cache->acquire(size);
  if (!acquired.ok()) {
    return acquired.error();
  }
  Block& block = acquired.value();
  memory::SharedMap* const shared = block.shared();
  void* const data = block.data();
  return makeOwningStorage(std::move(block), shared, data, size);
}

c10::Storage adoptMemory(
    std::shared_ptr<memory::SharedMap> memory,
    const transport::ConnectionPtr& from,
    size_t size) {
  memory::SharedMap* const shared = memory.get();
  const auto home = shared->isForeign() ? from : nullptr;
  return makeOwningStorage(
      Mapped{std::move(memory), home}, shared, shared->data(), size);
}

c10::Storage copyBytesOf(base::ConstSpan bytes) {
  at::DataPtr data = c10::GetCPUAllocator()->allocate(bytes.size);
  if (bytes.size != 0) {
    std::memcpy(data.get(), bytes.data, bytes.size);
  }
  return makeStorage(std::move(data), bytes.size);
}

c10::Storage borrow(base::ConstSpan bytes) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      bytes.size,
      at::DataPtr(const_cast<void*>(bytes.data), at::Device(at::kCPU)));
}

c10::Storage metaStorage(size_t size) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      size,
      c10::GetAllocator(c10::DeviceType::Meta),
      /*resizable=*/true);
}

bool mayNeedGil(const c10::Storage& storage) {
  static const auto ofTorch = c10::GetCPUAllocator()->raw_deleter();
  const bool isKnown = storage.data_ptr().get_deleter() == ofTorch ||
      memoryOf<Block>(storage) != nullptr ||
      memoryOf<Mapped>(storage) != nullptr;
  return !isKnown || compat::hasPyObject(*storage.unsafeGetStorageImpl());
}

Block* soleBlock(const c10::Storage& storage) {
  Block* const block = memoryOf<Block>(storage);
  return block != nullptr && hasOneOwner(storage) ? block : nullptr;
}

std::shared_ptr<memory::SharedMap> giveable(
    const c10::Storage& storage,
    const transport::ConnectionPtr& to) {
  memory::SharedMap* map = nullptr;
  if (const Block* const block = memoryOf<Block>(storage)) {
    map = block->shared();
  } else if (const Mapped* const mapped = memoryOf<Mapped>(storage)) {
    map = mapped->home.lock() == to ? mapped->map.get() : nullptr;
  }
  if (map == nullptr || map->discarded() || map->isPrivate() ||
      !hasOneOwner(storage)) {
    return nullptr;
  }
  return {std::make_shared<c10::Storage>(storage), map};
}

} // namespace torch_rpc_ext::agent
