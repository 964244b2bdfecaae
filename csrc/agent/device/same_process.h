#pragma once

#include "agent/device/launcher.h"
#include "agent/device/way.h"
#include "base/synchronized.h"

#include <functional>
#include <unordered_map>

namespace torch_rpc_ext::agent::device {

// The way for calls of a worker to itself: copies each tensor once on the
// devices, because the receiver may write to the tensor that it gets.
//
// Owns: nothing; the Departure's parcel owns the copies.
class SameProcess final : public SendingWay, public ReceivingWay {
 public:
  explicit SameProcess(Launcher& launcher) : launcher_(launcher) {}

  base::Error depart(
      const MessageKey& key,
      const DepartOptions& options,
      std::vector<Departing>& storages,
      Departure& departure) override;
  bool writesOnTargets() const override {
    return true;
  }
  base::Result<Arrived> arrive(
      const MessageKey& key,
      base::ConstSpan note,
      const std::vector<Expected>& expected) override;
  bool isTrusted() const override {
    return true;
  }

 private:
  struct Copies;
  struct Hash {
    size_t operator()(const MessageKey& key) const {
      return std::hash<uint64_t>()(key.callId << 1 | size_t(key.kind));
    }
  };

  Launcher& launcher_;
  base::Synchronized<
      std::unordered_map<MessageKey, std::weak_ptr<Copies>, Hash>>
      copies_;
};

} // namespace torch_rpc_ext::agent::device
