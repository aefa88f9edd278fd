"""Messages over a channel whose receiver reads the sender's memory: one view exposed, and read."""

from torch import Tensor

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import ProtocolError
from cosmos_weightsync.transports.contract import OneSidedChannel

__all__ = ["receive_exposed", "send_exposed"]


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
