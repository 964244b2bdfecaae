#include "transport/ucx/abandoned_slots.h"

#include "base/descriptor.h"
#include "base/log.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

namespace torch_rpc_ext::transport::ucx {

namespace {

// UCX's queue as of version 1.22, with the default sizes (POSIX_FIFO_SIZE,
// POSIX_FIFO_ELEM_SIZE).
// Source: uct_mm_fifo_ctl_t and uct_mm_fifo_element_t in UCX's mm_iface.h
struct Control {
  uint64_t head; // the next slot to take
  uint32_t wakeAddressLength;
  std::array<char, 110> wakeAddress; // a struct sockaddr_un
  std::array<char, 6> padding1;
  uint64_t tail; // all slots before tail have been read, maybe more
  int32_t process; // the receiver
  std::array<char, 52> padding2;
};
static_assert(offsetof(Control, tail) == 128 && sizeof(Control) == 192);

struct Slot {
  uint8_t flags;
  uint8_t message; // the kind of the message
  uint16_t length;
  std::array<char, 124> rest;
};
static_assert(sizeof(Slot) == 128);

constexpr uint64_t kSlots = 256; // a power of 2
struct Content {
  Control control;
  std::array<Slot, kSlots> slots;
};
constexpr uint64_t kMappedBytes = 9 * 4096; // sizeof(Content) in whole pages

// A bit of `head`: the receiver has read all messages, and sleeps until it is
// woken.
constexpr uint64_t kAsleepBit = uint64_t{1} << 63;
constexpr uint8_t kFullBit = 1; // full: set in odd laps, clear in even laps
constexpr uint8_t kInline = 2;
// UCX numbers its kinds of messages from 1, and drops unknown kinds.
constexpr uint8_t kNoMessage = 0;

constexpr std::chrono::milliseconds kLookEvery{1000};
constexpr std::chrono::milliseconds kLookAgainAfter{100}; // if a slot is taken
// The search for writers begins after so many looks. A sender that lives has
// mostly filled its slot by then, except on a busy machine, where it may have
// had no core.
constexpr int kLooksBeforeSearch = 3;
// After so many looks at a slot that is taken and not full, the log says so.
constexpr int kLooksBeforeWord = 100;
// A thread that has computed for so long is not filling the slot any more: that
// takes microseconds, and a tick is 10 ms.
constexpr uint64_t kTicksOfWriting = 2;

uint8_t fullMark(uint64_t slot) {
  return (slot / kSlots) & kFullBit;
}

// Reads and writes this process's memory without pointers, because the queue
// may belong to another user of UCX in this process, who may unmap it at any
// time.
class OwnMemory {
 public:
  OwnMemory() : file_(open("/proc/self/mem", O_RDWR | O_CLOEXEC)) {}

  bool read(uint64_t address, void* into, size_t bytes) const {
    return pread(file_.fd(), into, bytes, static_cast<off_t>(address)) ==
        static_cast<ssize_t>(bytes);
  }
  bool write(uint64_t address, const void* from, size_t bytes) const {
    return pwrite(file_.fd(), from, bytes, static_cast<off_t>(address)) ==
        static_cast<ssize_t>(bytes);
  }

