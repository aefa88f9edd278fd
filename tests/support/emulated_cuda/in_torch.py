"""The side of Python: what ``torch.cuda`` and NCCL's groups are, with the emulated device."""

import os

import emulated_device as device
import torch
import torch.cuda.memory
import torch.cuda.random
import torch.cuda.streams
import torch.distributed as dist
import torch.storage
import torch.utils._triton
from torch.distributed import distributed_c10d

_NAME = "NVIDIA H100 80GB HBM3"
_MEMORY = 80 << 30


class Stream(torch.Stream):
    """One whose operations come after those of others where something says so."""

    def __new__(cls, device=None, priority=0, stream_id=None, **_):
        index = _index_of(device)
        if stream_id is not None:
            return super().__new__(cls, stream_id=stream_id, device_index=index, device_type=1)
        return super().__new__(cls, torch.device("cuda", index))

    @property
    def cuda_stream(self):
        return self.stream_id

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def wait_event(self, event):
        event.wait(self)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        device.finish_stream(self.device_index, self.stream_id)

    def query(self):
        self.synchronize()
        return True


class Event:
    """What a stream had begun when it was recorded."""

    def __init__(self, *_, **__):
        self._moment = device.Moment()

    def record(self, stream=None):
        stream = stream or _current_stream()
        self._moment.record(stream.device_index, stream.stream_id)

    def wait(self, stream=None):
        stream = stream or _current_stream()
        self._moment.wait(stream.device_index, stream.stream_id)

    def query(self):
        self.synchronize()
        return True

    def synchronize(self):
        self._moment.synchronize()

    def elapsed_time(self, other):
        if not (self._moment.is_recorded and other._moment.is_recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1.0


class OnStream:
    """``torch.cuda.stream``, which changes the device as well."""

    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        if self._stream is None:
            return
        self._device = device.current_device()
        device.set_device(self._stream.device_index)
        self._before = _current_stream()
        _set_stream(self._stream)

    def __exit__(self, *_):
        if self._stream is None:
            return
        _set_stream(self._before)
        device.set_device(self._device)


class CurrentDevice:
    """``torch.cuda.device``."""

    def __init__(self, which):
        self._index = _index_of(which)

    def __enter__(self):
        self._before = device.current_device()
        device.set_device(self._index)

    def __exit__(self, *_):
        device.set_device(self._before)


class Properties:
    """Those of a GPU of compute capability 9.0."""

    name = _NAME
    major, minor = 9, 0
    total_memory = _MEMORY
    multi_processor_count, warp_size = 132, 32
    max_threads_per_multi_processor, regs_per_multiprocessor = 2048, 65536
    shared_memory_per_block_optin = 232448
    gcnArchName = ""  # noqa: N815 - torch's

    def __init__(self, index):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        number = int(visible.split(",")[index]) if visible else index
        self.uuid = f"00000000-0000-0000-0000-{number:012d}"


class Runtime:
    """``torch.cuda.cudart()``, as far as it is asked for."""

    def __init__(self):
        torch.empty(1, pin_memory=True)  # from then on torch asks what is page-locked

    def cudaHostRegister(self, place, num_bytes, _):  # noqa: N802 - torch's
        return device.register_host(place, num_bytes)

    def cudaHostUnregister(self, place):  # noqa: N802 - torch's
        return device.unregister_host(place)


class _AnyOfOurs(type):
    def __instancecheck__(cls, group):
        return isinstance(group, device.Collectives)


class ProcessGroupNCCL(metaclass=_AnyOfOurs):
    """Builds groups over gloo that take tensors of the device."""

    class Options:
        """What callers set; the time limit is heeded."""

        def __init__(self, *_, **__):
            self._timeout = distributed_c10d.default_pg_timeout
            self.is_high_priority_stream = False

    def __new__(cls, store, rank, size, options=None, *_):
        options = options or cls.Options()
        store = dist.PrefixStore("emulated", store)

        def make_gloo():
            return dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)

        return device.Collectives(rank, size, make_gloo)


def _index_of(which):
    if which is None:
        return device.current_device()
    if isinstance(which, int):
        return which if which >= 0 else device.current_device()
    which = torch.device(which)
    if which.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {which}")
    return device.current_device() if which.index is None else which.index


def _exchange_device(index):
    before = device.current_device()
    if index >= 0:
        device.set_device(index)
    return before


def _current_stream(which=None):
    index = _index_of(which)
    return Stream(index, stream_id=device.current_stream(index))


