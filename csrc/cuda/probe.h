#pragma once

#include "base/bytes.h"
#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/ipc_import.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Whether two workers can use CUDA IPC: first what each says of itself, then a
// trial, because containers and drivers refuse for reasons that nobody can see.
namespace torch_rpc_ext::cuda {

inline constexpr size_t kMaxGpus = 64; // that a worker tells of

// What a worker tells its peers of itself.
struct Identity {
  struct Gpu {
    Uuid uuid;
    bool isMig = false;
    bool hasIpcEvents = false;
  };
  uint64_t bootId = 0; // hash of the kernel's boot id: the host
  uint64_t pidNamespace = 0; // inodes of /proc/self/ns
  uint64_t ipcNamespace = 0;
  int32_t pid = 0;
  std::vector<Gpu> gpus; // by index, at most kMaxGpus

  size_t wireBytes() const;
  void write(base::ByteWriter& writer) const;
  static base::Result<Identity> read(base::ByteReader& reader);
};

Identity identify(const Driver& driver);

// The index here of a peer's GPU, if this process can see it.
std::optional<int> findGpu(const Identity& self, const Identity::Gpu& gpu);

// Empty if memory on the peer's GPU `device` can be mapped here as far as can
// be told, else the reason, one line.
std::string whyNoIpc(const Identity& self, const Identity& peer, size_t device);

// A few bytes on a GPU that nobody else can know, for peers to try.
// Owns: its device memory.
// Thread: any.
class Trial {
 public:
  static base::Result<std::unique_ptr<Trial>>
  create(const std::shared_ptr<Driver>& driver, int device, uint64_t nonce);
  ~Trial();
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  const MemoryExport& exported() const {
    return exported_;
  }

  // At the peer: empty if it reads `nonce` there, else the reason, one line.
  // Waits for a copy of 8 bytes on a stream of its own, and for nothing else.
  static std::string attempt(
      const std::shared_ptr<Driver>& driver,
      MemoryImporter& importer,
      PeerKey peer,
      int device,
      const MemoryExport& exported,
      uint64_t nonce);

 private:
  Trial(std::shared_ptr<Driver> driver, int device, Address address);

  const std::shared_ptr<Driver> driver_;
  const int device_;
  const Address address_;
  MemoryExport exported_;
};

} // namespace torch_rpc_ext::cuda
