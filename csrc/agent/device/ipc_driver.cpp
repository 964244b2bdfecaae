#include "agent/device/ipc_driver.h"

#include <random>

namespace torch_rpc_ext::agent::device {

namespace {

uint64_t newNonce() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

} // namespace

std::shared_ptr<IpcDriver> IpcLoader::loaded() const {
  return *driver_.lock();
}

base::Result<std::shared_ptr<IpcDriver>> IpcLoader::load() {
  auto work = work_.lock();
  if (!work->isLoaded) {
    work->isLoaded = true;
    auto driver = cuda::Driver::load();
    if (driver.ok()) {
      auto made = std::make_shared<IpcDriver>(driver.value());
      *driver_.lock() = std::move(made);
    } else {
      work->why = driver.error();
    }
  }
  if (work->why) {
    return work->why;
  }
  return loaded();
}

base::Result<IpcOffer::Trial> IpcLoader::trial(IpcDriver& driver, int device) {
  auto work = work_.lock();
  OwnTrial& own = work->trials[device];
  if (own.trial == nullptr) {
    const uint64_t nonce = newNonce();
    auto made = cuda::Trial::create(driver.driver, device, nonce);
    if (!made.ok()) {
      return made.error();
    }
    own = {std::move(made.value()), nonce};
  }
  return IpcOffer::Trial{
      static_cast<uint8_t>(device), own.nonce, own.trial->exported()};
}

} // namespace torch_rpc_ext::agent::device
