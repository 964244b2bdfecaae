// The workers of the group.

#include "agent/group.h"

#include "agent/call_label.h"
#include "base/log.h"
#include "compat/torch_compat.h"

#include <optional>
#include <utility>

namespace torch_rpc_ext::agent {

using torch::distributed::rpc::Message;
using torch::distributed::rpc::RRefId;

Group::Group(
    const WorkerInfo& self,
    bool isStatic,
    std::shared_ptr<transport::Context> remote,
    std::shared_ptr<transport::Context> loopback,
    base::TaskRunner& runner,
    Listeners listeners)
    : self_(self),
      isStatic_(isStatic),
      runner_(runner),
      listeners_(std::move(listeners)),
      membership_(isStatic),
      remote_(std::move(remote)),
      loopback_(std::move(loopback)),
      peers_(
          membership_,
          Hello{.group = {}, .workerId = self_.id_, .name = self_.name_},
          remote_,
          loopback_),
      barrier_(self_.name_) {}

void Group::start(base::Poller& poller, transport::Handler& handler) {
  remote_->start(poller, runner_, handler);
  loopback_->start(poller, runner_, handler);
  peers_.start();
}

std::string Group::introduction() const {
  return peers_.introduction();
}

base::Error Group::onAccept(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  auto error = peers_.onAccept(connection, hello);
  heardOf(connection);
  return error;
}

base::Error Group::onConnected(
    const transport::ConnectionPtr& connection,
    const std::string& hello) {
  auto error = peers_.onConnected(connection, hello);
  heardOf(connection);
  return error;
}

void Group::heardOf(const transport::ConnectionPtr& connection) {
  // A worker that was refused, or only asks whether it may come back, is still
  // lost: shutdown must not wait for it.
  const std::string name = peers_.nameOf(connection.get());
  if (!peers_.isLost(name)) {
    barrier_.regain(name);
    events_.heardOf(name);
  }
}

void Group::onClosed(
    const transport::ConnectionPtr& connection,
    const base::Error& error) {
  const std::string name = peers_.nameOf(connection.get());
  const auto lost = peers_.onClosed(connection, error);
  base::log(
      base::LogLevel::kInfo,
      "the connection to worker \"" + name + "\" ended: " + error.message);
  listeners_.ended(connection, error);
  if (lost) {
    const bool died = connection->peer() == transport::PeerState::kDead;
    const bool left = connection->peer() == transport::PeerState::kLeft;
    listeners_.lost(*lost, died || left);
    barrier_.lose(
        *lost, {error.kind, "worker \"" + *lost + "\": " + error.message});
    events_.unreachable(*lost, left, error.message);
    if (const auto id = membership_.idOf(*lost)) {
      release(membership_.find(*id), died);
    }
  }
}

void Group::release(const Membership::MemberPtr& worker, bool died) {
  if (worker == nullptr || left_.load()) {
    return;
  }
  // A task, because it sends messages to the workers that took part in a
  // context: too long for the thread that polls.
  runner_.submit(base::makeTask([this, worker, died] {
    const auto id = static_cast<worker_id_t>(worker->info.id_);
    // The worker may have come back meanwhile: what its new life has begun must
    // stay.
    const auto now = membership_.find(id);
    std::optional<uint32_t> successor;
    if (now != nullptr && now->life > worker->life) {
      successor = now->life;
    }
    const size_t contexts = compat::releaseAutogradOf(id, successor);
    // A worker that did not die may connect again and use its RRefs.
    RRefs values;
    if (died) {
      values = compat::releaseRRefsOf(id, successor);
    }
    if (contexts + values.size() != 0) {
      base::log(
          base::LogLevel::kInfo,
          "released " + std::to_string(contexts) +
              " distributed autograd contexts and " +
              std::to_string(values.size()) + " values of RRefs of worker \"" +
              worker->info.name_ + "\"");
    }
    if (!values.empty() && listeners_.dropValues) {
      listeners_.dropValues(std::move(values));
    }
  }));
}

std::string Group::address() const {
  return remote_->address();
}

void Group::setSecret(const std::string& id, const std::string& secret) {
  membership_.setGroup(id);
  remote_->setSecret(secret);
  compat::resetLifeOfRRefs();
}

void Group::add(
    const std::string& name,
    worker_id_t id,
    std::string address,
    uint32_t life) {
  compat::raiseLifeOfRRefs(life); // before an RRef can be made at that life
  const auto formerId = membership_.idOf(name);
  const auto former = formerId ? membership_.find(*formerId) : nullptr;
  const auto member = membership_.add(name, id, std::move(address), life);
  if (id == self_.id_) {
    compat::beginContextIds(life);
    return;
  }
  if (former != nullptr && former->life < life) {
    const base::Error why{
        base::ErrorKind::kPeerLost,
        "worker \"" + name + "\" died, and has been started again"};
    for (const auto& connection : peers_.succeed(*member)) {
      connection->lose(why);
    }
    listeners_.lost(name, /*exited=*/true);
    barrier_.regain(name);
    release(former, /*died=*/true);
  }
  events_.added(name, life); // last: whoever hears may call the worker
}

void Group::remove(const std::string& name) {
  membership_.remove(name);
  events_.removed(name);
}

void Group::watch(worker_id_t id) {
  peers_.connection(id);
  // A connection that failed at once does not report its end as that of a
  // worker.
  const std::string& name = membership_.byId(id).name_;
  if (peers_.isLost(name)) {
    events_.unreachable(name, /*left=*/false, peers_.whyLost(name));
  }
}

bool Group::isAlive(const std::string& worker) {
  const worker_id_t id = membership_.byName(worker).id_;
  if (id == self_.id_) {
    return true;
  }
  // Connects, so that its death is noticed from here on.
  peers_.connection(id);
  return !peers_.isLost(worker);
}

base::Error Group::ownerDied(const RRefId& rref, worker_id_t owner) const {
  const auto member = membership_.find(owner);
  if (member == nullptr ||
      !compat::isOlder(rref, peers_.reachedLife(*member))) {
    return {};
  }
  return {
      base::ErrorKind::kPeerLost,
      "the owner of this RRef died: worker \"" + member->info.name_ +
          "\" has been started again since the RRef was made"};
}

base::Error Group::ownerDied(const Message& message, worker_id_t owner) const {
  if (compat::lifeOfRRefs() == 0) {
    return {}; // the common case: every worker has had one life only
  }
  const auto rref = ownedRRef(message);
  return rref ? ownerDied(*rref, owner) : base::Error{};
}

void Group::addTo(Metrics& metrics) const {
  metrics["agent.peers"] = std::to_string(peers_.size());
}

bool Group::trim(std::chrono::steady_clock::duration idle) {
  return remote_->trim(idle);
}

void Group::leave() {
  left_.store(true);
  events_.end();
}

void Group::stop() {
  remote_->stop();
  loopback_->stop();
}

} // namespace torch_rpc_ext::agent
