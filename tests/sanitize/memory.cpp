// memory::BufferCache, and transport::ucx::SharedMaps over its shared regions.

#include "memory/buffer_cache.h"
#include "sanitize/stress.h"
#include "transport/ucx/shared_maps.h"

#include <unistd.h>

#include <cstring>
#include <memory>
#include <utility>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;
using memory::BufferCache;
using transport::ucx::BulkEntry;
using transport::ucx::SharedMaps;

namespace {

constexpr size_t kMib = size_t{1} << 20;

// A block has one owner: nobody else writes to it meanwhile.
void use(BufferCache& cache, unsigned number) {
  auto result = cache.acquire(kMib * (1 + number % 4) - number % 100);
  require(result.ok(), "there is memory");
  BufferCache::Block block = std::move(result.value());
  auto* bytes = static_cast<unsigned char*>(block.data());
  const auto mark = static_cast<unsigned char>(number);
  bytes[0] = bytes[block.size() - 1] = mark;
  std::this_thread::yield();
  require(
      bytes[0] == mark && bytes[block.size() - 1] == mark,
      "a block has one owner");
  BufferCache::Block moved;
  moved = std::move(block);
  if (number % 16 == 0) {
    moved.discard();
  }
}

// Lends a block of shared memory, and maps it as a peer would.
void lend(BufferCache& cache, SharedMaps& maps, unsigned number) {
  const size_t size = 8 * kMib;
  cache.share(size);
  auto result = cache.acquire(size);
  require(result.ok(), "there is memory");
  BufferCache::Block block = std::move(result.value());
  if (block.region().id == 0) {
    return; // too many are shared already
  }
  std::memcpy(block.data(), &number, sizeof(number));
  const BulkEntry entry{
      size, 0, block.region().id, static_cast<uint64_t>(block.region().fd)};
  const auto mapped = maps.map(getpid(), entry);
  require(mapped != nullptr, "a region of ours can be mapped");
  require(
      std::memcmp(mapped.get(), &number, sizeof(number)) == 0, "same memory");
  // It came back, and goes out again, before the peer has let go.
  require(maps.map(getpid(), entry) == mapped, "what is in use is mapped once");
}

// What a peer offers that does not have it.
void offer(SharedMaps& maps, unsigned number) {
  int ends[2];
  require(pipe(ends) == 0, "a pipe");
  const uint64_t fds[] = {
      static_cast<uint64_t>(ends[0]), 0, 1u << 20, UINT64_MAX, number % 64};
  for (const uint64_t fd : fds) {
    // Larger than what a region here has: one of a neighbour's is refused, too.
    const BulkEntry entry{uint64_t{1} << 40, 0, number, fd};
    require(maps.map(getpid(), entry) == nullptr, "not a region");
    require(maps.map(-1, entry) == nullptr, "not a process");
  }
  close(ends[0]);
  close(ends[1]);
}

} // namespace

int main(int count, char** arguments) {
  auto cache = std::make_unique<BufferCache>(16 * kMib);
  SharedMaps maps;
  Crowd crowd;
  crowd.add(3, [&](auto& random) { use(*cache, random()); });
  crowd.add(2, [&](auto& random) { lend(*cache, maps, random()); });
  crowd.add(1, [&](auto& random) { offer(maps, random()); });
  crowd.add(1, [&](auto& random) {
    cache->trim(std::chrono::microseconds(random() % 1000));
    maps.trim(std::chrono::microseconds(random() % 1000));
    maps.forget(random() % 2 == 0 ? getpid() : 1);
    (void)cache->stats();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  });
  require(crowd.run(seconds(count, arguments)) > 100, "something was done");
  maps.trim({});
  require(maps.trim({}) == 0, "no map is lost");
  require(cache->stats().usedBytes == 0, "no block is lost");
  auto last = cache->acquire(kMib);
  cache.reset();
  require(last.ok(), "a block outlives its cache");
  std::memset(last.value().data(), 1, kMib);
  return 0;
}
