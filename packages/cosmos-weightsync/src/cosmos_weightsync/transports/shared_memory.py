"""Between processes of one host: a ring of slots in memory that both have mapped.

The memory is an anonymous file (`memfd_create`) that the sender hands over a Unix socket. It has
no name, so nothing can be left behind by a process that is killed, and it does not count against
the size of ``/dev/shm``. The same socket is the doorbell: a byte from the sender says "the next
slot is full", a byte from the receiver says "a slot is free", and its end says "the other died".
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TransportUnavailableError,
)
from cosmos_weightsync.frames import recv_exactly
from cosmos_weightsync.transports.contract import PendingChannel, Side

__all__ = ["SharedMemoryTransport"]

_SIZES = struct.Struct("!QQ")
_CREDENTIALS = struct.Struct("3i")


class _Ring:
    """``num_slots`` slots of ``slot_bytes`` each, in one mapping."""

    def __init__(self, descriptor: int, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._mapping = mmap.mmap(descriptor, slot_bytes * num_slots)
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def slot(self, turn: int, size: int) -> Tensor:
        start = (turn % self.num_slots) * self.slot_bytes
        return self._memory[start : start + size]


class _SharedMemoryChannel:
    def __init__(self, connection: socket.socket, ring: _Ring, peer: str) -> None:
        self._socket = connection
        self._ring = ring
        self._peer = peer
        self._turn = 0
        self._num_free = ring.num_slots

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def send(self, view: Tensor, deadline: Deadline) -> None:
        for part in view.split(self._ring.slot_bytes):
            if self._num_free == 0:
                self._num_free += len(self._await_bytes(deadline))
            self._ring.slot(self._turn, part.numel()).copy_(part)
            self._ring_bell(deadline)
            self._turn += 1
            self._num_free -= 1

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        bell = bytearray(1)
        for part in view.split(self._ring.slot_bytes):
            recv_exactly(self._socket, memoryview(bell), deadline, self._peer)
            part.copy_(self._ring.slot(self._turn, part.numel()))
            self._turn += 1
            with contextlib.suppress(PeerLostError):
                # Gone after its last message is fine; if more is due, the next wait says so.
                self._ring_bell(deadline)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # Not connected any more is what is asked for.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _await_bytes(self, deadline: Deadline) -> bytes:
        left = deadline.remaining(self._peer)
        try:
            self._socket.settimeout(left)
            found = self._socket.recv(self._ring.num_slots)
        except TimeoutError as error:
            raise DeadlineError(f"{self._peer} did not take the bytes in time") from error
        except OSError as error:
            raise PeerLostError(f"{self._peer} is gone: {error}") from error
        if not found:
            raise PeerLostError(f"{self._peer} closed the channel")
        return found

    def _ring_bell(self, deadline: Deadline) -> None:
        left = deadline.remaining(self._peer)
        try:
            self._socket.settimeout(left)
            self._socket.sendall(b"\x01")
        except TimeoutError as error:
            raise DeadlineError(f"{self._peer} does not listen") from error
        except OSError as error:
            raise PeerLostError(f"{self._peer} is gone: {error}") from error


class _Offering:
    """The sender's end: waits for a process of the same user, hands it the memory."""

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._address = f"cosmos-weightsync-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self._address}")
        self._listener.listen(1)

    @property
    def description(self) -> Mapping[str, Any]:
        return {"address": self._address}

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> _SharedMemoryChannel:
        with self._listener:
            left = deadline.remaining("the receiver to attach")
            try:
                self._listener.settimeout(left)
                connection, _ = self._listener.accept()
            except TimeoutError as error:
                raise DeadlineError("the receiver did not attach in time") from error
            except OSError as error:
                raise PeerLostError(f"no receiver attached: {error}") from error
        process, user = _peer_of(connection)
        if user != os.getuid():
            connection.close()
            raise ProtocolError(f"process {process} of user {user} tried to attach")
        descriptor = os.memfd_create("cosmos-weightsync", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, self._slot_bytes * self._num_slots)
            sizes = _SIZES.pack(self._slot_bytes, self._num_slots)
            connection.settimeout(deadline.remaining("the receiver to attach"))
            socket.send_fds(connection, [sizes], [descriptor])
            ring = _Ring(descriptor, self._slot_bytes, self._num_slots)
        except OSError as error:
            connection.close()
            raise PeerLostError(f"receiver process {process} is gone: {error}") from error
        finally:
            os.close(descriptor)
        return _SharedMemoryChannel(connection, ring, f"receiver process {process}")

    def close(self) -> None:
        self._listener.close()


class _Attaching:
    """The receiver's end."""

    @property
    def description(self) -> Mapping[str, Any]:
        return {}

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> _SharedMemoryChannel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(deadline.remaining("the sender's shared memory"))
        descriptors: list[int] = []
        try:
            connection.connect(f"\0{peer.get('address')}")
            sizes, descriptors, _, _ = socket.recv_fds(connection, _SIZES.size, 1)
            slot_bytes, num_slots = _SIZES.unpack(sizes)
            ring = _Ring(descriptors[0], slot_bytes, num_slots)
        except TimeoutError as error:
            connection.close()
            raise DeadlineError("the sender did not hand over its memory in time") from error
        except (OSError, struct.error, IndexError) as error:
            connection.close()
            raise TransportUnavailableError(
                f"no shared memory with the sender, is it on this host? {error}"
            ) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return _SharedMemoryChannel(connection, ring, "sender on this host")

    def close(self) -> None:
        """Nothing is open yet."""


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


class SharedMemoryTransport:
    """A ring of shared memory per channel. Linux only.

    Args:
        slot_bytes: Size of one slot.
        num_slots: Slots in the ring; two let one side fill while the other empties.
    """

    def __init__(self, slot_bytes: int = 4 << 20, num_slots: int = 4) -> None:
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots

    @property
    def name(self) -> str:
        """``shared_memory``."""
        return "shared_memory"

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Wait for the receiver as the sender; nothing yet as the receiver."""
        if sys.platform != "linux":
            raise TransportUnavailableError("'shared_memory' needs Linux; use 'tcp'")
        return _Offering(self._slot_bytes, self._num_slots) if side == "sender" else _Attaching()
