#include "agent/served_call.h"

#include <utility>

namespace torch_rpc_ext::agent {

namespace {

thread_local const ServedCall* current_ = nullptr;

} // namespace

const ServedCall* ServedCall::current() {
  return current_;
}

ServedCall::Scope::Scope(const ServedCall& call)
    : before_(std::exchange(current_, &call)) {}

ServedCall::Scope::~Scope() {
  current_ = before_;
}

} // namespace torch_rpc_ext::agent
