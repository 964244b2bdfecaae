#pragma once

#include "base/error.h"
#include "base/synchronized.h"
#include "cuda/driver.h"
#include "cuda/plan.h"
#include "cuda/table_pool.h"

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace torch_rpc_ext::cuda {

struct Ptx {
  std::string text;
  std::string entry;
};

// Compiles the kernel of this name for a compute capability (major, minor). The
// first time on a machine this takes seconds. Takes the GIL.
using PtxSource =
    std::function<base::Result<Ptx>(const std::string&, int, int)>;

// The kernels of torch_rpc_ext/kernels. Each is loaded once for each device, by
// prepare() or at its first launch, and launched on the caller's stream. Only
// loading takes the GIL and may take long.
// Owns: modules and tables on the devices.
// Thread: any that does not hold the GIL.
class Kernels {
 public:
  Kernels(std::shared_ptr<Driver> driver, PtxSource source);
  ~Kernels();

  // Loads the kernel of this name, or returns why it cannot be used: no
  // numba-cuda (kUnsupported), a GPU that is too old, ...
  base::Error prepare(int device, const std::string& kernel);

  // Copies or casts all segments, with one launch for each TablePool::kRows of
  // them: a gather or a scatter. In a cast, every address must be aligned to
  // the element's size. `segments` is not used after this returns.
  base::Error segments(
      int device,
      StreamHandle stream,
      std::span<const Segment> segments,
      Cast cast = Cast::kNone);

  // Copies or casts as planStrided() has planned for the same cast.
  base::Error strided(
      int device,
      StreamHandle stream,
      const StridedCopy& copy,
      Cast cast = Cast::kNone);

  // Writes the checksum of the bytes (kernels/integrity.py) to the int64 at
  // `result`, which is on the device or in pinned host memory.
  base::Error checksum(
      int device,
      StreamHandle stream,
      Address source,
      uint64_t bytes,
      Address result);

 private:
  struct Loaded {
    ModuleHandle module = nullptr;
    base::Result<FunctionHandle> function; // or why it cannot be used
  };
  using Key = std::pair<int, std::string>; // device, kernel

  base::Result<FunctionHandle> find(int device, const std::string& name);
  Loaded load(int device, const std::string& name);
  void unload(int device, const Loaded& loaded);
  base::Error launchTable(
      int device,
      StreamHandle stream,
      std::span<const Segment> segments,
      FunctionHandle function,
      const std::string& name);
  base::Error launch(
      FunctionHandle function,
      StreamHandle stream,
      uint64_t blocks,
      std::span<int64_t> arguments,
      const std::string& name);

  const std::shared_ptr<Driver> driver_;
  const PtxSource source_;
  TablePool tables_;
  base::Synchronized<std::map<Key, Loaded>> loaded_;
};

} // namespace torch_rpc_ext::cuda