def _record_stream(tensor, stream):
    device.record_stream(tensor, stream.device_index, stream.stream_id)


def _set_stream(stream):
    if stream is not None:
        device.set_device(stream.device_index)
        device.set_stream(stream.device_index, stream.stream_id)


def _memory_stats(_=None):
    now, peak = device.allocated(), device.peak()
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
    stats = {f"{kind}.all.{when}": value for kind in kinds for when, value in
             (("current", now), ("peak", peak))}  # fmt: skip
    return {**stats, "num_alloc_retries": 0, "num_ooms": 0}


def _names():
    """Return what stands in for functions and classes of ``torch.cuda``."""
    generators = tuple(
        torch.Generator(device=f"cuda:{index}") for index in range(device.num_devices())
    )
    return {
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **_: function(),
        "_is_in_bad_fork": lambda: False,
        "is_initialized": lambda: True,
        "is_available": lambda: device.num_devices() > 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": device.num_devices,
        "current_device": device.current_device,
        "set_device": lambda which: device.set_device(_index_of(which)),
        "device": CurrentDevice,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "get_device_name": lambda which=None: _NAME,
        "get_device_capability": lambda which=None: (9, 0),
        "get_device_properties": lambda which=None: Properties(_index_of(which)),
        "cudart": Runtime,
        "Stream": Stream,
        "Event": Event,
        "current_stream": _current_stream,
        "default_stream": lambda which=None: Stream(which, stream_id=0),
        "stream": OnStream,
        "StreamContext": OnStream,
        "set_stream": _set_stream,
        "synchronize": lambda which=None: device.finish_device(_index_of(which)),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": lambda which=None: device.allocated(),
        "max_memory_allocated": lambda which=None: device.peak(),
        "memory_reserved": lambda which=None: device.allocated(),
        "max_memory_reserved": lambda which=None: device.peak(),
        "reset_peak_memory_stats": lambda which=None: device.reset_peak(),
        "memory_stats": _memory_stats,
        "mem_get_info": lambda which=None: (_MEMORY - device.allocated(), _MEMORY),
        **_random_states(generators),
    }


def _random_states(generators):
    def of(which="cuda"):
        return generators[_index_of(which)]

    return {
        "default_generators": generators,
        "manual_seed": lambda seed: of().manual_seed(seed),
        "manual_seed_all": lambda seed: [each.manual_seed(seed) for each in generators],
        "initial_seed": lambda: of().initial_seed(),
        "get_rng_state": lambda which="cuda": of(which).get_state(),
        "set_rng_state": lambda state, which="cuda": of(which).set_state(state),
        "get_rng_state_all": lambda: [each.get_state() for each in generators],
    }


def _storage_to(original):
    def to(storage, target, non_blocking=False):
        if torch.device(target).type != "cuda":
            return original(storage, target, non_blocking)
        return _bytes_of(storage).to(target).untyped_storage()

    return to


def _resize_storage(original):
    def resize_(storage, num_bytes):
        if storage.device.type != "cuda":
            return original(storage, num_bytes)
        device.resize_storage(_bytes_of(storage), num_bytes)
        return storage

    return resize_


def _share(storage):
    """Return what `_new_shared_cuda` takes: one's own device, a handle, where in it, and more."""
    process, file, offset, size, within = device.share(_bytes_of(storage))
    handle = f"{process} {file} {offset} {size}".encode()
    return storage.device.index, handle, storage.nbytes(), within, b"", 0, b"", False


def _map_shared(_, index, handle, num_bytes, within, *__):
    whole = device.map(*(int(word) for word in handle.split()), index)
    if (num_bytes, within) == (whole.numel(), 0):
        return whole.untyped_storage()
    part = torch.empty(0, dtype=torch.uint8, device=whole.device)
    return part.set_(whole.untyped_storage(), within, (num_bytes,), (1,)).untyped_storage()


def _bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def install():
    """Put the device into this process's torch; once, right after its import."""
    for name, value in _names().items():
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch._C._cuda_getCurrentRawStream = device.current_stream
    torch.version.cuda = "13.0"
    torch.utils._triton.has_triton = lambda: False  # whose kernels want a real one
    torch.storage._to = _storage_to(torch.storage._to)
    torch.UntypedStorage.resize_ = _resize_storage(torch.UntypedStorage.resize_)
    torch.UntypedStorage._share_cuda_ = _share
    torch.UntypedStorage._new_shared_cuda = classmethod(_map_shared)
    torch.Tensor.record_stream = _record_stream
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
