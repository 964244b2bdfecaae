#include "agent/tensor_encoder.h"

#include "agent/dtype.h"
#include "agent/host_storage.h"
#include "agent/wire_dtype.h"
#include "wire/limits.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace torch_rpc_ext::agent {

using base::Error;
using base::ErrorKind;
using base::Result;
using wire::TensorLayout;
using wire::TensorRecord;

namespace {

// cloneSparseTensors' rule (torch/csrc/distributed/rpc/utils.cpp): a storage
// this large, of which at most half is used, is not worth its way.
constexpr uint64_t kMinCompactBytes = 8 * 1024;
constexpr uint64_t kMinCompactRatio = 2;

// Up to here a scan over the storages is faster than a hash table.
constexpr size_t kMaxScan = 16;

// The keys that an ordinary strided tensor of a backend may carry. Any other
// one means that its bytes are not all there is to it.
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

bool isPlain(const at::Tensor& tensor) {
  const uint64_t plain =
      tensor.device().is_cpu() ? kPlainKeys : kPlainDeviceKeys;
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
  if (!tensor.device().is_cpu() &&
      (tensor.device().type() != device::kType || tensor.is_quantized())) {
    return fail(
        "is on device " + tensor.device().str() + " and " +
        (tensor.is_quantized() ? "quantised" : "not a CUDA tensor") +
        ": move it with .cpu() first");
  }
  // Its parts are not to be recorded by autograd.
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
  const uint64_t whole =
      tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
  if (whole >= kMinCompactBytes) {
    const uint64_t useful = tensor.numel() * tensor.itemsize();
    if (whole / kMinCompactRatio >= useful) {
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
  exact_[index.value()] |= addsExact_ || tensor.scalar_type() != c10::kFloat;
  TensorRecord record = makeRecord(TensorLayout::kStrided, requiresGrad);
  record.dtype = static_cast<uint8_t>(tensor.scalar_type());
  record.flags |=
      (tensor.is_conj() ? wire::kConj : 0) | (tensor.is_neg() ? wire::kNeg : 0);
  record.aux = index.value();
  record.offset = tensor.storage_offset();
  addShape(record, tensor.sizes(), tensor.strides());
  const auto reach = wire::reach(
      record.offset, std::span(dims_.data() + dims, dims_.size() - dims));
  const uint64_t available = storages_[index.value()].bytes.size;
  if (!reach || !fits(*reach, tensor.scalar_type(), available)) {
    return fail(
        "reaches beyond the " + std::to_string(available) +
        " bytes of its storage");
  }
  return {};
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
  // Rounded scales would be other numbers for all of its elements.
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
  // More than the limit is refused when the frame is written.
  record.ndim =
      static_cast<uint8_t>(std::min<size_t>(sizes.size(), wire::kMaxDims + 1));
  records_.push_back(record);
  for (size_t i = 0; i < sizes.size(); ++i) {
    dims_.push_back({sizes[i], strides.empty() ? 0 : strides[i]});
  }
}

Result<uint32_t> TensorEncoder::addStorage(const c10::Storage& storage) {
  const c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
  const auto next = static_cast<uint32_t>(keys_.size());
  if (next <= kMaxScan) {
    for (uint32_t i = 0; i < next; ++i) {
      if (keys_[i] == key) {
        return i;
      }
    }
    if (next == kMaxScan) {
      for (uint32_t i = 0; i < next; ++i) {
        index_.emplace(keys_[i], i);
      }
    }
  } else if (const auto found = index_.find(key); found != index_.end()) {
    return found->second;
  }

  const size_t size = storage.nbytes();
  wire::DevicePlace place = wire::kHostPlace;
  if (route_.map != nullptr || !storage.device().is_cpu()) {
    auto mapped = route_.placeOf(storage.device());
    if (!mapped.ok()) {
      return mapped.error();
    }
    place = mapped.value();
  }
  if (!storage.device().is_cpu()) {
    departing_.emplace_back(next, storage);
    addEntry(storage, {nullptr, size}, size > inlineThreshold_, place);
    return next;
  }
  const void* data = storage.data();
  if (data == nullptr && size != 0) {
    return fail("has no data (a wrapper subclass, or a freed storage)");
  }
  const bool bulk = size > inlineThreshold_;
  if (bulk) {
    const at::DataPtr& pointer = storage.data_ptr();
    if (pointer.get_context() == nullptr && pointer.get_deleter() == nullptr) {
      // Made by from_blob() over memory of somebody who may free it as soon as
      // the call returns.
      owners_.emplace_back(
          c10::Storage::use_byte_size_t(),
          size,
          c10::GetCPUAllocator()->allocate(size));
      void* const copy = owners_.back().mutable_data();
      std::memcpy(copy, data, size);
      data = copy;
    } else {
      owners_.push_back(storage);
    }
  }
  addEntry(storage, {data, size}, bulk, place);
  return next;
}

void TensorEncoder::addEntry(
    const c10::Storage& storage,
    base::ConstSpan bytes,
    bool bulk,
    wire::DevicePlace place) {
  const c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
  const size_t index = keys_.size();
  storages_.push_back({bytes, bulk, /*beside=*/false, place});
  keys_.push_back(key);
  exact_.push_back(false);
  if (index >= kMaxScan) {
    index_.emplace(key, static_cast<uint32_t>(index));
  }
}

// The storages that parts of sparse tensors are in.
std::vector<bool> TensorEncoder::checkedStorages() const {
  std::vector<bool> checked(storages_.size());
  uint32_t parts = 0;
  for (const auto& record : records_) {
    if (parts > 0) {
      --parts;
      checked[record.aux] = true;
    } else {
      parts = wire::partsOf(record.layout);
    }
  }
  return checked;
}

Error TensorEncoder::narrow(wire::WireDtype dtype, memory::BufferCache* cache) {
  if (dtype == wire::WireDtype::kFloat32) {
    return {};
  }
  for (size_t i = 0; i < storages_.size(); ++i) {
    const size_t size = storages_[i].bytes.size;
    if (exact_[i] || size == 0 || size % sizeof(float) != 0) {
      continue;
    }
    if (auto error = narrowOne(i, dtype, cache)) {
      return error;
    }
  }
  return {};
}

Error TensorEncoder::narrowOne(
    size_t index,
    wire::WireDtype dtype,
    memory::BufferCache* cache) {
  wire::StorageEntry& entry = storages_[index];
  const base::ConstSpan floats = entry.bytes;
  entry.dtype = dtype;
  entry.bytes.size /= wire::widening(dtype);
  entry.bulk = entry.bytes.size > inlineThreshold_;
  if (floats.data == nullptr) {
    return {}; // on a device, where it is narrowed
  }
  auto memory = allocateOnHost(cache, entry.bytes.size);
  if (!memory.ok()) {
    return memory.error();
  }
  owners_.push_back(std::move(memory.value()));
  void* const bytes = owners_.back().mutable_data();
  agent::narrow(floats, dtype, {bytes, entry.bytes.size});
  entry.bytes.data = bytes;
  return {};
}

std::vector<device::Departing> TensorEncoder::takeDeparting() {
  std::vector<device::Departing> result;
  result.reserve(departing_.size());
  const std::vector<bool> checked = checkedStorages();
  for (auto& [index, storage] : departing_) {
    result.push_back({std::move(storage), &storages_[index], checked[index]});
  }
  return result;
}

} // namespace torch_rpc_ext::agent
