"""Between processes of one host: the receiver reads the sender's memory with `process_vm_readv`.

One copy, made by the kernel, out of whatever memory the sender has; the sender tells addresses and
does nothing else. The system must allow one process to read another of the same user, as it must
for a debugger.
"""

import ctypes
import errno
import os
import secrets
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.byte_rows import row_bytes_of
from cosmos_weightsync.checksums import RunningChecksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    PeerLostError,
    ProtocolError,
    TransferError,
    TransportUnavailableError,
)
from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.streaming import RowRead, compiled_rows
from cosmos_weightsync.transports.contract import Capabilities, PendingChannel, Side, Windows
from cosmos_weightsync.transports.exposing import (
    KnownWindows,
    ToldPlaces,
    receive_exposed,
    send_exposed,
)
from cosmos_weightsync.transports.host_sockets import HostConnection, prepare_on_host

__all__ = ["CrossMemoryTransport", "read_process"]

_CAPABILITIES = Capabilities(one_sided=True, same_host=True, copies=1, read_bytes=1 << 20)
_MOST_RUNS = 1024
"""``IOV_MAX`` of Linux: runs of bytes that one call may read."""
_PROBE_BYTES = 16

_READV = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)


def read_process(process: int, starts: IntArray, run_bytes: int, into: int) -> None:
    """Read runs of equal length from another process, one after the other into one place.

    Args:
        process: Its id.
        starts: The address of each run there.
        run_bytes: The length of each.
        into: The address here.

    Raises:
        TransportUnavailableError: the system does not allow it.
        PeerLostError: there is no such process.
        TransferError: it has no memory there.
    """
    if _READV is None:
        raise TransportUnavailableError("this system has no process_vm_readv; use 'shared_memory'")
    for first in range(0, len(starts), _MOST_RUNS):
        some = starts[first : first + _MOST_RUNS]
        remote = np.empty((len(some), 2), dtype=np.uint64)
        remote[:, 0], remote[:, 1] = some, run_bytes
        _read_all(process, remote, into + first * run_bytes)


def _read_all(process: int, remote: np.ndarray, into: int) -> None:
    """Read the runs of one call; the kernel may stop early, at 2 GiB at the latest."""
    remote = np.ascontiguousarray(remote)
    total = int(remote[:, 1].sum())
    done = 0
    while done < total:
        local = np.array([into + done, total - done], dtype=np.uint64)
        count = _READV(  # pyright: ignore[reportOptionalCall]
            ctypes.c_int(process),
            ctypes.c_void_p(local.ctypes.data),
            ctypes.c_ulong(1),
            ctypes.c_void_p(remote.ctypes.data),
            ctypes.c_ulong(len(remote)),
            ctypes.c_ulong(0),
        )
        if count <= 0:
            raise _failure(ctypes.get_errno(), process)
        done += count
        if done < total:
            remote = _rest(remote, count)


def _rest(remote: np.ndarray, count: int) -> np.ndarray:
    """The runs without their first ``count`` bytes."""
    ends = np.cumsum(remote[:, 1])
    index = int(np.searchsorted(ends, count, side="right"))
    rest = remote[index:].copy()
    skipped = np.uint64(count - (int(ends[index - 1]) if index else 0))
    rest[0, 0] += skipped
    rest[0, 1] -= skipped
    return rest


def _failure(number: int, process: int) -> TransferError:
    if number == errno.EPERM:
        return TransportUnavailableError(
            f"may not read the memory of process {process}: the system forbids it "
            "(kernel.yama.ptrace_scope, another user, or a container without CAP_SYS_PTRACE). "
            "Allow it with 'sysctl kernel.yama.ptrace_scope=0' or 'docker run "
            "--cap-add=SYS_PTRACE', or use 'shared_memory', which needs no permission"
        )
    if number == errno.ESRCH:
        return PeerLostError(f"process {process} is gone")
    return TransferError(f"reading process {process}: {os.strerror(number)}")


class _RemoteWindow:
    """A strided view in another process."""

    def __init__(
        self, process: int, address: int, strides: Sequence[int], shape: Sequence[int], item: int
    ) -> None:
        self._process = process
        self._address = address
        self._row_bytes = row_bytes_of(shape, strides, item)
        self._strides = [stride * item for stride in strides]
        self._item = item

    @property
    def row_bytes(self) -> int | None:
        return self._row_bytes

    def read_into(self, into: np.ndarray) -> RowRead:
        """What reads all of it, whose rows these are."""
        assert self._row_bytes is not None
        step = 1 if self._row_bytes == 1 else self._strides[0]
        return RowRead(self._address, step, into.reshape(-1, self._row_bytes))

    def read(self, part: tuple[slice, ...], into: Tensor) -> None:
        address, run, outer = self._address, self._item, len(part)
        shape = [s.stop - s.start for s in part]
        for stride, piece in zip(self._strides, part, strict=True):
            address += piece.start * stride
        while outer > 0 and (self._strides[outer - 1] == run or shape[outer - 1] == 1):
            outer -= 1
            run *= shape[outer]
        starts = np.array([address], dtype=np.int64)
        for size, stride in zip(shape[:outer], self._strides[:outer], strict=True):
            steps = np.arange(size, dtype=np.int64) * stride
            starts = (starts[:, None] + steps[None, :]).ravel()
        read_process(self._process, starts, run, into.data_ptr())


