"""One reader's conversation with one holder, on the holder's side, in a thread of its own.

A holder is a sender rank, or a receiver that passes on what it has: the same conversation.
```
reader                       holder
hello(token)           ─►
                       ◄─    welcome(role, rank, layout, transports, bucket_bytes)
pin(range)             ─►                     waits for a version
                       ◄─    pinned(version, run)
open(transport, pieces)─►                     the pieces must lie in the layout both know
                       ◄─    opened(digest, channel description)        both connect the channel
pull()                 ─►                     or pull(base): see `cosmos_weightsync.reuse`
                       ◄═    messages over the channel; a holder that is still receiving sends
                       ◄─    settling() …     each region when it has it, and waits until all
                       ◄─    sent(checksum of every piece)          of these are verified
checksums(pieces)      ─►                     of what is in memory
                       ◄─    checksums(checksum of every piece)
release()              ─►                     the version is given back
```
`open` holds for all versions after it; `pin` may come before or after. A holder that loses the
version hangs up, so ``sent`` is proof that it did not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_weightsync.boxes import subtract_all
from cosmos_weightsync.buckets import LEAST_BUCKET_BYTES, BucketPool
from cosmos_weightsync.chunks import piece_checksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edge_ends import EdgeEnd
from cosmos_weightsync.edge_pieces import EdgePieces
from cosmos_weightsync.edges import serve_edge
from cosmos_weightsync.errors import (
    DeadlineError,
    LayoutError,
    PeerLostError,
    ProtocolError,
    TransportUnavailableError,
    UncoveredRegionError,
    UnknownTensorError,
    WeightSyncError,
)
from cosmos_weightsync.frames import ControlConnection
from cosmos_weightsync.holding import Holder, PinnedVersion, Reader, Role, VersionRange
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.machines import this_machine
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.reuse import Move, Offer, serve_offer
from cosmos_weightsync.server import complain, receive_hello
from cosmos_weightsync.transports import Channel, PendingChannel, Transport
from cosmos_weightsync.transports.cuda_ipc import gpu_of

__all__ = ["PROTOCOL", "HolderIdentity", "ServingSession", "pieces_of"]

PROTOCOL = 5
SETTLING_S = 5.0
"""How often a holder that has nothing to say says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HolderIdentity:
    """What all sessions of one holder share and none of them changes."""

    role: Role
    rank: int
    num_ranks: int
    name: str
    holder: Holder
    transports: Mapping[str, Transport]
    token: str
    host: str
    buckets: BucketPool
    idle_s: float

    @property
    def role_and_rank(self) -> str:
        """What it is and its rank, for errors."""
        return f"{self.role} rank {self.rank}"


def pieces_of(wanted: Layout, source: int = 0) -> EdgePieces:
    """The pieces of an edge, in travel order, from the layout that describes them."""
    specs = wanted.specs_of(0)
    return EdgePieces(Piece(spec.name, spec.box, source, 0, spec.num_bytes) for spec in specs)


