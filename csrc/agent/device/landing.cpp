#include "agent/device/landing.h"

#include "agent/device/staging.h"
#include "base/log.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

namespace torch_rpc_ext::agent::device {

namespace {

void logFailure(const std::exception& error) {
  base::log(
      base::LogLevel::kDebug,
      std::string(
          "a tensor is copied to its device only when it is complete: ") +
          error.what());
}

} // namespace

Landing::Landing(Streams streams, std::shared_ptr<std::atomic<int>> count)
    : streams_(std::move(streams)), count_(std::move(count)) {
  count_->fetch_add(1);
}

Landing::~Landing() {
  count_->fetch_sub(1);
}

void Landing::add(const c10::Storage& host, c10::Device device) {
  const StreamScope scope(streams_);
  try {
    c10::Storage onDevice = allocate(device, host.nbytes());
    places_.lock()->push_back({host, std::move(onDevice), {}});
  } catch (const std::exception& error) {
    logFailure(error);
  }
}

void Landing::arrived(base::MutableSpan part) {
  auto places = places_.lock();
  const auto* const data = static_cast<const char*>(part.data);
  for (Place& place : *places) {
    const auto* const begin = static_cast<const char*>(place.host.data());
    if (data < begin || data >= begin + place.host.nbytes() ||
        !place.onDevice) {
      continue;
    }
    const size_t at = data - begin;
    const StreamScope scope(streams_);
    try {
      copyBytes(place.onDevice, at, place.host, at, part.size);
      place.copied[at] = at + part.size;
    } catch (const std::exception& error) {
      place.onDevice = c10::Storage();
      logFailure(error);
    }
    return;
  }
}

c10::Storage Landing::take(const c10::Storage& host) {
  auto places = places_.lock();
  const auto place =
      std::find_if(places->begin(), places->end(), [&](const Place& each) {
        return each.host.data() == host.data();
      });
  if (place == places->end()) {
    return {};
  }
  c10::Storage taken = std::exchange(place->onDevice, c10::Storage());
  if (!taken) {
    return {};
  }
  const StreamScope scope(streams_);
  size_t at = 0;
  for (const auto& [begin, end] : place->copied) {
    copyBytes(taken, at, host, at, begin - at);
    at = end;
  }
  copyBytes(taken, at, host, at, host.nbytes() - at);
  return taken;
}

} // namespace torch_rpc_ext::agent::device
