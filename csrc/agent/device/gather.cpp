#include "agent/device/gather.h"

#include "agent/device/bytes_view.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/GradMode.h>

namespace torch_rpc_ext::agent::device {

namespace {

struct Lists {
  std::vector<at::Tensor> storages;
  std::vector<at::Tensor> places;
};

Lists listsOf(const std::vector<Slice>& slices, const c10::Storage& block) {
  Lists lists;
  lists.storages.reserve(slices.size());
  lists.places.reserve(slices.size());
  for (const Slice& slice : slices) {
    const size_t size = slice.storage.nbytes();
    lists.storages.push_back(bytesOf(slice.storage, 0, size));
    lists.places.push_back(bytesOf(block, slice.offset, size));
  }
  return lists;
}

} // namespace

void gather(const std::vector<Slice>& slices, const c10::Storage& block) {
  const c10::NoGradGuard noGrad;
  const Lists lists = listsOf(slices, block);
  at::_foreach_copy_(lists.places, lists.storages, /*non_blocking=*/true);
}

void scatter(const c10::Storage& block, const std::vector<Slice>& slices) {
  const c10::NoGradGuard noGrad;
  const Lists lists = listsOf(slices, block);
  at::_foreach_copy_(lists.storages, lists.places, /*non_blocking=*/true);
}

} // namespace torch_rpc_ext::agent::device
