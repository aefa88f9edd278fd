"""Over torch.distributed point to point: a private group of two for every channel.

The group is built straight from a store of its own. It is never the default group and takes part
in no collective, so that a peer that dies harms no one but its channel, and weight transfer never
shares a communicator with training.

NCCL's waits stop the stream they are called on, which is the one that whoever trains or generates
here computes on, so a channel has a stream of its own. torch's watchdog ends a process that has a
broken or late group, unless that is being aborted: whoever waits aborts first. What the network
tells NCCL itself the watchdog may see before; ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0`` turns it off.
"""

# torch.distributed documents Store and TCPStore but does not list them as exported.
# pyright: reportPrivateImportUsage=false

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    DeadlineError,
    PeerLostError,
    TransferError,
    TransportUnavailableError,
)
from cosmos_weightsync.frames import listen
from cosmos_weightsync.transports.contract import Capabilities, PendingChannel, Side
from cosmos_weightsync.transports.near_sockets import unpaced_meanwhile

__all__ = ["ProcessGroupTransport"]

_CAPABILITIES = {
    "cpu": Capabilities(  # Gloo: a message costs as much as packing some hundred KiB.
        direct_bytes=512 << 10, message_bytes=6 << 20, groups=1024
    ),
    "cuda": Capabilities(  # NCCL: a call costs more than packing.
        devices=frozenset({"cpu", "cuda"}),
        copies=0,
        direct_bytes=4 << 20,
        message_bytes=64 << 20,
        groups=16,
    ),
}
_RANKS: Mapping[Side, int] = {"sender": 0, "receiver": 1}
_LOOK_S = 0.0002
_WATCHDOG = timedelta(days=1)  # Longer than any wait here, which has a deadline of its own.
_NAMES: Mapping[Side, str] = {"sender": "receiver", "receiver": "sender"}


class _ProcessGroupChannel:
    def __init__(self, group: Any, store: dist.Store, side: Side, device: torch.device) -> None:
        # One of torch's C++ process groups (their stubs are partial), and the store through which
        # gloo connects lazily: it must live as long. Dropping both is what closes the sockets.
        self._group: Any = group
        self._store: dist.Store | None = store
        self._peer_rank = 1 - _RANKS[side]
        self._peer_name = _NAMES[side]
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES[self._device.type]

    @property
    def device(self) -> torch.device:
        return self._device

    def send(self, view: Tensor, deadline: Deadline) -> None:
        self.begin_send(view, deadline)()

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        self.begin_recv(view, deadline)()

    def begin_send(self, view: Tensor, deadline: Deadline) -> Callable[[], None]:
        return self._begin(lambda group: group.send([view], self._peer_rank, 0), deadline)

    def begin_recv(self, view: Tensor, deadline: Deadline) -> Callable[[], None]:
        return self._begin(lambda group: group.recv([view], self._peer_rank, 0), deadline)

    def close(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None and self._stream is not None:
            with contextlib.suppress(RuntimeError):  # It is given up either way.
                group.abort()

    def _begin(self, start: Callable[[Any], Any], deadline: Deadline) -> Callable[[], None]:
        group = self._group
        if group is None:
            raise PeerLostError("this end of the channel is closed")
        try:
            if self._stream is None:
                work = start(group)
            else:
                with self._aside(self._stream):
                    work = start(group)
        except RuntimeError as error:
            raise _translated(error, self._peer_name) from error

        def wait() -> None:
            seconds = deadline.remaining(f"the {self._peer_name}")
            try:
                if self._stream is None:
                    work.wait(timedelta(seconds=seconds))
                else:
                    self._finish(work, self._stream, seconds)
            except RuntimeError as error:
                raise _translated(error, self._peer_name) from error

        return wait

    @contextlib.contextmanager
    def _aside(self, stream: torch.cuda.Stream) -> Generator[None]:
        """On the channel's stream, after what this thread has begun on its own."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def _finish(self, work: Any, stream: torch.cuda.Stream, seconds: float) -> None:
        """Wait for the device; NCCL's own wait only orders the stream."""
        end = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > end:
                self.close()
                raise DeadlineError(f"the {self._peer_name} did not answer in {seconds:g} s")
            time.sleep(_LOOK_S)
        with torch.cuda.stream(stream):
            work.wait()
        stream.synchronize()


def _translated(error: RuntimeError, peer: str) -> TransferError:
    text = str(error).split("\n", 1)[0]
    if "imed out" in text or "imeout" in text:
        return DeadlineError(f"the {peer} did not answer in time: {text}")
    return PeerLostError(f"the {peer} is gone: {text}")


class _PendingGroup:
    """Both ends; the sender's carries the store."""

    def __init__(self, side: Side, host: str, device: torch.device) -> None:
        self._side: Side = side
        self._host = host
        self._device = device
        self._store: dist.Store | None = None
        self._description: dict[str, Any] = {}
        if side == "sender":
            listener = listen(host)
            port = int(listener.getsockname()[1])
            self._store = dist.TCPStore(
                host,
                port,
                world_size=2,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            self._description = {"host": host, "port": port}

    @property
    def description(self) -> Mapping[str, Any]:
        return self._description

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> _ProcessGroupChannel:
        timeout = timedelta(seconds=deadline.remaining(f"the {_NAMES[self._side]}"))
        try:
            store = self._store or dist.TCPStore(
                str(peer.get("host")), int(peer.get("port", 0)), is_master=False, timeout=timeout
            )
            store.set_timeout(timeout)
            group = self._group(store, timeout)
            if self._device.type == "cuda":
                _meet(group, self._side, self._device, deadline)
        except RuntimeError as error:
            raise _translated(error, _NAMES[self._side]) from error
        finally:
            self._store = None
        return _ProcessGroupChannel(group, store, self._side, self._device)

    def close(self) -> None:
        self._store = None

    def _group(self, store: dist.Store, timeout: timedelta) -> Any:
        rank = _RANKS[self._side]
        if self._device.type == "cuda":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = _WATCHDOG
            return nccl(store, rank, 2, options)
        gloo: Any = dist.ProcessGroupGloo  # Its options have no public name and no stubs.
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=self._host)]
        options._threads = 1
        with unpaced_meanwhile():
            return gloo(store, rank, 2, options)


