#include "agent/held_message.h"

#include <utility>

namespace torch_rpc_ext::agent {

std::shared_ptr<Encoded> hold(Encoded& encoded, Executor& executor) {
  if (!encoded.borrows()) {
    return nullptr;
  }
  auto held = std::make_unique<Encoded>();
  held->storages = std::move(encoded.storages);
  held->message = std::move(encoded.message);
  held->parcel = std::move(encoded.parcel);
  if (!encoded.borrowsBulk() && held->message == nullptr &&
      held->parcel == nullptr) {
    return held; // receive memory, which needs no GIL
  }
  return {held.release(), [&executor](Encoded* last) {
            executor.submitCompletion(
                base::makeTask([last = std::unique_ptr<Encoded>(last)] {}));
          }};
}

} // namespace torch_rpc_ext::agent
