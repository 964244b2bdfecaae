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
  std::lock_guard lock(mutex_);
  return driver_;
}

base::Result<std::shared_ptr<IpcDriver>> IpcLoader::load() {
  std::lock_guard working(workMutex_);
  if (!isLoaded_) {
    isLoaded_ = true;
    auto driver = cuda::Driver::load();
    if (driver.ok()) {
      auto made = std::make_shared<IpcDriver>(driver.value());
      std::lock_guard lock(mutex_);
      driver_ = std::move(made);
    } else {
      why_ = driver.error();
    }
  }
  if (why_) {
    return why_;
  }
  return loaded();
}

base::Result<IpcOffer::Trial> IpcLoader::trial(IpcDriver& driver, int device) {
  std::lock_guard working(workMutex_);
  OwnTrial& own = trials_[device];
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
