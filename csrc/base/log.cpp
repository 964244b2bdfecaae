#include "base/log.h"

#include <strings.h>
#include <unistd.h>

#include <cstdlib>

namespace torch_rpc_ext::base {

namespace {

LogLevel logThreshold() {
  static const LogLevel threshold = [] {
    const char* value = std::getenv("TORCH_RPC_EXT_LOG");
    const char* const text = value ? value : "warning";
    if (strcasecmp(text, "debug") == 0) {
      return LogLevel::kDebug;
    }
    if (strcasecmp(text, "info") == 0) {
      return LogLevel::kInfo;
    }
    return strcasecmp(text, "error") == 0 ? LogLevel::kError
                                          : LogLevel::kWarning;
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
