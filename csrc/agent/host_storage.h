#pragma once

#include "base/buffer.h"
#include "base/error.h"
#include "memory/buffer_cache.h"
#include "transport/transport.h"

#include <c10/core/Storage.h>

#include <cstddef>
#include <memory>

// Storages of the CPU over memory of every kind, and of the meta device without
// any. Resizable, as every tensor that is made here: the receiver may resize_()
// it.
namespace torch_rpc_ext::agent {

// A block of the cache; torch's memory for small ones and where there is none.
base::Result<c10::Storage> allocateOnHost(
    memory::BufferCache* cache,
    size_t size);

// Of a peer.
c10::Storage adoptMemory(transport::Adopted adopted, size_t size);

c10::Storage copyBytesOf(base::ConstSpan bytes);

// Only for as long as the bytes are there.
c10::Storage borrow(base::ConstSpan bytes);

// Of the meta device: a size, and no bytes.
c10::Storage metaStorage(size_t size);

// The block of the cache that a storage is, or null.
memory::BufferCache::Block* blockOf(const c10::Storage& storage);
// The same, when nobody else refers to the storage.
memory::BufferCache::Block* soleBlock(const c10::Storage& storage);

// The region of adopted memory that nobody else refers to, no child of this
// process either, when it came over `to` and can go back there; else 0.
uint64_t returnable(
    const c10::Storage& storage,
    const transport::ConnectionPtr& to);

} // namespace torch_rpc_ext::agent
