// The operators that tests need as work on streams. Every other operator waits
// for the streams, runs on the CPU, and copies its results back.

#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace fake_cuda {

bool isPinned(const c10::DataPtr& pointer);
c10::Allocator* deviceAllocator();
void registerAll();

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

c10::DeviceIndex indexOf(std::optional<c10::Device> device) {
  const auto index =
      device && device->has_index() ? device->index() : currentDevice();
  TORCH_CHECK(
      index < Runtime::get().settings.devices,
      "CUDA error: invalid device ordinal ",
      int(index));
  return index;
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, indexOf(device)));
  return at::detail::empty_generic(
      size, deviceAllocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor emptyStrided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, indexOf(device)));
  return at::detail::empty_strided_generic(
      size, stride, deviceAllocator(), kKeys, c10::dtype_or_default(dtype));
}

// What a kernel gets of a tensor: address and layout. It does not keep the
// memory alive.
struct Argument {
  explicit Argument(const at::Tensor& tensor)
      : data(tensor.data_ptr()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}

  at::Tensor onCpu() const {
    return at::from_blob(data, sizes, strides, at::TensorOptions(dtype));
  }

  void* data;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;
};

void launch(const c10::Stream& stream, std::function<void()> kernel) {
  Runtime::get().queue(stream).push(std::move(kernel), /*late=*/true);
}

c10::Stream streamOf(const at::Tensor& tensor) {
  return Runtime::get().current(tensor.device().index());
}

// Copies between devices, in the order of CUDA: the copy runs on the source's
// stream, waits for the target's, and the target's waits for the copy.
void copyAcross(const at::Tensor& to, const at::Tensor& from) {
  Runtime& runtime = Runtime::get();
  Queue& source = runtime.queue(streamOf(from));
  Queue& target = runtime.queue(streamOf(to));
  Event ready;
  ready.record(target);
  ready.block(source);
  source.push(
      [to = Argument(to), from = Argument(from)] {
        to.onCpu().copy_(from.onCpu());
      },
      /*late=*/true);
  Event copied;
  copied.record(source);
  copied.block(target);
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool nonBlocking) {
  Runtime& runtime = Runtime::get();
  if (!to.is_cpu() && !from.is_cpu()) {
    ++runtime.counts.deviceToDevice;
    const at::Tensor source = from.expand_as(to);
    if (to.device() == from.device()) {
      launch(streamOf(to), [to = Argument(to), from = Argument(source)] {
        to.onCpu().copy_(from.onCpu());
      });
    } else {
      copyAcross(to, source);
    }
    return to;
  }
  ++(from.is_cpu() ? runtime.counts.hostToDevice : runtime.counts.deviceToHost);
  const at::Tensor& host = from.is_cpu() ? from : to;
  const c10::Stream stream = streamOf(from.is_cpu() ? to : from);
  const at::Tensor source = from.expand_as(to);
  const bool damages = from.is_cpu() && runtime.settings.damaged > 0;
  runtime.settings.damaged -= damages ? 1 : 0;
  launch(stream, [to = Argument(to), from = Argument(source), damages] {
    to.onCpu().copy_(from.onCpu());
    if (damages) {
      *static_cast<uint8_t*>(to.data) ^= 1;
    }
  });
  const at::DataPtr& memory = host.storage().data_ptr();
  if (nonBlocking && isPinned(memory)) {
    at::getHostAllocator(c10::kCUDA)
        ->record_event(memory.get(), memory.get_context(), stream);
  } else {
    runtime.counts.pageable += isPinned(memory) ? 0 : 1;
    runtime.synchronize(stream);
  }
  return to;
}

void foreachCopy(at::TensorList to, at::TensorList from, bool) {
  TORCH_CHECK(to.size() == from.size(), "lists of different length");
  ++Runtime::get().counts.foreachCopies;
  std::vector<std::pair<Argument, Argument>> pairs;
  for (size_t i = 0; i < to.size(); ++i) {
    pairs.emplace_back(to[i], from[i]);
  }
  launch(streamOf(to[0]), [pairs = std::move(pairs)] {
    for (const auto& [one, other] : pairs) {
      one.onCpu().copy_(other.onCpu());
    }
  });
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  launch(streamOf(self), [self = Argument(self), value] {
    self.onCpu().fill_(value);
  });
  return self;
}

at::Tensor& zero(at::Tensor& self) {
  return fill(self, 0);
}

