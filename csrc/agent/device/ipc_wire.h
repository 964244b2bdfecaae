#pragma once

#include "base/buffer.h"
#include "base/bytes.h"
#include "base/error.h"
#include "cuda/ipc_export.h"
#include "cuda/probe.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

// The wire format of CUDA IPC between two workers of a host: the note of a
// frame (wire/call_frame.h), and separate messages. Integers are little-endian
// and unaligned. All reads are bounded, and fail with kInvalid.
namespace torch_rpc_ext::agent::device {

// A kInvalid error: the peer sent bytes about CUDA IPC that cannot be right.
base::Error invalidIpc(const std::string& text);

// The note tells where the tensors beside the frame are. Their bytes are there
// when the frame arrives.
//
//   8      token         names what the sender holds until kReleased comes
//   4      runs          number of runs
//   var    runs          of each run:
//                        device of the sender (1)
//                        number of storages n (4), at least 1
//                        cuda::MemoryExport of the storages' bytes: one storage
//                        after the other, each at a multiple of 16 bytes
//                        n times the number of a storage (4), counted among the
//                        storages beside the frame
//                        whether there is a checksum (1), and if so
//                        cuda::MemoryExport of where its 8 bytes will be
struct IpcNote {
  struct Run {
    uint8_t device = 0;
    cuda::MemoryExport memory;
    std::vector<uint32_t> storages;
    std::optional<cuda::MemoryExport> sum = std::nullopt;
  };

  uint64_t token = 0;
  std::vector<Run> runs;

  base::Buffer write() const;
  // `sizes` are those of the storages beside the frame. Checks that each of
  // these storages is in exactly one run, and that each run has as many bytes
  // as its storages need.
  static base::Result<IpcNote> read(
      base::ConstSpan bytes,
      std::span<const uint64_t> sizes);
  // Only the token, of a note that may be malformed.
  static base::Result<uint64_t> tokenOf(base::ConstSpan bytes);
};

// kOffer: the sender's identity, and what the receiver shall try to read.
struct IpcOffer {
  struct Trial {
    uint8_t device = 0;
    uint64_t nonce = 0;
    cuda::MemoryExport memory;
  };

  cuda::Identity identity;
  std::vector<Trial> trials;

  std::vector<char> write() const;
  static base::Result<IpcOffer> read(base::ConstSpan bytes);
};

// kVerdict: the answer to an offer. May come again later, for a device from
// which reading does not work any more.
struct IpcVerdict {
  // kNatural: it cannot work between these workers, so nothing is wrong.
  // kHindered: a user could change what prevents it.
  enum class Kind : uint8_t { kWorks = 0, kNatural = 1, kHindered = 2 };
  struct Device {
    uint8_t device = 0; // of the worker that made the offer
    Kind kind = Kind::kWorks;
    std::string why; // printable; empty if it works
  };

  std::vector<Device> devices;

  std::vector<char> write() const;
  static base::Result<IpcVerdict> read(base::ConstSpan bytes);
};

// kReleased: the receiver's copies are over.
std::vector<char> writeReleased(uint64_t token);
base::Result<uint64_t> readReleased(base::ConstSpan bytes);

} // namespace torch_rpc_ext::agent::device
