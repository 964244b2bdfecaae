#include "agent/device/gather.h"

#include "agent/device/bytes_view.h"
#include "agent/wire_dtype.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/GradMode.h>

namespace torch_rpc_ext::agent::device {

namespace {

using wire::WireDtype;

enum class Direction : bool { kGather, kScatter };

cuda::Cast castOf(WireDtype dtype, Direction direction) {
  const bool out = direction == Direction::kGather;
  switch (dtype) {
    case WireDtype::kBfloat16:
      return out ? cuda::Cast::kFloat32ToBfloat16
                 : cuda::Cast::kBfloat16ToFloat32;
    case WireDtype::kFloat16:
      return out ? cuda::Cast::kFloat32ToFloat16
                 : cuda::Cast::kFloat16ToFloat32;
    case WireDtype::kFloat32:
      break;
  }
  return cuda::Cast::kNone;
}

// The slices of this dtype that are runs of bytes, without scattered elements.
std::vector<Slice> ofDtype(const std::vector<Slice>& slices, WireDtype dtype) {
  std::vector<Slice> some;
  for (const Slice& slice : slices) {
    if (slice.dtype == dtype && slice.scattered == nullptr) {
      some.push_back(slice);
    }
  }
  return some;
}

bool launch(
    const std::vector<Slice>& slices,
    const c10::Storage& block,
    Direction direction,
    Launcher& launcher) {
  const auto begin = reinterpret_cast<cuda::Address>(block.data());
  const WireDtype dtype = slices.front().dtype;
  std::vector<cuda::Segment> runs;
  runs.reserve(slices.size());
  for (const Slice& slice : slices) {
    const cuda::Address address = slice.address();
    if (slice.narrowed() && address % sizeof(float) != 0) {
      return false; // not aligned: not memory of torch's allocator
    }
    const uint64_t elements =
        slice.narrowed() ? slice.bytes / sizeof(float) : slice.bytes;
    const cuda::Address place = begin + slice.offset;
    runs.push_back(
        direction == Direction::kGather
            ? cuda::Segment{address, place, elements}
            : cuda::Segment{place, address, elements});
  }
  return launcher.segments(block.device(), runs, castOf(dtype, direction));
}

void copyByTorch(
    const std::vector<Slice>& slices,
    const c10::Storage& block,
    Direction direction) {
  std::vector<at::Tensor> storages;
  std::vector<at::Tensor> places;
  for (const Slice& slice : slices) {
    const bool narrowed = slice.narrowed();
    storages.push_back(viewOf(
        slice.storage,
        slice.begin,
        slice.bytes,
        narrowed ? c10::kFloat : c10::kByte));
    places.push_back(viewOf(
        block,
        slice.offset,
        slice.size(),
        narrowed ? toTorch(slice.dtype) : c10::kByte));
  }
  const c10::NoGradGuard noGrad;
  if (direction == Direction::kGather) {
    at::_foreach_copy_(places, storages, /*non_blocking=*/true);
  } else {
    at::_foreach_copy_(storages, places, /*non_blocking=*/true);
  }
}

void copy(
    const std::vector<Slice>& slices,
    const c10::Storage& block,
    Direction direction,
    Launcher* launcher) {
  for (const auto dtype :
       {WireDtype::kFloat32, WireDtype::kBfloat16, WireDtype::kFloat16}) {
    const auto some = ofDtype(slices, dtype);
    if (some.empty()) {
      continue;
    }
    if (launcher == nullptr || !launch(some, block, direction, *launcher)) {
      copyByTorch(some, block, direction);
    }
  }
}

cuda::Layout layoutOf(
    cuda::Address address,
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& strides,
    size_t elementBytes) {
  cuda::Layout layout{address, elementBytes, sizes, strides};
  for (int64_t& stride : layout.strides) {
    stride *= static_cast<int64_t>(elementBytes);
  }
  return layout;
}

// Copies a region with scattered elements into the block, without a temporary
// tensor.
void pack(const Slice& slice, const c10::Storage& block, Launcher* launcher) {
  const Scattered& from = *slice.scattered;
  const c10::ScalarType dtype =
      slice.narrowed() ? toTorch(slice.dtype) : from.dtype;
  if (launcher != nullptr && block.device() == slice.device() &&
      launcher->strided(
          block.device(),
          layoutOf(
              slice.address(),
              from.sizes,
              from.strides,
              c10::elementSize(from.dtype)),
          layoutOf(
              reinterpret_cast<cuda::Address>(block.data()) + slice.offset,
              from.sizes,
              from.packedStrides,
              c10::elementSize(dtype)),
          castOf(slice.dtype, Direction::kGather))) {
    return;
  }
  const c10::NoGradGuard noGrad;
  viewOf(block, slice.offset, from.sizes, from.packedStrides, dtype)
      .copy_(
          viewOf(
              slice.storage, slice.begin, from.sizes, from.strides, from.dtype),
          /*non_blocking=*/true);
}

} // namespace

void gather(
    const std::vector<Slice>& slices,
    const c10::Storage& block,
    Launcher* launcher) {
  copy(slices, block, Direction::kGather, launcher);
  for (const Slice& slice : slices) {
    if (slice.scattered != nullptr) {
      pack(slice, block, launcher);
    }
  }
}

void scatter(
    const c10::Storage& block,
    const std::vector<Slice>& slices,
    Launcher* launcher) {
  copy(slices, block, Direction::kScatter, launcher);
}

} // namespace torch_rpc_ext::agent::device
