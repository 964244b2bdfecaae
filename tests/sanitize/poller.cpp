// base::Poller, its leaders, and base::Timer.

#include "base/poller.h"
#include "base/timer.h"
#include "sanitize/stress.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <string>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;

namespace {

// Counts what is written to it. Two threads must not run its handler at a time,
// except that of the main descriptor, which takes a lock.
class Source {
 public:
  Source(base::Poller& poller, bool main)
      : poller_(poller),
        main_(main),
        fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    const auto handler = [this] { onReadable(); };
    if (main) {
      poller.addMain(fd_, handler, [this] {
        const uint64_t before = seen_.load();
        onReadable();
        return seen_.load() != before;
      });
    } else {
      poller.add(fd_, handler);
    }
  }
  ~Source() {
    close(fd_);
  }
  void raise() {
    const uint64_t one = 1;
    raised_.fetch_add(1);
    (void)!write(fd_, &one, sizeof(one));
  }
  bool served() const {
    return seen_.load() == raised_.load();
  }

 private:
  void onReadable() {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (main_) {
      lock.lock();
    }
    require(!running_.exchange(true), "one handler at a time");
    uint64_t count = 0;
    if (read(fd_, &count, sizeof(count)) == sizeof(count)) {
      seen_.fetch_add(count);
    }
    ++unguarded_; // a data race if two threads run this handler at a time
    running_.store(false);
    poller_.rearm(fd_);
  }

  base::Poller& poller_;
  const bool main_;
  const int fd_;
  std::mutex mutex_;
  std::atomic<bool> running_{false};
  std::atomic<uint64_t> raised_{0};
  std::atomic<uint64_t> seen_{0};
  uint64_t unguarded_ = 0;
};

// All timers share a descriptor; each fires at its own moment.
void fireInOrder() {
  base::Poller poller;
  std::string order;
  const auto letter = [&order](char one) {
    return [&order, one] { order += one; };
  };
  base::Timer late(poller, letter('l'));
  base::Timer early(poller, letter('e'));
  base::Timer never(poller, letter('n'));
  base::Timer stopped(poller, letter('s'));
  base::Timer past(poller, letter('p'));
  base::Timer again(poller, [&] {
    order += 'a';
    if (order.size() < 5) {
      again.set(base::Timer::Clock::now());
    }
  });
  const auto start = base::Timer::Clock::now();
  const auto after = [start](int ms) {
    return start + std::chrono::milliseconds(ms);
  };
  never.set(after(5));
  stopped.set(after(5));
  late.set(after(1)); // the descriptor is now set too early
  late.set(after(60));
  early.set(after(30));
  past.set(after(-1000));
  again.set(after(15));
  never.set(base::Timer::Clock::time_point::max());
  stopped.stop();
  stopped.set(after(5));
  while (order.find('l') == std::string::npos &&
         base::Timer::Clock::now() < after(10'000)) {
    poller.wait(1000);
    require(
        order.find('e') == std::string::npos ||
            base::Timer::Clock::now() >= after(30),
        "not before its moment");
  }
  require(base::Timer::Clock::now() >= after(60), "not before its moment");
  require(order == "paaaael", "each once, in the order of their moments");
}

} // namespace

int main(int count, char** arguments) {
  fireInOrder();
  base::Poller poller;
  Source main(poller, /*main=*/true);
  Source other(poller, /*main=*/false);
  std::atomic<uint64_t> fired{0};
  base::Timer timer(poller, [&fired] { fired.fetch_add(1); });
  std::atomic<uint64_t> neverFired{0};
  base::Timer never(poller, [&neverFired] { neverFired.fetch_add(1); });
  const auto signal = std::make_shared<base::Poller::Lead::Signal>();
  {
    Crowd waiters;
    waiters.add(3, [&](auto&) { poller.wait(10); });
    waiters.add(2, [&](auto&) {
      base::Poller::Lead lead(poller, signal);
      if (lead.leads()) {
        lead.wait();
      }
      std::this_thread::yield();
    });
    waiters.add(1, [&](auto&) {
      base::Poller::Lead lead(poller, signal, base::Poller::Lead::As::kGuest);
      for (int i = 0; i < 100 && lead.leads() && !lead.isWanted(); ++i) {
        lead.poll();
      }
      std::this_thread::yield();
    });
    Crowd crowd;
    crowd.add(1, [&](auto&) { main.raise(); });
    crowd.add(1, [&](auto&) { other.raise(); });
    crowd.add(1, [&](auto& random) {
      timer.set(
          base::Timer::Clock::now() + std::chrono::microseconds(random() % 99));
      never.set(base::Timer::Clock::now() + std::chrono::hours(1));
      signal->raise();
      poller.wake();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
    // Descriptors are made and closed, and their numbers used again.
    crowd.add(1, [&](auto&) {
      const int fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
      const auto alive = std::make_shared<std::atomic<int>>(0);
      poller.add(fd, [alive] { alive->fetch_add(1); });
      std::this_thread::yield();
      poller.rearm(fd);
      poller.remove(fd);
      close(fd);
    });
    const uint64_t acts = crowd.run(seconds(count, arguments));
    require(acts > 100, "something was done");
    for (int i = 0; i < 1000 && !(main.served() && other.served()); ++i) {
      signal->raise();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    require(main.served() && other.served(), "no event is lost");
    // A leader waits until it is woken. This thread wakes leaders until the
    // test is over.
    std::atomic<bool> over{false};
    std::thread waker([&] {
      while (!over.load()) {
        signal->raise();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    waiters.run(0);
    over.store(true);
    waker.join();
  }
  require(fired.load() != 0, "the timer fires");
  require(neverFired.load() == 0, "nor does another one fire with it");
  timer.stop();
  never.stop();
  return 0;
}
