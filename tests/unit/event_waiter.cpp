// EventWaiter on a fake device, whose events complete or fail when this program
// says so.

#include "agent/device/event_waiter.h"
#include "base/boundary.h"
#include "sanitize/stress.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <future>
#include <new>
#include <stdexcept>

using namespace torch_rpc_ext;
using agent::device::Events;
using agent::device::EventWaiter;
using stress::require;

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr auto kPatience = std::chrono::seconds(20);

std::atomic<bool> complete{false};
std::atomic<bool> broken{false};
std::atomic<int> throws{0};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return getDevice();
  }
  c10::Device getDevice() const override {
    return {kType, 0};
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void record(
      void** event,
      const c10::Stream&,
      c10::DeviceIndex,
      c10::EventFlag) const override {
    *event = &complete;
  }
  bool queryEvent(void*) const override {
    if (broken.load()) {
      throw std::runtime_error("the device is broken");
    }
    return complete.load();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void inject(base::Boundary where) {
  if (where == base::Boundary::kDeviceEvent && throws.fetch_sub(1) > 0) {
    throw std::bad_alloc();
  }
}

Events recorded() {
  Events events;
  events.emplace_back(kType);
  events.back().record(
      c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, 0)));
  return events;
}

// Records what `done` is called with.
class Answer {
 public:
  EventWaiter::Done take() {
    return [this](const base::Error& error) { heard_.set_value(error); };
  }
  bool ready() const {
    return future_.wait_for(std::chrono::milliseconds(20)) ==
        std::future_status::ready;
  }
  base::Error get() {
    require(
        future_.wait_for(kPatience) == std::future_status::ready,
        "everybody hears something");
    return future_.get();
  }

 private:
  std::promise<base::Error> heard_;
  std::future<base::Error> future_ = heard_.get_future();
};

void afterTheDevice(EventWaiter& waiter) {
  Answer answer;
  waiter.whenComplete(recorded(), answer.take());
  require(!answer.ready(), "not before the device");
  complete.store(true);
  require(!answer.get(), "no error");
}

void withTheErrorOfTheDevice(EventWaiter& waiter) {
  Answer answer;
  complete.store(false);
  waiter.whenComplete(recorded(), answer.take());
  broken.store(true);
  const base::Error error = answer.get();
  broken.store(false);
  require(error.kind == base::ErrorKind::kSystem, "kind");
  require(error.message == "the device is broken", "text");
}

// An exception becomes the error of the wait that it hit, and other waits go
// on.
void withWhatWasThrown(EventWaiter& waiter) {
  Answer first;
  Answer second;
  complete.store(true);
  throws.store(1);
  waiter.whenComplete(recorded(), first.take());
  require(first.get().kind == base::ErrorKind::kOverloaded, "no memory");
  waiter.whenComplete(recorded(), second.take());
  require(!second.get(), "the next one");
}

// A `done` that throws is called once more, with the error.
void onceMore(EventWaiter& waiter) {
  Answer answer;
  auto done = answer.take();
  waiter.whenComplete(recorded(), [&done](const base::Error& error) {
    if (!error) {
      throw std::runtime_error("in the middle");
    }
    done(error);
  });
  require(answer.get().message == "in the middle", "text");
}

void atTheEnd(EventWaiter& waiter) {
  Answer waiting;
  Answer late;
  complete.store(false);
  waiter.whenComplete(recorded(), waiting.take());
  waiter.stop();
  require(waiting.get().kind == base::ErrorKind::kShutDown, "who waits");
  waiter.whenComplete(recorded(), late.take());
  require(late.get().kind == base::ErrorKind::kShutDown, "who comes later");
}

} // namespace

int main() {
  base::injector.store(&inject);
  EventWaiter waiter;
  afterTheDevice(waiter);
  withTheErrorOfTheDevice(waiter);
  withWhatWasThrown(waiter);
  onceMore(waiter);
  atTheEnd(waiter);
}