 private:
  const base::Descriptor file_;
};

// The first slot that was taken and is not full.
std::optional<uint64_t> takenSlot(const Content& queue) {
  const uint64_t head = queue.control.head & ~kAsleepBit;
  const uint64_t tail = queue.control.tail;
  if (head - tail > kSlots) {
    return std::nullopt; // the queue changed while it was read
  }
  for (uint64_t slot = tail; slot != head; ++slot) {
    if ((queue.slots[slot % kSlots].flags & kFullBit) != fullMark(slot)) {
      return slot;
    }
  }
  return std::nullopt;
}

// A segment of UCX's shared memory.
struct Mapping {
  uint64_t begin;
  uint64_t end;
  std::string file;
};

// Source: proc(5), /proc/pid/maps
std::vector<Mapping> mappingsOf(const std::string& process) {
  std::vector<Mapping> found;
  std::ifstream maps("/proc/" + process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/ucx_shm_posix_") == std::string::npos) {
      continue;
    }
    std::istringstream fields(line);
    Mapping mapping{};
    char dash = 0;
    std::string mode, offset, device, inode;
    fields >> std::hex >> mapping.begin >> dash >> mapping.end >> mode >>
        offset >> device >> inode;
    mapping.file = device + " " + inode;
    found.push_back(std::move(mapping));
  }
  return found;
}

bool hasWakeAddress(const Control& control) {
  sa_family_t family = 0;
  std::memcpy(&family, control.wakeAddress.data(), sizeof(family));
  return family == AF_UNIX && control.wakeAddressLength > sizeof(family) &&
      control.wakeAddressLength <= control.wakeAddress.size();
}

// Wakes the receiver as a sender does; a needless wake-up does no harm. While
// the receiver has no connection, a thread of UCX's own takes the wake-up.
void wake(const Control& control) {
  const base::Descriptor own(
      socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const char byte = 0;
  (void)!sendto(
      own.fd(),
      &byte,
      sizeof(byte),
      /*flags=*/0,
      reinterpret_cast<const sockaddr*>(control.wakeAddress.data()),
      control.wakeAddressLength);
}

struct ThreadState {
  char state = 0;
  uint64_t ticks = 0;
};

// Nullopt if the thread has ended. Source: proc(5), /proc/pid/stat
std::optional<ThreadState> stateOf(pid_t process, pid_t thread) {
  std::ifstream file(
      "/proc/" + std::to_string(process) + "/task/" + std::to_string(thread) +
      "/stat");
  std::string text;
  if (!std::getline(file, text, '\0')) {
    return std::nullopt;
  }
  // The name, in parentheses, may contain anything, also the end of a line.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  ThreadState found;
  fields >> found.state;
  std::string other;
  for (int field = 4; field < 14; ++field) {
    fields >> other;
  }
  uint64_t user = 0;
  uint64_t system = 0;
  fields >> user >> system;
  found.ticks = user + system;
  return found;
}

// A thread whose cgroup is frozen looks asleep, but may have been frozen amid
// its own code, outside of a system call. Where this process may not trace the
// other one, the kernel does not say that, and a thread that looks asleep is
// taken for asleep.
// Source: proc(5), /proc/pid/syscall
bool isAsleep(pid_t process, pid_t thread, char state) {
  if (state != 'S') {
    return state == 'I' || state == 'Z' || state == 'X';
  }
  std::ifstream file(
      "/proc/" + std::to_string(process) + "/task/" + std::to_string(thread) +
      "/syscall");
  std::string call; // its number; -1 outside of one; "running" meanwhile
  file >> call;
  return call != "-1" && call != "running";
}

template <typename F>
void forEachNumber(const std::string& directory, F&& use) {
  std::error_code error; // the process may end meanwhile
  std::filesystem::directory_iterator it(directory, error);
  for (; !error && it != std::filesystem::directory_iterator();
       it.increment(error)) {
    const std::string name = it->path().filename();
    if (name.find_first_not_of("0123456789") == std::string::npos) {
      use(static_cast<pid_t>(std::stol(name)));
    }
  }
}

} // namespace

AbandonedSlots::AbandonedSlots(
    base::Poller& poller,
    base::TaskRunner& runner,
    std::function<void()> progress)
    : runner_(runner), progress_(std::move(progress)), timer_(poller, [this] {
        // Not on the thread that polls, because look() may have to look at all
        // processes of the host.
        runner_.submit(base::makeTask([this] { look(); }));
      }) {
  timer_.set(base::Timer::Clock::now() + kLookEvery);
}

std::vector<AbandonedSlots::Queue> AbandonedSlots::queuesOfThisProcess() {
  std::vector<Queue> queues;
  const OwnMemory memory;
  for (auto& mapping : mappingsOf("self")) {
    Control control{};
    if (mapping.end - mapping.begin == kMappedBytes &&
        memory.read(mapping.begin, &control, sizeof(control)) &&
        control.process == getpid() && hasWakeAddress(control)) {
      queues.push_back({mapping.begin, std::move(mapping.file)});
    }
  }
  return queues;
}

void AbandonedSlots::lookSoon() {
  timer_.set(base::Timer::Clock::now());
}

void AbandonedSlots::stop() {
  timer_.stop();
}

std::vector<AbandonedSlots::Writer> AbandonedSlots::writersTo(
    const Queue& queue) {
  std::vector<Writer> writers;
  forEachNumber("/proc", [&](pid_t process) {
    if (process == getpid()) {
      return;
    }
    for (const auto& mapping : mappingsOf(std::to_string(process))) {
      if (mapping.file == queue.file) {
        forEachNumber(
            "/proc/" + std::to_string(process) + "/task", [&](pid_t thread) {
              if (const auto state = stateOf(process, thread)) {
                writers.push_back({process, thread, state->ticks});
              }
            });
        return;
      }
    }
  });
  return writers;
}

void AbandonedSlots::look() {
  const auto queues = queues_.lock();
  if (!searched_.exchange(true)) {
    *queues = queuesOfThisProcess();
  }
  std::erase_if(*queues, [this](Queue& queue) { return !lookAt(queue); });
  const bool again = std::ranges::any_of(
      *queues, [](const Queue& queue) { return queue.looks != 0; });
  timer_.set(
      base::Timer::Clock::now() + (again ? kLookAgainAfter : kLookEvery));
}

bool AbandonedSlots::lookAt(Queue& queue) {
  // Before the queue is read: if a thread has now stopped writing, the queue
  // read below shows what it wrote.
  std::erase_if(queue.writers, [](const Writer& writer) {
    const auto state = stateOf(writer.process, writer.thread);
    return !state || isAsleep(writer.process, writer.thread, state->state) ||
        state->ticks >= writer.ticks + kTicksOfWriting;
  });
  const OwnMemory memory;
  Content content;
  std::optional<uint64_t> slot;
  if (memory.read(queue.address, &content.control, sizeof(Control)) &&
      (content.control.head & kAsleepBit) == 0 &&
      memory.read(queue.address, &content, sizeof(Content))) {
    slot = takenSlot(content);
    // The sender of a full slot may have been killed before it woke the
    // receiver.
    wake(content.control);
    progress_();
  }
  if (!slot || queue.looks == 0 || queue.slot != *slot) {
    queue.slot = slot.value_or(0);
    queue.looks = slot ? 1 : 0;
    queue.writers.clear();
    return true;
  }
  ++queue.looks;
  if (queue.looks == kLooksBeforeSearch) {
    queue.writers = writersTo(queue);
  } else if (queue.looks > kLooksBeforeSearch && queue.writers.empty()) {
    const bool freed = freeSlot(queue);
    progress_();
    return freed;
  } else if (queue.looks == kLooksBeforeWord) {
    base::log(
        base::LogLevel::kWarning,
        "this worker hears nothing from workers of its host: process " +
            std::to_string(queue.writers[0].process) +
            ", which is stopped or has no core, may be writing into its "
            "shared memory");
  }
  return true;
}

bool AbandonedSlots::freeSlot(const Queue& queue) {
  const auto queues = queuesOfThisProcess();
  if (std::ranges::none_of(queues, [&](const Queue& found) {
        return found.address == queue.address && found.file == queue.file;
      })) {
    // The owner has unmapped the queue. What looked like a taken slot is memory
    // of somebody else, who has it now.
    return false;
  }
  const uint64_t address =
      queue.address + sizeof(Control) + (queue.slot % kSlots) * sizeof(Slot);
  Slot slot{};
  slot.flags = kInline | fullMark(queue.slot);
  slot.message = kNoMessage;
  const OwnMemory memory;
  // The mark is written last, because UCX reads the slot as soon as it is
  // marked.
  const bool done = memory.write(
                        address + offsetof(Slot, message),
                        &slot.message,
                        sizeof(slot.message)) &&
      memory.write(
          address + offsetof(Slot, length),
          &slot.length,
          sizeof(slot.length)) &&
      memory.write(address, &slot.flags, sizeof(slot.flags));
  base::log(
      base::LogLevel::kWarning,
      std::string(
          "a process of this host died while it was writing into this "
          "worker's shared memory; ") +
          (done ? "what it left has been removed"
                : "this worker will hear nothing from workers of its host: "
                  "/proc/self/mem cannot be written"));
  return done;
}

} // namespace torch_rpc_ext::transport::ucx
