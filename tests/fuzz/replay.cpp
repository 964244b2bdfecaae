// Replaces libFuzzer: gives a target each file that is named on the command
// line, and mutations of it: cut off, with flipped bits, and with numbers that
// no length or count should have. Every run gives the same inputs.

#include "fuzz/targets/target.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <vector>

namespace {

using Bytes = std::vector<uint8_t>;

// The most mutations of each kind that are tried, evenly spread over the file.
constexpr size_t kMost = 2048;

size_t executions = 0;

// Copies the input to memory of exactly its size, so that the sanitizer notices
// a read beyond its end.
void run(const Bytes& bytes) {
  const auto copy = std::make_unique<uint8_t[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), copy.get());
  LLVMFuzzerTestOneInput(copy.get(), bytes.size());
  ++executions;
}

size_t stepOver(size_t count) {
  return std::max<size_t>(1, (count + kMost - 1) / kMost);
}

void cutOff(const Bytes& bytes) {
  for (size_t i = 0; i < bytes.size(); i += stepOver(bytes.size())) {
    run(Bytes(bytes.begin(), bytes.begin() + i));
  }
  Bytes longer = bytes;
  longer.push_back(0);
  run(longer);
}

void flipBits(Bytes bytes) {
  const size_t bits = 8 * bytes.size();
  for (size_t i = 0; i < bits; i += stepOver(bits)) {
    bytes[i / 8] ^= 1 << (i % 8);
    run(bytes);
    bytes[i / 8] ^= 1 << (i % 8);
  }
}

template <typename T>
void writeNumbers(const Bytes& bytes) {
  if (bytes.size() < sizeof(T)) {
    return;
  }
  const size_t places = bytes.size() - sizeof(T) + 1;
  constexpr T kMax = std::numeric_limits<T>::max();
  const T numbers[] = {
      0,
      1,
      static_cast<T>(bytes.size()),
      static_cast<T>(bytes.size() + 1),
      kMax / 16,
      kMax / 2,
      kMax / 2 + 1,
      kMax - 1,
      kMax};
  for (size_t i = 0; i < places; i += stepOver(places)) {
    Bytes changed = bytes;
    for (const T number : numbers) {
      std::memcpy(changed.data() + i, &number, sizeof(T));
      run(changed);
    }
  }
}

} // namespace

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    std::ifstream file(names[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", names[i]);
      return 2;
    }
    // Printed before the input runs: the last name printed is the one that
    // failed.
    std::fprintf(stderr, "%s\n", names[i]);
    const Bytes bytes{std::istreambuf_iterator<char>(file), {}};
    run(bytes);
    cutOff(bytes);
    flipBits(bytes);
    writeNumbers<uint16_t>(bytes);
    writeNumbers<uint32_t>(bytes);
    writeNumbers<uint64_t>(bytes);
  }
  std::printf("%zu executions\n", executions);
  return 0;
}
