"""What channels share whose receivers read the sender's memory.

A message is one view exposed, and read. Views of a version mostly lie where those of one before
lay: then the sender says no more than that, and the receiver has its windows already.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import ProtocolError
from cosmos_weightsync.transports.contract import OneSidedChannel

__all__ = ["KnownWindows", "receive_exposed", "send_exposed"]

WindowT = TypeVar("WindowT")
Shapes = Sequence[tuple[Sequence[int], torch.dtype]]


class KnownWindows(Generic[WindowT]):
    """The windows of each arena of a sender, as they were when it was last exposed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[Any], Shapes, list[WindowT]]] = {}

    def find(
        self,
        key: int,
        places: Sequence[Any] | None,
        shapes: Shapes,
        make: Callable[[Sequence[int], torch.dtype, Any], WindowT],
    ) -> list[WindowT]:
        """The windows of views of these shapes.

        Args:
            key: Of the arena.
            places: Where each view lies; ``None`` if they lie where they last did.
            shapes: Of each view, and its dtype.
            make: Of a shape, a dtype and a place.

        Raises:
            KeyError: the places are not known.
            ValueError: there are more places than shapes, or fewer.
        """
        if places is None:
            places = self._known[key][0]
        known = self._known.get(key)
        if known is None or known[0] != places or known[1] != shapes:
            pairs = zip(shapes, places, strict=True)
            windows = [make(shape, dtype, place) for (shape, dtype), place in pairs]
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
