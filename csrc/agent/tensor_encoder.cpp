#include "agent/tensor_encoder.h"

#include "agent/dtype.h"
#include "wire/limits.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>

namespace torch_rpc_ext::agent {

using base::Error;
using base::ErrorKind;
using base::Result;
using wire::TensorLayout;
using wire::TensorRecord;

namespace {

// The rule of cloneSparseTensors() (torch/csrc/distributed/rpc/utils.cpp): of a
// storage this large of which a tensor uses at most half, only a copy of that
// part is sent.
constexpr uint64_t kMinCompactBytes = 8 * 1024;
constexpr uint64_t kMinCompactRatio = 2;

// The dispatch keys that an ordinary strided tensor of a backend may have. A
// tensor with another key is more than its bytes.
uint64_t plainKeys(c10::DispatchKey dense, c10::BackendComponent backend) {
  using c10::DispatchKey;
  const c10::DispatchKeySet keys = c10::DispatchKeySet(dense) |
      c10::getAutogradRelatedKeySetFromBackend(backend) |
      c10::getAutocastRelatedKeySetFromBackend(backend) |
      c10::DispatchKeySet(
                                       {DispatchKey::ADInplaceOrView,
                                        DispatchKey::Conjugate,
                                        DispatchKey::Negative,
                                        DispatchKey::Python,
                                        DispatchKey::PythonTLSSnapshot});
  return keys.raw_repr();
}

const uint64_t kPlainKeys =
    plainKeys(c10::DispatchKey::CPU, c10::BackendComponent::CPUBit);
const uint64_t kPlainDeviceKeys =
    plainKeys(c10::DispatchKey::CUDA, c10::BackendComponent::CUDABit);
const uint64_t kPlainMetaKeys =
    plainKeys(c10::DispatchKey::Meta, c10::BackendComponent::MetaBit);

// 0 for devices whose tensors cannot be sent: every tensor has some key.
uint64_t plainKeysOf(c10::Device device) {
  switch (device.type()) {
    case c10::kCPU:
      return kPlainKeys;
    case device::kType:
      return kPlainDeviceKeys;
    case c10::kMeta:
      return kPlainMetaKeys;
    default:
      return 0;
  }
}

bool isPlain(const at::Tensor& tensor) {
  const uint64_t plain = plainKeysOf(tensor.device());
  return (tensor.key_set().raw_repr() & ~plain) == 0 &&
      tensor.layout() == at::kStrided && tensor.has_storage();
}

TensorLayout wireLayout(at::Layout layout) {
  switch (layout) {
    case at::kSparse:
      return TensorLayout::kSparseCoo;
    case at::kSparseCsr:
      return TensorLayout::kSparseCsr;
    case at::kSparseCsc:
      return TensorLayout::kSparseCsc;
    case at::kSparseBsr:
      return TensorLayout::kSparseBsr;
    case at::kSparseBsc:
      return TensorLayout::kSparseBsc;
    default:
      return TensorLayout::kUndefined;
  }
}

TensorRecord makeRecord(TensorLayout layout, bool requiresGrad) {
  TensorRecord record;
  record.layout = layout;
  record.flags = requiresGrad ? wire::kRequiresGrad : 0;
  return record;
}

} // namespace

Error TensorEncoder::fail(const std::string& why) const {
  return {
      ErrorKind::kInvalid,
      "tensor " + std::to_string(tensors_ - 1) + " of the message " + why};
}

Error TensorEncoder::add(const at::Tensor& tensor) {
  ++tensors_;
  if (!tensor.defined()) {
    records_.push_back({});
    return {};
  }
  if (isPlain(tensor)) {
    return addCompact(tensor, tensor.requires_grad(), Held::kYes);
  }
  if (tensor.device().is_meta()) {
    return fail(
        "is on device meta and not an ordinary strided tensor: of that device "
        "only those can be sent");
  }
  if (!tensor.device().is_cpu() &&
      (tensor.device().type() != device::kType || tensor.is_quantized())) {
    return fail(
        "is on device " + tensor.device().str() + " and " +
        (tensor.is_quantized() ? "quantised" : "not a CUDA tensor") +
        ": move it with .cpu() first");
  }
  // Autograd must not record the making of the parts.
  c10::NoGradGuard noGrad;
  if (tensor.is_nested()) {
    return fail("is nested: send its buffer and sizes instead");
  }
  if (wireLayout(tensor.layout()) != TensorLayout::kUndefined) {
    return addSparse(tensor);
  }
  if (tensor.is_quantized()) {
    return addQuantized(tensor);
  }
  if (tensor._is_zerotensor()) {
    return addStrided(
        at::zeros(tensor.sizes(), tensor.options()),
        tensor.requires_grad(),
        Held::kNo);
  }
  return fail(
      "cannot be sent: its layout is " + c10::str(tensor.layout()) +
      ", its dispatch keys are " + c10::toString(tensor.key_set()));
}

Error TensorEncoder::addCompact(
    const at::Tensor& tensor,
    bool requiresGrad,
    Held held) {
  if (tensor.device().is_meta()) {
    return addStrided(tensor, requiresGrad, held); // there are no bytes to save
  }
  const uint64_t whole =
      tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
  if (whole >= kMinCompactBytes) {
    // Divides, because the bytes of an expanded tensor may overflow.
    const uint64_t most = whole / kMinCompactRatio / tensor.itemsize();
    if (static_cast<uint64_t>(tensor.numel()) <= most) {
      if (!tensor.device().is_cpu()) {
        return addExcerpt(tensor, requiresGrad);
      }
      c10::NoGradGuard noGrad;
      return addStrided(tensor.clone(), requiresGrad, Held::kNo);
    }
  }
  return addStrided(tensor, requiresGrad, held);
}

Error TensorEncoder::addPart(const at::Tensor& tensor) {
  if (!isPlain(tensor)) {
    return fail("has a part that is not a strided tensor");
  }
  return addCompact(tensor, /*requiresGrad=*/false, Held::kNo);
}

Error TensorEncoder::addStrided(
    const at::Tensor& tensor,
    bool requiresGrad,
    Held held) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (held == Held::kNo) {
    owners_.push_back(storage);
  }
  const size_t dims = dims_.size();
  auto index = addStorage(storage);
  if (!index.ok()) {
    return index.error();
  }
  addRecord(
      tensor,
      requiresGrad,
      index.value(),
      tensor.storage_offset(),
      tensor.strides());
  return checkReach(
      tensor.storage_offset(),
      std::span(dims_.data() + dims, dims_.size() - dims),
      tensor.scalar_type(),
      storages_[index.value()].bytes.size);
}

