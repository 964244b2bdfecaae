// base::guarded(): handlers, timers, threads and tasks throw now and then, and
// nothing is lost: handlers and timers are called again, a request gives its
// slot back, and the threads go on.

#include "base/boundary.h"
#include "agent/executor.h"
#include "base/timer.h"
#include "sanitize/stress.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <new>
#include <stdexcept>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;
using agent::Executor;
using base::Boundary;

namespace {

std::atomic<uint64_t> crossings{0};
std::atomic<uint64_t> thrown{0};

// Throws at every seventh boundary that is crossed.
void throwNowAndThen(Boundary where) {
  if (crossings.fetch_add(1) % 7 != 0) {
    return;
  }
  thrown.fetch_add(1);
  if (where == Boundary::kEvent) {
    throw std::bad_alloc();
  }
  throw std::runtime_error("injected\nException raised from here");
}

bool becomes(const std::function<bool()>& holds) {
  for (int i = 0; i < 20000 && !holds(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return holds();
}

// An exception becomes an error of the right kind, and `failed` may throw.
void translate() {
  base::Error error;
  const auto take = [&](const base::Error& caught) { error = caught; };
  base::guarded(Boundary::kTask, [] { throw std::bad_alloc(); }, take);
  require(error.kind == base::ErrorKind::kOverloaded, "no memory");
  base::guarded(
      Boundary::kTask,
      [] { throw std::runtime_error("text\nException raised from f()"); },
      take);
  require(error.kind == base::ErrorKind::kSystem, "another exception");
  require(error.message == "text", "without where it was raised");
  base::guarded(Boundary::kTask, [] { throw 1; }, take);
  require(!error.message.empty(), "what is no exception");
  base::guarded(
      Boundary::kTask,
      [] { throw 1; },
      [](const base::Error&) { throw std::bad_alloc(); });
  base::caughtHere(Boundary::kTask, [] { throw 1; });
}

class Served {
 public:
  explicit Served(base::Poller& poller)
      : poller_(poller), fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    poller_.add(fd_, [this] {
      uint64_t count = 0;
      if (read(fd_, &count, sizeof(count)) == sizeof(count)) {
        seen_.fetch_add(count);
      }
      poller_.rearm(fd_);
    });
  }
  ~Served() {
    poller_.remove(fd_);
    close(fd_);
  }
  void raise() {
    const uint64_t one = 1;
    raised_.fetch_add(1);
    (void)!write(fd_, &one, sizeof(one));
  }
  bool all() const {
    return seen_.load() == raised_.load();
  }

 private:
  base::Poller& poller_;
  const int fd_;
  std::atomic<uint64_t> raised_{0};
  std::atomic<uint64_t> seen_{0};
};

} // namespace

int main(int count, char** arguments) {
  // Discards the log: each exception writes a line to stderr.
  const int null = open("/dev/null", O_WRONLY);
  const int log = dup(STDERR_FILENO);
  dup2(null, STDERR_FILENO);
  translate();
  base::injector.store(&throwNowAndThen);
  std::atomic<uint64_t> done{0};
  std::atomic<uint64_t> submitted{0};
  std::atomic<uint64_t> fired{0};
  Executor executor(/*requestThreads=*/2);
  executor.setThreadScope([] { return std::make_shared<int>(1); });
  executor.start();
  {
    std::array<Served, 2> served{
        Served(executor.poller()), Served(executor.poller())};
    base::Timer timer(executor.poller(), [&] { fired.fetch_add(1); });
    Crowd crowd;
    crowd.add(2, [&](auto& random) {
      served[random() % served.size()].raise();
      if (submitted.load() - done.load() < 100) {
        submitted.fetch_add(2);
        const bool throws = random() % 3 == 0;
        const auto act = [&done, throws] {
          done.fetch_add(1);
          if (throws) {
            throw std::bad_alloc();
          }
        };
        executor.submitRequest(base::makeTask(act));
        executor.submitCompletion(base::makeTask(act));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
    crowd.run(seconds(count, arguments));
    const uint64_t before = fired.load();
    for (int i = 0; i < 20; ++i) {
      const uint64_t now = fired.load();
      timer.set(base::Timer::Clock::now());
      require(
          becomes([&] { return fired.load() > now; }), "a timer comes again");
    }
    require(fired.load() >= before + 20, "each time");
    require(
        becomes([&] { return served[0].all() && served[1].all(); }),
        "every event is served");
    require(
        becomes([&] { return done.load() == submitted.load(); }),
        "every task runs");
    require(
        becomes([&] { return executor.runningRequests() == 0; }),
        "no slot is lost");
  }
  require(thrown.load() > 10, "something was thrown");
  base::injector.store(nullptr);
  require(executor.stop(10000), "it ends");
  dup2(log, STDERR_FILENO);
  return 0;
}
