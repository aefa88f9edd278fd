"""Fetching one version over all its edges, and what is left of an edge from somebody else.

```
edges of the plan ─► pulled at the same time ─► all verified ─► done
                            │ one fails
                            ▼
       what of it arrived is held against another holder's checksums,
       what did not arrive is pulled from another holder; nothing else starts over
```
An edge that fails has cost what was not verified of it, and the holder it came from is not asked
again for this version. No holder left for a region is the end of the version.
"""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Protocol

from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.chunks import piece_checksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    DeadlineError,
    DigestError,
    PeerLostError,
    PlanError,
    TransferError,
    VersionError,
    VersionGoneError,
    WeightSyncError,
)
from cosmos_weightsync.holding import Role
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.planning import plan_transfer
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.reuse import Offer
from cosmos_weightsync.serving import pieces_of
from cosmos_weightsync.shadow import Shadow

__all__ = ["Dialer", "Edge", "Instead", "Source", "Staging", "assign", "assign_again", "in_order"]


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """Somebody who may have the version.

    Attributes:
        endpoint: Where it is reached; identifies it.
        name: For people: ``sender rank 3``.
        layout: What it holds, as a side of one rank.
        role: What it is.
        rank: Its number on its side.
        host: Where it runs, as far as is known.
        version: The newest version it has whole, as far as is known; -1 for none.
    """

    endpoint: str
    name: str
    layout: Layout
    role: Role
    rank: int
    host: str = ""
    version: int = -1


@dataclass(eq=False, slots=True)
class Edge:
    """The pieces that one source is to give.

    Attributes:
        source: Who.
        wanted: The pieces to pull, as a layout of one rank.
        arrived: Pieces that are here from another source, unverified.
        session: Connected, pinned and open for ``wanted``; ``None`` makes one for this version.
        is_relay: The source is a receiver that gets the version at the same time.
        chunk_bytes: The most that may travel before it is passed on; ``None`` for no limit.
        num_sharing: How many such edges may share the bucket.
        had: The version that was pinned last; -1 for none.
    """

    source: Source
    wanted: Layout
    arrived: Layout = field(default_factory=lambda: Layout.from_ranks([]))
    session: ReceiverSession | None = None
    is_relay: bool = False
    chunk_bytes: int | None = None
    num_sharing: int = 1
    had: int = -1

    _specs: tuple[Layout, Layout, list[ShardSpec]] | None = None

    def specs(self) -> list[ShardSpec]:
        """All regions that this edge answers for; written out once, as edges outlive versions."""
        if self._specs is None or self._specs[:2] != (self.wanted, self.arrived):
            specs = [*self.wanted.specs_of(0), *self.arrived.specs_of(0)]
            self._specs = self.wanted, self.arrived, specs
        return self._specs[2]

    def pinned(
        self, at_least: int, deadline: Deadline, stall_s: float, *, elsewhere: bool = False
    ) -> int:
        """The version that the source holds for this edge, once it was asked for one.

        Who had it, or was said to, has it at once: a sender that is silent then hangs, and a
        receiver may wait for others, as it may if it might have it from ``elsewhere``.

        Raises:
            PeerLostError: it does, so it has lost the version or hangs.
            DeadlineError: nobody has such a version in time.
        """
        assert self.session is not None
        known = max(self.source.version, self.had)
        may_wait = known < at_least and (self.source.role == "sender" or not elsewhere)
        soon = deadline if may_wait else deadline.within(stall_s)
        try:
            self.had = self.session.pinned(at_least, soon)
        except DeadlineError as error:
            if may_wait:
                raise
            deadline.remaining(self.source.name)
            raise PeerLostError(
                f"{self.source.name} at {self.source.endpoint} had version {known}, and gives "
                f"none from {at_least} on now"
            ) from error
        return self.had


class Instead(Protocol):
    """Who stands in for sources that failed."""

    def __call__(
        self, wanted: Sequence[ShardSpec], failed: Collection[str], version: int
    ) -> list[tuple[Source, Layout]]:
        """Plan regions over others than those at the endpoints ``failed``.

        Raises:
            PlanError: they do not have all of it.
        """
        ...