def _meet(group: Any, side: Side, device: torch.device, deadline: Deadline) -> None:
    """Have NCCL make its communicator, which waits for the other end as long as that takes.

    So a thread waits there, by moving a byte of its own: whoever comes when nobody waits any more
    writes into nothing else.
    """
    met: Future[None] = Future()

    def move() -> None:
        try:
            with torch.cuda.device(device):  # a thread begins on the first one
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                begin = group.send if side == "sender" else group.recv
                work = begin([byte], 1 - _RANKS[side], 0)
            while not work.is_completed():
                time.sleep(_LOOK_S)
            met.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits, in another thread
            met.set_exception(error)

    seconds = deadline.remaining(f"the {_NAMES[side]}")
    threading.Thread(target=move, name="weight-meet", daemon=True).start()
    try:
        met.result(seconds)
    except TimeoutError as error:
        raise DeadlineError(f"the {_NAMES[side]} did not come in {seconds:g} s") from error


class ProcessGroupTransport:
    """Gloo for host memory, NCCL for CUDA memory.

    Args:
        backend: Which of the two.
        device_index: The CUDA device of this process, for NCCL.
    """

    def __init__(self, backend: Literal["gloo", "nccl"] = "gloo", device_index: int = 0) -> None:
        self._device = torch.device("cuda", device_index) if backend == "nccl" else _CPU
        self._is_available = (
            dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available()
        )
        self._backend = backend

    @property
    def name(self) -> str:
        """``process_group``, with the backend when it is not gloo."""
        return "process_group" if self._backend == "gloo" else f"process_group:{self._backend}"

    @property
    def capabilities(self) -> Capabilities:
        """Over gloo large pieces go in place, over NCCL buckets are large and grouped."""
        return _CAPABILITIES[self._device.type]

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Start the store as the sender; nothing yet as the receiver."""
        if not self._is_available:
            raise TransportUnavailableError(f"this torch has no {self._backend}")
        try:
            return _PendingGroup(side, host, self._device)
        except (OSError, RuntimeError) as error:
            raise TransportUnavailableError(f"cannot listen on {host}: {error}") from error


_CPU = torch.device("cpu")
