#pragma once

#include <cstdint>

namespace torch_rpc_ext::wire {

// Limits of what a frame may announce. A sender that exceeds a limit gets an
// error; a receiver refuses the frame before it allocates anything.

// Tensor records in one message: the parts of sparse and quantised tensors
// count too.
inline constexpr uint32_t kMaxRecords = 1u << 20;
inline constexpr uint32_t kMaxStorages = 1u << 20;
inline constexpr uint32_t kMaxDims = 64;

// Sizes beyond the memory of any machine. The sum of many of them overflows 64
// bits, so a sum has to be checked at each step.
inline constexpr uint64_t kMaxPayloadBytes = uint64_t{1} << 40;
inline constexpr uint64_t kMaxStorageBytes = uint64_t{1} << 46;
inline constexpr uint64_t kMaxFrameBytes = uint64_t{1} << 46;

// The note (see call_frame.h) takes some 120 bytes for each storage that
// travels beside the frame.
inline constexpr uint64_t kMaxNoteBytes = uint64_t{1} << 27;

// In elements. More than any storage has, because a tensor without elements may
// begin beyond the end of its storage.
inline constexpr int64_t kMaxStorageOffset = int64_t{1} << 56;

} // namespace torch_rpc_ext::wire
