#pragma once

#include <cstdint>

namespace torch_rpc_ext::wire {

// What a frame may announce. A sender that exceeds one gets an error; a
// receiver refuses the frame before it allocates anything.

// Tensors in one message; parts of sparse and quantised tensors count too.
inline constexpr uint32_t kMaxTensors = 1u << 20;
inline constexpr uint32_t kMaxStorages = 1u << 20;
inline constexpr uint32_t kMaxDims = 64;

// Beyond every machine's memory, and small enough that sums of a few cannot
// overflow 64 bits.
inline constexpr uint64_t kMaxPayloadBytes = uint64_t{1} << 40;
inline constexpr uint64_t kMaxStorageBytes = uint64_t{1} << 46;
inline constexpr uint64_t kMaxFrameBytes = uint64_t{1} << 46;

// What the way beside a frame says: some 120 bytes for each storage.
inline constexpr uint64_t kMaxNoteBytes = uint64_t{1} << 27;

// Only a tensor without elements may start beyond its storage.
inline constexpr int64_t kMaxStorageOffset = int64_t{1} << 56;

} // namespace torch_rpc_ext::wire
