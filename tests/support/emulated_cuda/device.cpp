// A CUDA device made of host memory, for a torch without CUDA.
//
// Tensors are CUDA's and every operation on them is computed by its CPU kernel. As on a GPU, tensors
// of two devices do not mix, generators are the device's own, and the host cannot reach the memory:
// it is open only while an operation copies from or to it. What is not like a GPU: everything has
// happened when a call returns (but for collectives), so that wrong use of streams goes unseen.

#include "collectives.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/extension.h>

#include <mutex>
#include <set>
#include <unordered_map>

namespace {
using namespace c10;
using at::Tensor;

thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream = 0;

// Those of CUDA_VISIBLE_DEVICES, or else EMULATED_CUDA_DEVICES.
DeviceIndex num_devices() {
  static const DeviceIndex found = [] {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible != nullptr) {
      const std::string names(visible);
      const auto commas = std::count(names.begin(), names.end(), ',');
      return static_cast<DeviceIndex>(names.empty() ? 0 : commas + 1);
    }
    const char* number = std::getenv("EMULATED_CUDA_DEVICES");
    return static_cast<DeviceIndex>(number != nullptr ? std::atoi(number) : 1);
  }();
  return found;
}

void require_device(DeviceIndex index) {
  TORCH_CHECK(index < num_devices(), "CUDA error: invalid device ordinal ", int{index});
}

// ---- memory ------------------------------------------------------------------------------------

struct Region {
  size_t size = 0;
  int num_open = 0;
};

std::recursive_mutex memory_lock;
size_t allocated = 0, peak = 0;

std::unordered_map<void*, Region>& regions() {
  static auto* held = new std::unordered_map<void*, Region>();
  return *held;
}

void release(void* at) {
  if (at == nullptr) return;
  const std::lock_guard hold(memory_lock);
  const auto found = regions().find(at);
  allocated -= found->second.size;
  munmap(at, found->second.size);
  regions().erase(found);
}

// Lets memory be touched while it lives.
class Open {
 public:
  explicit Open(const std::vector<const void*>& places) : hold_(memory_lock) {
    for (const void* place : places) {
      void* at = const_cast<void*>(place);
      const auto found = regions().find(at);
      if (found == regions().end()) continue;
      if (found->second.num_open++ == 0) mprotect(at, found->second.size, PROT_READ | PROT_WRITE);
      opened_.push_back(at);
    }
  }
  explicit Open(const Tensor& tensor) : Open({tensor.storage().data()}) {}
  Open(const Tensor& one, const Tensor& other)
      : Open({one.storage().data(), other.storage().data()}) {}
  ~Open() {
    for (void* at : opened_) {
      auto& region = regions().at(at);
      if (--region.num_open == 0) mprotect(at, region.size, PROT_NONE);
    }
  }

 private:
  std::unique_lock<std::recursive_mutex> hold_;
  std::vector<void*> opened_;
};

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t num_bytes) override {
    const Device device(DeviceType::CUDA, current_device);
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    const size_t size = (num_bytes + 4095) / 4096 * 4096;
    void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "CUDA out of memory");
    const std::lock_guard hold(memory_lock);
    regions()[at] = {size, 0};
    allocated += size;
    peak = std::max(peak, allocated);
    return {at, at, &release, device};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    const Open open(std::vector<const void*>{to, from});
    std::memcpy(to, from, num_bytes);
  }
};

DeviceAllocator& device_allocator() {
  static DeviceAllocator held;
  return held;
}

std::set<std::pair<const char*, const char*>>& pinned() {
  static auto* held = new std::set<std::pair<const char*, const char*>>();
  return *held;
}

