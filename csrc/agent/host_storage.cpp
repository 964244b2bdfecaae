#include "agent/host_storage.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
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
using HeldBlock = HeldMemory<Block>;
// Memory that came mapped over a connection.
struct Mapped {
  std::shared_ptr<memory::SharedMap> map;
  // Where the memory can be given back; null if it is this process's own, which
  // has come back.
  std::weak_ptr<transport::Connection> home;
};
using HeldMapped = HeldMemory<Mapped>;

void deleteBlock(void* held) {
  delete static_cast<HeldBlock*>(held);
}

void deleteMapped(void* held) {
  delete static_cast<HeldMapped*>(held);
}

bool hasOneOwner(const c10::Storage& storage) {
  const auto one = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      storage.unsafeGetStorageImpl());
  // `one` itself is the second reference.
  return one.use_count() == 2 && one.weak_use_count() == 1;
}

Block* blockOf(const c10::Storage& storage) {
  return storage.data_ptr().get_deleter() == deleteBlock
      ? &static_cast<HeldBlock*>(storage.data_ptr().get_context())->memory
      : nullptr;
}

c10::Storage adoptBlock(Block block) {
  memory::SharedMap* const shared = block.shared();
  std::unique_ptr<HeldBlock> owner(
      new HeldBlock{std::move(block), memory::SharedMap::Hold(shared)});
  void* const data = owner->memory.data();
  const size_t size = owner->memory.size();
  at::DataPtr pointer(data, owner.release(), deleteBlock, at::Device(at::kCPU));
  return makeStorage(std::move(pointer), size);
}

} // namespace

base::Result<c10::Storage> allocateOnHost(
    memory::BufferCache* cache,
    size_t size) {
  if (size < memory::kMinBlockBytes || cache == nullptr) {
    return makeStorage(c10::GetCPUAllocator()->allocate(size), size);
  }
  auto block = cache->acquire(size);
  if (!block.ok()) {
    return block.error();
  }
  return adoptBlock(std::move(block.value()));
}

c10::Storage adoptMemory(
    std::shared_ptr<memory::SharedMap> memory,
    const transport::ConnectionPtr& from,
    size_t size) {
  memory::SharedMap* const shared = memory.get();
  const auto home = shared->isForeign() ? from : nullptr;
  std::unique_ptr<HeldMapped> owner(new HeldMapped{
      {std::move(memory), home}, memory::SharedMap::Hold(shared)});
  at::DataPtr pointer(
      shared->data(), owner.release(), deleteMapped, at::Device(at::kCPU));
  return makeStorage(std::move(pointer), size);
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

Block* soleBlock(const c10::Storage& storage) {
  Block* const block = blockOf(storage);
  return block != nullptr && hasOneOwner(storage) ? block : nullptr;
}

std::shared_ptr<memory::SharedMap> giveable(
    const c10::Storage& storage,
    const transport::ConnectionPtr& to) {
  memory::SharedMap* map = nullptr;
  if (const Block* const block = blockOf(storage)) {
    map = block->shared();
  } else if (storage.data_ptr().get_deleter() == deleteMapped) {
    const Mapped& mapped =
        static_cast<HeldMapped*>(storage.data_ptr().get_context())->memory;
    map = mapped.home.lock() == to ? mapped.map.get() : nullptr;
  }
  if (map == nullptr || map->discarded() || map->isPrivate() ||
      !hasOneOwner(storage)) {
    return nullptr;
  }
  return {std::make_shared<c10::Storage>(storage), map};
}

} // namespace torch_rpc_ext::agent
