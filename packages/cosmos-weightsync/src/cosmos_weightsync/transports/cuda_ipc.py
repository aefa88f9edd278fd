"""Between processes that use one GPU, or GPUs of one host: the receiver maps the sender's memory.

One copy, by the GPU. Handles of allocations cross a Unix socket, each once; after that an exposure
is offsets and strides. Host memory (a snapshot, as senders keep it) goes through buckets on the
device. It is torch's own sharing of storages, whose handles not all processes can use: with
expandable segments one takes a descriptor from the other, which the system may forbid. So a byte
comes first.

```
sender                                                  receiver
device's uuid, a byte's handle                       ─► finds it among its own, opens it
                                           yes or no ◄─
expose: waits for its stream, offsets [+ handles]    ─► opens handles, copies on its stream
                                             "." ◄───── finish: waits for its stream
```
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import ProtocolError, TransportUnavailableError
from cosmos_weightsync.transports.contract import (
    Capabilities,
    PendingChannel,
    Side,
    Transport,
    Windows,
)
from cosmos_weightsync.transports.exposing import receive_exposed, send_exposed
from cosmos_weightsync.transports.host_sockets import HostConnection, prepare_on_host
from cosmos_weightsync.transports.windows import MappedWindows, strided_view

__all__ = ["CudaIpcTransport", "gpu_of", "receiving", "visible_gpus"]

_YES, _NO = b"\x01", b"\x00"
_NOT_SHARED = (
    "this GPU's memory cannot be shared with the other process (with expandable_segments that "
    "takes pidfd_getfd: kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE in a container)"
)
_CAPABILITIES = Capabilities(
    one_sided=True,
    same_host=True,
    same_device=True,
    devices=frozenset({"cuda"}),
    copies=1,
    direct_bytes=4 << 20,
    message_bytes=64 << 20,
    read_bytes=64 << 20,
)


class _CudaIpcChannel:
    def __init__(self, connection: HostConnection, device: torch.device) -> None:
        self._connection = connection
        self._device = device
        # What was told of must stay allocated, or its address would come to mean other memory.
        self._shared: dict[int, torch.UntypedStorage] = {}
        self._opened: dict[int, Tensor] = {}

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def device(self) -> torch.device:
        return self._device

    def send(self, view: Tensor, deadline: Deadline) -> None:
        send_exposed(self, view, deadline)

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        receive_exposed(self, view, deadline)

    def expose(self, views: Sequence[Tensor], arena: Arena | None, deadline: Deadline) -> bool:
        if any(view.device != self._device for view in views):
            self._connection.send_json(None, deadline)
            return False
        torch.cuda.current_stream(self._device).synchronize()
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}
        fresh = {key: each for key, each in storages.items() if key not in self._shared}
        try:
            handles = {str(key): _handle_of(storage) for key, storage in fresh.items()}
        except RuntimeError:  # Not of torch's allocator, such as vLLM's where it can sleep.
            self._connection.send_json(None, deadline)
            return False
        self._shared.update(fresh)
        places = [
            (
                view.untyped_storage().data_ptr(),
                view.storage_offset() * view.element_size(),
                view.stride(),
            )
            for view in views
        ]
        self._connection.send_json([handles, places], deadline)
        return True

    def decline(self, deadline: Deadline) -> None:
        self._connection.send_json(None, deadline)

    def await_finish(self, deadline: Deadline) -> None:
        self._connection.receive(1, deadline)

    def windows(
        self, shapes: Sequence[tuple[Sequence[int], torch.dtype]], deadline: Deadline
    ) -> Windows | None:
        exposed, _ = self._connection.receive_json(deadline)
        if exposed is None:
            return None
        try:
            handles, places = exposed
            for key, handle in handles.items():
                self._opened[int(key)] = self.open(handle)
            return MappedWindows(
                strided_view(self._opened[key], dtype, tuple(shape), offset, strides)
                for (shape, dtype), (key, offset, strides) in zip(shapes, places, strict=True)
            )
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ProtocolError(f"{self._connection.peer} exposed nonsense: {error}") from error

    def finish(self, deadline: Deadline) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self._connection.send(b"\x01", deadline)

    def close(self) -> None:
        self._connection.close()

    def open(self, handle: Sequence[Any]) -> Tensor:
        """The bytes of the sender's allocation, as memory of this process.

        Raises:
            RuntimeError: the handle is none, or this process may not use it.
        """
        found = [bytes.fromhex(item) if isinstance(item, str) else item for item in handle]
        # torch.multiprocessing's own way, which it documents no other name for.
        storage: Any = torch.UntypedStorage._new_shared_cuda(  # pyright: ignore
            self._device.index, *found
        )
        memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        return memory.set_(storage, 0, (storage.nbytes(),), (1,))


def _handle_of(storage: Any) -> list[Any]:
    """What opens a storage in another process, as JSON; without its device's number here."""
    _, *parts = storage._share_cuda_()
    return [part.hex() if isinstance(part, bytes) else part for part in parts]


