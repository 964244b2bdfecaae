#include "transport/ucx/lanes/bulk_sender.h"

#include "base/boundary.h"

#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace torch_rpc_ext::transport::ucx::lanes {

namespace {

// The most lanes to one receiver. Four lanes are as fast as eight or sixteen on
// an idle machine; eight are as fast as sixteen where other work shares the
// cores.
constexpr size_t kMaxLanes = 8;
// The most lanes to all receivers together, because each lane takes a
// descriptor at both ends. Beyond this number a receiver gets only one lane.
constexpr size_t kMaxLanesInAll = 128;
// The windows are made for links of up to 100 Gb/s: what is under way on all
// lanes to a receiver fills such a link for one round trip.
constexpr uint64_t kBytesPerMicrosecond = 12'500;
constexpr size_t kMaxWindow = 64;
// How often the hosts are checked to which something is on its way: four times
// in the time for which a host may be silent, but at least as often as this.
constexpr std::chrono::nanoseconds kCheckAtLeast = std::chrono::seconds(1);
constexpr uint64_t kTimerId = UINT64_MAX; // of timer_; lanes have others

// An error of this worker ends the lane as a broken one: the receiver may have
// taken what the lane carried.
base::Error lost(const base::Error& why) {
  return {base::ErrorKind::kPeerLost, why.message};
}

} // namespace

BulkSender::BulkSender(
    double keepaliveSeconds,
    std::shared_ptr<base::Gate> gate)
    : keepaliveSeconds_(keepaliveSeconds),
      patience_(kPatience * keepaliveSeconds),
      timer_(
          base::checked(
              ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK),
              "timerfd_create")),
      set_(
          std::make_shared<LaneSet>(
              std::move(gate),
              [this](Locked& locked, uint64_t id, uint32_t events) {
                handle(locked, id, events);
              },
              [this](Locked& locked) { return work(locked); })) {}

void BulkSender::send(
    const std::string& address,
    uint64_t tag,
    std::vector<base::ConstSpan> chunks,
    Callback callback) {
  set_->run([&](Locked& locked) {
    const auto batch = std::make_shared<Batch>();
    batch->callback = std::move(callback);
    batches_.insert(batch);
    auto& receiver = receivers_[address];
    if (receiver == nullptr) {
      auto parsed = parseAddress(address);
      if (stopped_ || !parsed.ok()) {
        receivers_.erase(address);
        end(locked, batch, stopped_ ? transportEnded() : parsed.error());
        return;
      }
      receiver = std::make_unique<Receiver>();
      receiver->address = std::move(parsed.value());
    }
    for (const base::ConstSpan& chunk : chunks) {
      for (uint64_t at = 0; at < chunk.size; at += kPieceBytes) {
        const uint64_t size = std::min<uint64_t>(kPieceBytes, chunk.size - at);
        receiver->waiting.push_back(
            {batch,
             {tag, at, size},
             static_cast<const char*>(chunk.data) + at});
        ++batch->left;
      }
      ++tag;
    }
    if (batch->left == 0) {
      end(locked, batch, {});
      return;
    }
    feed(locked, *receiver);
  });
  set_->workSoon();
}

void BulkSender::stop() {
  set_->run([&](Locked& locked) {
    stopped_ = true;
    set_->stop(locked);
    writable_.clear();
    lanes_.clear();
    receivers_.clear();
    while (!batches_.empty()) {
      end(locked, std::shared_ptr(*batches_.begin()), transportEnded());
    }
  });
  set_->join();
}

// Gives the pieces that wait to lanes that are free, and opens more lanes if
// there are not enough.
void BulkSender::feed(Locked& locked, Receiver& receiver) {
  for (const uint64_t id : receiver.lanes) {
    Lane& lane = lanes_.at(id);
    if (lane.isOpen && !lane.piece && take(locked, lane)) {
      queue(lane);
    }
  }
  const size_t others = lanes_.size() - receiver.lanes.size();
  const size_t most = others >= kMaxLanesInAll ? 1 : kMaxLanes;
  const size_t opening = std::count_if(
      receiver.lanes.begin(), receiver.lanes.end(), [this](uint64_t id) {
        return !lanes_.at(id).isOpen;
      });
  size_t wanted = receiver.waiting.size();
  while (wanted > opening && receiver.lanes.size() < most) {
    const base::Error error = openLane(locked, receiver);
    if (!error) {
      --wanted;
    } else if (!receiver.lanes.empty()) {
      return; // these lanes do the work
    } else if (failedToConnect(receiver)) {
      loseWaiting(locked, receiver, error);
      return;
    }
  }
}

