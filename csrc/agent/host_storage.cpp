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
using HeldAdopted = HeldMemory<transport::Adopted>;

void deleteBlock(void* held) {
  delete static_cast<HeldBlock*>(held);
}

void deleteAdopted(void* held) {
  delete static_cast<HeldAdopted*>(held);
}

bool hasOneOwner(const c10::Storage& storage) {
  const auto one = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
      storage.unsafeGetStorageImpl());
  // `one` itself is the second reference.
  return one.use_count() == 2 && one.weak_use_count() == 1;
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

c10::Storage adoptMemory(transport::Adopted adopted, size_t size) {
  memory::SharedMap* const shared = adopted.memory.get();
  std::unique_ptr<HeldAdopted> owner(
      new HeldAdopted{std::move(adopted), memory::SharedMap::Hold(shared)});
  void* const data = shared->data();
  at::DataPtr pointer(
      data, owner.release(), deleteAdopted, at::Device(at::kCPU));
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

Block* blockOf(const c10::Storage& storage) {
  return storage.data_ptr().get_deleter() == deleteBlock
      ? &static_cast<HeldBlock*>(storage.data_ptr().get_context())->memory
      : nullptr;
}

Block* soleBlock(const c10::Storage& storage) {
  Block* const block = blockOf(storage);
  return block != nullptr && hasOneOwner(storage) ? block : nullptr;
}

uint64_t returnable(
    const c10::Storage& storage,
    const transport::ConnectionPtr& to) {
  if (storage.data_ptr().get_deleter() != deleteAdopted ||
      !hasOneOwner(storage)) {
    return 0;
  }
  const transport::Adopted& adopted =
      static_cast<HeldAdopted*>(storage.data_ptr().get_context())->memory;
  return adopted.home.lock() == to && !adopted.memory->discarded()
      ? adopted.region
      : 0;
}

} // namespace torch_rpc_ext::agent
