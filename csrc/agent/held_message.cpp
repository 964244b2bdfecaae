#include "agent/held_message.h"

#include "agent/host_storage.h"

#include <algorithm>
#include <utility>

namespace torch_rpc_ext::agent {

namespace {

bool needsNoPython(const Encoded& held) {
  return held.message == nullptr && held.parcel == nullptr &&
      std::all_of(
             held.storages.begin(),
             held.storages.end(),
             [](const auto& storage) { return agent::needsNoPython(storage); });
}

} // namespace

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
            std::unique_ptr<Encoded> message(last);
            if (!needsNoPython(*message)) {
              executor.submitCompletion(
                  base::makeTask([message = std::move(message)] {}));
            }
          }};
}

} // namespace torch_rpc_ext::agent