// Counts an attempt to open a lane that has failed. True if there have been as
// many in a row as there are endpoints, so that each has been tried.
bool BulkSender::failedToConnect(Receiver& receiver) {
  return ++receiver.failures >= receiver.address.endpoints.size();
}

// Whether the lane has got a piece.
bool BulkSender::take(Locked& locked, Lane& lane) {
  auto& waiting = lane.receiver->waiting;
  if (waiting.empty() || lane.untaken.size() >= lane.window) {
    return false;
  }
  if (!lane.carries()) {
    lane.silentSince = Clock::now();
    setTimer(locked, true);
  }
  lane.piece.emplace(std::move(waiting.front()));
  lane.written = 0;
  waiting.pop_front();
  return true;
}

void BulkSender::queue(Lane& lane) {
  if (!lane.isBlocked && !std::exchange(lane.isQueued, true)) {
    writable_.push_back(lane.id);
  }
}

base::Error BulkSender::openLane(Locked& locked, Receiver& receiver) {
  if (!timerIsServed_) {
    if (base::Error error = set_->add(locked, timer_.fd(), kTimerId, EPOLLIN)) {
      return error;
    }
    timerIsServed_ = true;
  }
  const auto& endpoints = receiver.address.endpoints;
  const size_t endpoint = receiver.nextEndpoint++ % endpoints.size();
  auto socket = connectTo(endpoints[endpoint]);
  if (!socket.ok()) {
    return socket.error();
  }
  setUp(socket.value(), keepaliveSeconds_);
  const uint64_t id = nextId_++;
  if (base::Error error =
          set_->add(locked, socket.value().fd(), id, EPOLLOUT)) {
    return error;
  }
  lanes_.emplace(
      id,
      Lane{
          .id = id,
          .receiver = &receiver,
          .endpoint = endpoint,
          .socket = std::move(socket.value())});
  receiver.lanes.push_back(id);
  return {};
}

void BulkSender::handle(Locked& locked, uint64_t id, uint32_t events) {
  if (id == kTimerId) {
    checkHosts(locked);
    return;
  }
  const auto found = lanes_.find(id);
  if (found == lanes_.end()) {
    return;
  }
  try {
    onEvents(locked, found->second, events);
  } catch (...) {
    fail(locked, id, lost(base::caught()));
    throw;
  }
}

void BulkSender::onEvents(Locked& locked, Lane& lane, uint32_t events) {
  int error = 0;
  if ((events & (EPOLLERR | EPOLLHUP)) != 0 ||
      ((events & EPOLLIN) != 0 && !readAnswers(locked, lane, error))) {
    fail(locked, lane.id, brokenBecause(lane.socket, error));
    return;
  }
  if ((events & EPOLLOUT) != 0) {
    set_->change(locked, lane.socket.fd(), lane.id, EPOLLIN);
    if (!std::exchange(lane.isOpen, true)) {
      setUpForSending(lane.socket, patience_.count());
    }
    lane.isBlocked = false;
    lane.receiver->failures = 0;
  }
  // A lane that got no piece says its Hello all the same, because a receiver
  // closes lanes that say nothing when there are many.
  if (lane.isOpen &&
      (lane.piece || take(locked, lane) || lane.helloLeft != 0)) {
    queue(lane);
  }
}

bool BulkSender::work(Locked& locked) {
  if (writable_.empty()) {
    return false;
  }
  const uint64_t id = writable_.front();
  writable_.pop_front();
  const auto found = lanes_.find(id);
  if (found == lanes_.end()) {
    return true;
  }
  found->second.isQueued = false;
  try {
    write(locked, found->second);
  } catch (...) {
    fail(locked, id, lost(base::caught()));
    throw;
  }
  return true;
}

