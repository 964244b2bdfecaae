#include "agent/served_call.h"

#include <utility>

namespace torch_rpc_ext::agent {

namespace {

thread_local const ServedCall* served = nullptr;

} // namespace

const ServedCall* ServedCall::current() {
  return served;
}

ServedCall::Scope::Scope(const ServedCall& call)
    : before_(std::exchange(served, &call)) {}

ServedCall::Scope::~Scope() {
  served = before_;
}

} // namespace torch_rpc_ext::agent
