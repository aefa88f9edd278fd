"""What every transport does, in which order, and who owns the bytes.

```
receiver: prepare("receiver") ─► description ─┐ exchanged over the control
sender:   prepare("sender")   ─► description ─┘ connection, then both at once:
both:     pending.connect(description of the peer, deadline) ─► Channel
then:     sender.send(view) … receiver.recv_into(view) …   same sizes, same order
   or, where the receiver can read the sender's memory (OneSidedChannel):
          sender.expose(views) ─► receiver.windows() ─► window.read(...) … finish()
          sender.await_finish() returns
at last:  close() on either side, in any order, any number of times
```
A channel has one direction, and each end belongs to one thread at a time; `close` alone may come
from another thread. It wakes a peer that waits, and ends a wait at its own end: at once, or, where
the library below cannot be interrupted (gloo), with the next message or the deadline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.checksums import BLOCK_BYTES, RunningChecksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.streaming import CompiledRows, StreamMoves

__all__ = [
    "BatchedChannel",
    "Capabilities",
    "Channel",
    "OneSidedChannel",
    "PendingChannel",
    "Side",
    "StreamChannel",
    "Transport",
    "Window",
    "Windows",
    "one_sided",
]

Side = Literal["sender", "receiver"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a transport can do and how it likes to be used; the same at both ends.

    Attributes:
        one_sided: The receiver reads the sender's memory; nothing is packed, save where the
            transport itself says so.
        same_host: Both ends must be on one host.
        same_process: Both ends must be in one process, and have the same transport object.
        same_device: The receiver must see the GPU that the sender is on.
        copies: How often processors copy a byte on its way; 0 is RDMA.
        devices: Kinds of memory that it moves: ``cpu``, ``cuda``.
        direct_bytes: Contiguous pieces of at least this size travel unpacked, from and into
            place; smaller and strided ones share a bucket.
        message_bytes: The largest message that is of use; buckets larger than this are cut.
        read_bytes: How much a one-sided receiver reads at a time of views that are not rows of
            bytes, before it hashes that.
        groups: How many messages it takes before the first must be done; 1 is one by one.
        registers: Memory is registered before its first use, so the same memory should be used
            again and again.
    """

    one_sided: bool = False
    same_host: bool = False
    same_process: bool = False
    same_device: bool = False
    copies: int = 2
    devices: frozenset[str] = frozenset({"cpu"})
    direct_bytes: int = 256 << 10
    message_bytes: int = 16 << 20
    read_bytes: int = BLOCK_BYTES
    groups: int = 1
    registers: bool = False


class Channel(Protocol):
    """One end of a one-way stream of messages."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of the transport."""
        ...

    @property
    def device(self) -> torch.device:
        """Where views must lie."""
        ...

    def send(self, view: Tensor, deadline: Deadline) -> None:
        """Send a message; the view may be changed as soon as this returns.

        Args:
            view: Contiguous, 1-dimensional, uint8, not empty, on `device`.
            deadline: When to give up. The channel is of no use afterwards.

        Raises:
            PeerLostError: the receiver closed its end or died.
            DeadlineError: the receiver did not take it in time.
        """
        ...

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        """Fill the view with the next message, which must have exactly its size.

        Args:
            view: Contiguous, 1-dimensional, uint8, not empty, on `device`.
            deadline: When to give up. The channel is of no use afterwards.

        Raises:
            PeerLostError: the sender closed its end or died.
            DeadlineError: the message did not come in time.
        """
        ...

    def close(self) -> None:
        """Give everything back. May be repeated."""
        ...


class Window(Protocol):
    """One exposed view, seen from the receiver."""

    @property
    def row_bytes(self) -> int | None:
        """How long its rows are, for `Windows.prepare`.

        A contiguous view falls into rows of one byte, so that it can be cut anywhere; a view whose
        rows (of the first dim) are stretches of many bytes, into these; others into none.
        """
        ...

    def read(self, part: tuple[slice, ...], into: Tensor) -> None:
        """Copy a part of the view.

        Args:
            part: Which; one slice per dim, without steps.
            into: Contiguous, of the part's shape and the view's dtype, on the channel's device.

        Raises:
            PeerLostError: the sender is gone.
        """
        ...


