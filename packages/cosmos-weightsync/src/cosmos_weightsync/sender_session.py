"""One receiver's conversation with one sender rank, on the sender's side, in a thread of its own.

```
receiver                      sender rank
hello(token)            ─►
                        ◄─    welcome(rank, layout, transports, bucket_bytes)
open(transport, layouts)─►                     both plan; digests are compared
                        ◄─    opened(digest, channel description)        both connect the channel
pin(at least, prefer)   ─►                     waits for a version
                        ◄─    pinned(version)
pull()                  ─►
                        ◄═    messages over the channel
                        ◄─    sent(checksum of every piece)
release()               ─►                     the version is given back
```
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edges import BucketPool, serve_edge
from cosmos_weightsync.errors import DeadlineError, ProtocolError, WeightSyncError
from cosmos_weightsync.frames import ControlConnection
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.planning import Piece, plan_transfer
from cosmos_weightsync.snapshots import Snapshot, SnapshotStore
from cosmos_weightsync.transports import Channel, Transport

__all__ = ["PROTOCOL", "SenderIdentity", "SenderSession"]

PROTOCOL = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderIdentity:
    """What all sessions of one sender rank share and none of them changes."""

    rank: int
    num_ranks: int
    specs: tuple[ShardSpec, ...]
    layout: Layout
    snapshots: SnapshotStore
    transports: Mapping[str, Transport]
    token: str
    host: str
    buckets: BucketPool
    idle_s: float


class SenderSession:
    """Serves one connection until it ends; `run` is the thread, `close` comes from any other."""

    def __init__(self, identity: SenderIdentity, connection: ControlConnection) -> None:
        self._identity = identity
        self._connection = connection
        self._channel: Channel | None = None
        self._pinned: Snapshot | None = None
        self._pieces: list[Piece] = []
        self._bucket_bytes = identity.buckets.bucket_bytes

    def run(self) -> None:
        """Talk until the receiver leaves, breaks the protocol or dies; never raises for these."""
        try:
            self._greet()
            while (frame := self._next_frame()) is not None:
                self._answer(frame)
        except WeightSyncError as error:
            self._complain(error)
        finally:
            self.close()
            self._release()

    def close(self) -> None:
        """End the conversation; `run` returns soon after. May be repeated."""
        self._connection.close()
        if self._channel is not None:
            self._channel.close()

    def _greet(self) -> None:
        identity = self._identity
        deadline = Deadline.after(30.0)
        hello = self._connection.receive(deadline, expect="hello")
        token = str(hello.get("token", ""))
        if not hmac.compare_digest(token.encode(), identity.token.encode()):
            raise ProtocolError("the token is not the sender's")
        if hello.get("protocol") != PROTOCOL:
            raise ProtocolError(f"this sender speaks protocol {PROTOCOL}")
        welcome = {
            "rank": identity.rank,
            "num_ranks": identity.num_ranks,
            "layout": identity.layout.to_json(),
            "transports": sorted(identity.transports),
            "bucket_bytes": identity.buckets.bucket_bytes,
        }
        self._connection.send("welcome", welcome, deadline)

    def _next_frame(self) -> Mapping[str, Any] | None:
        """What the receiver wants next; ``None`` once it has wanted nothing for too long."""
        try:
            return self._connection.receive(Deadline.after(self._identity.idle_s))
        except DeadlineError:
            return None

    def _answer(self, frame: Mapping[str, Any]) -> None:
        try:
            deadline = Deadline.after(float(frame.get("seconds", 0)))
            match frame["kind"]:
                case "open":
                    self._open(frame, deadline)
                case "pin":
                    self._pin(frame, deadline)
                case "pull":
                    self._send_version(deadline)
                case "release":
                    self._release()
                case kind:
                    raise ProtocolError(f"a sender does not know {kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"malformed {frame['kind']!r}: {error!r}") from error

    def _open(self, frame: Mapping[str, Any], deadline: Deadline) -> None:
        identity = self._identity
        transport = identity.transports.get(str(frame["transport"]))
        if transport is None:
            known = sorted(identity.transports)
            raise ProtocolError(f"transport {frame['transport']!r} is none of {known}")
        senders = Layout.from_json(frame["senders"])
        if senders.num_ranks != identity.num_ranks:
            raise ProtocolError(f"{senders.num_ranks} senders, not {identity.num_ranks}")
        if set(senders.specs_of(identity.rank)) != set(identity.specs):
            raise ProtocolError(f"not the layout of sender rank {identity.rank}")
        plan = plan_transfer(senders, Layout.from_json(frame["receivers"]))
        self._pieces = plan.pieces(source=identity.rank, receiver=int(frame["receiver"]))
        self._bucket_bytes = min(identity.buckets.bucket_bytes, int(frame["bucket_bytes"]))
        pending = transport.prepare("sender", identity.host)
        try:
            answer = {"digest": plan.digest(), "channel": dict(pending.description)}
            self._connection.send("opened", answer, deadline)
            self._channel = pending.connect(frame["channel"], deadline)
        finally:
            pending.close()

    def _pin(self, frame: Mapping[str, Any], deadline: Deadline) -> None:
        self._release()
        prefer = "oldest" if frame["prefer"] == "oldest" else "newest"
        self._pinned = self._identity.snapshots.pin(int(frame["at_least"]), prefer, deadline)
        self._connection.send("pinned", {"version": self._pinned.version}, deadline)

    def _send_version(self, deadline: Deadline) -> None:
        snapshot, channel = self._pinned, self._channel
        if snapshot is None or channel is None:
            raise ProtocolError("'pull' comes after 'open' and 'pin'")
        held = HeldBoxes(
            (
                (spec.name, spec.box, tensor)
                for spec, tensor in zip(self._identity.specs, snapshot.tensors, strict=True)
            ),
            arena=snapshot.arena,
            checksums=snapshot.checksums,
        )
        sums = serve_edge(
            channel,
            self._pieces,
            held,
            self._identity.buckets,
            deadline,
            bucket_bytes=self._bucket_bytes,
        )
        self._connection.send("sent", {"checksums": sums}, deadline)

    def _release(self) -> None:
        if self._pinned is not None:
            self._identity.snapshots.unpin(self._pinned)
            self._pinned = None

    def _complain(self, error: WeightSyncError) -> None:
        """Tell the receiver why, as far as it still listens."""
        try:
            reason = {"class": type(error).__name__, "message": str(error)}
            self._connection.send("error", reason, Deadline.after(1.0))
        except WeightSyncError:
            return
