// agent::Mailbox: each task that is put runs exactly once: on the thread that
// waits, or, when no thread waits any more, on the thread that put the task.

#include "agent/mailbox.h"
#include "sanitize/stress.h"

#include <array>
#include <memory>
#include <mutex>

using namespace torch_rpc_ext;
using namespace torch_rpc_ext::stress;

namespace {

using MailboxPtr = std::shared_ptr<agent::Mailbox>;

// Where other threads find the mailbox of a waiting thread.
class Door {
 public:
  void set(MailboxPtr mailbox) {
    std::lock_guard lock(mutex_);
    mailbox_ = std::move(mailbox);
  }
  MailboxPtr get() {
    std::lock_guard lock(mutex_);
    return mailbox_;
  }

 private:
  std::mutex mutex_;
  MailboxPtr mailbox_;
};

} // namespace

int main(int count, char** arguments) {
  std::array<Door, 2> doors;
  std::atomic<size_t> taken{0}; // doors
  std::atomic<uint64_t> made{0};
  std::atomic<uint64_t> run{0};
  // This thread runs longer than all others, so that each wait ends.
  std::atomic<bool> over{false};
  std::thread bell([&] {
    while (!over.load()) {
      for (auto& door : doors) {
        if (const auto mailbox = door.get()) {
          mailbox->ring();
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  {
    Crowd crowd;
    crowd.add(doors.size(), [&](Crowd::Source& random) {
      thread_local const size_t mine = taken.fetch_add(1);
      const auto mailbox = std::make_shared<agent::Mailbox>();
      // Not atomic, because only this thread runs the tasks of its mailbox.
      uint64_t before = run.load();
      uint64_t looks = 0;
      const uint64_t most = 1 + random() % 20;
      mailbox->open();
      doors[mine].set(mailbox);
      require(
          mailbox->serve([&] { return run.load() > before || ++looks > most; }),
          "no signal ends it");
      for (auto& task : mailbox->close()) {
        task->run();
      }
      base::TaskPtr late = base::makeTask([] {});
      require(!mailbox->put(late) && late != nullptr, "closed");
    });
    crowd.add(3, [&](Crowd::Source& random) {
      const auto mailbox = doors[random() % doors.size()].get();
      if (mailbox == nullptr || random() % 4 == 0) {
        if (mailbox != nullptr) {
          mailbox->ring();
        }
        return;
      }
      // The task holds its mailbox, as an answer does through its call.
      base::TaskPtr task =
          base::makeTask([&run, mailbox] { run.fetch_add(1); });
      made.fetch_add(1);
      if (!mailbox->put(task)) {
        task->run();
      }
    });
    crowd.run(seconds(count, arguments));
  }
  over.store(true);
  bell.join();
  require(run.load() == made.load(), "each task has run once");
  require(run.load() > 100, "something was done");
}
