#include "support/fake_libcuda/fake.h"

#include <map>

namespace {

struct Fault {
  CUresult error;
  int times;
};

std::mutex mutex;
std::string calls;
std::map<std::string, Fault> faults;

} // namespace

CUresult fake::enter(const char* name, const std::string& arguments) {
  // Tests use a function's name in the manual, without the ABI's suffix _v2.
  std::string plain = name;
  if (const size_t at = plain.rfind("_v"); at != std::string::npos) {
    plain.resize(at);
  }
  std::lock_guard lock(mutex);
  calls += plain + (arguments.empty() ? "" : " ") + arguments + "\n";
  const auto fault = faults.find(plain);
  if (fault == faults.end() || fault->second.times == 0) {
    return CUDA_SUCCESS;
  }
  --fault->second.times;
  return fault->second.error;
}

const char* fakeCudaCalls() {
  static std::string shown;
  std::lock_guard lock(mutex);
  shown = calls;
  return shown.c_str();
}

void fakeCudaForgetCalls() {
  std::lock_guard lock(mutex);
  calls.clear();
}

void fakeCudaFail(const char* function, int error, int times) {
  std::lock_guard lock(mutex);
  faults[function] = {static_cast<CUresult>(error), times};
}
