#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "memory/buffer_cache.h"
#include "transport/transport.h"

#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>

// Makes storages on the CPU over memory of several kinds, and on the meta
// device without memory. All but those of borrow() are resizable, because the
// receiver of a tensor may resize_() it.
namespace torch_rpc_ext::agent {

// Takes a block of the cache, or memory of torch's allocator for a small size
// or where `cache` is null.
base::Result<c10::Storage> allocateOnHost(
    memory::BufferCache* cache,
    size_t size);

// A storage over memory that came mapped over `from`.
c10::Storage adoptMemory(
    std::shared_ptr<memory::SharedMap> memory,
    const transport::ConnectionPtr& from,
    size_t size);

c10::Storage copyBytesOf(base::ConstSpan bytes);

// A storage over `bytes`, to be used only while they exist.
c10::Storage borrow(base::ConstSpan bytes);

// On the meta device: a size without bytes.
c10::Storage metaStorage(size_t size);

// The block of the cache that a storage lies in; null if there is none, or if
// somebody else refers to the storage, too.
memory::BufferCache::Block* soleBlock(const c10::Storage& storage);

// Whether the GIL may be needed to drop the storage. It is not if the memory
// comes from torch's allocator or from this file, and Python has no object for
// the storage.
bool mayNeedGil(const c10::Storage& storage);

// The shared memory that a storage lies in, with the storage, if it can be
// given away over `to`: nobody else refers to the storage, not even a forked
// child of this process, and the memory is a block of the cache or came mapped
// over `to`. Else null.
std::shared_ptr<memory::SharedMap> giveable(
    const c10::Storage& storage,
    const transport::ConnectionPtr& to);

} // namespace torch_rpc_ext::agent