class Windows(Protocol):
    """All views that are exposed; the same object, where it can be, from version to version."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, number: int, /) -> Window:
        """One of them."""
        ...

    def prepare(self, first: int, into: Sequence[np.ndarray]) -> Callable[[], list[int]]:
        """Get ready to copy whole views into host memory.

        Args:
            first: The first of the views, all of which have `Window.row_bytes`.
            into: As many bytes for each, one after another.

        Returns:
            What copies them, in any version, and returns the XXH3 of each as it was copied. It
            raises `PeerLostError` when the sender is gone.
        """
        ...


@runtime_checkable
class BatchedChannel(Channel, Protocol):
    """A channel that takes a message before the one before it is done.

    Messages are done in the order in which they were begun. Who has waited for one waits no more
    for those before it, but calls what was returned for them all the same.
    """

    def begin_send(self, view: Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to send; the view may be changed once what this returns has been called.

        Calling it waits for the message, and raises as `send`.
        """
        ...

    def begin_recv(self, view: Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to receive; the view is full once what this returns has been called.

        Calling it waits for the message, and raises as `recv_into`.
        """
        ...


@runtime_checkable
class StreamChannel(Channel, Protocol):
    """A channel that takes host memory as it lies, and gives it back hashed.

    Its messages are those of `Channel`: either end may use either way for any of them.
    """

    @property
    def compiled(self) -> CompiledRows | None:
        """What moves many messages in one call; ``None`` where there is no such thing."""
        ...

    def send_moves(self, moves: StreamMoves, deadline: Deadline) -> None:
        """Send messages, as `send` does, from where they lie; ``compiled`` prepared them."""
        ...

    def recv_moves(self, moves: StreamMoves, deadline: Deadline) -> list[int]:
        """Receive messages, as `recv_into` does; returns the XXH3 of each."""
        ...

    def send_rows(self, rows: np.ndarray, deadline: Deadline) -> None:
        """Send a message, as `send` does.

        Args:
            rows: ``uint8[rows, row_bytes]``; each row is contiguous, any step leads to the next.
            deadline: When to give up.
        """
        ...

    def recv_hashed(self, into: np.ndarray, checksum: RunningChecksum, deadline: Deadline) -> None:
        """Receive a message, as `recv_into` does, and carry the checksum on over it.

        Args:
            into: Contiguous bytes.
            checksum: Of the piece that the message is a part of.
            deadline: When to give up.
        """
        ...


class OneSidedChannel(Channel, Protocol):
    """A channel whose receiver can read what the sender has in memory."""

    def expose(self, views: Sequence[Tensor], arena: Arena | None, deadline: Deadline) -> bool:
        """As the sender: let the receiver read these views.

        They must not change until `await_finish` has returned.

        Args:
            views: Of any strides, on any device that the transport moves from. The same object as
                before stands for the same memory.
            arena: Where they lie, if in one.
            deadline: When to give up.

        Returns:
            Whether they can be read. Otherwise the receiver has been told, and messages follow.
        """
        ...

    def decline(self, deadline: Deadline) -> None:
        """As the sender, instead of `expose`: messages follow."""
        ...

    def await_finish(self, deadline: Deadline) -> None:
        """As the sender: wait until the receiver has read what it wants.

        Raises:
            PeerLostError: it closed its end or died.
            DeadlineError: it takes too long.
        """
        ...

    def windows(
        self, shapes: Sequence[tuple[Sequence[int], torch.dtype]], deadline: Deadline
    ) -> Windows | None:
        """As the receiver: what the sender exposes.

        Args:
            shapes: Shape and dtype of each view, known from the plan.
            deadline: When to give up.

        Returns:
            The views in the sender's order; ``None`` when they are sent as messages instead.
        """
        ...

    def finish(self, deadline: Deadline) -> None:
        """As the receiver: nothing more will be read."""
        ...


def one_sided(channel: Channel) -> TypeGuard[OneSidedChannel]:
    """Whether the receiver can read the sender's memory; quicker than `isinstance`."""
    return channel.capabilities.one_sided


class PendingChannel(Protocol):
    """One end before the two have met."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What the peer needs to know, as JSON."""
        ...

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> Channel:
        """Meet the peer; both sides call this, and each may wait for the other.

        Raises:
            PeerLostError: the peer is gone.
            DeadlineError: it did not come.
            ProtocolError: its description makes no sense.
            TransportUnavailableError: the two cannot reach each other in this way.
        """
        ...

    def close(self) -> None:
        """Give up waiting; of no effect once connected. May be repeated."""
        ...


class Transport(Protocol):
    """Makes channels."""

    @property
    def name(self) -> str:
        """The name under which both sides choose it."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Open this side's end.

        Args:
            side: Which end.
            host: The address of the interface to use, where the transport uses the network.

        Raises:
            TransportUnavailableError: this machine does not have it.
        """
        ...
