#pragma once

#include "base/error.h"
#include "cuda/driver_api.h"

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

// From tensors to the arguments of kernels, as torch_rpc_ext/kernels/plan.py
// and table.py have it (tests/unit/test_cuda_kernels.py compares them).
namespace torch_rpc_ext::cuda {

inline constexpr uint64_t kBlockAlignment = 16; // of tensors in a block
inline constexpr size_t kMaxDims = 8;

enum class Cast : uint8_t {
  kNone, // a copy
  kFloat32ToBfloat16,
  kFloat32ToFloat16,
  kBfloat16ToFloat32,
  kFloat16ToFloat32,
};

// The end of its kernels' names; empty for kNone.
const char* toString(Cast cast);

// A contiguous run to copy or cast; elements are bytes in a copy.
struct Segment {
  Address source = 0;
  Address destination = 0;
  uint64_t elements = 0;
};

// Row of the table that the kernels `segments` read, all int64.
struct SegmentRow {
  int64_t source;
  int64_t destination;
  int64_t elements;
  int64_t firstChunk;
};
static_assert(sizeof(SegmentRow) == 32);

// Writes one row for each segment; returns the number of chunks.
int64_t writeTable(
    std::span<const Segment> segments,
    int64_t chunkElements,
    SegmentRow* rows);

// Where the elements of a tensor are; strides in bytes, dimensions as torch has
// them, the innermost last.
struct Layout {
  Address address = 0;
  uint64_t elementBytes = 1;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// The arguments of a kernel `strided_...`, in their order.
struct StridedCopy {
  int64_t source = 0;
  int64_t destination = 0;
  int64_t elements = 0; // pieces that threads move at once
  std::array<int64_t, kMaxDims> sizes{}; // the innermost first
  std::array<int64_t, kMaxDims> sourceStrides{};
  std::array<int64_t, kMaxDims> destinationStrides{};
  int64_t width = 0; // bytes of a piece; not an argument
};

// The fewest dimensions and the widest accesses for a copy or cast between two
// layouts of the same sizes; the destination's elements must not overlap.
// kUnsupported if more than kMaxDims dimensions are left: let torch copy.
base::Result<StridedCopy>
planStrided(const Layout& source, const Layout& destination, Cast cast);

// The kernels' names.
std::string segmentsName(Cast cast);
std::string stridedName(const StridedCopy& copy, Cast cast);

} // namespace torch_rpc_ext::cuda