void unpin(void* at) {
  const std::lock_guard hold(memory_lock);
  std::erase_if(pinned(), [&](const auto& range) { return range.first == at; });
  std::free(at);
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t num_bytes) override {
    auto* at = static_cast<char*>(std::aligned_alloc(64, (num_bytes + 63) / 64 * 64));
    const std::lock_guard hold(memory_lock);
    pinned().insert({at, at + num_bytes});
    return {at, at, &unpin, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

// ---- operations --------------------------------------------------------------------------------

// The same memory as the CPU's, to be used while it is open.
Tensor on_host(const Tensor& tensor) {
  const auto options = tensor.options().device(kCPU);
  if (!tensor.is_cuda()) return tensor;
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  auto made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
             std::optional<Device> device, std::optional<bool> is_pinned,
             std::optional<MemoryFormat> format) {
  TORCH_CHECK(!is_pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator(), DispatchKeySet(DispatchKey::CUDA),
                                   dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                     std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  const OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           DispatchKeySet(DispatchKey::CUDA),
                                           dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  if (self.numel() == 0) return self;
  const Open open(self, source);
  auto target = on_host(self);
  target.copy_(on_host(source));
  return self;
}

void resize_storage(StorageImpl* storage, size_t num_bytes) {
  DataPtr fresh = device_allocator().allocate(num_bytes);
  const size_t kept = std::min(num_bytes, storage->nbytes());
  if (kept > 0) device_allocator().copy_data(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(num_bytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  auto* made = self.unsafeGetTensorImpl();
  made->set_sizes_contiguous(size);
  const size_t needed = (made->storage_offset() + made->numel()) * made->itemsize();
  auto* storage = made->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(storage, needed);
  if (format.value_or(MemoryFormat::Preserve) != MemoryFormat::Preserve) {
    made->empty_tensor_restride(*format);
  }
  return self;
}

Tensor copy_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  auto to = target;
  return copy_(to, source, false);
}

Scalar item(const Tensor& self) {
  const Open open(self);
  return on_host(self).item();
}

bool equal(const Tensor& one, const Tensor& other) {
  TORCH_CHECK(one.device() == other.device(), "Expected all tensors to be on the same device");
  const Open open(one, other);
  return at::equal(on_host(one), on_host(other));
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  auto* made = self.unsafeGetTensorImpl();
  made->set_storage_keep_dtype(std::move(source));
  made->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    made->set_sizes_contiguous(size);
  } else {
    made->set_sizes_and_strides(size, stride);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, Storage source) {
  const int64_t count = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

// The one written in operations that any device has.
int64_t attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double,
                  bool, std::optional<double>, bool) {
  return 0;
}

// The CPU's has no kernel for integers.
Tensor histogram(const Tensor& self, int64_t bins, const Scalar& low, const Scalar& high) {
  return at::histc(self.to(kCPU, kFloat), bins, low, high).to(self.options());
}

struct DeviceGenerator final : GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index)
      : GeneratorImpl(Device(DeviceType::CUDA, index), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { of_host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return of_host.current_seed(); }
  uint64_t seed() override { return of_host.seed(); }
  void set_state(const TensorImpl& state) override {
    of_host.unsafeGetGeneratorImpl()->set_state(state);
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    return of_host.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* made = new DeviceGenerator(device_.index());
    made->of_host = of_host.clone();
    return made;
  }
  at::Generator of_host = at::detail::createCPUGenerator();
};

// Refuses what a GPU would, for lack of a common device.
class Devices {
 public:
  void see(const Tensor& tensor) {
    if (!tensor.defined()) return;
    is_on_host_ = is_on_host_ || (tensor.is_cpu() && tensor.dim() > 0);
    if (!tensor.is_cuda()) return;
    TORCH_CHECK(!device_ || *device_ == tensor.device(), where, *device_, " and ", tensor.device());
    device_ = tensor.device();
  }
  void require_one(const std::string& operation) const {
    TORCH_CHECK(!device_ || !is_on_host_, where, *device_, " and cpu (", operation, ")");
  }

 private:
  static constexpr auto where = "Expected all tensors to be on the same device, but found ";
  std::optional<Device> device_;
  bool is_on_host_ = false;
};

void compute(const OperatorHandle& operation, torch::jit::Stack* stack) {
  // indices may be the host's
  static const std::set<std::string> mixing = {"aten::index", "aten::index_put_",
                                               "aten::_index_put_impl_", "aten::_unsafe_index"};
  const auto& schema = operation.schema();
  Devices devices;
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) devices.see(value.toTensor());
    if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) devices.see(tensor);
    }
    if (value.isGenerator()) {
      auto* given = value.toGenerator().unsafeGetGeneratorImpl();
      auto* ours = dynamic_cast<DeviceGenerator*>(given);
      TORCH_CHECK(ours != nullptr, "Expected a 'cuda' device type for generator");
      value = ours->of_host;
    }
  }
  if (!mixing.contains(schema.name())) devices.require_one(schema.name());
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("copy_", TORCH_FN(copy_));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(item));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("equal", TORCH_FN(equal));
  library.impl("_fused_sdp_choice", TORCH_FN(attention));
  library.impl("histc", TORCH_FN(histogram));
}

// ---- what torch asks of a device ---------------------------------------------------------------

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, current_device}; }
  void setDevice(Device device) const override {
    require_device(device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, current_stream);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> next = 1;
    return Stream(Stream::UNSAFE, device, next++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return num_devices() > 0; }
  int getNumGPUs() const override { return num_devices(); }
  DeviceIndex deviceCount() const override { return num_devices(); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator held;
    return &held;
  }
  bool isPinnedPtr(const void* at) const override {
    const std::lock_guard hold(memory_lock);
    return std::any_of(pinned().begin(), pinned().end(), [&](const auto& range) {
      return range.first <= at && at < range.second;
    });
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static const auto* held = [] {
      auto* made = new std::vector<at::Generator>();
      for (DeviceIndex each = 0; each < num_devices(); ++each) {
        made->push_back(at::make_generator<DeviceGenerator>(each));
      }
      return made;
    }();
    return held->at(index < 0 ? ::current_device : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? ::current_device : index);
  }
  void deviceSynchronize(DeviceIndex) const override {}
};
}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

PYBIND11_MODULE(emulated_device, module) {
  module.def("num_devices", [] { return int{num_devices()}; });
  module.def("current_device", [] { return int{current_device}; });
  module.def("set_device", [](int index) {
    Guard().setDevice({DeviceType::CUDA, static_cast<DeviceIndex>(index)});
  });
  module.def("allocated", [] { return allocated; });
  module.def("peak", [] { return peak; });
  module.def("reset_peak", [] { peak = allocated; });
  module.def("resize_storage", [](const Tensor& bytes, size_t num_bytes) {
    resize_storage(bytes.storage().unsafeGetStorageImpl(), num_bytes);
  });
  py::class_<emulated::Collectives, c10d::Backend, intrusive_ptr<emulated::Collectives>>(
      module, "Collectives")
      .def(py::init<int, int, intrusive_ptr<c10d::Backend>>());
}