Error TensorEncoder::checkReach(
    int64_t offset,
    std::span<const wire::Dim> dims,
    c10::ScalarType dtype,
    uint64_t available) const {
  const auto reach = wire::reach(offset, dims);
  if (!reach || !fits(*reach, dtype, available)) {
    return fail(
        "reaches beyond the " + std::to_string(available) +
        " bytes of its storage");
  }
  return {};
}

void TensorEncoder::addRecord(
    const at::Tensor& tensor,
    bool requiresGrad,
    uint32_t storage,
    int64_t offset,
    c10::IntArrayRef strides) {
  exact_[storage] |= addsExact_ || tensor.scalar_type() != c10::kFloat;
  TensorRecord record = makeRecord(TensorLayout::kStrided, requiresGrad);
  record.dtype = static_cast<uint8_t>(tensor.scalar_type());
  record.flags |=
      (tensor.is_conj() ? wire::kConj : 0) | (tensor.is_neg() ? wire::kNeg : 0);
  record.aux = storage;
  record.offset = offset;
  addShape(record, tensor.sizes(), strides);
}

Error TensorEncoder::addSparse(const at::Tensor& tensor) {
  TensorRecord record =
      makeRecord(wireLayout(tensor.layout()), tensor.requires_grad());
  const bool coo = record.layout == TensorLayout::kSparseCoo;
  if (coo) {
    record.aux = static_cast<uint32_t>(tensor.sparse_dim());
    record.flags |= tensor.is_coalesced() ? wire::kCoalesced : 0;
  }
  addShape(record, tensor.sizes(), {});

  const bool byRow = record.layout == TensorLayout::kSparseCsr ||
      record.layout == TensorLayout::kSparseBsr;
  std::vector<at::Tensor> parts;
  if (coo) {
    parts = {tensor._indices(), tensor._values()};
  } else {
    parts = {
        byRow ? tensor.crow_indices() : tensor.ccol_indices(),
        byRow ? tensor.col_indices() : tensor.row_indices(),
        tensor.values()};
  }
  for (auto& part : parts) {
    const bool isIndex = &part != &parts.back();
    if (isIndex && part.nbytes() > part.storage().nbytes()) {
      part = part.contiguous(); // the decoder refuses repeated indices
    }
    if (auto error = addPart(part)) {
      return error;
    }
  }
  return {};
}

Error TensorEncoder::addQuantized(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided) {
    return fail("is quantised and has no storage");
  }
  auto place = route_.placeOf(tensor.device());
  if (!place.ok() || place.value() != wire::kHostPlace) {
    return fail("is quantised, and such tensors can only be sent to a CPU");
  }
  TensorRecord record =
      makeRecord(TensorLayout::kQuantized, tensor.requires_grad());
  at::Tensor scales;
  at::Tensor zeroPoints;
  switch (tensor.qscheme()) {
    case at::kPerTensorAffine:
      record.aux = wire::kPerTensor;
      scales = at::full({1}, tensor.q_scale(), at::kDouble);
      zeroPoints = at::full({1}, tensor.q_zero_point(), at::kLong);
      break;
    case at::kPerChannelAffine:
    case at::kPerChannelAffineFloatQParams:
      record.aux = static_cast<uint32_t>(tensor.q_per_channel_axis());
      scales = tensor.q_per_channel_scales();
      zeroPoints = tensor.q_per_channel_zero_points();
      break;
    default:
      return fail("is quantised by a scheme that cannot be sent");
  }
  addShape(record, {}, {});
  // The scales must arrive exactly: rounding them would change every element.
  addsExact_ = true;
  Error error = addStrided(tensor, /*requiresGrad=*/false, Held::kYes);
  if (!error) {
    error = addPart(scales);
  }
  if (!error) {
    error = addPart(zeroPoints);
  }
  addsExact_ = false;
  return error;
}

void TensorEncoder::addShape(
    TensorRecord record,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides) {
  // More dimensions than the limit are refused when the frame is written.
  record.ndim =
      static_cast<uint8_t>(std::min<size_t>(sizes.size(), wire::kMaxDims + 1));
  records_.push_back(record);
  for (size_t i = 0; i < sizes.size(); ++i) {
    dims_.push_back({sizes[i], strides.empty() ? 0 : strides[i]});
  }
}

} // namespace torch_rpc_ext::agent
