#include "base/log.h"

#include <unistd.h>

#include <cstdlib>

namespace torch_rpc_ext::base {

namespace {

LogLevel logThreshold() {
  static const LogLevel threshold = [] {
    const char* value = std::getenv("TORCH_RPC_EXT_LOG");
    const std::string text = value ? value : "warning";
    if (text == "debug") {
      return LogLevel::kDebug;
    }
    if (text == "info") {
      return LogLevel::kInfo;
    }
    return text == "error" ? LogLevel::kError : LogLevel::kWarning;
  }();
  return threshold;
}

} // namespace

void log(LogLevel level, const std::string& line) {
  if (level < logThreshold()) {
    return;
  }
  static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  // One write(2) for the whole line, so that lines of other threads and
  // processes do not get into it.
  const std::string text = std::string("[torch_rpc_ext ") +
      kNames[static_cast<int>(level)] + "] " + line + "\n";
  (void)!write(STDERR_FILENO, text.data(), text.size());
}

void LimitedLog::operator()(LogLevel level, const std::string& line) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) {
    ++leftOut_;
    return;
  }
  log(level,
      leftOut_ == 0
          ? line
          : line + " (and " + std::to_string(leftOut_) + " lines like this)");
  leftOut_ = 0;
  next_ = now + std::chrono::seconds(1);
}

} // namespace torch_rpc_ext::base
