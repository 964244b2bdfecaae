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

// What two workers of a host say to each other about CUDA IPC: the note of a
// frame (wire/call_frame.h), and messages of their own. Integers as in the call
// frame; all reads are bounded and fail with kInvalid.
namespace torch_rpc_ext::agent::device {

// kInvalid: the peer said something about CUDA IPC that cannot be true.
base::Error invalidIpc(const std::string& text);

// The note: where the tensors beside the frame are, and from when on.
//
//   8      token         names what the sender holds until it is released
//   4      events        number of events
//   65 n   events        device of the sender (1), handle
//   4      runs          number of runs
//   var    runs          device of the sender (1); number of storages n (4), 1
//                        or more; cuda::MemoryExport of their bytes; n times
//                        the number of a storage (4) among those of the frame
//                        that travel beside it; whether there is a checksum
//                        (1), and then cuda::MemoryExport of where its 8 bytes
//                        will be. Several storages follow each other, each from
//                        a multiple of 16 bytes on.
struct IpcNote {
  struct Event {
    uint8_t device = 0;
    cuda::IpcEventHandle handle;
  };
  struct Run {
    uint8_t device = 0;
    cuda::MemoryExport memory;
    std::vector<uint32_t> storages;
    std::optional<cuda::MemoryExport> sum = std::nullopt;
  };

  uint64_t token = 0;
  std::vector<Event> events;
  std::vector<Run> runs;

  base::Buffer write() const;
  // `sizes`: of the storages beside the frame. After it each of them is in one
  // run, and each run has as many bytes as its storages need.
  static base::Result<IpcNote> read(
      base::ConstSpan bytes,
      std::span<const uint64_t> sizes);
  // Of a note that may be anything.
  static base::Result<uint64_t> tokenOf(base::ConstSpan bytes);
};

// "This is me; try to read from my devices."
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

// The answer to an offer, and later on that it does not work any more.
struct IpcVerdict {
  // Whether somebody could do something about it.
  enum class Kind : uint8_t { kWorks = 0, kNatural = 1, kHindered = 2 };
  struct Device {
    uint8_t device = 0; // of the worker that offered
    Kind kind = Kind::kWorks;
    std::string why; // printable; empty if it works
  };

  std::vector<Device> devices;

  std::vector<char> write() const;
  static base::Result<IpcVerdict> read(base::ConstSpan bytes);
};

// "I have copied it."
std::vector<char> writeReleased(uint64_t token);
base::Result<uint64_t> readReleased(base::ConstSpan bytes);

} // namespace torch_rpc_ext::agent::device
