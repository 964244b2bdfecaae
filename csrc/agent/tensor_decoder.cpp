#include "agent/tensor_decoder.h"

#include "agent/dtype.h"

#include <ATen/ATen.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <string>

namespace torch_rpc_ext::agent {

using base::Error;
using base::ErrorKind;
using wire::TensorLayout;
using wire::TensorView;

namespace {

// The most parts that a sparse or a quantised tensor has.
constexpr size_t kMaxParts = 3;

struct Shape {
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
};

Shape shapeOf(const TensorView& view) {
  Shape shape;
  shape.sizes.resize(view.ndim);
  shape.strides.resize(view.ndim);
  for (size_t i = 0; i < view.ndim; ++i) {
    const wire::Dim dim = view.dim(i);
    shape.sizes[i] = dim.size;
    shape.strides[i] = dim.stride;
  }
  return shape;
}

at::Layout torchLayout(TensorLayout layout) {
  switch (layout) {
    case TensorLayout::kSparseCsr:
      return at::kSparseCsr;
    case TensorLayout::kSparseCsc:
      return at::kSparseCsc;
    case TensorLayout::kSparseBsr:
      return at::kSparseBsr;
    case TensorLayout::kSparseBsc:
      return at::kSparseBsc;
    default:
      return at::kSparse;
  }
}

c10::DispatchKey keyOf(c10::Device device) {
  return device.is_cpu() ? c10::DispatchKey::CPU
      : device.is_meta() ? c10::DispatchKey::Meta
                         : c10::DispatchKey::CUDA;
}

// Whether the storage is large enough for all elements. torch checks each
// index, scale and zero point: with strides of 0, a few bytes from a peer could
// make it check for hours. Divides, because Tensor::nbytes() overflows.
bool hasEachElement(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) <=
      tensor.storage().nbytes() / tensor.itemsize();
}

// Builds one tensor of the message from its record and its parts.
class TensorBuilder {
 public:
  using Storages = c10::ArrayRef<c10::Storage>;

  TensorBuilder(
      Storages storages,
      Storages onHost,
      bool isTrusted,
      size_t index)
      : storages_(storages),
        onHost_(onHost),
        isTrusted_(isTrusted),
        index_(index) {}

  Error
  build(const TensorView& view, wire::TensorCursor& cursor, at::Tensor& tensor);

 private:
  Error buildStrided(
      const TensorView& view,
      Storages storages,
      at::QuantizerPtr quantizer,
      at::Tensor& tensor);
  Error buildCoo(const TensorView& view, at::Tensor& tensor);
  Error buildCompressed(const TensorView& view, at::Tensor& tensor);
  Error buildQuantized(const TensorView& view, at::Tensor& tensor);
  Error readParts(wire::TensorCursor& cursor, const TensorView& view);
  Error setFlags(const TensorView& view, const at::Tensor& tensor);
  // Whether the first `count` parts are on one device, and the bytes of all or
  // of none of them are readable here.
  bool onOneDevice(size_t count) const;
  Error fail(const std::string& why) const;