class _RemoteWindows:
    """Views in another process."""

    def __init__(self, process: int, windows: Sequence[_RemoteWindow]) -> None:
        self._process = process
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, number: int) -> _RemoteWindow:
        return self._windows[number]

    def prepare(self, first: int, into: Sequence[np.ndarray]) -> Callable[[], list[int]]:
        process, windows = self._process, self._windows[first : first + len(into)]
        reads = [window.read_into(place) for window, place in zip(windows, into, strict=True)]
        compiled = compiled_rows()
        if compiled is None:
            return lambda: [_read_plainly(process, read) for read in reads]
        moves = compiled.prepare_reads(process, reads)

        def take() -> list[int]:
            try:
                return moves.make()
            except OSError as error:
                raise _failure(error.errno or 0, process) from error

        return take


def _read_plainly(process: int, read: RowRead) -> int:
    """Read rows without the compiled library; those without gaps are one run."""
    running = RunningChecksum()
    row_bytes = read.into.shape[1]
    num_rows = max(1, _CAPABILITIES.read_bytes // row_bytes)
    for first in range(0, len(read.into), num_rows):
        part = read.into[first : first + num_rows]
        start, steps = read.address + first * read.step, np.arange(len(part), dtype=np.int64)
        starts, run = start + steps * read.step, row_bytes
        if read.step == row_bytes:
            starts, run = starts[:1], part.size
        read_process(process, starts, run, part.ctypes.data)
        running.add_bytes(part)
    return running.value


class _CrossMemoryChannel:
    def __init__(self, connection: HostConnection) -> None:
        self._connection = connection
        self._told = ToldPlaces()
        self._windows = KnownWindows[_RemoteWindows]()

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def send(self, view: Tensor, deadline: Deadline) -> None:
        send_exposed(self, view, deadline)

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        receive_exposed(self, view, deadline)

    def expose(self, views: Sequence[Tensor], arena: Arena | None, deadline: Deadline) -> bool:
        is_host_memory = all(view.device.type == "cpu" for view in views)
        if not is_host_memory:
            self.decline(deadline)
            return False
        key = 0 if arena is None else arena.key
        news = self._told.news(key, views, lambda view: (view.data_ptr(), view.stride()))
        self._connection.send_json([key, news], deadline)
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
        process = self._connection.process
        try:
            key, places = exposed
            return self._windows.find(
                key,
                places,
                shapes,
                lambda found: _RemoteWindows(
                    process,
                    [
                        _RemoteWindow(process, int(start), strides, shape, dtype.itemsize)
                        for shape, dtype, (start, strides) in found
                    ],
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self._connection.peer} exposed nonsense: {error}") from error

    def finish(self, deadline: Deadline) -> None:
        self._connection.send(b"\x01", deadline)

    def close(self) -> None:
        self._connection.close()


def _sending(connection: HostConnection, deadline: Deadline) -> _CrossMemoryChannel:
    """Have the receiver prove that it can read what it will have to read."""
    secret = secrets.token_bytes(_PROBE_BYTES)
    probe = np.frombuffer(secret, dtype=np.uint8)
    connection.send_json([probe.ctypes.data, secret.hex()], deadline)
    connection.receive(1, deadline)
    return _CrossMemoryChannel(connection)


def _receiving(connection: HostConnection, deadline: Deadline) -> _CrossMemoryChannel:
    frame, _ = connection.receive_json(deadline)
    found = np.zeros(_PROBE_BYTES, dtype=np.uint8)
    try:
        address, expected = frame
        starts = np.array([int(address)], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{connection.peer} told no address") from error
    read_process(connection.process, starts, _PROBE_BYTES, found.ctypes.data)
    if found.tobytes().hex() != expected:
        raise TransportUnavailableError(
            f"process {connection.process} here is not the sender: are the two in different "
            "process namespaces? Use 'shared_memory' or 'tcp'"
        )
    connection.send(b"\x01", deadline)
    return _CrossMemoryChannel(connection)


class CrossMemoryTransport:
    """Reads the other process's memory. Linux only; see `read_process` for what it may need."""

    @property
    def name(self) -> str:
        """``cross_memory``."""
        return "cross_memory"

    @property
    def capabilities(self) -> Capabilities:
        """One-sided, on one host."""
        return _CAPABILITIES

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Wait for the receiver as the sender; nothing yet as the receiver."""
        return prepare_on_host(self.name, side, sending=_sending, receiving=_receiving)
