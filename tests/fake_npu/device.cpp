// A device of torch's kind PrivateUse1 whose memory is the host's. Every allocation, kernel, stream, event and
// collective is written to a log; kernels are the CPU's, run at once, so values are those of the CPU whatever the
// streams say. Tests only.
#include "log.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace fake_npu {

Log& log() {
  static Log instance;
  return instance;
}

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
thread_local int64_t current_stream = 0;
thread_local int inside_kernel = 0;
std::atomic<int64_t> last_stream{0};
std::atomic<int64_t> last_event{0};

// ---- memory ---------------------------------------------------------------------------------------------------------

std::mutex memory_mutex;
std::unordered_map<void*, int64_t> alive;
int64_t allocated = 0, peak = 0;

void release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  {
    const std::lock_guard<std::mutex> guard(memory_mutex);
    allocated -= alive[pointer];
    alive.erase(pointer);
    log().add("free", current_stream, reinterpret_cast<int64_t>(pointer));
  }
  c10::GetDefaultCPUAllocator()->raw_deallocate(pointer);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* pointer = size > 0 ? c10::GetDefaultCPUAllocator()->raw_allocate(size) : nullptr;
    if (pointer != nullptr) {
      const std::lock_guard<std::mutex> guard(memory_mutex);
      alive[pointer] = static_cast<int64_t>(size);
      allocated += static_cast<int64_t>(size);
      peak = std::max(peak, allocated);
      log().add("allocate", current_stream, reinterpret_cast<int64_t>(pointer), 0, static_cast<int64_t>(size));
    }
    return {pointer, pointer, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
};

Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

// ---- streams and events ---------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++last_stream); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++last_stream); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return !log().events_are_pending; }
  void synchronizeStream(const c10::Stream& stream) const override { log().add("host waits for stream", stream.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override { log().add("host waits for device", 0); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    log().add("keep for stream", stream.id(), reinterpret_cast<int64_t>(pointer.get()));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = reinterpret_cast<void*>(new_event());
    }
    log().add("record", stream.id(), reinterpret_cast<int64_t>(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    log().add("wait", stream.id(), reinterpret_cast<int64_t>(event));
  }
  bool queryEvent(void* event) const override {
    if (log().events_are_pending) {
      return false;
    }
    log().add("host sees event", 0, reinterpret_cast<int64_t>(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    log().add("host waits for event", 0, reinterpret_cast<int64_t>(event));
  }
  // Two milliseconds, whichever they are: nothing here takes a device's time.
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 2.0; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, 0}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = at::detail::getDefaultCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* const impl = storage.unsafeGetStorageImpl();
    auto fresh = allocator.allocate(size);
    const size_t kept = std::min(size, impl->nbytes());
    if (kept > 0) {
      std::memcpy(fresh.mutable_get(), impl->data(), kept);
      log().add("read", current_stream, reinterpret_cast<int64_t>(impl->data()), 0, kept, "resize");
      log().add("write", current_stream, reinterpret_cast<int64_t>(fresh.get()), 0, kept, "resize");
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

// ---- kernels --------------------------------------------------------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  log_access(source, current_stream, "read", "copy");
  log_access(target, current_stream, "write", "copy");
  as_cpu(target).copy_(as_cpu(source));
  if (!target.device().is_privateuseone() && inside_kernel == 0) {
    log().add("host waits for stream", current_stream);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  log_access(tensor, current_stream, "read", "item");
  log().add("host waits for stream", current_stream);
  return as_cpu(tensor).item();
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> at) {
  return at::native::as_strided_tensorimpl(self, size, stride, at);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {count}, {});
}

void record_stream(at::Tensor& self, at::Stream stream) {
  log().add("keep for stream", stream.id(), reinterpret_cast<int64_t>(self.storage().data()));
}

void log_argument(const c10::IValue& value, bool is_written, bool is_read, const std::string& name) {
  const auto one = [&](const at::Tensor& tensor) {
    if (is_read) {
      log_access(tensor, current_stream, "read", name);
    }
    if (is_written) {
      log_access(tensor, current_stream, "write", name);
    }
  };
  if (value.isTensor()) {
    one(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      one(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& entry : value.toOptionalTensorVector()) {
      if (entry.has_value()) {
        one(*entry);
      }
    }
  }
}

// A device's kernel does not take host memory, but for single numbers.
void refuse_host_memory(const c10::IValue& value, const std::string& name) {
  const auto one = [&](const at::Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || tensor.device().is_privateuseone() || tensor.dim() == 0, name,
                " was given a tensor on ", tensor.device(), " beside one on ", c10::Device(kDevice, 0));
  };
  if (value.isTensor()) {
    one(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      one(tensor);
    }
  }
}

// Runs the CPU's kernel on copies, and logs which memory a kernel of a device would have read and written.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = schema.operator_name().name;
  const size_t first = stack->size() - schema.arguments().size();
  for (size_t i = 0; inside_kernel == 0 && i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    refuse_host_memory((*stack)[first + i], name);
    log_argument((*stack)[first + i], is_written, !schema.arguments()[i].is_out(), name);
  }
  ++inside_kernel;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    --inside_kernel;
    throw;
  }
  --inside_kernel;
  for (size_t i = 0; inside_kernel == 0 && i < schema.returns().size(); ++i) {
    if (schema.returns()[i].alias_info() == nullptr) {
      log_argument((*stack)[stack->size() - schema.returns().size() + i], true, false, name);
    }
  }
}

}  // namespace

int64_t stream_of_this_thread() { return current_stream; }
void set_stream_of_this_thread(int64_t stream) { current_stream = stream; }
int64_t new_stream() { return ++last_stream; }
int64_t new_event() { return ++last_event; }
int64_t allocated_bytes() { return allocated; }
int64_t peak_bytes() { return peak; }
void reset_peak() { peak = allocated; }

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!tensor.device().is_privateuseone()) {
    return tensor;
  }
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.numel() == 0) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

void log_access(const at::Tensor& tensor, int64_t stream, const char* kind, const std::string& name) {
  if (!tensor.defined() || !tensor.device().is_privateuseone() || tensor.numel() == 0 || inside_kernel > 0) {
    return;
  }
  int64_t span = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    span += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const int64_t size = tensor.dtype().itemsize(), start = tensor.storage_offset() * size;
  log().add(kind, stream, reinterpret_cast<int64_t>(tensor.storage().data()), start, start + span * size, name);
}

void register_hooks() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace fake_npu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &fake_npu::empty);
  m.impl("empty_strided", &fake_npu::empty_strided);
  m.impl("_copy_from", &fake_npu::copy_from);
  m.impl("_copy_from_and_resize", &fake_npu::copy_from_and_resize);
  m.impl("_local_scalar_dense", &fake_npu::local_scalar);
  m.impl("as_strided", &fake_npu::as_strided);
  m.impl("record_stream", &fake_npu::record_stream);
  m.impl("resize_", &at::native::resize_);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("set_.source_Storage", &fake_npu::set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake_npu::run_on_cpu>());
}