  Storages storages_;
  Storages onHost_;
  bool isTrusted_;
  size_t index_;
  TensorView integers_; // of a quantised tensor
  std::array<at::Tensor, kMaxParts> parts_;
  // The same parts on the CPU, for checks; undefined where the bytes came
  // beside the frame, from a trusted sender.
  std::array<at::Tensor, kMaxParts> readable_;
};

Error TensorBuilder::fail(const std::string& why) const {
  return {
      ErrorKind::kInvalid,
      "call frame: tensor " + std::to_string(index_) + " " + why};
}

Error TensorBuilder::build(
    const TensorView& view,
    wire::TensorCursor& cursor,
    at::Tensor& tensor) {
  if (view.layout == TensorLayout::kUndefined) {
    return {};
  }
  if (view.layout == TensorLayout::kStrided) {
    return buildStrided(view, storages_, nullptr, tensor);
  }
  c10::NoGradGuard noGrad;
  if (auto error = readParts(cursor, view)) {
    return error;
  }
  Error error;
  if (view.layout == TensorLayout::kQuantized) {
    error = buildQuantized(view, tensor);
  } else if (view.layout == TensorLayout::kSparseCoo) {
    error = buildCoo(view, tensor);
  } else {
    error = buildCompressed(view, tensor);
  }
  return error ? error : setFlags(view, tensor);
}

Error TensorBuilder::buildStrided(
    const TensorView& view,
    Storages storages,
    at::QuantizerPtr quantizer,
    at::Tensor& tensor) {
  const auto dtype = toDtype(view.dtype);
  // torch does not expect a quantised dtype without scales.
  if (!dtype || c10::isQIntType(*dtype) != (quantizer != nullptr)) {
    return fail("has the unknown dtype " + std::to_string(view.dtype));
  }
  if (view.aux >= storages.size()) {
    return fail("names a storage that does not exist");
  }
  const c10::Storage& storage = storages[view.aux];
  if (!fits(view.reach, *dtype, storage.nbytes())) {
    return fail(
        "reaches over " + std::to_string(view.reach) + " elements of " +
        c10::toString(*dtype) + " in a storage of " +
        std::to_string(storage.nbytes()) + " bytes");
  }
  // Does what at::empty() and as_strided() do, without their dispatch.
  const auto type = c10::scalarTypeToTypeMeta(*dtype);
  if (quantizer) {
    if (!storage.device().is_cpu()) {
      return fail("is quantised and not for the CPU");
    }
    tensor = at::detail::make_tensor<at::QTensorImpl>(
        c10::Storage(storage),
        c10::DispatchKeySet(c10::DispatchKey::QuantizedCPU),
        type,
        std::move(quantizer));
  } else {
    tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage),
        c10::DispatchKeySet(keyOf(storage.device())),
        type);
  }
  const Shape shape = shapeOf(view);
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(shape.sizes, shape.strides, view.offset);
  return view.flags == 0 ? Error() : setFlags(view, tensor);
}

Error TensorBuilder::setFlags(
    const TensorView& view,
    const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  const bool complex = c10::isComplexType(dtype);
  const bool floating = c10::isFloatingType(dtype);
  auto* const impl = tensor.unsafeGetTensorImpl();
  if (view.flags & wire::kConj) {
    if (!complex || view.layout != TensorLayout::kStrided) {
      return fail("is conjugated and not complex");
    }
    impl->_set_conj(true);
  }
  if (view.flags & wire::kNeg) {
    if (!(complex || floating) || view.layout != TensorLayout::kStrided) {
      return fail("is negated and not floating");
    }
    impl->_set_neg(true);
  }
  if (view.flags & wire::kRequiresGrad) {
    if (!complex && !floating) {
      return fail("requires grad and is not floating");
    }
    impl->set_requires_grad(true);
  }
  return {};
}

Error TensorBuilder::readParts(
    wire::TensorCursor& cursor,
    const TensorView& view) {
  const size_t count = std::min<size_t>(wire::partsOf(view.layout), kMaxParts);
  for (size_t i = 0; i < count; ++i) {
    TensorView part;
    if (!cursor.next(part)) {
      return fail("lacks a part");
    }
    part.flags &= static_cast<uint8_t>(~wire::kRequiresGrad);
    if (view.layout == TensorLayout::kQuantized && i == 0) {
      integers_ = part; // its tensor needs the two other parts
      continue;
    }
    if (auto error = buildStrided(part, storages_, nullptr, parts_[i])) {
      return error;
    }
    if (parts_[i].is_meta()) {
      return fail("has a part of the meta device");
    }
    if (parts_[i].device().is_cpu()) {
      readable_[i] = parts_[i];
    } else if (onHost_[part.aux]) {
      if (auto error = buildStrided(part, onHost_, nullptr, readable_[i])) {
        return error;
      }
    } else if (!isTrusted_) {
      return fail("has a part beside the frame, which cannot be checked");
    }
  }
  return {};
}

bool TensorBuilder::onOneDevice(size_t count) const {
  for (size_t i = 1; i < count; ++i) {
    if (parts_[i].device() != parts_[0].device() ||
        readable_[i].defined() != readable_[0].defined()) {
      return false;
    }
  }
  return true;
}