class ServingSession:
    """Serves one connection until it ends; `run` is the thread, `close` comes from any other."""

    def __init__(self, identity: HolderIdentity, connection: ControlConnection) -> None:
        self._identity = identity
        self._connection = connection
        self._pending: PendingChannel | None = None
        self._channel: Channel | None = None
        self._layout: Layout | None = None
        self._pinned: PinnedVersion | None = None
        self._pieces = EdgePieces(())
        self._bucket_bytes = identity.buckets.bucket_bytes

    def run(self) -> None:
        """Talk until the reader leaves, breaks the protocol or dies; never raises for these."""
        try:
            self._greet()
            while (frame := self._next_frame()) is not None:
                self._answer(frame)
        except WeightSyncError as error:
            complain(self._connection, error)
        finally:
            self.close()
            self._release()

    def close(self) -> None:
        """End the conversation; `run` returns soon after. May be repeated."""
        self._connection.close()
        for end in (self._pending, self._channel):
            if end is not None:
                end.close()

    def _greet(self) -> None:
        identity = self._identity
        deadline = Deadline.after(30.0)
        hello = receive_hello(
            self._connection, identity.token, "the sender's: show it by ReceiverConfig.token"
        )
        if hello.get("protocol") != PROTOCOL:
            raise ProtocolError(f"this sender speaks protocol {PROTOCOL}")
        self._layout = identity.holder.layout(deadline)
        welcome = {
            "role": identity.role,
            "rank": identity.rank,
            "num_ranks": identity.num_ranks,
            "name": identity.name,
            "layout": self._layout.to_json(),
            "transports": {n: t.capabilities.copies for n, t in identity.transports.items()},
            "machine": this_machine(),
            "gpu": gpu_of(identity.transports.values()),
            "bucket_bytes": identity.buckets.bucket_bytes,
        }
        self._connection.send("welcome", welcome, deadline)

    def _next_frame(self) -> Mapping[str, Any] | None:
        """What the reader wants next; ``None`` once it has wanted nothing for too long."""
        try:
            return self._connection.receive(Deadline.after(self._identity.idle_s))
        except DeadlineError:
            return None

    def _answer(self, frame: Mapping[str, Any]) -> None:
        known: dict[str, Callable[[Mapping[str, Any], Deadline], None]] = {
            "open": self._open,
            "pin": self._pin,
            "pull": self._send_version,
            "checksums": self._send_checksums,
            "release": self._give_back,
        }
        answer = known.get(str(frame["kind"]))
        if answer is None:
            raise ProtocolError(f"a holder does not know {frame['kind']!r}")
        try:
            answer(frame, Deadline.after(float(frame.get("seconds", 0))))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"malformed {frame['kind']!r}: {error!r}") from error

    def _open(self, frame: Mapping[str, Any], deadline: Deadline) -> None:
        identity = self._identity
        transport = identity.transports.get(str(frame["transport"]))
        if transport is None:
            known = sorted(identity.transports)
            raise ProtocolError(
                f"{identity.role_and_rank}: transport {frame['transport']!r} is none of {known}"
            )
        self._pieces, digest = self._requested(frame)
        self._bucket_bytes = min(identity.buckets.bucket_bytes, int(frame["bucket_bytes"]))
        if self._bucket_bytes < LEAST_BUCKET_BYTES:
            raise ProtocolError(f"a bucket of {frame['bucket_bytes']} bytes is too small")
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._pending = pending = transport.prepare("sender", identity.host)
        try:
            answer = {"digest": digest, "channel": dict(pending.description)}
            self._connection.send("opened", answer, deadline)
            self._channel = pending.connect(frame["channel"], deadline)
        except (PeerLostError, TransportUnavailableError):
            return  # a reader that is still there asks for another transport
        finally:
            pending.close()

    def _requested(self, frame: Mapping[str, Any]) -> tuple[EdgePieces, str]:
        """The pieces a reader wants, which must be ours to give."""
        layout, holder = self._layout, self._identity.role_and_rank
        wanted = Layout.from_json(frame["pieces"])
        digest = wanted.digest()
        if layout is None or frame["layout"] != layout.digest():
            raise ProtocolError(
                f"planned with a layout of digest {frame['layout']}, {holder} has another"
            )
        if frame["digest"] != digest:
            raise ProtocolError(
                f"{holder}: planned {frame['digest']}, the same pieces are {digest} here: do both "
                "run the same version of this library?"
            )
        _check_held(wanted, layout, holder)
        return pieces_of(wanted, self._identity.rank), digest

    def _pin(self, frame: Mapping[str, Any], deadline: Deadline) -> None:
        self._release()
        at_most = frame.get("at_most")
        wanted = VersionRange(
            int(frame["at_least"]),
            None if at_most is None else int(at_most),
            "oldest" if frame["prefer"] == "oldest" else "newest",
        )
        reader = Reader(self._connection.peer, self.close)
        self._pinned = self._identity.holder.pin(wanted, deadline, reader)
        answer = {
            "version": self._pinned.version,
            "run": self._pinned.run_id,
            "whole": self._pinned.is_whole,
        }
        self._connection.send("pinned", answer, deadline)

    def _send_version(self, frame: Mapping[str, Any], deadline: Deadline) -> None:
        pinned, channel = self._pinned, self._channel
        if pinned is None or channel is None:
            raise ProtocolError("'pull' comes after 'open' and 'pin'")
        buckets, offered = self._identity.buckets, frame.get("base")

        def announce(move: Move) -> None:
            self._connection.send("moving", move.to_json(), deadline)

        if offered is not None and pinned.is_whole:
            end = EdgeEnd(channel, self._pieces, buckets, self._bucket_bytes)
            offer = Offer.from_json(offered)
            sums = serve_offer(end, pinned, self._identity.holder, offer, announce, deadline)
        else:
            if offered is not None:
                announce(Move(tuple(range(len(self._pieces))), "pieces"))
            held, size = pinned.boxes(deadline), self._bucket_bytes
            sums = serve_edge(channel, self._pieces, held, buckets, deadline, bucket_bytes=size)
        self._settle(pinned, self._pieces, deadline)
        self._connection.send("sent", {"checksums": sums}, deadline)

    def _settle(self, pinned: PinnedVersion, pieces: EdgePieces, deadline: Deadline) -> None:
        """Wait until the pieces are known to be good, and keep the reader's patience alive."""
        while True:
            try:
                return pinned.settle(pieces.regions, deadline.within(SETTLING_S))
            except DeadlineError:
                deadline.remaining("the pieces to be verified")
                self._connection.send("settling", {}, deadline)

    def _send_checksums(self, frame: Mapping[str, Any], deadline: Deadline) -> None:
        if self._pinned is None:
            raise ProtocolError("'checksums' comes after 'pin'")
        pieces, _ = self._requested(frame)
        held = self._pinned.boxes(deadline)
        sums = [piece_checksum(held, piece) for piece in pieces]
        self._settle(self._pinned, pieces, deadline)
        self._connection.send("checksums", {"checksums": sums}, deadline)

    def _give_back(self, _: Mapping[str, Any], deadline: Deadline) -> None:
        self._release()

    def _release(self) -> None:
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None


def _check_held(wanted: Layout, held: Layout, holder: str) -> None:
    """Refuse what cannot be read out of what is held."""
    for spec in wanted.specs_of(0):
        entry = held.tensors.get(spec.name)
        if entry is None:
            raise UnknownTensorError(f"{spec.name} {spec.box}: {holder} has no such tensor")
        if entry.dtype != spec.dtype or held.shape_of(spec.name) != spec.global_shape:
            raise LayoutError(
                f"{spec.name} {spec.box}: wanted as {spec.dtype} {spec.global_shape}, held by "
                f"{holder} as {entry.dtype} {held.shape_of(spec.name)}"
            )
        boxes = held.geometries[entry.geometry].boxes_of(0)
        if not any(box.contains(spec.box) for box in boxes):
            missing = subtract_all(spec.box, boxes)
            raise UncoveredRegionError(
                f"{spec.name} {spec.box}: not in one box of {holder}, "
                f"{', '.join(map(str, missing)) or 'nothing'} is missing altogether"
            )
