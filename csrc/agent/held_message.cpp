#include "agent/held_message.h"

#include "agent/host_storage.h"

#include <algorithm>
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
  return {held.release(), [&executor](Encoded* last) {
            std::unique_ptr<Encoded> message(last);
            const auto& storages = message->storages;
            if (message->message != nullptr || message->parcel != nullptr ||
                std::any_of(storages.begin(), storages.end(), mayNeedGil)) {
              executor.submitCompletion(
                  base::makeTask([message = std::move(message)] {}));
            }
          }};
}

} // namespace torch_rpc_ext::agent