void BulkSender::write(Locked& locked, Lane& lane) {
  int error = 0;
  if (!writeSome(locked, lane, error)) {
    fail(locked, lane.id, brokenBecause(lane.socket, error));
  } else if (lane.piece || take(locked, lane)) {
    queue(lane);
  }
}

bool BulkSender::writeSome(Locked& locked, Lane& lane, int& error) {
  Hello hello;
  lane.receiver->address.key.copy(hello.key, kKeyBytes);
  std::array<iovec, 3> parts{};
  size_t count = 0;
  size_t left = 0;
  // Adds the last `size` bytes of something, up to `end`.
  const auto add = [&](const void* end, size_t size) {
    if (size != 0) {
      const char* const begin = static_cast<const char*>(end) - size;
      parts[count++] = {const_cast<char*>(begin), size};
      left += size;
    }
  };
  add(&hello + 1, lane.helloLeft);
  if (lane.piece) {
    const Piece& piece = *lane.piece;
    const size_t headerLeft =
        sizeof(PieceHeader) - std::min(sizeof(PieceHeader), lane.written);
    add(&piece.header + 1, headerLeft);
    add(piece.bytes + piece.header.size,
        sizeof(PieceHeader) + piece.header.size - headerLeft - lane.written);
  }
  if (count == 0) {
    return true;
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t sent =
      ::sendmsg(lane.socket.fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) {
    error = errno;
    if (error != EAGAIN && error != EINTR && error != ENOBUFS) {
      return false;
    }
  }
  const size_t taken = static_cast<size_t>(std::max<ssize_t>(sent, 0));
  const size_t ofHello = std::min(taken, lane.helloLeft);
  lane.helloLeft -= ofHello;
  lane.written += taken - ofHello;
  if (taken < left) {
    // The socket is full: the lane goes on when there is room.
    lane.isBlocked = true;
    set_->change(locked, lane.socket.fd(), lane.id, EPOLLIN | EPOLLOUT);
    return true;
  }
  if (lane.piece) {
    lane.untaken.push_back(std::move(*lane.piece));
    lane.piece.reset();
  }
  return true;
}

bool BulkSender::readAnswers(Locked& locked, Lane& lane, int& error) {
  std::array<char, kMaxWindow> answers{};
  const ssize_t got =
      ::recv(lane.socket.fd(), answers.data(), answers.size(), MSG_DONTWAIT);
  if (got <= 0) {
    error = got == 0 ? 0 : errno;
    return got < 0 && (error == EAGAIN || error == EINTR);
  }
  if (static_cast<size_t>(got) > lane.untaken.size()) {
    return false; // answers to nothing
  }
  for (ssize_t i = 0; i < got; ++i) {
    const auto batch = lane.untaken.front().batch;
    if (--batch->left == 0 && batches_.contains(batch)) {
      end(locked, batch, {});
    }
    lane.untaken.pop_front(); // last: if end() throws, fail() ends the batch
  }
  const uint64_t bytes =
      kBytesPerMicrosecond * roundTripMicroseconds(lane.socket);
  lane.window = std::clamp<size_t>(
      bytes / (lane.receiver->lanes.size() * kPieceBytes), 1, kMaxWindow);
  return true;
}

void BulkSender::setTimer(Locked&, bool runs) {
  if (std::exchange(timerRuns_, runs) == runs) {
    return;
  }
  const auto interval =
      std::min<std::chrono::duration<double>>(kCheckAtLeast, patience_ / 4);
  const auto ns = std::max<int64_t>(
      1,
      std::chrono::duration_cast<std::chrono::nanoseconds>(interval).count());
  itimerspec spec{};
  if (runs) {
    spec.it_interval = {
        .tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
    spec.it_value = spec.it_interval;
  }
  ::timerfd_settime(timer_.fd(), /*flags=*/0, &spec, nullptr);
}

// Ends the lanes whose host has acknowledged nothing for too long.
void BulkSender::checkHosts(Locked& locked) {
  uint64_t expirations = 0;
  (void)!::read(timer_.fd(), &expirations, sizeof(expirations));
  const auto now = Clock::now();
  bool carry = false;
  std::vector<uint64_t> silent;
  for (auto& [id, lane] : lanes_) {
    if (!lane.carries()) {
      continue;
    }
    carry = true;
    const LastAck ack = lastAckOf(lane.socket);
    // The kernel asks a host that has no room less and less often. So the age
    // of the last acknowledgement says nothing: what counts is since when
    // another one has been due.
    if (!ack.nextIsDue || ack.age < now - checkedAt_) {
      lane.silentSince = now;
    } else if (now - lane.silentSince >= patience_) {
      silent.push_back(id);
    }
  }
  checkedAt_ = now;
  for (const uint64_t id : silent) {
    if (const auto lane = lanes_.find(id); lane != lanes_.end()) {
      fail(locked, id, brokenBecause(lane->second.socket, ETIMEDOUT));
    }
  }
  setTimer(locked, carry);
}

// The lane broke, or could not be opened. What it carried is lost. The pieces
// that wait go over the other lanes, or over a new one.
void BulkSender::fail(Locked& locked, uint64_t id, base::Error why) {
  const auto found = lanes_.find(id);
  if (found == lanes_.end()) {
    return;
  }
  Receiver& receiver = *found->second.receiver;
  set_->remove(locked, found->second.socket.fd());
  Lane lane = std::move(found->second);
  lanes_.erase(found);
  std::erase(receiver.lanes, id);
  if (lane.piece) {
    abort(locked, lane.piece->batch, why);
  }
  for (const Piece& piece : lane.untaken) {
    abort(locked, piece.batch, why);
  }
  if (lane.isOpen) {
    feed(locked, receiver);
    return;
  }
  const Endpoint& endpoint = receiver.address.endpoints[lane.endpoint];
  why.message = "cannot connect to " + toString(endpoint) +
      " for large tensors: " + why.message;
  const bool allFailed = failedToConnect(receiver);
  // As long as there are other lanes, these do the work.
  if (receiver.lanes.empty()) {
    if (allFailed) {
      loseWaiting(locked, receiver, why);
    } else {
      feed(locked, receiver);
    }
  }
}

void BulkSender::loseWaiting(
    Locked& locked,
    Receiver& receiver,
    const base::Error& why) {
  receiver.failures = 0; // the next send() tries all endpoints again
  for (const Piece& piece : std::exchange(receiver.waiting, {})) {
    abort(locked, piece.batch, why);
  }
}

// Ends a send(), unless it has ended, so that none of its bytes is read any
// more. A lane that has written a part of a piece cannot be used again.
void BulkSender::abort(
    Locked& locked,
    const std::shared_ptr<Batch>& batch,
    const base::Error& why) {
  if (!batches_.contains(batch)) {
    return;
  }
  // If nothing is left, the receiver has taken all, and end() has thrown.
  end(locked, batch, batch->left == 0 ? base::Error() : why);
  for (auto& [address, receiver] : receivers_) {
    std::erase_if(receiver->waiting, [&](const Piece& piece) {
      return piece.batch == batch;
    });
  }
  std::vector<uint64_t> cut;
  for (auto& [id, lane] : lanes_) {
    if (lane.piece && lane.piece->batch == batch) {
      if (lane.written == 0) {
        lane.piece.reset();
      } else {
        cut.push_back(id);
      }
    }
  }
  for (const uint64_t id : cut) {
    if (lanes_.contains(id)) {
      fail(locked, id, why);
    }
  }
}

void BulkSender::end(
    Locked& locked,
    const std::shared_ptr<Batch>& batch,
    base::Error error) {
  // Copied, not moved: if defer() throws, a later end() needs the callback.
  locked.defer([callback = batch->callback, error = std::move(error)] {
    callback(error);
  });
  batch->callback = nullptr; // what it holds dies with the copy, later
  batches_.erase(batch);
}

} // namespace torch_rpc_ext::transport::ucx::lanes
