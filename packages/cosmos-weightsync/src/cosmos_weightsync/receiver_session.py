"""One reader's conversation with one holder, on the reader's side.

The frames are listed in `cosmos_weightsync.serving`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.chunks import HeldBoxes, piece_checksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edge_ends import EdgeEnd
from cosmos_weightsync.edge_pieces import EdgePieces
from cosmos_weightsync.edges import compare_checksums, pull_edge
from cosmos_weightsync.errors import DeadlineError, ProtocolError
from cosmos_weightsync.frames import ControlConnection, connect_control, parse_endpoint
from cosmos_weightsync.holding import Role
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.reuse import Move, Offer, pull_move
from cosmos_weightsync.serving import PROTOCOL, pieces_of
from cosmos_weightsync.transports import Channel, Transport

__all__ = ["ReceiverSession"]


class ReceiverSession:
    """Connected to one holder once constructed. Used by one thread at a time, save `close`.

    Attributes:
        endpoint: Where the holder listens.
        role: What it is.
        rank: Its rank on its side.
        num_ranks: How many ranks its side has, as it says.
        name: What it calls itself: ``sender rank 3``.
        layout: What it holds, as a side of one rank.
        copies: The transports it offers, with how often they copy (`Capabilities.copies`).
        machine: Where it runs; see `cosmos_weightsync.machines.this_machine`.
        gpu: The identity of the GPU that it can share memory of; empty without one.
        run_id: Of the trainer whose version is pinned.
        is_whole: Whether the pinned version was whole when it was pinned.
        wire_bytes: What the last `pull` took off the channel.
    """

    def __init__(self, endpoint: str, token: str, deadline: Deadline) -> None:
        self.endpoint = endpoint
        self._connection: ControlConnection = connect_control(endpoint, deadline)
        self._channel: Channel | None = None
        self._wanted = Layout.from_ranks([])
        self._pieces = EdgePieces(())
        self._bucket_bytes = 0
        self.run_id = ""
        self.is_whole = False
        self.wire_bytes = 0
        try:
            self._connection.send("hello", {"protocol": PROTOCOL, "token": token}, deadline)
            welcome = self._connection.receive(deadline, expect="welcome")
            self.role: Role = "receiver" if welcome["role"] == "receiver" else "sender"
            self.rank = int(welcome["rank"])
            self.num_ranks = int(welcome["num_ranks"])
            self.name = str(welcome["name"])
            self.layout = Layout.from_json(welcome["layout"])
            offered: Mapping[str, Any] = welcome["transports"]
            self.copies: Mapping[str, int] = {str(k): int(v) for k, v in offered.items()}
            self.machine = str(welcome["machine"])
            self.gpu = str(welcome.get("gpu", ""))
            self._holder_bucket_bytes = int(welcome["bucket_bytes"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.close()
            raise ProtocolError(f"sender at {endpoint} sent a malformed welcome") from error
        except BaseException:
            self.close()
            raise
        self._connection.peer = f"{self.name} at {endpoint}"

    def open(
        self, wanted: Layout, transport: Transport, bucket_bytes: int, deadline: Deadline
    ) -> None:
        """Agree on the pieces and connect the channel.

        Args:
            wanted: The pieces, as a layout of one rank.
            transport: What to move the bytes with.
            bucket_bytes: The largest bucket this side wants.
            deadline: When to give up.

        Raises:
            ProtocolError: the holder knows other pieces, or does not have the transport.
            PlanError: it does not hold them.
        """
        self._hang_up_channel()
        self._bucket_bytes = min(bucket_bytes, self._holder_bucket_bytes)
        host, _ = parse_endpoint(self.endpoint)
        pending = transport.prepare("receiver", host)
        try:
            request = {
                "transport": transport.name,
                "channel": dict(pending.description),
                "bucket_bytes": self._bucket_bytes,
                "seconds": self._seconds(deadline),
                **self._request(wanted),
            }
            self._connection.send("open", request, deadline)
            answer = self._connection.receive(deadline, expect="opened")
            if answer.get("digest") != wanted.digest():
                raise ProtocolError(
                    f"{self._connection.peer} planned {answer.get('digest')}, this side "
                    f"{wanted.digest()}: do both run the same version of this library?"
                )
            self._channel = pending.connect(answer["channel"], deadline)
        finally:
            pending.close()
        self._wanted, self._pieces = wanted, pieces_of(wanted, self.rank)

    def pin(
        self,
        at_least: int,
        prefer: Literal["newest", "oldest"],
        deadline: Deadline,
        *,
        at_most: int | None = None,
    ) -> int:
        """Make the holder hold a version for this session; returns which.

        Raises:
            DeadlineError: it has none that will do, in time.
            VersionGoneError: it has only newer ones.
        """
        self.ask_pin(at_least, prefer, deadline, at_most=at_most)
        return self.pinned(at_least, deadline)

    def ask_pin(
        self,
        at_least: int,
        prefer: Literal["newest", "oldest"],
        deadline: Deadline,
        *,
        at_most: int | None = None,
    ) -> None:
        """The first half of `pin`: several holders can be asked before the first has answered."""
        request = {
            "at_least": at_least,
            "at_most": at_most,
            "prefer": prefer,
            "seconds": self._seconds(deadline),
        }
        self._connection.send("pin", request, deadline)

    def pinned(self, at_least: int, deadline: Deadline) -> int:
        """The second half of `pin`."""
        try:
            answer = self._connection.receive(deadline, expect="pinned")
        except DeadlineError as error:
            raise DeadlineError(
                f"{self._connection.peer} published no version {at_least} or newer in time"
            ) from error
        try:
            self.run_id, self.is_whole = str(answer["run"]), bool(answer["whole"])
            return int(answer["version"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self._connection.peer} sent a malformed 'pinned'") from error

    def pull(
        self,
        held: HeldBoxes,
        buckets: BucketPool,
        deadline: Deadline,
        *,
        offer: Offer | None = None,
    ) -> list[int]:
        """Fetch the opened pieces of the pinned version into ``held`` and check them.

        Args:
            held: Where they go.
            buckets: Memory for pieces that travel packed.
            deadline: When to give up.
            offer: The version that is in ``held`` now, for the holder to build on.

        Returns:
            The checksum of every piece.

        Raises:
            DigestError: a piece is not what was sent.
            BaseVersionError: what is in ``held`` is not the version it is offered as.
        """
        channel = self._channel
        if channel is None:
            raise ProtocolError("'pull' before 'open'")
        request = {"seconds": self._seconds(deadline)}
        if offer is None:
            self._connection.send("pull", request, deadline)
            self.wire_bytes = self._pieces.num_bytes
            arrived = pull_edge(
                channel, self._pieces, held, buckets, deadline, bucket_bytes=self._bucket_bytes
            )
        else:
            sums = tuple(piece_checksum(held, piece) for piece in self._pieces)
            offer = replace(offer, checksums=sums)
            self._connection.send("pull", {**request, "base": offer.to_json()}, deadline)
            answer = self._connection.receive(deadline, expect="moving")
            end = EdgeEnd(channel, self._pieces, buckets, self._bucket_bytes)
            move = Move.from_json(answer, len(self._pieces))
            arrived, self.wire_bytes = pull_move(end, held, move, offer, deadline)
        sent = self._checksums("sent", len(self._pieces), deadline)
        compare_checksums(self._pieces, sent, arrived, self.name)
        return arrived

    def checksums(self, wanted: Layout, deadline: Deadline) -> list[int]:
        """What the holder has in memory of the pinned version, as the checksum of every piece.

        Raises:
            PlanError: the holder does not hold these pieces.
            VersionGoneError: it lost the version.
        """
        request = {"seconds": self._seconds(deadline), **self._request(wanted)}
        self._connection.send("checksums", request, deadline)
        return self._checksums("checksums", len(pieces_of(wanted)), deadline)

    def release(self, deadline: Deadline) -> None:
        """Let the holder overwrite the pinned version."""
        self._connection.send("release", {}, deadline)

    @property
    def is_open(self) -> bool:
        """Whether pieces are agreed on, be they none."""
        return self._channel is not None

    @property
    def pieces(self) -> Sequence[Piece]:
        """What this holder sends, in order."""
        return self._pieces

    def close(self) -> None:
        """Hang up. May be repeated."""
        self._connection.close()
        self._hang_up_channel()

    def _hang_up_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _seconds(self, deadline: Deadline) -> float:
        """How long the holder may take: as long as we would wait, all waits together."""
        return Deadline(deadline.at).remaining(self._connection.peer)

    def _request(self, wanted: Layout) -> Mapping[str, Any]:
        return {
            "pieces": wanted.to_json(),
            "digest": wanted.digest(),
            "layout": self.layout.digest(),
        }

    def _checksums(self, kind: str, count: int, deadline: Deadline) -> list[int]:
        """The holder's answer, after any number of signs of life."""
        while (frame := self._connection.receive(deadline))["kind"] == "settling":
            deadline.remaining(self._connection.peer)
        sums = frame.get("checksums")
        if frame["kind"] != kind or not isinstance(sums, list) or len(sums) != count:
            raise ProtocolError(
                f"{self._connection.peer} sent {frame['kind']!r} where {kind!r} of {count} pieces "
                "was due"
            )
        return [int(value) for value in sums]
