// Bulk over TCP: a sender and a receiver in one process, and strangers.

#include "sanitize/stress.h"
#include "transport/ucx/lanes/bulk_receiver.h"
#include "transport/ucx/lanes/bulk_sender.h"
#include "unit/busy_receiver.h"
#include "unit/no_descriptors.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::transport;
namespace lanes = ucx::lanes;
using stress::require;
using unit::BusyReceiver;
using unit::NoDescriptors;

namespace {

// Whether epoll_ctl() takes no more descriptors from this thread.
thread_local bool epollIsFull = false;
// Whether this thread can start no other one.
thread_local bool noThreadIsLeft = false;
// Whether no socket has room for a single byte.
std::atomic<bool> isOneByteTooMany{false};
// If not 0: the allocation with this number from now on finds no memory.
// Allocations of the main thread do not count.
std::atomic<int> allocationThatFails{0};
thread_local bool isMainThread = false;

} // namespace

// These replace the C++ library's, and those below the C library's, in this
// program. (Not inlined, because gcc would take free() for a mistake.)
void* operator new(size_t size) {
  const bool fails = !isMainThread && allocationThatFails.load() != 0 &&
      allocationThatFails.fetch_sub(1) == 1;
  void* const memory = fails ? nullptr : std::malloc(size);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

extern "C" ssize_t
send(int fd, const void* data, size_t size, int flags) noexcept {
  if (isOneByteTooMany.load() && size == 1) {
    errno = EAGAIN;
    return -1;
  }
  return syscall(SYS_sendto, fd, data, size, flags, nullptr, 0);
}

extern "C" int pthread_create(
    pthread_t* thread,
    const pthread_attr_t* attributes,
    void* (*run)(void*),
    void* argument) noexcept {
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(
      dlsym(RTLD_NEXT, "pthread_create"));
  return noThreadIsLeft ? EAGAIN : real(thread, attributes, run, argument);
}

extern "C" int
epoll_ctl(int epoll, int operation, int fd, epoll_event* event) noexcept {
  if (epollIsFull && operation == EPOLL_CTL_ADD) {
    errno = ENOSPC;
    return -1;
  }
  return static_cast<int>(syscall(SYS_epoll_ctl, epoll, operation, fd, event));
}

namespace {

constexpr size_t kPiece = lanes::kPieceBytes;
using Bytes = std::vector<char>;

Bytes numbered(size_t size, int seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<char>((i * 7 + seed) ^ (i >> 11));
  }
  return bytes;
}

uint64_t reserveTags(uint64_t chunks) {
  static std::atomic<uint64_t> next{uint64_t{1} << 40};
  return next.fetch_add(chunks);
}

// The end of a send() or of a receive().
struct End {
  std::promise<base::Error> promise;
  std::future<base::Error> future = promise.get_future();
  std::atomic<int> times{0};

  Callback callback() {
    return [this](const base::Error& error) {
      require(times.fetch_add(1) == 0, "each callback fires once");
      promise.set_value(error);
    };
  }
  base::Error wait() {
    require(
        future.wait_for(std::chrono::seconds(60)) == std::future_status::ready,
        "the callback fires");
    return future.get();
  }
  bool fired() const {
    return times.load() != 0;
  }
};

struct Fixture {
  std::shared_ptr<base::Gate> gate = std::make_shared<base::Gate>();
  lanes::BulkReceiver receiver{{}, gate};
  lanes::BulkSender sender{2.0, gate};
  std::string address;

  Fixture() {
    auto made = receiver.addressAt({"127.0.0.1"});
    require(made.ok(), "it listens");
    address = made.value();
  }
  ~Fixture() {
    sender.stop();
    receiver.stop();
  }

  // Moves one message of these sizes; both ends must succeed. The sender knows
  // the receiver by `toAddress`.
  void move(const std::vector<size_t>& sizes, int seed) {
    move(address, sizes, seed);
  }
  void move(
      const std::string& toAddress,
      const std::vector<size_t>& sizes,
      int seed) {
    std::vector<Bytes> from;
    std::vector<Bytes> to;
    std::vector<base::ConstSpan> out;
    std::vector<base::MutableSpan> in;
    for (const size_t size : sizes) {
      from.push_back(numbered(size, seed));
      to.emplace_back(size);
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      out.push_back({from[i].data(), sizes[i]});
      in.push_back({to[i].data(), sizes[i]});
    }
    const uint64_t tag = reserveTags(sizes.size());
    End received;
    End sent;
    std::atomic<uint64_t> arrived{0};
    receiver.receive(tag, in, received.callback(), [&](base::MutableSpan part) {
      arrived.fetch_add(part.size);
    });
    sender.send(toAddress, tag, out, sent.callback());
    require(!sent.wait(), "it is sent");
    require(!received.wait(), "it is received");
    require(from == to, "the bytes are the sender's");
    uint64_t all = 0;
    for (const size_t size : sizes) {
      all += size;
    }
    // The last part may be told on another thread, after the callback.
    for (int i = 0; i < 1000 && arrived.load() != all; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    require(arrived.load() == all, "all parts are told");
  }
};

void testSizes() {
  Fixture f;
  f.move({}, 1);
  f.move({0}, 2);
  f.move({1}, 3);
  f.move({kPiece - 1, kPiece, kPiece + 1, 0, 5}, 4);
  f.move({20 * kPiece + 77, 3}, 5);
}

void testManyAtOnce() {
  Fixture f;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&f, i] {
      for (int round = 0; round < 10; ++round) {
        f.move({kPiece * (1 + i), 100}, i + round);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

void testCancelledReceive() {
  Fixture f;
  const Bytes from = numbered(64 * kPiece, 1);
  for (int round = 0; round < 20; ++round) {
    Bytes to(from.size());
    const uint64_t tag = reserveTags(1);
    End received;
    End sent;
    const uint64_t id = f.receiver.receive(
        tag, {{to.data(), to.size()}}, received.callback(), nullptr);
    f.sender.send(
        f.address, tag, {{from.data(), from.size()}}, sent.callback());
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    f.receiver.cancel(id, {base::ErrorKind::kRefused, "not wanted"});
    const base::Error end = received.wait();
    require(!end || end.message == "not wanted", "its own reason");
    const Bytes then = to;
    require(!sent.wait(), "the sender gets rid of the rest");
    require(to == then, "nothing is written after the end");
    f.receiver.cancel(id, {base::ErrorKind::kRefused, "again"});
  }
  f.move({kPiece}, 9);
}

void testNobodyThere() {
  Fixture f;
  std::string nowhere = f.address;
  {
    Fixture other;
    nowhere = other.address;
  }
  const Bytes from = numbered(3 * kPiece, 1);
  End sent;
  f.sender.send(nowhere, 7, {{from.data(), from.size()}}, sent.callback());
  const base::Error error = sent.wait();
  require(error.kind == base::ErrorKind::kPeerLost, "the receiver is lost");
  require(
      error.message.find("cannot connect to 127.0.0.1:") != std::string::npos,
      "where it was looked for");
  End refused;
  f.sender.send("rubbish", 7, {{from.data(), 1}}, refused.callback());
  require(refused.wait().kind == base::ErrorKind::kInvalid, "no address");
  f.move({kPiece}, 2);
}

// What connect() refuses at once, epoll does not tell of.
void testAnEndpointWithoutARoute() {
  Fixture f;
  lanes::Address address = lanes::parseAddress(f.address).value();
  const lanes::Endpoint noRoute{"255.255.255.255", 9};
  require(!lanes::connectTo(noRoute).ok(), "connect() refuses at once");
  address.endpoints.insert(address.endpoints.begin(), noRoute);
  f.move(lanes::encode(address), {3 * kPiece}, 1);

  address.endpoints = {noRoute, noRoute};
  const Bytes from = numbered(kPiece, 1);
  End sent;
  f.sender.send(
      lanes::encode(address),
      reserveTags(1),
      {{from.data(), from.size()}},
      sent.callback());
  const base::Error error = sent.wait();
  require(error.kind == base::ErrorKind::kPeerLost, "no endpoint is left");
  require(
      error.message.find("255.255.255.255:9") != std::string::npos,
      "which endpoint was tried");
}

// The receiver closes its lanes first, and the kernel keeps them for a minute.
void testTheNextReceiverOnAPort() {
  std::pair<uint16_t, uint16_t> ports;
  for (int life = 0; life < 3; ++life) {
    const auto gate = std::make_shared<base::Gate>();
    lanes::BulkReceiver receiver({.ports = ports}, gate);
    lanes::BulkSender sender(2.0, gate);
    auto address = receiver.addressAt({"127.0.0.1"});
    require(address.ok(), "a port whose last receiver has ended is free");
    const uint16_t port =
        lanes::parseAddress(address.value()).value().endpoints[0].port;
    ports = {port, port};

    const Bytes from = numbered(kPiece, life);
    Bytes to(from.size());
    const uint64_t tag = reserveTags(1);
    End received;
    End sent;
    receiver.receive(
        tag, {{to.data(), to.size()}}, received.callback(), nullptr);
    sender.send(
        address.value(), tag, {{from.data(), from.size()}}, sent.callback());
    require(!sent.wait() && !received.wait(), "it arrives");
    lanes::BulkReceiver second({.ports = ports}, gate);
    require(
        !second.addressAt({"127.0.0.1"}).ok(), "two cannot listen at a port");
    second.stop();
    receiver.stop();
    sender.stop();
  }
}

void testAReceiverThatEnds() {
  const Bytes from = numbered(400 * kPiece, 1);
  Fixture f;
  auto other = std::make_unique<Fixture>();
  Bytes to(from.size());
  const uint64_t tag = reserveTags(1);
  End received;
  End sent;
  other->receiver.receive(
      tag, {{to.data(), to.size()}}, received.callback(), nullptr);
  f.sender.send(
      other->address, tag, {{from.data(), from.size()}}, sent.callback());
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  other.reset();
  require(received.fired(), "stop() fires all callbacks");
  (void)received.wait();
  (void)sent.wait(); // with an error, or before the end
  f.move({kPiece}, 3);
}

// A socket of a stranger, connected to the receiver.
class Stranger {
 public:
  explicit Stranger(const std::string& address) {
    auto parsed = lanes::parseAddress(address);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(parsed.value().endpoints[0].port);
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    require(
        ::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0,
        "anybody can connect");
  }
  ~Stranger() {
    close(fd_);
  }
  void say(const void* data, size_t size) {
    (void)!::send(fd_, data, size, MSG_NOSIGNAL);
  }
  bool isClosed() {
    char byte = 0;
    timeval patience{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    const ssize_t got = ::recv(fd_, &byte, 1, 0);
    return got == 0 || (got < 0 && errno != EAGAIN);
  }

 private:
  const int fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
};

lanes::Hello helloOf(const std::string& address) {
  lanes::Hello hello;
  lanes::parseAddress(address).value().key.copy(hello.key, lanes::kKeyBytes);
  return hello;
}

void testStrangers() {
  Fixture f;
  Bytes to(2 * kPiece, 'o');
  const uint64_t tag = reserveTags(1);
  End received;
  f.receiver.receive(
      tag, {{to.data(), to.size()}}, received.callback(), nullptr);
  const lanes::PieceHeader good{tag, 0, kPiece};
  const Bytes piece = numbered(kPiece, 1);
  {
    Stranger wrongKey(f.address);
    lanes::Hello hello = helloOf(f.address);
    hello.key[3] ^= 1;
    wrongKey.say(&hello, sizeof(hello));
    wrongKey.say(&good, sizeof(good));
    wrongKey.say(piece.data(), piece.size());
    require(wrongKey.isClosed(), "a wrong key");
    Stranger rubbish(f.address);
    const std::string http = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    rubbish.say(http.data(), http.size());
    require(rubbish.isClosed(), "no Hello");
  }
  // These know the key, as a member of the group does.
  const auto says = [&](lanes::PieceHeader header, const char* what) {
    Stranger member(f.address);
    const lanes::Hello hello = helloOf(f.address);
    member.say(&hello, sizeof(hello));
    member.say(&header, sizeof(header));
    require(member.isClosed(), what);
  };
  says({tag, 0, 0}, "an empty piece");
  says({tag, 0, kPiece + 1}, "a piece that is too large");
  says({tag, kPiece + 1, kPiece}, "a piece that leads out of the chunk");
  says({tag, ~uint64_t{0}, kPiece}, "an offset that overflows");
  says({tag, ~uint64_t{0} - kPiece + 1, kPiece}, "a sum that overflows");
  says({tag + 99, 0, ~uint64_t{0}}, "the same for a tag that nobody expects");
  require(to == Bytes(2 * kPiece, 'o'), "nothing was written");
  require(!received.fired(), "nothing has ended");
  {
    // A tag that nobody expects: its bytes are dropped.
    Stranger member(f.address);
    const lanes::Hello hello = helloOf(f.address);
    const lanes::PieceHeader unknown{tag + 99, 5, kPiece};
    member.say(&hello, sizeof(hello));
    member.say(&unknown, sizeof(unknown));
    member.say(piece.data(), piece.size());
    require(!member.isClosed(), "an answer to it");
    // Half of a piece, and then silence.
    member.say(&good, sizeof(good));
    member.say(piece.data(), piece.size() / 2);
    f.move({3 * kPiece}, 4);
  }
  {
    // The same piece twice, at once.
    Stranger one(f.address);
    const lanes::Hello hello = helloOf(f.address);
    const lanes::PieceHeader second{tag, kPiece, kPiece};
    one.say(&hello, sizeof(hello));
    for (const auto& header : {good, second}) {
      one.say(&header, sizeof(header));
      one.say(piece.data(), piece.size());
    }
    require(!received.wait(), "whoever knows key and tag may send");
  }
}

// A header is compared with the memory that its tag stands for when the header
// comes. The memory that the tag stands for later is not written to.
void testAHeaderBeforeItsReceive() {
  Fixture f;
  const uint64_t tag = reserveTags(1);
  const Bytes piece = numbered(kPiece, 1);
  const lanes::Hello hello = helloOf(f.address);
  const lanes::PieceHeader early{tag, 4 * kPiece, kPiece};
  Stranger member(f.address);
  member.say(&hello, sizeof(hello));
  member.say(&early, sizeof(early));
  member.say(piece.data(), 1);
  f.move({kPiece}, 1); // so the receiver has read what came before
  Bytes all(8 * kPiece, 'o');
  End received;
  const uint64_t id = f.receiver.receive(
      tag, {{all.data(), kPiece}}, received.callback(), nullptr);
  member.say(piece.data() + 1, piece.size() - 1);
  require(!member.isClosed(), "an answer to it");
  require(all == Bytes(8 * kPiece, 'o'), "nothing was written");
  require(!received.fired(), "and nothing received");
  f.receiver.cancel(id, {base::ErrorKind::kRefused, "enough"});
}

void testManySilentStrangers() {
  Fixture f;
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 600; ++i) {
    silent.push_back(std::make_unique<Stranger>(f.address));
  }
  require(silent[0]->isClosed(), "the oldest makes room");
  f.move({9 * kPiece}, 5);
}

void testAnAnswerThatCannotBeSent() {
  Fixture f;
  Bytes to(kPiece);
  const Bytes from = numbered(kPiece, 1);
  const uint64_t tag = reserveTags(1);
  End received;
  End sent;
  isOneByteTooMany.store(true);
  f.receiver.receive(
      tag, {{to.data(), to.size()}}, received.callback(), nullptr);
  f.sender.send(f.address, tag, {{from.data(), from.size()}}, sent.callback());
  require(!received.wait(), "all has come");
  require(sent.wait().kind == base::ErrorKind::kPeerLost, "the lane ends");
  isOneByteTooMany.store(false);
  f.move({kPiece}, 10);
}

// Whatever an exception leaves half done, both callbacks fire.
void testNoMemoryIsLeft() {
  isMainThread = true;
  bool hasFailed = true;
  for (int number = 1; hasFailed; ++number) {
    Fixture f;
    Bytes to(kPiece);
    const Bytes from = numbered(kPiece, 1);
    const uint64_t tag = reserveTags(1);
    End received;
    End sent;
    allocationThatFails.store(number);
    const uint64_t id = f.receiver.receive(
        tag, {{to.data(), to.size()}}, received.callback(), nullptr);
    f.sender.send(
        f.address, tag, {{from.data(), from.size()}}, sent.callback());
    const base::Error error = sent.wait();
    if (error) {
      f.receiver.cancel(id, error); // the sender of a message says so
    }
    require(!received.wait() || error, "what is taken is received");
    hasFailed = allocationThatFails.exchange(0) <= 0;
  }
}

// A receiver closes lanes that say nothing when there are many.
void testALaneThatOpensTooLateForAPiece() {
  BusyReceiver receiver;
  lanes::BulkSender sender{2.0, std::make_shared<base::Gate>()};
  const Bytes from = numbered(3 * kPiece, 1);
  End sent;
  sender.send(
      receiver.address, 7, {{from.data(), from.size()}}, sent.callback());
  for (int lane = 0; lane < 3; ++lane) {
    auto isKnown = receiver.takeLane();
    require(
        isKnown.wait_for(std::chrono::seconds(10)) ==
                std::future_status::ready &&
            isKnown.get(),
        "a lane says at once who has opened it");
  }
  require(!sent.wait(), "all is sent");
  sender.stop();
  receiver.join();
}

void testNoDescriptorIsLeft() {
  const auto gate = std::make_shared<base::Gate>();
  Fixture f;
  f.move({kPiece}, 6); // opens a lane
  {
    NoDescriptors none;
    none.giveOneBack();
    for (int i = 0; i < 2; ++i) {
      Stranger stranger(f.address); // takes the one
      require(stranger.isClosed(), "it does not wait for a descriptor");
    }
    f.move({kPiece}, 7);
    while (none.takeOne()) {
    }
    none.giveOneBack();
    try {
      const lanes::BulkSender sender(2.0, gate);
      require(false, "a sender needs more than one descriptor");
    } catch (const std::system_error&) {
    }
    require(none.takeOne(), "what it had is closed");
  }
  f.move({9 * kPiece}, 8);

  Fixture without; // no lane is open
  const Bytes from = numbered(kPiece, 1);
  End sent;
  {
    const NoDescriptors none;
    without.sender.send(
        without.address, 9, {{from.data(), from.size()}}, sent.callback());
  }
  require(sent.fired(), "a send without a lane ends");
  require(sent.wait().kind == base::ErrorKind::kSystem, "the peer is not lost");
  without.move({kPiece}, 10);
}

void testSocketsThatCannotBeServed() {
  Fixture f;
  const Bytes from = numbered(kPiece, 1);
  End sent;
  epollIsFull = true;
  f.sender.send(f.address, 7, {{from.data(), from.size()}}, sent.callback());
  const bool listens = f.receiver.addressAt({"127.0.0.2"}).ok();
  epollIsFull = false;
  require(sent.fired(), "a send without a lane ends");
  require(sent.wait().kind == base::ErrorKind::kSystem, "with the reason");
  require(!listens, "nobody would accept");
  require(f.receiver.addressAt({"127.0.0.2"}).ok(), "now somebody does");
  f.move({9 * kPiece}, 9);
}

void testAThreadThatCannotBeStarted() {
  Fixture f;
  const Bytes from = numbered(kPiece, 1);
  End sent;
  noThreadIsLeft = true;
  f.sender.send(f.address, 7, {{from.data(), from.size()}}, sent.callback());
  noThreadIsLeft = false;
  require(sent.fired(), "a send without a thread ends");
  require(sent.wait().kind == base::ErrorKind::kSystem, "with the reason");
  f.move({9 * kPiece}, 9); // and the next one finds nothing left of it
}

void testAddresses() {
  Fixture f;
  require(lanes::parseAddress(f.address).ok(), "its own");
  const std::string key(lanes::kKeyBytes, 'k');
  for (const char* text :
       {"",
        "127.0.0.1",
        "127.0.0.1 \n",
        "127.0.0.1 0\n",
        "127.0.0.1 65536\n",
        "127.0.0.1 99999999999999999999\n",
        "127.0.0.1 -1\n",
        "localhost 80\n",
        "127.0.0.1 80",
        " 80\n",
        "::1%eth0 80\n",
        "127.0.0.1 80\nx"}) {
    require(!lanes::parseAddress(key + text).ok(), text);
  }
  require(!lanes::parseAddress("short").ok(), "no key");
  require(lanes::parseAddress(key + "::1 80\n10.0.0.1 9\n").ok(), "two");
  require(!f.receiver.addressAt({"192.0.2.1"}).ok(), "not of this host");
  require(!f.receiver.addressAt({}).ok(), "none");
}

void testWhatWasDeferredBeforeAnException() {
  const auto set = std::make_shared<lanes::LaneSet>(
      std::make_shared<base::Gate>(),
      [](lanes::LaneSet::Locked&, uint64_t, uint32_t) {},
      [](lanes::LaneSet::Locked&) { return false; });
  int ended = 0;
  bool caught = false;
  try {
    set->run([&](lanes::LaneSet::Locked& locked) {
      locked.defer([&] {
        ++ended;
        set->run([](lanes::LaneSet::Locked&) {}); // the lock is free
      });
      throw std::bad_alloc();
    });
  } catch (const std::bad_alloc&) {
    caught = true;
  }
  require(ended == 1, "a callback that was deferred fires");
  require(caught, "and the exception goes on");
}

} // namespace

int main() {
  testAddresses();
  testSizes();
  testManyAtOnce();
  testCancelledReceive();
  testNobodyThere();
  testAnEndpointWithoutARoute();
  testTheNextReceiverOnAPort();
  testAReceiverThatEnds();
  testStrangers();
  testAHeaderBeforeItsReceive();
  testManySilentStrangers();
  testALaneThatOpensTooLateForAPiece();
  testAnAnswerThatCannotBeSent();
  testNoMemoryIsLeft();
  testNoDescriptorIsLeft();
  testSocketsThatCannotBeServed();
  testAThreadThatCannotBeStarted();
  testWhatWasDeferredBeforeAnException();
  return 0;
}