class Dialer(Protocol):
    """How sources are met."""

    def meet(self, endpoint: str, deadline: Deadline) -> ReceiverSession:
        """Connect to a source."""
        ...

    def open(
        self,
        session: ReceiverSession,
        wanted: Layout,
        deadline: Deadline,
        *,
        chunk_bytes: int | None,
        num_sharing: int,
    ) -> None:
        """Agree on pieces, a channel for them and the size of messages."""
        ...


def in_order(sources: Iterable[Source]) -> list[Source]:
    """Senders by rank, then receivers."""
    return sorted(sources, key=lambda s: (s.role == "receiver", s.rank, s.name, s.endpoint))


def assign(wanted: Iterable[ShardSpec], sources: Sequence[Source]) -> list[tuple[Source, Layout]]:
    """Plan the regions of one receiver over sources that all have the version.

    Returns:
        The pieces of each source that is to give any, as a layout of one rank.

    Raises:
        PlanError: they do not have all of it.
    """
    regions = list(wanted)
    specs = {spec.name: spec for spec in regions}
    if not regions:
        return []
    senders = Layout.merge([source.layout for source in sources])
    plan = plan_transfer(senders, Layout.from_ranks([regions]))
    found: list[tuple[Source, Layout]] = []
    for number, source in enumerate(sources):
        parts = [
            replace(specs[piece.name], box=piece.box, dtype=senders.tensors[piece.name].dtype)
            for piece in plan.pieces(source=number, receiver=0)
        ]
        if parts:
            found.append((source, Layout.from_ranks([parts])))
    return found


def assign_again(
    wanted: Sequence[ShardSpec], sources: Sequence[Source], version: int
) -> list[tuple[Source, Layout]]:
    """Plan regions over sources some of which may still be fetching the version themselves.

    These are asked only for what nobody else has: two that ask each other would wait for ever.

    Raises:
        PlanError: they do not have all of it.
    """
    have = [source for source in sources if source.role == "sender" or source.version >= version]
    try:
        return assign(wanted, have)
    except PlanError:
        return assign(wanted, sources)


