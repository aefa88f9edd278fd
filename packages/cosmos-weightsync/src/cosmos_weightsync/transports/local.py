"""Between threads of one process: the receiver copies straight out of the sender's view."""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TransportUnavailableError,
)
from cosmos_weightsync.transports.contract import Capabilities, PendingChannel, Side, Windows
from cosmos_weightsync.transports.exposing import receive_exposed, send_exposed
from cosmos_weightsync.transports.windows import MappedWindows

__all__ = ["LocalTransport"]

_CAPABILITIES = Capabilities(one_sided=True, same_host=True, same_process=True, copies=1)


class _Exchange:
    """The meeting point of one sender and one receiver."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.offered: Sequence[Tensor] | None = None
        self.is_declined = False
        self.is_closed = False


class _LocalChannel:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

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
        with self._exchange.condition:
            self._exchange.offered = views
            self._exchange.condition.notify_all()
        return True

    def decline(self, deadline: Deadline) -> None:
        exchange = self._exchange
        with exchange.condition:
            exchange.is_declined = True
            exchange.condition.notify_all()

    def await_finish(self, deadline: Deadline) -> None:
        exchange = self._exchange
        with exchange.condition:
            try:
                self._wait(lambda: exchange.offered is None, "receiver", deadline)
            finally:
                exchange.offered = None

    def windows(
        self, shapes: Sequence[tuple[Sequence[int], torch.dtype]], deadline: Deadline
    ) -> Windows | None:
        exchange = self._exchange
        with exchange.condition:
            self._wait(
                lambda: exchange.is_declined or exchange.offered is not None, "sender", deadline
            )
            if exchange.is_declined:
                exchange.is_declined = False
                return None
            offered = exchange.offered or ()
            if [view.shape for view in offered] != [tuple(shape) for shape, _ in shapes]:
                raise ProtocolError(f"the sender offers {len(offered)} views, of other shapes")
            return MappedWindows(offered)

    def finish(self, deadline: Deadline) -> None:
        with self._exchange.condition:
            self._exchange.offered = None
            self._exchange.condition.notify_all()

    def close(self) -> None:
        with self._exchange.condition:
            self._exchange.is_closed = True
            self._exchange.condition.notify_all()

    def _wait(self, is_ready: Callable[[], bool], peer: str, deadline: Deadline) -> None:
        exchange = self._exchange
        done = exchange.condition.wait_for(
            lambda: is_ready() or exchange.is_closed,
            timeout=deadline.remaining(f"the {peer} thread"),
        )
        if not done:
            raise DeadlineError(f"the {peer} thread did not answer in time")
        if not is_ready():
            raise PeerLostError(f"the {peer} thread closed the channel")


class _LocalPending:
    def __init__(self, side: Side, exchanges: dict[str, _Exchange]) -> None:
        self._side: Side = side
        self._exchanges = exchanges
        self._key = secrets.token_hex(8)
        self._exchange = _Exchange()
        self._is_connected = False
        if side == "sender":
            exchanges[self._key] = self._exchange

    @property
    def description(self) -> Mapping[str, Any]:
        return {"key": self._key}

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> _LocalChannel:
        if self._side == "sender":
            self._is_connected = True
            return _LocalChannel(self._exchange)
        exchange = self._exchanges.pop(str(peer.get("key")), None)
        if exchange is None:
            raise TransportUnavailableError(
                "'local' joins threads that share one LocalTransport; the sender has another"
            )
        return _LocalChannel(exchange)

    def close(self) -> None:
        if not self._is_connected:
            self._exchanges.pop(self._key, None)
            _LocalChannel(self._exchange).close()


class LocalTransport:
    """Joins senders and receivers in one process; both must be given this same object."""

    def __init__(self) -> None:
        self._exchanges: dict[str, _Exchange] = {}

    @property
    def name(self) -> str:
        """``local``."""
        return "local"

    @property
    def capabilities(self) -> Capabilities:
        """One-sided, in one process."""
        return _CAPABILITIES

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Open one end; ``host`` is of no use here."""
        return _LocalPending(side, self._exchanges)
