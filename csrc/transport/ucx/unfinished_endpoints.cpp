#include "transport/ucx/unfinished_endpoints.h"

#include "base/boundary.h"
#include "base/log.h"
#include "base/synchronized.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_set>

namespace torch_rpc_ext::transport::ucx {

namespace {

// The parts of UCX that this file knows.
// Source: struct ucp_ep in UCX's ucp_ep.h, UCP_WORKER_CFG_INDEX_NULL in
// ucp_types.h, and the callers in wireup.c
struct Layout {
  unsigned firstMinor; // 1.18 for example is 18
  unsigned lastMinor;
  const char* function; // marks an endpoint as failed
  size_t configuration; // the offset of the endpoint's configuration number
  size_t bytes; // of that number, of which all bits are 1 for "none"
};
constexpr Layout kLayouts[] = {
    {18, 20, "ucp_ep_set_failed_schedule", 9, 1},
    {21, 22, "ucp_ep_set_lanes_failed_schedule", 8, 2},
};
const Layout* layout = nullptr;

// The functions of kLayouts: both have three arguments, of which the second is
// an integer.
using SetFailed = void (*)(ucp_ep_h, uint64_t lanes, ucs_status_t);
SetFailed originalSetFailed = nullptr;

// Takes an endpoint that waits for its other half out of a table: one that the
// first message of a peer has made, where this process connects to that peer.
// Source: UCX's ucp_ep_match.c; the last two arguments are smaller integers.
constexpr const char* kRetrieve = "ucp_ep_match_retrieve";
using Retrieve =
    ucp_ep_h (*)(ucp_worker_h, uint64_t peer, uint64_t number, uint64_t queue);
Retrieve originalRetrieve = nullptr;

bool isUnfinished(ucp_ep_h endpoint) {
  constexpr std::array<unsigned char, 2> kNone{0xff, 0xff};
  const auto* const begin = reinterpret_cast<const unsigned char*>(endpoint);
  return std::memcmp(
             begin + layout->configuration, kNone.data(), layout->bytes) == 0;
}

// An endpoint begins with a pointer to its worker.
ucp_worker_h workerOf(ucp_ep_h endpoint) {
  ucp_worker_h worker = nullptr;
  std::memcpy(&worker, endpoint, sizeof(worker));
  return worker;
}

using Workers = base::Synchronized<std::unordered_set<ucp_worker_h>>;
// UCX never destroys these workers, so no other worker gets the same address.
Workers& workers() {
  static auto* const set = new Workers();
  return *set;
}

// What UCX calls in place of the original.
void setFailed(
    ucp_ep_h endpoint,
    uint64_t lanes,
    ucs_status_t status) noexcept {
  if (!isUnfinished(endpoint)) {
    originalSetFailed(endpoint, lanes, status);
    return;
  }
  base::caughtHere(base::Boundary::kBroken, [&] {
    workers().lock()->insert(workerOf(endpoint));
    base::log(
        base::LogLevel::kInfo,
        std::string(
            "UCX found no way to answer the first message of a process of this "
            "host, which may have ended (") +
            ucs_status_string(status) + ")");
  });
}

// What UCX calls in place of the original. An unfinished endpoint is not handed
// out: ucp_ep_create() would read its configuration.
ucp_ep_h retrieve(
    ucp_worker_h worker,
    uint64_t peer,
    uint64_t number,
    uint64_t queue) noexcept {
  ucp_ep_h endpoint = originalRetrieve(worker, peer, number, queue);
  return endpoint != nullptr && isUnfinished(endpoint) ? nullptr : endpoint;
}

// Where libucp keeps the address of the imported function. Null if it imports
// no such function.
// Source: elf(5), DT_JMPREL; the System V ABI for x86-64 and AArch64
void** entryOf(const link_map& library, const char* function) {
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela)* relocations = nullptr;
  size_t bytes = 0;
  for (const ElfW(Dyn)* entry = library.l_ld; entry->d_tag != DT_NULL;
       ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr);
        break;
      case DT_STRTAB:
        names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
        break;
      case DT_JMPREL:
        relocations = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
        break;
      case DT_PLTRELSZ:
        bytes = entry->d_un.d_val;
        break;
      default:
        break;
    }
  }
  if (symbols == nullptr || names == nullptr || relocations == nullptr) {
    return nullptr;
  }
  for (size_t i = 0; i < bytes / sizeof(ElfW(Rela)); ++i) {
    const auto symbol = ELF64_R_SYM(relocations[i].r_info);
    if (std::string(names + symbols[symbol].st_name) == function) {
      return reinterpret_cast<void**>(library.l_addr + relocations[i].r_offset);
    }
  }
  return nullptr;
}

const Layout* layoutOfThisVersion() {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  for (const Layout& known : kLayouts) {
    if (major == 1 && minor >= known.firstMinor && minor <= known.lastMinor) {
      return &known;
    }
  }
  return nullptr;
}

// Replaces a function that libucp calls by way of its own table, and keeps the
// original.
void replace(
    const link_map& library,
    void* handle,
    const char* function,
    void* replacement,
    void** original) {
  void** const entry = entryOf(library, function);
  *original = entry == nullptr ? nullptr : dlsym(handle, function);
  const size_t page = sysconf(_SC_PAGESIZE);
  const auto begin = reinterpret_cast<uintptr_t>(entry) & ~(page - 1);
  // The linker may have made the table read-only (RELRO).
  if (*original == nullptr ||
      mprotect(reinterpret_cast<void*>(begin), page, PROT_READ | PROT_WRITE) !=
          0) {
    base::log(
        base::LogLevel::kInfo,
        std::string(
            "UCX is not guarded against peers that it cannot answer: ") +
            library.l_name + " does not call " + function + " by its name");
    return;
  }
  __atomic_store_n(entry, replacement, __ATOMIC_RELEASE);
}

void guard() {
  layout = layoutOfThisVersion();
  if (layout == nullptr) {
    return;
  }
  Dl_info info{};
  link_map* library = nullptr;
  if (dladdr1(
          reinterpret_cast<void*>(&ucp_get_version),
          &info,
          reinterpret_cast<void**>(&library),
          RTLD_DL_LINKMAP) == 0 ||
      library == nullptr) {
    return;
  }
  void* const handle =
      dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_LOCAL);
  if (handle == nullptr) {
    return;
  }
  replace(
      *library,
      handle,
      kRetrieve,
      reinterpret_cast<void*>(&retrieve),
      reinterpret_cast<void**>(&originalRetrieve));
  replace(
      *library,
      handle,
      layout->function,
      reinterpret_cast<void*>(&setFailed),
      reinterpret_cast<void**>(&originalSetFailed));
  dlclose(handle);
}

} // namespace

void guardUnfinishedEndpoints() {
  static std::once_flag once;
  std::call_once(once, guard);
}

bool hasUnfinishedEndpoint(ucp_worker_h worker) {
  return workers().lock()->count(worker) != 0;
}

} // namespace torch_rpc_ext::transport::ucx
