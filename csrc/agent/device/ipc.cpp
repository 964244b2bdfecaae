#include "agent/device/ipc.h"

#include "agent/device/ipc_receiving.h"
#include "agent/device/ipc_sending.h"
#include "base/log.h"

#include <utility>

namespace torch_rpc_ext::agent::device {

using base::Error;
using base::ErrorKind;
using base::Result;
using transport::ConnectionPtr;
using Kind = IpcVerdict::Kind;

namespace {

IpcVerdict
forAll(const std::vector<int>& devices, Kind kind, const std::string& why) {
  IpcVerdict verdict;
  for (const int device : devices) {
    verdict.devices.push_back({static_cast<uint8_t>(device), kind, why});
  }
  return verdict;
}

std::vector<int> devicesOf(const IpcOffer& offer) {
  std::vector<int> devices;
  for (const auto& trial : offer.trials) {
    devices.push_back(trial.device);
  }
  return devices;
}

// "cuda:0, cuda:1: reason; cuda:2: other reason"
std::string reasonsOf(const std::map<int, std::string>& why) {
  std::map<std::string, std::string> devices; // reason -> devices
  for (const auto& [device, reason] : why) {
    std::string& list = devices[reason];
    list += (list.empty() ? "cuda:" : ", cuda:") + std::to_string(device);
  }
  std::string text;
  for (const auto& [reason, list] : devices) {
    text += (text.empty() ? "" : "; ") + list + ": " + reason;
  }
  return text;
}

} // namespace

const char* toString(IpcState state) {
  switch (state) {
    case IpcState::kUnknown:
      return "unknown";
    case IpcState::kOffered:
      return "offered";
    case IpcState::kWorks:
      return "works";
    case IpcState::kStaged:
      return "staged";
  }
  return "?";
}

Ipc::Ipc(bool isEnabled, Links links)
    : isEnabled_(isEnabled),
      links_(std::move(links)),
      parcels_(std::make_shared<IpcParcels>()),
      bytesSent_(std::make_shared<std::atomic<uint64_t>>(0)) {}

// ---- peers -----------------------------------------------------------------

Ipc::Known* Ipc::find(KnownPeers& peers, const PeerLife& peer) {
  const auto found = peers.byName.find(peer.name);
  if (found != peers.byName.end() && found->second.life == peer.life) {
    return &found->second;
  }
  if (found != peers.byName.end()) {
    if (peer.life < found->second.life) {
      return nullptr;
    }
    forgetLater(found->second.key);
    peers.byName.erase(found);
  }
  Known& known = peers.byName[peer.name];
  known.name = peer.name;
  known.life = peer.life;
  known.key = ++peers.lastKey;
  return &known;
}

void Ipc::forgetLater(cuda::PeerKey key) {
  const auto loaded = driver();
  if (loaded != nullptr && !stopped_.load()) {
    links_.run([driver = loaded, key] { driver->importer.forget(key); });
  }
}

void Ipc::lost(const std::string& worker, bool hasEnded) {
  {
    auto peers = peers_.lock();
    const auto found = peers->byName.find(worker);
    if (found != peers->byName.end()) {
      forgetLater(found->second.key);
      peers->byName.erase(found);
    }
  }
  if (hasEnded) {
    parcels_->releaseAll(worker);
  } else {
    parcels_->abandon(worker);
  }
}

void Ipc::setState(Known& known, IpcState state) {
  const IpcState before = std::exchange(known.state, state);
  const std::string reasons = reasonsOf(known.why);
  std::string text = "CUDA IPC to worker \"" + known.name +
      "\": " + toString(before) + " -> " + toString(state);
  auto level = base::LogLevel::kDebug;
  if (state == IpcState::kWorks || state == IpcState::kStaged) {
    level = known.hindered.empty() ? base::LogLevel::kInfo
                                   : base::LogLevel::kWarning;
    if (!reasons.empty()) {
      text += "; tensors are staged through the host from " + reasons;
    }
  }
  base::log(level, text);
}

Ipc::Description Ipc::describe(const std::string& worker) const {
  if (!isEnabled_) {
    return {"staged", "the option use_cuda_ipc is off"};
  }
  const auto peers = peers_.lock();
  const auto found = peers->byName.find(worker);
  if (found == peers->byName.end() ||
      found->second.state == IpcState::kUnknown) {
    return {};
  }
  const Known& known = found->second;
  if (known.state == IpcState::kOffered) {
    return {
        "staged", "the worker has not said yet whether it can use CUDA IPC"};
  }
  return {
      known.state == IpcState::kWorks ? "cuda ipc" : "staged",
      reasonsOf(known.why)};
}

Ipc::Stats Ipc::stats() const {
  Stats stats;
  stats.bytesSent = bytesSent_->load();
  stats.bytesReceived = bytesReceived_.load();
  stats.held = parcels_->held();
  if (const auto loaded = driver()) {
    stats.open = loaded->importer.stats().open;
  }
  return stats;
}

void Ipc::trim(std::chrono::steady_clock::duration age) {
  if (const auto loaded = driver()) {
    loaded->importer.trim(age);
  }
}

// ---- the sender's side -----------------------------------------------------

std::shared_ptr<SendingWay> Ipc::to(
    const ConnectionPtr& connection,
    const PeerLife& peer,
    DeviceList devices) {
  if (!isEnabled_ || stopped_.load()) {
    return nullptr;
  }
  auto peers = peers_.lock();
  Known* const known = find(*peers, peer);
  if (known == nullptr) {
    return nullptr;
  }
  const auto offeredOn = known->offeredOn.lock();
  const bool isLost = known->state == IpcState::kOffered &&
      (offeredOn == nullptr || offeredOn->closed());
  if (known->state == IpcState::kUnknown || isLost) {
    known->offeredOn = connection;
    setState(*known, IpcState::kOffered);
    std::vector<int> indices;
    for (const c10::Device& device : devices) {
      indices.push_back(device.index());
    }
    links_.run([self = shared_from_this(), connection, peer, indices] {
      self->offer(connection, peer, indices);
    });
  }
  return known->way;
}

void Ipc::offer(
    const ConnectionPtr& connection,
    const PeerLife& peer,
    const std::vector<int>& devices) {
  auto loaded = loader_.load();
  if (!loaded.ok()) {
    settle(peer, forAll(devices, Kind::kHindered, loaded.error().message));
    return;
  }
  IpcDriver& driver = *loaded.value();
  IpcOffer offer{driver.identity, {}};
  IpcVerdict without;
  for (const int device : devices) {
    auto trial = loader_.trial(driver, device);
    if (trial.ok()) {
      offer.trials.push_back(trial.value());
    } else {
      without.devices.push_back(
          {static_cast<uint8_t>(device),
           Kind::kHindered,
           trial.error().message});
    }
  }
  if (offer.trials.empty()) {
    settle(peer, without);
    return;
  }
  tell(connection, IpcMessage::kOffer, offer.write());
}

void Ipc::settle(const PeerLife& peer, const IpcVerdict& verdict) {
  const auto loaded = driver();
  auto peers = peers_.lock();
  Known* const known = find(*peers, peer);
  if (known == nullptr || known->state == IpcState::kUnknown) {
    return; // a verdict without an offer
  }
  for (const auto& device : verdict.devices) {
    known->hindered.erase(device.device);
    if (device.kind == Kind::kWorks) {
      known->works.insert(device.device);
      known->why.erase(device.device);
      continue;
    }
    known->works.erase(device.device);
    known->why[device.device] = device.why;
    if (device.kind == Kind::kHindered) {
      known->hindered.insert(device.device);
    }
  }
  known->way = known->works.empty() || loaded == nullptr
      ? nullptr
      : std::make_shared<IpcSending>(
            loaded,
            parcels_,
            bytesSent_,
            known->name,
            known->works,
            links_.launcher);
  setState(
      *known, known->way == nullptr ? IpcState::kStaged : IpcState::kWorks);
}

// ---- the receiver's side ---------------------------------------------------

IpcVerdict Ipc::judge(const PeerLife& peer, const IpcOffer& offer) {
  if (!isEnabled_) {
    return forAll(
        devicesOf(offer),
        Kind::kNatural,
        "the option use_cuda_ipc is off at the receiver");
  }
  if (!links_.hasDevices()) {
    return forAll(
        devicesOf(offer),
        Kind::kNatural,
        "RPC uses no CUDA device at the receiver");
  }
  auto loaded = loader_.load();
  if (!loaded.ok()) {
    return forAll(devicesOf(offer), Kind::kHindered, loaded.error().message);
  }
  IpcDriver& driver = *loaded.value();
  cuda::PeerKey key = 0;
  {
    auto peers = peers_.lock();
    Known* const known = find(*peers, peer);
    if (known == nullptr) {
      return {};
    }
    known->identity = std::make_shared<const cuda::Identity>(offer.identity);
    key = known->key;
  }
  const bool isHere = offer.identity.bootId == driver.identity.bootId;
  IpcVerdict verdict;
  for (const auto& trial : offer.trials) {
    std::string why =
        cuda::whyNoIpc(driver.identity, offer.identity, trial.device);
    if (why.empty()) {
      const auto gpu =
          cuda::findGpu(driver.identity, offer.identity.gpus[trial.device]);
      why = cuda::Trial::attempt(
          driver.driver, driver.importer, key, *gpu, trial.memory, trial.nonce);
    }
    const Kind kind = why.empty() ? Kind::kWorks
        : isHere                  ? Kind::kHindered
                                  : Kind::kNatural;
    verdict.devices.push_back({trial.device, kind, std::move(why)});
  }
  return verdict;
}

std::shared_ptr<ReceivingWay> Ipc::from(
    const ConnectionPtr& connection,
    const PeerLife& peer,
    base::ConstSpan note) {
  auto token = IpcNote::tokenOf(note);
  if (!token.ok()) {
    return nullptr;
  }
  auto peers = peers_.lock();
  Known* const known = find(*peers, peer);
  return known == nullptr
      ? nullptr
      : std::make_shared<IpcReceiving>(
            shared_from_this(), connection, *known, token.value());
}

void Ipc::release(const ConnectionPtr& connection, uint64_t token) {
  tell(connection, IpcMessage::kReleased, writeReleased(token));
}

void Ipc::refuse(
    const ConnectionPtr& connection,
    uint8_t device,
    const std::string& why) {
  const IpcVerdict verdict{{{device, Kind::kHindered, why}}};
  tell(connection, IpcMessage::kVerdict, verdict.write());
}

// ---- messages --------------------------------------------------------------

void Ipc::tell(
    const ConnectionPtr& connection,
    IpcMessage kind,
    std::vector<char> payload) {
  if (!stopped_.load()) {
    links_.tell(connection, kind, std::move(payload));
  }
}

Error Ipc::onMessage(
    const ConnectionPtr& connection,
    const PeerLife& peer,
    IpcMessage kind,
    base::ConstSpan payload) {
  switch (kind) {
    case IpcMessage::kOffer: {
      auto offer = IpcOffer::read(payload);
      if (!offer.ok()) {
        return offer.error();
      }
      const IpcVerdict verdict = judge(peer, offer.value());
      tell(connection, IpcMessage::kVerdict, verdict.write());
      return {};
    }
    case IpcMessage::kVerdict: {
      auto verdict = IpcVerdict::read(payload);
      if (!verdict.ok()) {
        return verdict.error();
      }
      settle(peer, verdict.value());
      return {};
    }
    case IpcMessage::kReleased: {
      auto token = readReleased(payload);
      if (!token.ok()) {
        return token.error();
      }
      // No effect if the parcel is gone already, which is no error of the peer.
      parcels_->release(token.value(), peer.name);
      return {};
    }
  }
  return {ErrorKind::kInvalid, "CUDA IPC: an unknown message"};
}

} // namespace torch_rpc_ext::agent::device
