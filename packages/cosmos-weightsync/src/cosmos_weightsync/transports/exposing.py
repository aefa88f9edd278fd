"""What channels share whose receivers read the sender's memory.

A message is one view exposed, and read. Views of a version mostly lie where those of one before
lay: then the sender says no more than that, and the receiver has its windows already.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import ProtocolError
from cosmos_weightsync.transports.contract import OneSidedChannel, Windows

__all__ = ["KnownWindows", "ToldPlaces", "receive_exposed", "send_exposed"]

WindowsT = TypeVar("WindowsT", bound=Windows)
Shapes = Sequence[tuple[Sequence[int], torch.dtype]]


class ToldPlaces:
    """What the receiver was told of each arena of a sender: where in it the views lie."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[Sequence[Any], weakref.ref[Any] | None]] = {}

    def knows(self, key: int) -> bool:
        """Whether the receiver was told of this arena."""
        return key in self._told

    def forget(self, key: int) -> None:
        """The receiver was not told after all."""
        self._told.pop(key, None)

    def news(
        self, key: int, views: Sequence[Tensor], places_of: Callable[[Tensor], Any]
    ) -> Sequence[Any] | None:
        """The place of each view, to be told; ``None`` if they lie where they last did.

        Args:
            key: Of the arena.
            views: What is exposed; those told last need no second look.
            places_of: Where a view lies.
        """
        places, views_told = self._told.get(key, (None, None))
        if views_told is not None and views_told() is views:
            return None
        found = [places_of(view) for view in views]
        # Views are not kept: they would keep memory that is of no use any more.
        is_plain = type(views) in {list, tuple}
        self._told[key] = found, None if is_plain else weakref.ref(views)
        return None if found == places else found


class KnownWindows(Generic[WindowsT]):
    """The windows of each arena of a sender, as they were when it was last exposed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[Any], Shapes, WindowsT]] = {}

    def find(
        self,
        key: int,
        places: Sequence[Any] | None,
        shapes: Shapes,
        make: Callable[[Iterable[tuple[Sequence[int], torch.dtype, Any]]], WindowsT],
    ) -> WindowsT:
        """The windows of views of these shapes.

        Args:
            key: Of the arena.
            places: Where each view lies; ``None`` if they lie where they last did.
            shapes: Of each view, and its dtype.
            make: Of the shape, the dtype and the place of each.

        Raises:
            KeyError: the places are not known.
            ValueError: there are more places than shapes, or fewer.
        """
        if places is None:
            places = self._known[key][0]
        known = self._known.get(key)
        if known is None or known[0] != places or known[1] != shapes:
            pairs = zip(shapes, places, strict=True)
            windows = make((*kind, place) for kind, place in pairs)
            known = self._known[key] = (places, list(shapes), windows)
        return known[2]


def send_exposed(channel: OneSidedChannel, view: Tensor, deadline: Deadline) -> None:
    """`Channel.send`, by exposing the view until it has been read."""
    channel.expose([view], None, deadline)
    channel.await_finish(deadline)


def receive_exposed(channel: OneSidedChannel, view: Tensor, deadline: Deadline) -> None:
    """`Channel.recv_into`, by reading what is exposed.

    Raises:
        ProtocolError: the sender exposed something else than this message.
    """
    windows = channel.windows([(view.shape, view.dtype)], deadline)
    if windows is None or len(windows) != 1:
        raise ProtocolError(f"the sender exposed no message where {view.numel()} bytes were due")
    windows[0].read((slice(0, view.numel()),), view)
    channel.finish(deadline)
