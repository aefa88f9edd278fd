"""What every transport does, in which order, and who owns the bytes.

```
receiver: prepare("receiver") ─► description ─┐ exchanged over the control
sender:   prepare("sender")   ─► description ─┘ connection, then both at once:
both:     pending.connect(description of the peer, deadline) ─► Channel
then:     sender.send(view) … receiver.recv_into(view) …   same sizes, same order
at last:  close() on either side, in any order, any number of times
```
A channel has one direction, and each end belongs to one thread at a time; `close` alone may come
from another thread. It wakes a peer that waits, and ends a wait at its own end: at once, or, where
the library below cannot be interrupted (gloo), with the next message or the deadline.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from cosmos_weightsync.deadlines import Deadline

__all__ = ["Channel", "PendingChannel", "Side", "Transport"]

Side = Literal["sender", "receiver"]


class Channel(Protocol):
    """One end of a one-way stream of messages."""

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

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Open this side's end.

        Args:
            side: Which end.
            host: The address of the interface to use, where the transport uses the network.

        Raises:
            TransportUnavailableError: this machine does not have it.
        """
        ...