def _uuids() -> Mapping[str, int]:
    """The devices of this process by identity: numbers differ with CUDA_VISIBLE_DEVICES."""
    return {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }


def gpu_of(transports: Iterable[Transport]) -> str:
    """The identity of the device that `CudaIpcTransport` among these serves from, or nothing."""
    return next((t.gpu for t in transports if isinstance(t, CudaIpcTransport)), "")


def visible_gpus() -> frozenset[str]:
    """The identities of the GPUs that this process sees; none while it does without CUDA."""
    return frozenset(_uuids() if torch.cuda.is_initialized() else ())


def receiving(connection: HostConnection, deadline: Deadline) -> _CudaIpcChannel:
    """Meet the sender over a connection: the device has to be one that this process sees too.

    Raises:
        TransportUnavailableError: it is not, or the sender is this process.
    """
    if connection.process == os.getpid():
        raise TransportUnavailableError(
            "CUDA opens no handle in the process that it is of: hand a LocalTransport to both ends"
        )
    frame, _ = connection.receive_json(deadline)
    try:
        uuid, probe = frame
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{connection.peer} told no device") from error
    index = _uuids().get(str(uuid))
    if index is None:
        connection.send(_NO, deadline)
        raise TransportUnavailableError(
            f"the sender's GPU {uuid} is not visible here, only {sorted(_uuids())}: extend "
            "CUDA_VISIBLE_DEVICES, or use 'shared_memory'"
        )
    channel = _CudaIpcChannel(connection, torch.device("cuda", index))
    try:
        channel.open(probe)
    except (TypeError, ValueError, RuntimeError) as error:
        connection.send(_NO, deadline)
        raise TransportUnavailableError(f"{_NOT_SHARED}: {_first_line(error)}") from error
    connection.send(_YES, deadline)
    return channel


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


class CudaIpcTransport:
    """Maps the memory of another process on the same GPU. Linux only.

    Args:
        device_index: The sender's CUDA device; the current one when omitted, where CUDA is in use.
    """

    def __init__(self, device_index: int | None = None) -> None:
        if device_index is None:  # CUDA is not to be started by a process that does without.
            device_index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        self._device_index = device_index

    @property
    def name(self) -> str:
        """``cuda_ipc``."""
        return "cuda_ipc"

    @property
    def gpu(self) -> str:
        """The identity of the sender's device; empty while this process does without CUDA."""
        if not torch.cuda.is_initialized():
            return ""
        return str(torch.cuda.get_device_properties(self._device_index).uuid)

    @property
    def capabilities(self) -> Capabilities:
        """One-sided, on one host, from GPU memory to GPU memory."""
        return _CAPABILITIES

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Wait for the receiver as the sender; nothing yet as the receiver."""
        if not torch.cuda.is_available():
            raise TransportUnavailableError("'cuda_ipc' needs a CUDA device")
        return prepare_on_host(self.name, side, sending=self._sending, receiving=receiving)

    def _sending(self, connection: HostConnection, deadline: Deadline) -> _CudaIpcChannel:
        device = torch.device("cuda", self._device_index)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        probe = torch.zeros(1, dtype=torch.uint8, device=device)
        try:
            handle = _handle_of(probe.untyped_storage())
        except RuntimeError as error:
            connection.send_json([uuid, None], deadline)
            raise TransportUnavailableError(f"{_NOT_SHARED}: {_first_line(error)}") from error
        connection.send_json([uuid, handle], deadline)
        if connection.receive(1, deadline) != _YES:
            raise TransportUnavailableError(f"{_NOT_SHARED}: the receiver cannot open its handle")
        return _CudaIpcChannel(connection, device)