template <typename F>
at::Tensor elementwise(const at::Tensor& self, const at::Tensor& other, F f) {
  const at::Tensor& onDevice = self.is_cpu() ? other : self;
  const auto sizes = at::infer_size(self.sizes(), other.sizes());
  at::Tensor result =
      at::empty(sizes, onDevice.options().dtype(at::result_type(self, other)));
  // A Python number comes as a CPU tensor. It is copied now, as CUDA passes it
  // by value.
  const auto bound = [](const at::Tensor& tensor) {
    return [argument = Argument(tensor),
            value = tensor.is_cpu() ? tensor.clone() : at::Tensor()] {
      return value.defined() ? value : argument.onCpu();
    };
  };
  launch(
      streamOf(result),
      [to = Argument(result), a = bound(self), b = bound(other), f] {
        to.onCpu().copy_(f(a(), b()));
      });
  return result;
}

at::Tensor
sum(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  return elementwise(self, other, [alpha](const auto& a, const auto& b) {
    return at::add(a, b, alpha);
  });
}

at::Tensor product(const at::Tensor& self, const at::Tensor& other) {
  return elementwise(
      self, other, [](const auto& a, const auto& b) { return at::mul(a, b); });
}

at::Tensor&
addInPlace(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  return self.copy_(sum(self, other, alpha), /*non_blocking=*/true);
}

at::Tensor asStrided(
    const at::Tensor& self,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW,
      c10::Storage(self.storage()),
      self.key_set(),
      self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride, offset.value_or(self.storage_offset()));
  return view;
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, self.numel());
  const auto stride =
      at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible");
  return asStrided(self, inferred, *stride, self.storage_offset());
}

const at::Tensor& resize(
    const at::Tensor& self,
    at::IntArrayRef size,
    std::optional<at::MemoryFormat>) {
  auto* const impl = self.unsafeGetTensorImpl();
  const auto bytes = c10::multiply_integers(size) * self.itemsize() +
      self.storage_offset() * self.itemsize();
  if (static_cast<size_t>(bytes) > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    impl->set_storage_keep_dtype(
        c10::Storage(
            c10::Storage::use_byte_size_t(),
            bytes,
            deviceAllocator(),
            /*resizable=*/true));
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return const_cast<at::Tensor&>(to).copy_(from);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

c10::Dict<std::string, int64_t> counts() {
  const Counts& counts = Runtime::get().counts;
  c10::Dict<std::string, int64_t> result;
  result.insert("synchronizations", counts.synchronizations);
  result.insert("host_to_device", counts.hostToDevice);
  result.insert("device_to_host", counts.deviceToHost);
  result.insert("device_to_device", counts.deviceToDevice);
  result.insert("pageable", counts.pageable);
  result.insert("foreach_copies", counts.foreachCopies);
  return result;
}

void install(int64_t devices) {
  registerAll();
  Runtime::get().settings.devices = static_cast<int>(devices);
}

} // namespace

TORCH_LIBRARY(fake_cuda, m) {
  m.def("install(int devices) -> ()", &install);
  m.def("counts() -> Dict(str, int)", &counts);
  m.def("set_delay(int microseconds) -> ()", [](int64_t value) {
    Runtime::get().settings.delayMicroseconds = value;
    if (Driver::get() != nullptr) {
      Driver::get()->delay(static_cast<int>(value));
    }
  });
  m.def("set_memory(int bytes) -> ()", [](int64_t value) {
    Runtime::get().settings.memoryBytes = value;
  });
  m.def("set_damaged(int copies) -> ()", [](int64_t value) {
    Runtime::get().settings.damaged = value;
  });
  m.def("set_broken(bool broken) -> ()", [](bool value) {
    Runtime::get().settings.broken = value;
  });
  m.def("current_stream(int device) -> int", [](int64_t device) {
    return Runtime::get().current(static_cast<int8_t>(device)).id();
  });
  m.def("set_stream(int device, int stream) -> ()", [](int64_t d, int64_t s) {
    currentStreams()[static_cast<int8_t>(d)] = s;
  });
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &emptyStrided);
  m.impl("copy_", &copy);
  m.impl("_foreach_copy_", &foreachCopy);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("add.Tensor", &sum);
  m.impl("add_.Tensor", &addInPlace);
  m.impl("mul.Tensor", &product);
  m.impl("as_strided", &asStrided);
  m.impl("resize_", &resize);
  m.impl("_copy_from_and_resize", &copyFromAndResize);
  m.impl("view", &view);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace fake_cuda
