// memory::BufferCache, transport::ucx::bulk::SharedMaps on the cache's shared
// regions, and memory::SharedMap, which both use, while the process forks.

#include "memory/buffer_cache.h"
#include "sanitize/stress.h"
#include "transport/ucx/bulk/shared_maps.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <utility>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;
using memory::BufferCache;
using transport::ucx::BulkEntry;
using transport::ucx::bulk::SharedMaps;

namespace {

constexpr size_t kMib = size_t{1} << 20;

// A block has one owner: no other thread writes to it meanwhile.
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
      std::memcmp(mapped->data(), &number, sizeof(number)) == 0, "same memory");
  // The lender gets the block back and lends it again, before the peer has
  // unmapped it.
  require(maps.map(getpid(), entry) == mapped, "what is in use is mapped once");
}

// The child of a fork keeps its tensors' values, whatever the parent and the
// next users of the memory write. A lent block is mapped as a peer would map
// it, and this peer forks.
void leaveAChild(BufferCache& cache, SharedMaps& maps, unsigned number) {
  const size_t size = 8 * kMib;
  cache.share(size);
  auto result = cache.acquire(size);
  require(result.ok(), "there is memory");
  BufferCache::Block block = std::move(result.value());
  const auto region = block.region();
  std::shared_ptr<memory::SharedMap> mapped;
  if (number % 2 == 0 && region.id != 0) {
    const BulkEntry entry{size, 0, region.id, static_cast<uint64_t>(region.fd)};
    mapped = maps.map(getpid(), entry);
    require(mapped != nullptr, "a region of ours can be mapped");
  }
  memory::SharedMap* const held = mapped ? mapped.get() : block.shared();
  auto* const bytes =
      static_cast<unsigned char*>(mapped ? mapped->data() : block.data());
  std::optional<memory::SharedMap::Hold> hold(held);
  const auto mark = static_cast<unsigned char>(number | 1);
  bytes[0] = bytes[size / 2] = bytes[size - 1] = mark;
  bytes[1] = 0;
  int go[2];
  require(pipe(go) == 0, "a pipe");
  const pid_t child = fork();
  require(child >= 0, "a process");
  if (child == 0) {
    close(go[1]);
    char byte = 0;
    (void)!read(go[0], &byte, 1);
    const bool same =
        bytes[0] == mark && bytes[size / 2] == mark && bytes[size - 1] == mark;
    bytes[1] = 0xff;
    _exit(same ? 0 : 1);
  }
  require(
      held == nullptr || held->discarded(), "what a child has is discarded");
  bytes[0] = bytes[size / 2] = 0;
  if (mapped) {
    block.discard(); // the peer has told the lender of the fork
  }
  hold.reset();
  block = BufferCache::Block();
  use(cache, number);
  require(write(go[1], "", 1) == 1, "the child is told");
  close(go[0]);
  close(go[1]);
  int status = 0;
  require(waitpid(child, &status, 0) == child, "the child ends");
  require(status == 0, "the child has its values");
  if (mapped) {
    require(bytes[1] != 0xff && bytes[size - 1] == mark, "so has the parent");
  }
}

// A peer offers regions that do not exist.
void offer(SharedMaps& maps, unsigned number) {
  int ends[2];
  require(pipe(ends) == 0, "a pipe");
  const uint64_t fds[] = {
      static_cast<uint64_t>(ends[0]), 0, 1u << 20, UINT64_MAX, number % 64};
  for (const uint64_t fd : fds) {
    // Larger than any region of this process: the descriptor's number may by
    // now be that of a real region, which must be refused too.
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
  crowd.add(2, [&](auto& random) { leaveAChild(*cache, maps, random()); });
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
