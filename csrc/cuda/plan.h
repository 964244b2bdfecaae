#pragma once

#include "base/error.h"
#include "cuda/driver_api.h"

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

// Plans copies of tensors: computes the arguments of the kernels. Gives the
// same results as plan.py and table.py of torch_rpc_ext/kernels, which
// tests/unit/test_cuda_kernels.py compares with this.
namespace torch_rpc_ext::cuda {

// Where a tensor begins in a gathered block, if the tensor before it ends at
// `end`: at a multiple of 16 bytes, so that elements of any dtype are aligned.
constexpr uint64_t aligned(uint64_t end) {
  return (end + 15) / 16 * 16;
}

inline constexpr size_t kMaxDims = 8;

enum class Cast : uint8_t {
  kNone, // a copy
  kFloat32ToBfloat16,
  kFloat32ToFloat16,
  kBfloat16ToFloat32,
  kFloat16ToFloat32,
};

// The last part of the names of the kernels that do this cast; "" for kNone.
const char* toString(Cast cast);

// A contiguous run of elements to copy or cast. In a copy an element is a byte.
struct Segment {
  Address source = 0;
  Address destination = 0;
  uint64_t elements = 0;
};

// A row of the table that the kernels segments* read; every field is an int64.
struct SegmentRow {
  int64_t source;
  int64_t destination;
  int64_t elements;
  int64_t firstChunk;
};
static_assert(sizeof(SegmentRow) == 32);

// Writes one row for each segment, and returns the number of chunks of at most
// `chunkElements` elements that the kernel has to copy.
int64_t writeTable(
    std::span<const Segment> segments,
    int64_t chunkElements,
    SegmentRow* rows);

// Where the elements of a tensor are. Strides are in bytes. The order of
// dimensions is torch's: the innermost comes last.
struct Layout {
  Address address = 0;
  uint64_t elementBytes = 1;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// The arguments of a kernel strided_*, in the kernel's order.
struct StridedCopy {
  int64_t source = 0;
  int64_t destination = 0;
  int64_t elements = 0; // in a copy: pieces of `width` bytes
  std::array<int64_t, kMaxDims> sizes{}; // the innermost first
  std::array<int64_t, kMaxDims> sourceStrides{};
  std::array<int64_t, kMaxDims> destinationStrides{};
  // Only for a copy: bytes that a thread moves at once. Part of the kernel's
  // name, not an argument.
  int64_t width = 0;
};

// Plans a copy or cast between two layouts of the same sizes, with as few
// dimensions and as wide accesses as possible. The destination's elements must
// not overlap. Fails with kUnsupported, so that torch has to copy, if more than
// kMaxDims dimensions are left or elements to cast are not aligned.
base::Result<StridedCopy>
planStrided(const Layout& source, const Layout& destination, Cast cast);

// The kernels' names.
std::string segmentsName(Cast cast);
std::string stridedName(const StridedCopy& copy, Cast cast);

} // namespace torch_rpc_ext::cuda
