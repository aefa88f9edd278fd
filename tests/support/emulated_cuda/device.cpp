// A CUDA device made of host memory, for a torch without CUDA.
//
// Tensors are CUDA's and every operation on them is computed by its CPU kernel. As on a GPU, tensors
// of two devices do not mix, generators are the device's own, and the host cannot reach the memory:
// it is open only while an operation copies from or to it, and page-locked memory is closed to the
// host while a copy from or to it may be under way. What is not like a GPU: everything has happened
// when a call returns (but for collectives). What streams left unordered is told instead: see
// streams.hpp.

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

namespace {
using namespace emulated;

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

// Between devices, the stream of each waits for the other's before and after.
void see_copy(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (unseen > 0) return;
  const Hold hold;
  auto& order = Order::held();
  const Key stream = stream_of(from.is_cuda() ? from : to);
  const bool is_between = from.is_cuda() && to.is_cuda() && stream_of(to) != stream;
  if (is_between) order.follow(stream, order.at(stream_of(to)));
  Seen seen(stream, "copy_");
  seen.access(from, false);
  seen.access(to, true);
  if (is_between) order.follow(stream_of(to), order.at(stream));
  if (from.is_cuda() && to.is_cuda()) return;
  const Tensor& host = from.is_cuda() ? to : from;
  const bool returns_at_once = non_blocking && (host.is_pinned() || to.is_cuda());
  if (!returns_at_once) finish_stream(stream);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  see_copy(self, source, non_blocking);
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
  Seen(stream_of(self), "item").access(self, false);
  finish_stream(stream_of(self));
  const Open open(self);
  return on_host(self).item();
}

bool equal(const Tensor& one, const Tensor& other) {
  TORCH_CHECK(one.device() == other.device(), "Expected all tensors to be on the same device");
  Seen seen(stream_of(one), "equal");
  seen.access(one, false);
  seen.access(other, false);
  finish_stream(stream_of(one));
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
  const std::optional<Device>& one() const { return device_; }

 private:
  static constexpr auto where = "Expected all tensors to be on the same device, but found ";
  std::optional<Device> device_;
  bool is_on_host_ = false;
};

std::vector<Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  return {};
}

// Note what an operation is given, or returns; the device of the first that is on one is its own.
void see(std::optional<Seen>& seen, const std::string& operation, const IValue& value, bool writes) {
  for (const Tensor& tensor : tensors_of(value)) {
    if (unseen > 0 || !tensor.defined() || !tensor.is_cuda()) continue;
    if (!seen) seen.emplace(stream_of(tensor), operation);
    seen->access(tensor, writes);
  }
}

