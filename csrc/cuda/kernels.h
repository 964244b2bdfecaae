#pragma once

#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/plan.h"
#include "cuda/table_ring.h"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

namespace torch_rpc_ext::cuda {

struct Ptx {
  std::string text;
  std::string entry;
};

// Compiles a kernel by name for a compute capability (major, minor), or says
// why not. Takes seconds at the first time on a machine, and the GIL.
using PtxSource =
    std::function<base::Result<Ptx>(const std::string&, int, int)>;

// The kernels of torch_rpc_ext/kernels, loaded by the driver once for each
// device and launched on the caller's stream. A launch waits for nothing and
// needs no GIL; the first one of a kernel loads it, unless prepare() has.
// Owns: modules and tables on the devices.
// Thread: any, without the GIL held.
class Kernels {
 public:
  Kernels(std::shared_ptr<Driver> driver, PtxSource source);
  ~Kernels();

  // Loads a kernel by its name; returns why it cannot be used: no numba-cuda
  // (kUnsupported), a GPU that is too old, ...
  base::Error prepare(int device, const std::string& kernel);

  // Copies or casts all runs by one launch: a gather, or a scatter. Elements to
  // cast are aligned to their size. The table is copied at once: `segments` may
  // go when this returns.
  base::Error segments(
      int device,
      StreamHandle stream,
      std::span<const Segment> segments,
      Cast cast = Cast::kNone);

  // Copies or casts as planStrided() has found for this cast.
  base::Error strided(
      int device,
      StreamHandle stream,
      const StridedCopy& copy,
      Cast cast = Cast::kNone);

  // Writes the checksum of the bytes (kernels/integrity.py) to the int64 at
  // `result`, on the device or in pinned memory of the host.
  base::Error checksum(
      int device,
      StreamHandle stream,
      Address source,
      uint64_t bytes,
      Address result);

 private:
  struct Loaded {
    ModuleHandle module = nullptr;
    FunctionHandle function = nullptr;
    base::Error why; // why it cannot be used; asked once
  };
  using Key = std::pair<int, std::string>; // device, kernel

  base::Result<FunctionHandle> find(int device, const std::string& name);
  static base::Result<FunctionHandle> answer(const Loaded& loaded);
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
  TableRing tables_;
  std::mutex mutex_;
  std::map<Key, Loaded> loaded_;
};

} // namespace torch_rpc_ext::cuda
