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

// Finds out whether two workers can use CUDA IPC. First they compare what each
// says about itself. Then one tries to read from the other, because containers
// and drivers may refuse for reasons that cannot be seen beforehand.
namespace torch_rpc_ext::cuda {

inline constexpr size_t kMaxGpus = 64; // in an Identity

// What a worker tells its peers about itself.
struct Identity {
  struct Gpu {
    Uuid uuid;
    bool isMig = false;
  };
  uint64_t bootId = 0; // base::bootId(): the host
  uint64_t pidNamespace = 0; // base::namespaceOf()
  uint64_t ipcNamespace = 0;
  int32_t pid = 0;
  std::vector<Gpu> gpus; // by index, at most kMaxGpus

  size_t wireBytes() const;
  void write(base::ByteWriter& writer) const;
  static base::Result<Identity> read(base::ByteReader& reader);
};

Identity identify(const Driver& driver);

// This process's index of a peer's GPU, if this process can see the GPU.
std::optional<int> findGpu(const Identity& self, const Identity::Gpu& gpu);

// Why memory on the peer's GPU `device` cannot be mapped in this process, in
// one line. Empty if nothing speaks against a trial.
std::string whyNoIpc(const Identity& self, const Identity& peer, size_t device);

// A random number in device memory. A peer that reads it there has proved that
// CUDA IPC works from this process to the peer.
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

  // For the peer: tries to read `nonce`. Returns an empty string if that works,
  // else the reason in one line. Waits for a copy of 8 bytes on a stream of its
  // own, not for other work on the device.
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
