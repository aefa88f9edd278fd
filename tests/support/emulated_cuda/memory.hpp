// The memory of devices and page-locked memory: closed to whoever must not touch it, and watched.
#pragma once

#include "streams.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <fstream>
#include <mutex>

namespace emulated {
using namespace c10;
using at::Tensor;

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<StreamId, 64> current_streams{};

// Those of CUDA_VISIBLE_DEVICES, or else EMULATED_CUDA_DEVICES; what is forked looks anew.
inline DeviceIndex num_devices() {
  static pid_t asked_by = 0;
  static DeviceIndex found = 0;
  if (asked_by == getpid()) return found;
  asked_by = getpid();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const char* number = std::getenv("EMULATED_CUDA_DEVICES");
  if (visible != nullptr) {
    const std::string names(visible);
    const auto commas = std::count(names.begin(), names.end(), ',');
    found = static_cast<DeviceIndex>(names.empty() ? 0 : commas + 1);
  } else {
    found = static_cast<DeviceIndex>(number != nullptr ? std::atoi(number) : 1);
  }
  return found;
}

inline void require_device(DeviceIndex index) {
  TORCH_CHECK(index < num_devices(), "CUDA error: invalid device ordinal ", int{index});
}

// ---- memory ------------------------------------------------------------------------------------

inline std::recursive_mutex memory_lock;

// Holds the lock of all memory. Who has it may come to want the interpreter's too, as a tensor that is
// copied or goes does; so nobody waits for this one with the interpreter's in hand.
class Hold {
 public:
  Hold() {
    if (memory_lock.try_lock()) return;
    PyThreadState* python = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    memory_lock.lock();
    if (python != nullptr) PyEval_RestoreThread(python);
  }
  ~Hold() { memory_lock.unlock(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
};

constexpr size_t page = 4096;
inline size_t allocated = 0, peak = 0;

inline size_t whole_pages(size_t num_bytes) { return (num_bytes + page - 1) / page * page; }

inline std::map<const char*, Region>& regions() {
  static auto* held = new std::map<const char*, Region>();
  return *held;
}

// The memory that an address is of; the lock is held.
inline std::map<const char*, Region>::iterator region_of(const void* place) {
  const auto* at = static_cast<const char*>(place);
  auto found = regions().upper_bound(at);
  if (found == regions().begin()) return regions().end();
  --found;
  return at < found->first + found->second.size ? found : regions().end();
}

// The host reaches page-locked memory that nothing writes any more, and none of a device.
inline void protect(const char* base, const Region& region) {
  char* at = const_cast<char*>(base);
  const int usual = region.is_pinned || region.num_open > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
  mprotect(at, region.size, usual);
  if (!region.is_pinned || region.num_open > 0) return;
  for (const bool writes : {false, true}) {
    for (const auto& access : region.accesses) {
      if (access.writes != writes || has(Order::held().over(), access)) continue;
      const size_t first = access.low / page * page;
      mprotect(at + first, whole_pages(access.high) - first, writes ? PROT_NONE : PROT_READ);
    }
  }
}

inline std::vector<std::string>& races() {
  static auto* held = new std::vector<std::string>();
  return *held;
}

// Note what is wrong, and in which line of Python; the lock is not held.
inline void tell(const std::string& wrong) {
  if (wrong.empty()) return;
  std::string text = wrong + "\n";
  if (Py_IsInitialized()) {
    const py::gil_scoped_acquire python;
    const auto lines = py::module_::import("traceback").attr("format_stack")();
    for (const auto& line : lines) text += line.cast<std::string>();
  }
  const Hold hold;
  races().push_back(text);
  if (const char* file = std::getenv("EMULATED_CUDA_RACES")) {
    std::ofstream(file, std::ios::app) << text << std::endl;
  }
}

inline struct sigaction fault_before;

// The host touches page-locked memory too early: told, and let through.
inline void on_fault(int, siginfo_t* info, void*) {
  std::string wrong;
  {
    const Hold hold;
    const auto found = region_of(info->si_addr);
    if (found == regions().end() || !found->second.is_pinned) {
      sigaction(SIGSEGV, &fault_before, nullptr);
      return;  // and fault again
    }
    for (const auto& access : found->second.accesses) {
      if (has(Order::held().over(), access)) continue;
      wrong = "the host touches page-locked memory before the end of " + Order::told(access);
    }
    found->second.accesses.clear();
    protect(found->first, found->second);
  }
  tell(wrong);
}

inline const bool is_watching = [] {
  struct sigaction action {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGSEGV, &action, &fault_before) == 0;
}();

// The memory of a process is one file, which another can map parts of.
inline int file_of_memory() {
  static const pid_t owner = getpid();
  static const int file = [] {
    const int made = memfd_create("emulated-cuda", MFD_CLOEXEC);
    TORCH_CHECK(ftruncate(made, off_t{1} << 42) == 0, "no file for memory");
    return made;
  }();
  TORCH_CHECK(owner == getpid(), "Cannot re-initialize CUDA in forked subprocess");
  return file;
}

inline void release(void* at) {
  if (at == nullptr) return;
  const Hold hold;
  const auto found = region_of(at);
  const Region& region = found->second;
  munmap(at, region.size);
  if (region.offset >= 0) {
    Order::held().freed(region);
    allocated -= region.size;
    const int holes = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    fallocate(file_of_memory(), holes, region.offset, region.size);
  }
  regions().erase(found);
}

// Lets memory be touched while it lives.
class Open {
 public:
  explicit Open(const std::vector<const void*>& places) {
    for (const void* place : places) {
      const auto found = region_of(place);
      if (found == regions().end()) continue;
      if (found->second.num_open++ == 0) protect(found->first, found->second);
      opened_.push_back(found->first);
    }
  }
  explicit Open(const Tensor& tensor) : Open({tensor.storage().data()}) {}
  Open(const Tensor& one, const Tensor& other)
      : Open({one.storage().data(), other.storage().data()}) {}
  ~Open() {
    for (const char* at : opened_) {
      auto& region = regions().at(at);
      if (--region.num_open == 0) protect(at, region);
    }
  }

 private:
  const Hold hold_;
  std::vector<const char*> opened_;
};

inline void* take_memory(int file, off_t offset, Region region) {
  void* at = mmap(nullptr, region.size, PROT_NONE, MAP_SHARED, file, offset);
  TORCH_CHECK(at != MAP_FAILED, "CUDA out of memory");
  const Hold hold;
  Order::held().allocated(region, {current_device, current_streams.at(current_device)});
  regions()[static_cast<char*>(at)] = std::move(region);
  return at;
}

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t num_bytes) override {
    const Device device(DeviceType::CUDA, current_device);
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    static off_t end = 0;
    const Hold hold;
    const size_t size = whole_pages(num_bytes);
    void* at = take_memory(file_of_memory(), end, Region{.size = size, .offset = end});
    end += size;
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

inline DeviceAllocator& device_allocator() {
  static DeviceAllocator held;
  return held;
}

inline void unpin(void* at) {
  const Hold hold;
  const auto found = region_of(at);
  munmap(at, found->second.size);
  regions().erase(found);
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t num_bytes) override {
    const size_t size = std::max(page, whole_pages(num_bytes));
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "CUDA error: out of memory");
    const Hold hold;
    regions()[static_cast<char*>(at)] = Region{.size = size, .is_pinned = true};
    return {at, at, &unpin, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

// ---- order -------------------------------------------------------------------------------------

inline Key stream_of(const Tensor& tensor) {
  const auto index = tensor.device().index();
  return {index, current_streams.at(index)};
}

// An operation of a stream, and what it reads and writes.
class Seen {
 public:
  Seen(Key stream, std::string operation) : stream_(stream), operation_(std::move(operation)) {
    const Hold hold;
    number_ = Order::held().launch(stream_);
  }
  void access(const Tensor& tensor, bool writes) {
    if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) return;
    std::string wrong;
    {
      const Hold hold;
      const auto found = region_of(tensor.storage().data());
      if (found == regions().end()) return;
      const auto* first = static_cast<const char*>(tensor.storage().data());
      int64_t last = 0;
      for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        last += (tensor.size(dim) - 1) * tensor.stride(dim);
      }
      const size_t low = first - found->first + tensor.storage_offset() * tensor.itemsize();
      const size_t high = low + (last + 1) * tensor.itemsize();
      auto& region = found->second;
      wrong = Order::held().see(region, {stream_, number_, low, high, writes, operation_});
    }
    tell(wrong);
  }
  // Memory that is freed waits for this stream.
  void keep(const Tensor& tensor) {
    const Hold hold;
    const auto found = region_of(tensor.storage().data());
    if (found != regions().end()) found->second.recorded.insert(stream_);
  }

 private:
  Key stream_;
  std::string operation_;
  uint64_t number_;
};

// The host has waited for this.
inline void finish(const Clock& done) {
  const Hold hold;
  Order::held().finish(done);
  for (auto& [at, region] : regions()) {
    if (!region.is_pinned || region.accesses.empty()) continue;
    std::erase_if(region.accesses, [](const auto& access) {
      return has(Order::held().over(), access);
    });
    protect(at, region);
  }
}

inline void finish_stream(Key stream) {
  const Hold hold;
  finish(Order::held().at(stream));
}

inline void finish_device(int index) {
  const Hold hold;
  finish(Order::held().all_of(index));
}

struct Moment {
  Clock done;
  bool is_recorded = false;
  void record(Key stream) {
    const Hold hold;
    done = Order::held().at(stream);
    is_recorded = true;
  }
  void wait(Key stream) const {
    const Hold hold;
    Order::held().follow(stream, done);
  }
  void synchronize() const { finish(done); }
};

}  // namespace emulated
