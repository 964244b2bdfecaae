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

// A storage over memory of a peer.
c10::Storage adoptMemory(transport::Adopted adopted, size_t size);

c10::Storage copyBytesOf(base::ConstSpan bytes);

// A storage over `bytes`, to be used only while they exist.
c10::Storage borrow(base::ConstSpan bytes);

// On the meta device: a size without bytes.
c10::Storage metaStorage(size_t size);

// The block of the cache that a storage lies in, or null.
memory::BufferCache::Block* blockOf(const c10::Storage& storage);
// The same if nobody else refers to the storage, else null.
memory::BufferCache::Block* soleBlock(const c10::Storage& storage);

// The region of a storage over adopted memory that can be given back over `to`:
// it came over that connection, and nobody else uses it, not even a forked
// child of this process. Else 0.
uint64_t returnable(
    const c10::Storage& storage,
    const transport::ConnectionPtr& to);

} // namespace torch_rpc_ext::agent
