#pragma once

#include "agent/executor.h"
#include "sanitize/stress.h"
#include "transport/ucx/context.h"

#include <memory>
#include <string>

namespace torch_rpc_ext::transport {

// Lets every peer connect, and takes no frames.
class Welcoming : public Handler {
 public:
  std::string introduction() override {
    return "side";
  }
  base::Error onAccept(const ConnectionPtr&, const std::string&) override {
    return {};
  }
  base::Error onConnected(const ConnectionPtr&, const std::string&) override {
    return {};
  }
  void onFrame(const ConnectionPtr&, std::unique_ptr<Incoming>) override {}
  void onClosed(const ConnectionPtr&, const base::Error&) override {}
};

// One of two ends in a process, and the threads that serve it. Derives from the
// handler, so that the context has stopped before the handler is destroyed.
template <typename H = Welcoming>
class Side final : public H {
 public:
  explicit Side(const ucx::Options& options = {}) {
    auto made = ucx::UcxContext::create(options);
    stress::require(made.ok(), "a context");
    context = made.value();
    context->setSecret("secret");
    executor.start();
    context->start(executor.poller(), executor, *this);
  }
  ~Side() override {
    context->stop();
    stress::require(executor.stop(10000), "the executor ends");
  }

  agent::Executor executor{2};
  std::shared_ptr<ucx::UcxContext> context;
};

} // namespace torch_rpc_ext::transport
