#include "transport/ucx/lanes/bulk_receiver.h"

#include "crypto/crypto.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

namespace torch_rpc_ext::transport::ucx::lanes {

namespace {

// How many connections may be open whose Hello has not come. When there is one
// more, the oldest of them is closed: a sender says its Hello at once.
constexpr size_t kMaxUnknown = 256;
// How many connections one event accepts at most, so that others can connect
// although the open lanes have much to do.
constexpr int kMostAccepted = 16;

base::Descriptor openSpare() {
  return base::Descriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

} // namespace

BulkReceiver::BulkReceiver(Options options, std::shared_ptr<base::Gate> gate)
    : options_(std::move(options)),
      key_(crypto::randomBytes(kKeyBytes)),
      dropped_(kPieceBytes),
      spare_(openSpare()),
      set_(
          std::make_shared<LaneSet>(
              std::move(gate),
              [this](Locked& locked, uint64_t id, uint32_t events) {
                handle(locked, id, events);
              },
              [](Locked&) { return false; })) {}

base::Result<std::string> BulkReceiver::addressAt(
    const std::vector<std::string>& ips) {
  Address address{.key = key_};
  base::Error failure{
      base::ErrorKind::kPeerLost, "no address to receive large tensors at"};
  set_->run([&](Locked& locked) {
    for (const std::string& ip : ips) {
      const auto known = std::find_if(
          listeners_.begin(), listeners_.end(), [&](const auto& listener) {
            return listener.second.second.ip == ip;
          });
      if (known != listeners_.end()) {
        address.endpoints.push_back(known->second.second);
        continue;
      }
      auto made = stopped_ ? transportEnded() : listenAt(ip, options_.ports);
      if (!made.ok()) {
        failure = made.error();
        continue;
      }
      const uint64_t id = nextId_++;
      if (base::Error error =
              set_->add(locked, made.value().first.fd(), id, EPOLLIN)) {
        failure = std::move(error);
        continue;
      }
      address.endpoints.push_back(made.value().second);
      listeners_.emplace(id, std::move(made.value()));
    }
  });
  if (address.endpoints.empty()) {
    return failure;
  }
  return encode(address);
}

uint64_t BulkReceiver::receive(
    uint64_t tag,
    std::vector<base::MutableSpan> chunks,
    Callback callback,
    Incoming::Arrived arrived) {
  uint64_t id = 0;
  set_->run([&](Locked& locked) {
    id = nextId_++;
    auto batch = std::make_shared<Batch>();
    batch->id = id;
    batch->firstTag = tag;
    batch->chunks = chunks.size();
    batch->callback = std::move(callback);
    batch->arrived = std::move(arrived);
    batches_.emplace(id, batch);
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (chunks[i].size != 0) {
        ++batch->left;
        expected_.insert_or_assign(
            tag + i, Expected{batch, chunks[i], chunks[i].size});
      }
    }
    if (stopped_) {
      end(locked, batch, transportEnded());
    } else if (batch->left == 0) {
      end(locked, batch, {});
    }
  });
  return id;
}

void BulkReceiver::cancel(uint64_t id, const base::Error& why) {
  set_->run([&](Locked& locked) {
    const auto batch = batches_.find(id);
    if (batch != batches_.end()) {
      end(locked, std::shared_ptr(batch->second), why);
    }
  });
}

void BulkReceiver::end(
    Locked& locked,
    const std::shared_ptr<Batch>& batch,
    base::Error error) {
  // Copied, not moved: if defer() throws, a later end() needs the callback.
  locked.defer([callback = batch->callback, error = std::move(error)] {
    callback(error);
  });
  batch->callback = nullptr; // what it holds dies with the copy, later
  for (size_t i = 0; i < batch->chunks; ++i) {
    expected_.erase(batch->firstTag + i);
  }
  batches_.erase(batch->id);
}

void BulkReceiver::stop() {
  set_->run([&](Locked& locked) {
    stopped_ = true;
    set_->stop(locked);
    lanes_.clear();
    listeners_.clear();
    while (!batches_.empty()) {
      end(locked, std::shared_ptr(batches_.begin()->second), transportEnded());
    }
  });
  set_->join();
}

void BulkReceiver::handle(Locked& locked, uint64_t id, uint32_t /*events*/) {
  if (const auto listener = listeners_.find(id); listener != listeners_.end()) {
    for (int i = 0; i < kMostAccepted; ++i) {
      if (!accept(locked, listener->second.first)) {
        break;
      }
    }
    return;
  }
  const auto found = lanes_.find(id);
  if (found == lanes_.end()) {
    return;
  }
  Lane& lane = found->second;
  bool goesOn = false;
  try {
    goesOn = lane.isKnown ? readPiece(locked, lane) : readHello(lane);
  } catch (...) {
    // What the lane has brought may be lost. When the lane ends, the sender
    // gives up the bulk that it sent over the lane, and says so.
    drop(locked, id);
    throw;
  }
  if (!goesOn) {
    drop(locked, id);
  }
}

bool BulkReceiver::accept(Locked& locked, const Socket& listener) {
  Socket socket = acceptFrom(listener);
  if (socket.fd() < 0) {
    if (errno == EMFILE || errno == ENFILE) {
      acceptAndClose(locked, listener);
    }
    return false;
  }
  if (unknown_.size() >= kMaxUnknown) {
    strangers_(
        base::LogLevel::kWarning,
        "closed a connection for large tensors: too many have not said who "
        "they are");
    drop(locked, unknown_.front());
  }
  setUp(socket, kPatience * options_.keepaliveSeconds);
  const uint64_t id = nextId_++;
  if (const base::Error error = set_->add(locked, socket.fd(), id, EPOLLIN)) {
    strangers_(
        base::LogLevel::kWarning,
        "closed a connection for large tensors: " + error.message);
    return true;
  }
  lanes_.emplace(id, Lane{.id = id, .socket = std::move(socket)});
  unknown_.push_back(id);
  return true;
}

// This process has no descriptor left for the connection that waits. If the
// connection went on waiting, the listener would wake the thread all the time,
// and the sender would not hear that it has to give up.
void BulkReceiver::acceptAndClose(Locked&, const Socket& listener) {
  spare_ = base::Descriptor();
  acceptFrom(listener);
  spare_ = openSpare();
  strangers_(
      base::LogLevel::kWarning,
      "closed a connection for large tensors: too many open files");
}

void BulkReceiver::drop(Locked& locked, uint64_t id) {
  const auto lane = lanes_.find(id);
  if (lane == lanes_.end()) {
    return;
  }
  std::erase(unknown_, id);
  set_->remove(locked, lane->second.socket.fd());
  lanes_.erase(lane);
}

int BulkReceiver::fill(Lane& lane, void* into, size_t size) {
  const ssize_t got = ::recv(
      lane.socket.fd(),
      static_cast<char*>(into) + lane.got,
      size - lane.got,
      MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
    return -1;
  }
  lane.got += static_cast<size_t>(std::max<ssize_t>(got, 0));
  if (lane.got < size) {
    return 0;
  }
  lane.got = 0;
  return 1;
}

bool BulkReceiver::readHello(Lane& lane) {
  const int state = fill(lane, &lane.hello, sizeof(lane.hello));
  if (state <= 0) {
    return state == 0;
  }
  if (lane.hello.magic != kMagic ||
      !crypto::equal(std::string_view(lane.hello.key, kKeyBytes), key_)) {
    strangers_(
        base::LogLevel::kWarning,
        "refused a connection for large tensors: the other end does not know "
        "this worker's key");
    return false;
  }
  lane.isKnown = true;
  std::erase(unknown_, lane.id);
  return true;
}

bool BulkReceiver::takeHeader(Lane& lane) {
  const PieceHeader& piece = lane.piece;
  const auto expected = expected_.find(piece.tag);
  const bool fits = piece.size != 0 && piece.size <= kPieceBytes &&
      (expected == expected_.end() ||
       (piece.offset <= expected->second.memory.size &&
        piece.size <= expected->second.memory.size - piece.offset &&
        piece.size <= expected->second.left));
  if (!fits) {
    strangers_(
        base::LogLevel::kWarning,
        "closed a connection for large tensors: a piece of " +
            std::to_string(piece.size) + " bytes does not fit");
  }
  lane.inPiece = fits;
  lane.isDropped = expected == expected_.end();
  return fits;
}

BulkReceiver::ByTag::iterator BulkReceiver::expectedOf(const Lane& lane) {
  return lane.isDropped ? expected_.end() : expected_.find(lane.piece.tag);
}

bool BulkReceiver::readPiece(Locked& locked, Lane& lane) {
  if (!lane.inPiece) {
    const int state = fill(lane, &lane.piece, sizeof(lane.piece));
    if (state <= 0) {
      return state == 0;
    }
    if (!takeHeader(lane)) {
      return false;
    }
  }
  const auto expected = expectedOf(lane);
  char* const into = expected == expected_.end()
      ? reinterpret_cast<char*>(dropped_.data())
      : static_cast<char*>(expected->second.memory.data) + lane.piece.offset;
  while (lane.got < lane.piece.size) {
    const ssize_t got = ::recv(
        lane.socket.fd(),
        into + lane.got,
        lane.piece.size - lane.got,
        MSG_DONTWAIT);
    if (got <= 0) {
      return got < 0 && (errno == EAGAIN || errno == EINTR);
    }
    lane.got += static_cast<size_t>(got);
  }
  lane.got = 0;
  lane.inPiece = false;
  // Before the answer: if this throws, the sender must not take the piece for
  // received.
  pieceDone(locked, lane);
  // One byte always has room: the sender has few pieces without an answer. A
  // sender that misses an answer would wait for it for ever.
  const char taken = 1;
  return ::send(lane.socket.fd(), &taken, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1;
}

void BulkReceiver::pieceDone(Locked& locked, Lane& lane) {
  const auto found = expectedOf(lane);
  if (found == expected_.end()) {
    return;
  }
  Expected& expected = found->second;
  if (lane.piece.size > expected.left) {
    end(locked,
        std::shared_ptr(expected.batch),
        {base::ErrorKind::kInvalid, "a piece of bulk came twice"});
    return;
  }
  expected.left -= lane.piece.size;
  if (expected.left != 0) {
    return;
  }
  const auto batch = expected.batch;
  if (batch->arrived) {
    locked.defer([arrived = batch->arrived, chunk = expected.memory] {
      arrived(chunk);
    });
  }
  expected_.erase(found);
  if (--batch->left == 0) {
    end(locked, batch, {});
  }
}

} // namespace torch_rpc_ext::transport::ucx::lanes
