"""A transport whose sender's ends are in a process of their own, for those that cannot do with one.

What the sender's end is given crosses as bytes and is laid out there as it is here, on the device
of its channel if it is on a device here; it is the transport's own end that does the rest.
"""

import itertools
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Any

import torch
from torch import Tensor

from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.transports import Capabilities, PendingChannel, Side, Transport

__all__ = ["SplitTransport", "start_ends"]

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, bool]
"""Of a view: dtype, shape, strides, offset in its storage, and whether that is on a device."""


class Ends:
    """Pending and connected ends, by number; lives in the other process."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._transports: dict[int, Transport] = {}
        self._ends: dict[int, Any] = {}
        self._laid_out: dict[tuple[int, int], Sequence[Tensor]] = {}

    def prepare(self, make: type[Transport], host: str) -> tuple[int, dict[str, Any]]:
        number = next(self._numbers)
        self._ends[number] = pending = make().prepare("sender", host)
        return number, dict(pending.description)

    def connect(self, number: int, peer: Mapping[str, Any], seconds: float) -> torch.device:
        self._ends[number] = self._ends[number].connect(peer, Deadline.after(seconds))
        return self._ends[number].device

    def send(self, number: int, content: bytes, seconds: float) -> None:
        view = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        channel = self._ends[number]
        channel.send(view.to(channel.device), Deadline.after(seconds))

    def knows(self, number: int, key: int) -> bool:
        return (number, key) in self._laid_out

    def expose(
        self, number: int, key: int, views: Sequence[tuple[bytes, Layout]], seconds: float
    ) -> bool:
        channel = self._ends[number]
        if views:
            self._laid_out[number, key] = [laid_out(*view, channel.device) for view in views]
        return channel.expose(self._laid_out.get((number, key), ()), None, Deadline.after(seconds))

    def decline(self, number: int, seconds: float) -> None:
        self._ends[number].decline(Deadline.after(seconds))

    def await_finish(self, number: int, seconds: float) -> None:
        self._ends[number].await_finish(Deadline.after(seconds))

    def close(self, number: int) -> None:
        self._ends[number].close()


def laid_out(content: bytes, layout: Layout, device: torch.device) -> Tensor:
    """A view like the one it comes from, of memory with the same content."""
    dtype, shape, strides, offset, is_on_device = layout
    storage = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    held = storage.to(device) if is_on_device else storage
    return held.view(dtype).as_strided(shape, strides, offset)


def described(view: Tensor) -> tuple[bytes, Layout]:
    """What `laid_out` makes its like of."""
    start, item = view.storage_offset(), view.element_size()
    size = item * (1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)))
    storage = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
    content = storage[start * item : start * item + size].cpu().numpy().tobytes()
    return content, (view.dtype, tuple(view.shape), view.stride(), 0, view.device.type != "cpu")


class _Manager(BaseManager):
    """Serves each thread of this process by a thread of its own."""


_Manager.register("Ends", Ends)


def start_ends() -> tuple[BaseManager, Any]:
    """Start the other process; ``shutdown`` of the first ends it, the second goes to transports."""
    manager = _Manager(ctx=get_context("spawn"))
    manager.start()
    return manager, manager.Ends()  # pyright: ignore[reportAttributeAccessIssue]


class _RemoteChannel:
    """The sender's end, seen from here."""

    def __init__(
        self, ends: Any, number: int, capabilities: Capabilities, device: torch.device
    ) -> None:
        self._ends, self._number = ends, number
        self.capabilities, self.device = capabilities, device
        self._exposed: list[Sequence[Tensor]] = []  # Kept: their identities are what they go by.

    def send(self, view: Tensor, deadline: Deadline) -> None:
        content = view.cpu().numpy().tobytes()
        self._ends.send(self._number, content, deadline.remaining("the receiver"))

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        raise NotImplementedError("this is the sender's end")

    def expose(self, views: Sequence[Tensor], arena: Arena | None, deadline: Deadline) -> bool:
        del arena  # It is in this process.
        is_known = self._ends.knows(self._number, id(views))
        self._exposed.append(views)
        told = [] if is_known else [described(view) for view in views]
        left = deadline.remaining("the receiver")
        return self._ends.expose(self._number, id(views), told, left)

    def decline(self, deadline: Deadline) -> None:
        self._ends.decline(self._number, deadline.remaining("the receiver"))

    def await_finish(self, deadline: Deadline) -> None:
        self._ends.await_finish(self._number, deadline.remaining("the receiver"))

    def windows(self, shapes: object, deadline: Deadline) -> None:
        raise NotImplementedError("this is the sender's end")

    def finish(self, deadline: Deadline) -> None:
        raise NotImplementedError("this is the sender's end")

    def close(self) -> None:
        self._ends.close(self._number)


class _RemotePending:
    def __init__(self, ends: Any, make: type[Transport], host: str) -> None:
        self._ends, self._capabilities = ends, make().capabilities
        self._number, self.description = ends.prepare(make, host)

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> _RemoteChannel:
        left = deadline.remaining("the receiver")
        device = self._ends.connect(self._number, dict(peer), left)
        return _RemoteChannel(self._ends, self._number, self._capabilities, device)

    def close(self) -> None:
        self._ends.close(self._number)


class SplitTransport:
    """Receivers in this process, senders in the other one.

    Args:
        make: The transport.
        ends: From `start_ends`.
    """

    def __init__(self, make: type[Transport], ends: Any) -> None:
        self._make, self._ends = make, ends
        self.name, self.capabilities = make().name, make().capabilities

    def prepare(self, side: Side, host: str) -> PendingChannel:
        if side == "sender":
            return _RemotePending(self._ends, self._make, host)
        return self._make().prepare(side, host)
