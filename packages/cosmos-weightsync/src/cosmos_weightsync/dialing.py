"""How a receiver reaches holders: token, transport of each edge, deadlines."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from cosmos_weightsync.buckets import LEAST_BUCKET_BYTES
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    TransferError,
    TransportUnavailableError,
)
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.machines import this_machine
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.transports import Transport, choose_transport
from cosmos_weightsync.transports.cuda_ipc import visible_gpus

__all__ = ["HolderDialer"]


class HolderDialer:
    """Connects to holders.

    Args:
        transports: By name, those that may be used.
        transport: Which to use; ``auto`` decides for each edge.
        token: What holders want to be shown.
        bucket_bytes: The bucket of this side.
        connect_timeout_s: How long meeting one holder may take.
        device: The kind of memory that versions are received into.

    Raises:
        ConfigurationError: the transport is not known.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        transport: str,
        *,
        token: str,
        bucket_bytes: int,
        connect_timeout_s: float,
        device: str = "cpu",
    ) -> None:
        self._transports: Mapping[str, Transport] = {item.name: item for item in transports}
        if transport not in {"auto", *self._transports}:
            raise ConfigurationError(
                f"transport {transport!r} is none of {sorted(self._transports)}"
            )
        self._transport = transport
        self._token = token
        self._bucket_bytes = bucket_bytes
        self._connect_timeout_s = connect_timeout_s
        self._device = device
        self._machine = this_machine()

    def meet(self, endpoint: str, deadline: Deadline) -> ReceiverSession:
        """Connect to one holder.

        Raises:
            TransferError: it cannot be reached, or speaks another protocol.
        """
        soon = deadline.within(self._connect_timeout_s)
        return ReceiverSession(endpoint, self._token, soon)

    def meet_all(
        self, endpoints: Iterable[str], deadline: Deadline
    ) -> tuple[list[ReceiverSession], dict[str, TransferError]]:
        """Connect to many at the same time; those that cannot be met are told apart."""
        with ThreadPoolExecutor(8, "weight-meet") as pool:
            futures = {e: pool.submit(self.meet, e, deadline) for e in dict.fromkeys(endpoints)}
        met = [f.result() for f in futures.values() if f.exception() is None]
        failed: dict[str, TransferError] = {}
        for endpoint, future in futures.items():
            error = future.exception()
            if isinstance(error, PeerLostError | DeadlineError):
                failed[endpoint] = error
            elif error is not None:
                for session in met:
                    session.close()
                raise error
        return met, failed

    def open(
        self,
        session: ReceiverSession,
        wanted: Layout,
        deadline: Deadline,
        *,
        chunk_bytes: int | None,
        num_sharing: int,
    ) -> None:
        """Agree with a holder on pieces and a channel for them.

        Args:
            session: The conversation with it.
            wanted: The pieces, as a layout of one rank.
            deadline: When to give up.
            chunk_bytes: The longest message that is wanted; ``None`` leaves it to buckets and
                transport.
            num_sharing: How many such edges may be at work at the same time: they get equal parts
                of the bucket.

        Raises:
            TransportUnavailableError: the two cannot use the transport, or none where they may
                choose: then it is the first that is told.
            WeightSyncError: the holder refuses.
        """
        soon = deadline.within(self._connect_timeout_s)
        size = max(LEAST_BUCKET_BYTES, self._bucket_bytes // num_sharing)
        if chunk_bytes is not None:  # Two messages share a bucket.
            size = min(size, max(LEAST_BUCKET_BYTES, 2 * chunk_bytes))
        if self._transport != "auto":
            session.open(wanted, self._transports[self._transport], size, soon)
            return
        left = dict(self._transports)
        failure: TransportUnavailableError | None = None
        while True:
            try:
                transport = self._best(left.values(), session)
            except TransportUnavailableError as none_left:
                raise failure or none_left from failure
            try:
                return session.open(wanted, transport, size, soon)
            except TransportUnavailableError as error:
                failure = failure or error
                del left[transport.name]

    def _best(self, transports: Iterable[Transport], session: ReceiverSession) -> Transport:
        return choose_transport(
            list(transports),
            session.copies,
            same_host=bool(self._machine) and session.machine == self._machine,
            same_device=session.gpu in visible_gpus(),
            device=self._device,
        )
