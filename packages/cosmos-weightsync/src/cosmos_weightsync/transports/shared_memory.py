"""Between processes of one host: the receiver maps the sender's snapshot and copies out of it.

```
sender                                       receiver
expose: offsets and strides [+ descriptor] ─► maps the arena, once per arena
                                              copies what it wants: one copy in all
                                        "." ◄─ finish
```
Memory that lies in no arena goes through a ring of slots in memory that both have mapped: one copy
in and one out; a byte from the sender says "the next slot is full", one from the receiver "a slot
is free". All of it is anonymous memory handed over a Unix socket: nothing can be left behind by a
process that is killed.
"""

import contextlib
import mmap
import os
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from cosmos_weightsync.arenas import Arena, map_arena
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import PeerLostError, ProtocolError
from cosmos_weightsync.transports.contract import Capabilities, PendingChannel, Side, Windows
from cosmos_weightsync.transports.exposing import KnownWindows, ToldPlaces
from cosmos_weightsync.transports.host_sockets import HostConnection, prepare_on_host
from cosmos_weightsync.transports.windows import MappedWindows, strided_view

__all__ = ["SharedMemoryTransport"]

_CAPABILITIES = Capabilities(one_sided=True, same_host=True, copies=1)


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
    def __init__(self, connection: HostConnection, ring: _Ring) -> None:
        self._connection = connection
        self._ring = ring
        self._turn = 0
        self._num_free = ring.num_slots
        self._told = ToldPlaces()
        self._mapped: dict[int, Tensor] = {}
        self._windows = KnownWindows[MappedWindows]()

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def send(self, view: Tensor, deadline: Deadline) -> None:
        for part in view.split(self._ring.slot_bytes):
            if self._num_free == 0:
                self._num_free += self._connection.receive_some(self._ring.num_slots, deadline)
            self._ring.slot(self._turn, part.numel()).copy_(part)
            self._connection.send(b"\x01", deadline)
            self._turn += 1
            self._num_free -= 1

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        for part in view.split(self._ring.slot_bytes):
            self._connection.receive(1, deadline)
            part.copy_(self._ring.slot(self._turn, part.numel()))
            self._turn += 1
            with contextlib.suppress(PeerLostError):
                # Gone after its last message is fine; if more is due, the next wait says so.
                self._connection.send(b"\x01", deadline)

    def expose(self, views: Sequence[Tensor], arena: Arena | None, deadline: Deadline) -> bool:
        self._take_back_slots(deadline)
        if arena is None or arena.descriptor is None:
            self._connection.send_json(None, deadline)
            return False
        descriptors = () if self._told.knows(arena.key) else [arena.descriptor]
        news = self._told.news(arena.key, views, lambda v: (arena.offset_of(v), v.stride()))
        if news is not None and any(offset is None for offset, _ in news):
            self._told.forget(arena.key)
            self._connection.send_json(None, deadline)
            return False
        self._connection.send_json([arena.key, arena.num_bytes, news], deadline, descriptors)
        return True

    def decline(self, deadline: Deadline) -> None:
        self._take_back_slots(deadline)
        self._connection.send_json(None, deadline)

    def await_finish(self, deadline: Deadline) -> None:
        self._connection.receive(1, deadline)

    def windows(
        self, shapes: Sequence[tuple[Sequence[int], torch.dtype]], deadline: Deadline
    ) -> Windows | None:
        exposed, descriptors = self._connection.receive_json(deadline)
        try:
            if exposed is None:
                return None
            key, num_bytes, places = exposed
            if descriptors:
                self._mapped[key] = map_arena(descriptors[0], num_bytes)
            memory = self._mapped[key]
            return self._windows.find(
                key,
                places,
                shapes,
                lambda found: MappedWindows(
                    strided_view(memory, dtype, tuple(shape), *place)
                    for shape, dtype, place in found
                ),
            )
        except (KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
            raise ProtocolError(f"{self._connection.peer} exposed nonsense: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def finish(self, deadline: Deadline) -> None:
        self._connection.send(b"\x01", deadline)

    def close(self) -> None:
        self._connection.close()

    def _take_back_slots(self, deadline: Deadline) -> None:
        """Collect the bytes for slots still out, so that the next byte means 'finished'."""
        while self._num_free < self._ring.num_slots:
            missing = self._ring.num_slots - self._num_free
            self._num_free += self._connection.receive_some(missing, deadline)


def _offer_ring(
    slot_bytes: int, num_slots: int, connection: HostConnection, deadline: Deadline
) -> _SharedMemoryChannel:
    descriptor = os.memfd_create("cosmos-weightsync", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, slot_bytes * num_slots)
        ring = _Ring(descriptor, slot_bytes, num_slots)
        connection.send_json([slot_bytes, num_slots], deadline, [descriptor])
    finally:
        os.close(descriptor)
    return _SharedMemoryChannel(connection, ring)


def _attach_ring(connection: HostConnection, deadline: Deadline) -> _SharedMemoryChannel:
    sizes, descriptors = connection.receive_json(deadline)
    try:
        slot_bytes, num_slots = sizes
        ring = _Ring(descriptors[0], int(slot_bytes), int(num_slots))
    except (TypeError, ValueError, IndexError, OSError) as error:
        raise ProtocolError(f"{connection.peer} handed over no memory: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return _SharedMemoryChannel(connection, ring)


class SharedMemoryTransport:
    """Maps the sender's snapshot, or a ring of slots where that cannot be mapped. Linux only.

    Args:
        slot_bytes: Size of one slot.
        num_slots: Slots in the ring; two let one side fill while the other empties.
    """

    def __init__(self, slot_bytes: int = 1 << 20, num_slots: int = 4) -> None:
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots

    @property
    def name(self) -> str:
        """``shared_memory``."""
        return "shared_memory"

    @property
    def capabilities(self) -> Capabilities:
        """One-sided, on one host."""
        return _CAPABILITIES

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Wait for the receiver as the sender; nothing yet as the receiver."""
        offer = partial(_offer_ring, self._slot_bytes, self._num_slots)
        return prepare_on_host(self.name, side, sending=offer, receiving=_attach_ring)
