#include "agent/one_copy.h"

#include <algorithm>

namespace torch_rpc_ext::agent {

namespace {

thread_local OneCopy* inside = nullptr;

} // namespace

void Loan::whenCopied(base::TaskPtr then) {
  {
    auto state = state_.lock();
    if (!state->copied) {
      state->waiting.push_back(std::move(then));
      return;
    }
  }
  then->run();
}

void Loan::copied() {
  std::vector<base::TaskPtr> waiting;
  {
    auto state = state_.lock();
    state->copied = true;
    waiting.swap(state->waiting);
  }
  for (const auto& then : waiting) {
    then->run();
  }
}

OneCopy* OneCopy::current() {
  return inside;
}

OneCopy* OneCopy::setCurrent(OneCopy* next) {
  return std::exchange(inside, next);
}

bool OneCopy::shares(base::ConstSpan bytes) const {
  return !only_ ||
      std::find(only_->begin(), only_->end(), bytes.data) != only_->end();
}

std::shared_ptr<Loan> OneCopy::find(base::ConstSpan bytes) const {
  const auto found =
      std::find_if(loans_.begin(), loans_.end(), [&](const auto& loan) {
        return loan->from().data == bytes.data &&
            loan->from().size == bytes.size;
      });
  return found == loans_.end() ? nullptr : *found;
}

void OneCopy::add(
    const std::vector<std::shared_ptr<Loan>>& loans,
    const std::vector<c10::Storage>& sources) {
  for (const auto& loan : loans) {
    if (loan->isCommon) {
      loans_.push_back(loan);
    }
  }
  for (const auto& source : sources) {
    if (shares({source.data(), source.nbytes()})) {
      sources_.push_back(source);
    }
  }
}

} // namespace torch_rpc_ext::agent
