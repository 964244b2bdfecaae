#include "cuda/plan.h"

namespace torch_rpc_ext::cuda {

namespace {

constexpr int64_t kWidest = 16; // bytes that one access can move

struct Dim {
  int64_t size;
  int64_t source; // stride, bytes
  int64_t destination;
};

// Merges neighbouring dimensions that are contiguous with each other in both
// layouts. In the result the innermost dimension comes first.
std::vector<Dim> merge(const Layout& source, const Layout& destination) {
  std::vector<Dim> merged;
  for (size_t i = source.sizes.size(); i-- > 0;) {
    const Dim dim{source.sizes[i], source.strides[i], destination.strides[i]};
    if (dim.size == 1) {
      continue;
    }
    if (!merged.empty()) {
      Dim& last = merged.back();
      if (dim.source == last.source * last.size &&
          dim.destination == last.destination * last.size) {
        last.size *= dim.size;
        continue;
      }
    }
    merged.push_back(dim);
  }
  return merged;
}

// Cuts a copy into pieces and returns the bytes of a piece: the largest power
// of two, at most kWidest, that divides both addresses, all strides and the
// length of the innermost contiguous run.
int64_t
widen(const Layout& source, const Layout& destination, std::vector<Dim>& dims) {
  int64_t run = static_cast<int64_t>(source.elementBytes);
  if (!dims.empty() && dims[0].source == run && dims[0].destination == run) {
    run *= dims[0].size;
    dims.erase(dims.begin());
  }
  int64_t bits = kWidest | run |
      static_cast<int64_t>(source.address | destination.address);
  for (const Dim& dim : dims) {
    bits |= dim.source | dim.destination;
  }
  const int64_t width = bits & -bits;
  if (run != width) {
    dims.insert(dims.begin(), {run / width, width, width});
  }
  return width;
}

struct Widths {
  uint64_t source;
  uint64_t destination;
};

Widths widthsOf(Cast cast) {
  const bool widens =
      cast == Cast::kBfloat16ToFloat32 || cast == Cast::kFloat16ToFloat32;
  return widens ? Widths{2, 4} : Widths{4, 2};
}

base::Error
checkCast(const Layout& source, const Layout& destination, Cast cast) {
  const Widths widths = widthsOf(cast);
  if (source.elementBytes != widths.source ||
      destination.elementBytes != widths.destination) {
    return {
        base::ErrorKind::kInvalid,
        std::string("cast ") + toString(cast) + " of elements of " +
            std::to_string(source.elementBytes) + " bytes to " +
            std::to_string(destination.elementBytes)};
  }
  if (source.address % widths.source != 0 ||
      destination.address % widths.destination != 0) {
    return {
        base::ErrorKind::kUnsupported,
        "elements to cast must be aligned to their size"};
  }
  return {};
}

} // namespace

const char* toString(Cast cast) {
  switch (cast) {
    case Cast::kNone:
      return "";
    case Cast::kFloat32ToBfloat16:
      return "float32_to_bfloat16";
    case Cast::kFloat32ToFloat16:
      return "float32_to_float16";
    case Cast::kBfloat16ToFloat32:
      return "bfloat16_to_float32";
    case Cast::kFloat16ToFloat32:
      return "float16_to_float32";
  }
  return "";
}

int64_t writeTable(
    std::span<const Segment> segments,
    int64_t chunkElements,
    SegmentRow* rows) {
  int64_t chunks = 0;
  for (const Segment& segment : segments) {
    const auto elements = static_cast<int64_t>(segment.elements);
    *rows++ = {
        static_cast<int64_t>(segment.source),
        static_cast<int64_t>(segment.destination),
        elements,
        chunks};
    chunks += (elements + chunkElements - 1) / chunkElements;
  }
  return chunks;
}

base::Result<StridedCopy>
planStrided(const Layout& source, const Layout& destination, Cast cast) {
  const size_t count = source.sizes.size();
  if (destination.sizes != source.sizes || source.strides.size() != count ||
      destination.strides.size() != count) {
    return base::Error{
        base::ErrorKind::kInvalid, "both layouts must have the same sizes"};
  }
  std::vector<Dim> dims = merge(source, destination);
  StridedCopy copy;
  if (cast != Cast::kNone) {
    if (auto error = checkCast(source, destination, cast)) {
      return error;
    }
  } else if (source.elementBytes != destination.elementBytes) {
    return base::Error{
        base::ErrorKind::kInvalid, "a copy's elements must have one size"};
  } else {
    copy.width = widen(source, destination, dims);
  }
  if (dims.size() > kMaxDims) {
    return base::Error{
        base::ErrorKind::kUnsupported,
        std::to_string(dims.size()) + " dimensions that cannot be merged"};
  }
  copy.source = static_cast<int64_t>(source.address);
  copy.destination = static_cast<int64_t>(destination.address);
  copy.elements = 1;
  copy.sizes.fill(1);
  for (size_t i = 0; i < dims.size(); ++i) {
    copy.elements *= dims[i].size;
    copy.sizes[i] = dims[i].size;
    copy.sourceStrides[i] = dims[i].source;
    copy.destinationStrides[i] = dims[i].destination;
  }
  return copy;
}

std::string segmentsName(Cast cast) {
  return cast == Cast::kNone ? "segments"
                             : std::string("segments_") + toString(cast);
}

std::string stridedName(const StridedCopy& copy, Cast cast) {
  return "strided_" +
      (cast == Cast::kNone ? std::to_string(copy.width) : toString(cast));
}

} // namespace torch_rpc_ext::cuda