Error TensorBuilder::buildCoo(const TensorView& view, at::Tensor& tensor) {
  const at::Tensor& indices = parts_[0];
  const at::Tensor& values = parts_[1];
  if (!onOneDevice(2)) {
    return fail("has its parts on different devices");
  }
  if (indices.dim() != 2 || indices.size(0) != view.aux ||
      indices.scalar_type() != at::kLong) {
    return fail("has indices of the wrong shape");
  }
  if (!hasEachElement(indices)) {
    return fail("has more indices than it has brought");
  }
  const bool coalesced = (view.flags & wire::kCoalesced) != 0;
  const Shape shape = shapeOf(view);
  // torch makes this check only when the user has turned it on, and otherwise
  // uses an index beyond the sizes.
  if (readable_[0].defined()) {
    at::_validate_sparse_coo_tensor_args(
        readable_[0], readable_[1], shape.sizes, coalesced);
  }
  tensor = at::_sparse_coo_tensor_unsafe(
      indices,
      values,
      shape.sizes,
      values.options().layout(at::kSparse),
      coalesced);
  return {};
}

Error TensorBuilder::buildCompressed(
    const TensorView& view,
    at::Tensor& tensor) {
  const Shape shape = shapeOf(view);
  const at::Layout layout = torchLayout(view.layout);
  const at::Tensor& values = parts_[2];
  if (!onOneDevice(3)) {
    return fail("has its parts on different devices");
  }
  if (!hasEachElement(parts_[0]) || !hasEachElement(parts_[1])) {
    return fail("has more indices than it has brought");
  }
  if (layout == at::kSparseBsr || layout == at::kSparseBsc) {
    // torch's check accepts blocks without elements, and torch later divides by
    // their size. Dimensions of values: batch, blocks, rows of a block, columns
    // of a block, dense.
    const int64_t batch = parts_[0].dim() - 1;
    if (batch < 0 || values.dim() < batch + 3 || values.size(batch + 1) == 0 ||
        values.size(batch + 2) == 0) {
      return fail("has empty blocks");
    }
  }
  if (readable_[0].defined()) {
    at::_validate_sparse_compressed_tensor_args(
        readable_[0], readable_[1], readable_[2], shape.sizes, layout);
  }
  tensor = at::_sparse_compressed_tensor_unsafe(
      parts_[0],
      parts_[1],
      values,
      shape.sizes,
      values.options().layout(layout));
  return {};
}

Error TensorBuilder::buildQuantized(
    const TensorView& view,
    at::Tensor& tensor) {
  const auto dtype = toDtype(integers_.dtype);
  const at::Tensor& scales = parts_[1];
  const at::Tensor& zeroPoints = parts_[2];
  if (!dtype || !c10::isQIntType(*dtype) || scales.dim() != 1 ||
      !scales.is_cpu() || !zeroPoints.is_cpu() || !hasEachElement(scales) ||
      !hasEachElement(zeroPoints) || zeroPoints.dim() != 1 ||
      scales.numel() != zeroPoints.numel() ||
      !c10::isFloatingType(scales.scalar_type())) {
    return fail("has malformed scales or zero points");
  }
  at::QuantizerPtr quantizer;
  if (view.aux == wire::kPerTensor) {
    if (scales.numel() != 1 || scales.scalar_type() != at::kDouble ||
        zeroPoints.scalar_type() != at::kLong) {
      return fail("has malformed scales or zero points");
    }
    quantizer = at::make_per_tensor_affine_quantizer(
        *scales.const_data_ptr<double>(),
        *zeroPoints.const_data_ptr<int64_t>(),
        *dtype);
  } else {
    if (view.aux >= integers_.ndim ||
        integers_.dim(view.aux).size != scales.numel()) {
      return fail("has a wrong number of scales");
    }
    quantizer = at::make_per_channel_affine_quantizer(
        scales, zeroPoints, static_cast<int64_t>(view.aux), *dtype);
  }
  return buildStrided(integers_, storages_, std::move(quantizer), tensor);
}

} // namespace

Error decodeTensors(
    const wire::CallFrameView& frame,
    c10::ArrayRef<c10::Storage> storages,
    c10::ArrayRef<c10::Storage> onHost,
    bool isTrusted,
    std::vector<at::Tensor>& tensors) {
  tensors.reserve(frame.tensorCount());
  TensorView view;
  for (auto cursor = frame.records(); cursor.next(view);) {
    TensorBuilder builder(storages, onHost, isTrusted, tensors.size());
    tensors.emplace_back();
    if (auto error = builder.build(view, cursor, tensors.back())) {
      return error;
    }
  }
  return {};
}

} // namespace torch_rpc_ext::agent
