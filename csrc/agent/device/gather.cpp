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

std::vector<Slice> ofDtype(const std::vector<Slice>& slices, WireDtype dtype) {
  std::vector<Slice> some;
  for (const Slice& slice : slices) {
    if (slice.dtype == dtype) {
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
    const auto address = reinterpret_cast<cuda::Address>(slice.storage.data());
    if (slice.narrowed() && address % sizeof(float) != 0) {
      return false; // no memory of torch's allocator
    }
    const uint64_t elements = slice.narrowed()
        ? slice.storage.nbytes() / sizeof(float)
        : slice.size();
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
    const size_t size = slice.storage.nbytes();
    const bool narrowed = slice.narrowed();
    storages.push_back(
        viewOf(slice.storage, 0, size, narrowed ? c10::kFloat : c10::kByte));
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

} // namespace

void gather(
    const std::vector<Slice>& slices,
    const c10::Storage& block,
    Launcher* launcher) {
  copy(slices, block, Direction::kGather, launcher);
}

void scatter(
    const c10::Storage& block,
    const std::vector<Slice>& slices,
    Launcher* launcher) {
  copy(slices, block, Direction::kScatter, launcher);
}

} // namespace torch_rpc_ext::agent::device
