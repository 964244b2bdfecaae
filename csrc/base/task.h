#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace torch_rpc_ext::base {

// A piece of work that runs at most once. Not a std::function, because that can
// only hold what can be copied, and a Buffer cannot.
class Task {
 public:
  virtual ~Task() = default;
  virtual void run() = 0;
};

using TaskPtr = std::unique_ptr<Task>;

template <typename F>
TaskPtr makeTask(F&& function) {
  class FunctionTask final : public Task {
   public:
    explicit FunctionTask(F&& f) : function_(std::forward<F>(f)) {}
    void run() override {
      function_();
    }

   private:
    std::decay_t<F> function_;
  };
  return std::make_unique<FunctionTask>(std::forward<F>(function));
}

// Runs tasks on threads that may be busy for long (copies, user code), never
// on the caller's stack. Thread-safe.
class TaskRunner {
 public:
  virtual ~TaskRunner() = default;
  virtual void submit(TaskPtr task) = 0;
};

} // namespace torch_rpc_ext::base
