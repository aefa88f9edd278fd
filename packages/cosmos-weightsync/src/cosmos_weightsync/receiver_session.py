"""One receiver's conversation with one sender rank, on the receiver's side.

The frames are listed in `cosmos_weightsync.sender_session`.
"""

from collections.abc import Sequence
from typing import Literal

from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edges import BucketPool, compare_checksums, pull_edge
from cosmos_weightsync.errors import DeadlineError, ProtocolError
from cosmos_weightsync.frames import ControlConnection, connect_control
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.planning import Piece, TransferPlan
from cosmos_weightsync.sender_session import PROTOCOL
from cosmos_weightsync.transports import Channel, Transport

__all__ = ["ReceiverSession"]


class ReceiverSession:
    """Connected to one sender rank once constructed. Used by one thread at a time, save `close`.

    Attributes:
        endpoint: Where the sender rank listens.
        rank: Its rank.
        num_ranks: How many sender ranks it says there are.
        layout: What it holds, as a side of one rank.
        transports: Names of the transports it offers.
    """

    def __init__(self, endpoint: str, token: str, deadline: Deadline) -> None:
        self.endpoint = endpoint
        self._connection: ControlConnection = connect_control(endpoint, deadline)
        self._channel: Channel | None = None
        self._pieces: list[Piece] = []
        self._bucket_bytes = 0
        try:
            self._connection.send("hello", {"protocol": PROTOCOL, "token": token}, deadline)
            welcome = self._connection.receive(deadline, expect="welcome")
            self.rank = int(welcome["rank"])
            self.num_ranks = int(welcome["num_ranks"])
            self.layout = Layout.from_json(welcome["layout"])
            self.transports: Sequence[str] = [str(name) for name in welcome["transports"]]
            self._sender_bucket_bytes = int(welcome["bucket_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            self.close()
            raise ProtocolError(f"sender at {endpoint} sent a malformed welcome") from error
        except BaseException:
            self.close()
            raise

    def open(
        self,
        plan: TransferPlan,
        sides: tuple[Layout, Layout],
        transport: Transport,
        bucket_bytes: int,
        deadline: Deadline,
    ) -> None:
        """Agree on the plan and connect the channel.

        Args:
            plan: From the senders' layout to this receiver's, as this side computed it.
            sides: Those two layouts.
            transport: What to move the bytes with.
            bucket_bytes: The largest bucket this side wants.
            deadline: When to give up.

        Raises:
            ProtocolError: the sender computed another plan.
        """
        self._pieces = plan.pieces(source=self.rank, receiver=0)
        self._bucket_bytes = min(bucket_bytes, self._sender_bucket_bytes)
        host = self.endpoint.rpartition(":")[0].strip("[]")
        pending = transport.prepare("receiver", host)
        try:
            request = {
                "transport": transport.name,
                "channel": dict(pending.description),
                "senders": sides[0].to_json(),
                "receivers": sides[1].to_json(),
                "receiver": 0,
                "bucket_bytes": self._bucket_bytes,
                "seconds": deadline.remaining(self._connection.peer),
            }
            self._connection.send("open", request, deadline)
            answer = self._connection.receive(deadline, expect="opened")
            if answer.get("digest") != plan.digest():
                raise ProtocolError(
                    f"{self._connection.peer} planned {answer.get('digest')}, this side "
                    f"{plan.digest()}: do both run the same version of this library?"
                )
            self._channel = pending.connect(answer["channel"], deadline)
        finally:
            pending.close()

    def pin(self, at_least: int, prefer: Literal["newest", "oldest"], deadline: Deadline) -> int:
        """Make the sender hold a version for this session; returns which.

        Raises:
            DeadlineError: it has none that will do, in time.
        """
        request = {
            "at_least": at_least,
            "prefer": prefer,
            "seconds": deadline.remaining(self._connection.peer),
        }
        self._connection.send("pin", request, deadline)
        try:
            return int(self._connection.receive(deadline, expect="pinned")["version"])
        except DeadlineError as error:
            raise DeadlineError(
                f"{self._connection.peer} published no version {at_least} or newer in time"
            ) from error

    def pull(
        self, held: HeldBoxes, buckets: BucketPool, deadline: Deadline
    ) -> dict[tuple[int, int], int]:
        """Fetch this sender's pieces of the pinned version into ``held`` and check them.

        Returns:
            The checksum of every piece, by (sender rank, number of the piece).

        Raises:
            DigestError: a piece is not what was sent.
        """
        channel = self._channel
        if channel is None:
            raise ProtocolError("'pull' before 'open'")
        request = {"seconds": deadline.remaining(self._connection.peer)}
        self._connection.send("pull", request, deadline)
        arrived = pull_edge(
            channel, self._pieces, held, buckets, deadline, bucket_bytes=self._bucket_bytes
        )
        sent = self._connection.receive(deadline, expect="sent")["checksums"]
        compare_checksums(self._pieces, sent, arrived, f"sender rank {self.rank}")
        return {(self.rank, index): value for index, value in enumerate(arrived)}

    def release(self, deadline: Deadline) -> None:
        """Let the sender overwrite the pinned version."""
        self._connection.send("release", {}, deadline)

    @property
    def pieces(self) -> Sequence[Piece]:
        """What this sender rank sends, in order."""
        return self._pieces

    def close(self) -> None:
        """Hang up. May be repeated."""
        self._connection.close()
        if self._channel is not None:
            self._channel.close()