class Staging:
    """One attempt at one version.

    Args:
        shadow: Where it goes; it has begun the version.
        version: Which.
        instead: Who gives what a source that failed was to give.
        dialer: How to meet one.
        buckets: Memory for pieces that travel packed.
        offer: The version that was in the shadow before, for the holders to build on.

    Attributes:
        wire_bytes: What crossed the channels.
        failed: What went wrong, by the endpoint of the source.
        sums: Checksums of the pieces of each of the first edges, by the number of the edge.
    """

    def __init__(
        self,
        shadow: Shadow,
        version: int,
        instead: Instead,
        dialer: Dialer,
        buckets: BucketPool,
        offer: Offer | None = None,
    ) -> None:
        self._offer = offer
        self.wire_bytes = 0
        self._shadow = shadow
        self._version = version
        self._instead = instead
        self._dialer = dialer
        self._buckets = buckets
        self._held = shadow.arriving()
        self._running: dict[Future[list[int]], Edge] = {}
        self._is_over = False
        self._num_sharing = 1
        self.failed: dict[str, WeightSyncError] = {}
        self.sums: dict[int, Sequence[int]] = {}

    def run(
        self, edges: Sequence[Edge], begun: Sequence[Edge], num_threads: int, deadline: Deadline
    ) -> None:
        """Pull all edges; returns when all that is wanted is here and verified.

        Args:
            edges: In the order of the plan, by which they are numbered.
            begun: The same in the order in which they are begun.
            num_threads: How many are pulled at the same time.
            deadline: When to give up.

        Raises:
            WeightSyncError: the first failure that nobody else could make up for.
        """
        numbers = {edge: number for number, edge in enumerate(edges)}
        # All threads may take the place of one edge: together they get the share of that one.
        self._num_sharing = num_threads * max((edge.num_sharing for edge in edges), default=1)
        with ThreadPoolExecutor(num_threads, "weight-pull") as pool:
            try:
                self._submit(pool, begun, deadline)
                while self._running:
                    done, _ = wait(self._running, return_when=FIRST_COMPLETED)
                    for future in done:
                        edge = self._running.pop(future)
                        self._submit(pool, self._outcome(edge, future), deadline)
                        if edge in numbers and future.exception() is None:
                            self.sums[numbers.pop(edge)] = future.result()
            except BaseException:
                self._stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        here = self._shadow.here()
        for edge, number in numbers.items():  # Verified by others: the sums are those of memory.
            self.sums[number] = [piece_checksum(here, piece) for piece in pieces_of(edge.wanted)]

    def _submit(self, pool: ThreadPoolExecutor, edges: Iterable[Edge], deadline: Deadline) -> None:
        for edge in edges:
            self._running[pool.submit(self._pull, edge, deadline)] = edge

    def _stop(self) -> None:
        """Wake every thread."""
        self._is_over = True
        for edge in self._running.values():
            if edge.session is not None:
                edge.session.close()

    def _outcome(self, edge: Edge, future: Future[list[int]]) -> Sequence[Edge]:
        """The edges that take the place of one that is over: none, if it went well."""
        error = future.exception()
        if error is None:
            self._shadow.verify(edge.specs())
            self.wire_bytes += edge.session.wire_bytes if edge.session is not None else 0
            return ()
        if edge.session is not None:
            edge.session.close()
        if not isinstance(error, TransferError | VersionError | PlanError):
            raise error
        self.failed[edge.source.endpoint] = error
        if isinstance(error, DigestError):
            self._shadow.taint()
        return self._reassign(edge, error)

    def _reassign(self, edge: Edge, error: WeightSyncError) -> Sequence[Edge]:
        arrived, missing = self._shadow.split(edge.specs())
        try:
            pulls = self._instead(missing, self.failed, self._version)
            checks = self._instead(arrived, self.failed, self._version)
        except PlanError as nobody:
            raise _lost(edge, self._version, error, [*missing, *arrived]) from nobody
        edges = {source: Edge(source, wanted) for source, wanted in pulls}
        for source, held in checks:
            edges.setdefault(source, Edge(source, Layout.from_ranks([]))).arrived = held
        for other in edges.values():
            other.chunk_bytes, other.num_sharing = edge.chunk_bytes, self._num_sharing
        return list(edges.values())

    def _pull(self, edge: Edge, deadline: Deadline) -> list[int]:
        session = edge.session
        if session is not None and not edge.is_relay:
            return session.pull(self._held, self._buckets, deadline, offer=self._offer)
        session = self._dialer.meet(edge.source.endpoint, deadline)
        edge.session = session
        try:
            return self._replace(edge, session, deadline)
        finally:
            session.close()

    def _replace(self, edge: Edge, session: ReceiverSession, deadline: Deadline) -> list[int]:
        """Check what came from a source that failed, and pull what did not come."""
        if self._is_over:
            raise PeerLostError("the transfer was given up")
        session.pin(self._version, "newest", deadline, at_most=self._version)
        if session.run_id != self._shadow.run_id:
            raise VersionGoneError(f"version {self._version} there is of another run")
        wrong = self._wrong(edge.arrived, session, deadline)
        if wrong:
            edge.wanted = Layout.from_ranks([[*edge.wanted.specs_of(0), *wrong]])
        if not edge.wanted.tensors:
            return []
        self._dialer.open(
            session,
            edge.wanted,
            deadline,
            chunk_bytes=edge.chunk_bytes,
            num_sharing=edge.num_sharing,
        )
        return session.pull(self._held, self._buckets, deadline)

    def _wrong(
        self, arrived: Layout, session: ReceiverSession, deadline: Deadline
    ) -> list[ShardSpec]:
        """Which of the regions that came from a source that failed are not what they should be."""
        if not arrived.tensors:
            return []
        here = self._shadow.here()
        expected = session.checksums(arrived, deadline)
        wrong = [
            spec
            for spec, piece, value in zip(
                arrived.specs_of(0), pieces_of(arrived), expected, strict=True
            )
            if piece_checksum(here, piece) != value
        ]
        if wrong:
            self._shadow.taint()
        return wrong


def _lost(
    edge: Edge, version: int, error: WeightSyncError, regions: Sequence[ShardSpec]
) -> WeightSyncError:
    first = regions[0]
    more = f" and {len(regions) - 1} more regions" if len(regions) > 1 else ""
    return type(error)(
        f"{edge.source.name} at {edge.source.endpoint}: {error}; nobody else that can be reached "
        f"has {first.name} {first.box}{more} of version {version}"
    )