void compute(const OperatorHandle& operation, torch::jit::Stack* stack) {
  // indices may be the host's
  static const std::set<std::string> mixing = {"aten::index", "aten::index_put_",
                                               "aten::_index_put_impl_", "aten::_unsafe_index"};
  // tell the host the size of what they return
  static const std::set<std::string> waiting = {"aten::nonzero", "aten::masked_select",
                                                "aten::_unique2", "aten::unique_dim"};
  const auto& schema = operation.schema();
  Devices devices;
  std::optional<Seen> seen;
  const size_t num_arguments = schema.arguments().size();
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[stack->size() - num_arguments + i];
    for (const Tensor& tensor : tensors_of(value)) devices.see(tensor);
    const auto* alias = schema.arguments()[i].alias_info();
    see(seen, schema.name(), value, alias != nullptr && alias->isWrite());
    if (value.isGenerator()) {
      auto* given = value.toGenerator().unsafeGetGeneratorImpl();
      auto* ours = dynamic_cast<DeviceGenerator*>(given);
      TORCH_CHECK(ours != nullptr, "Expected a 'cuda' device type for generator");
      value = ours->of_host;
    }
  }
  if (!mixing.contains(schema.name())) devices.require_one(schema.name());
  {
    const Unseen inside;
    at::native::cpu_fallback(operation, stack);
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (schema.returns()[i].alias_info() != nullptr) continue;
    see(seen, schema.name(), (*stack)[stack->size() - schema.returns().size() + i], true);
  }
  if (waiting.contains(schema.name()) && devices.one()) {
    finish_stream({devices.one()->index(), current_streams.at(devices.one()->index())});
  }
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
    return Stream(Stream::UNSAFE, device, current_streams.at(indexed(device)));
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
    current_streams.at(indexed(stream.device())) = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { finish_stream(key(stream)); }
  void synchronizeDevice(DeviceIndex index) const override {
    finish_device(index < 0 ? current_device : index);
  }
  void recordDataPtrOnStream(const DataPtr& memory, const Stream& stream) const override {
    const Hold hold;
    const auto found = region_of(memory.get());
    if (found != regions().end()) found->second.recorded.insert(key(stream));
  }
  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    if (*event == nullptr) *event = new Moment();
    static_cast<Moment*>(*event)->record(key(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) static_cast<Moment*>(event)->wait(key(stream));
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<Moment*>(event)->synchronize();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 1.0; }

 private:
  static DeviceIndex indexed(Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  static Key key(const Stream& stream) { return {indexed(stream.device()), stream.id()}; }
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
  DeviceIndex current_device() const override { return emulated::current_device; }
  DeviceIndex getCurrentDevice() const override { return emulated::current_device; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator held;
    return &held;
  }
  bool isPinnedPtr(const void* at) const override {
    const Hold hold;
    const auto found = region_of(at);
    return found != regions().end() && found->second.is_pinned;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static const auto* held = [] {
      auto* made = new std::vector<at::Generator>();
      for (DeviceIndex each = 0; each < num_devices(); ++each) {
        made->push_back(at::make_generator<DeviceGenerator>(each));
      }
      return made;
    }();
    return held->at(index < 0 ? emulated::current_device : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? emulated::current_device : index);
  }
  void deviceSynchronize(DeviceIndex index) const override { Guard().synchronizeDevice(index); }
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
  module.def("races", [] {
    const Hold hold;
    return std::exchange(races(), {});
  });
  module.def("current_stream", [](int device) { return current_streams.at(device); });
  module.def("set_stream", [](int device, StreamId id) { current_streams.at(device) = id; });
  module.def("finish_stream", [](int device, StreamId id) { finish_stream({device, id}); });
  module.def("finish_device", &finish_device);
  module.def("record_stream", [](const Tensor& tensor, int device, StreamId id) {
    Guard().recordDataPtrOnStream(tensor.storage().data_ptr(),
                                  Stream(Stream::UNSAFE, Device(kCUDA, device), id));
  });
  module.def("register_host", [](size_t at, size_t size) {
    const Hold hold;
    regions()[reinterpret_cast<const char*>(at)] = Region{.size = size, .is_pinned = true};
    return 0;
  });
  module.def("unregister_host", [](size_t at) {
    const Hold hold;
    return regions().erase(reinterpret_cast<const char*>(at)) == 1 ? 0 : 1;
  });
  module.def("share", [](const Tensor& bytes) {
    const Hold hold;
    const auto found = region_of(bytes.storage().data());
    TORCH_CHECK(found != regions().end() && found->second.offset >= 0, "CUDA error: invalid handle");
    const auto offset = static_cast<const char*>(bytes.storage().data()) - found->first;
    return py::make_tuple(getpid(), file_of_memory(), found->second.offset, found->second.size,
                          offset);
  });
  module.def("map", [](int process, int file, off_t offset, size_t size, int device) {
    const auto path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
    const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(opened >= 0, "CUDA error: invalid resource handle");
    void* at = take_memory(opened, offset, Region{.size = size});
    close(opened);
    const Device place(kCUDA, device);
    DataPtr memory{at, at, &release, place};
    Storage storage(Storage::use_byte_size_t(), size, std::move(memory));
    auto made = at::empty({0}, at::TensorOptions(place).dtype(kByte));
    return set_storage(made, std::move(storage), 0, {static_cast<int64_t>(size)}, {1});
  });
  py::class_<Moment>(module, "Moment")
      .def(py::init<>())
      .def_readonly("is_recorded", &Moment::is_recorded)
      .def("record", [](Moment& self, int device, StreamId id) { self.record({device, id}); })
      .def("wait", [](Moment& self, int device, StreamId id) { self.wait({device, id}); })
      .def("synchronize", &Moment::synchronize);
  py::class_<emulated::Collectives, c10d::Backend, intrusive_ptr<emulated::Collectives>>(
      module, "Collectives")
      .def(py::init<int, int, py::function>());
}
