"""Versions over the network: who has them, which one all can give, and moving it.

Conversations are kept from one version to the next. After anything went wrong they are all given
up, and the next version starts with whoever can be reached then.
"""

import random
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import xxhash

from cosmos_weightsync.ballots import Content
from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.chunks import HeldBoxes, piece_checksum, version_digest
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.dialing import HolderDialer
from cosmos_weightsync.errors import (
    BaseVersionError,
    DeadlineError,
    DigestError,
    PeerLostError,
    PlanError,
    TransferError,
    VersionError,
    VersionGoneError,
    WeightSyncError,
)
from cosmos_weightsync.holding import VersionRange
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.reuse import Offer, ReusePolicy
from cosmos_weightsync.rosters import Found, Roster
from cosmos_weightsync.serving import pieces_of
from cosmos_weightsync.shadow import Shadow
from cosmos_weightsync.staging import Edge, Source, Staging
from cosmos_weightsync.turns import in_turn
from cosmos_weightsync.wanted import WantedWeights

__all__ = ["Fetched", "Patience", "VersionFetcher"]

ATTEMPTS = 5
"""Holders may die or move on between being met and being read; so often it is tried anew."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version that is whole and verified in the shadow."""

    version: int
    num_bytes: int
    wire_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Patience:
    """How long others are waited for.

    Attributes:
        stall_s: A holder that sends nothing for so long is given up.
        linger_s: Readers of the version before may go on for so long.
    """

    stall_s: float
    linger_s: float


def _asked_for_versions(found: Found) -> tuple[Source, Layout]:
    """Whom a receiver follows that wants nothing, such as a rank whose shards are all empty."""
    if not found.sources:
        raise next(iter(found.unreachable.values()), PeerLostError("there are no senders"))
    return found.sources[0], Layout.from_ranks([[]])


def _received(edges: Sequence[Edge], sums: Mapping[int, Sequence[int]]) -> Mapping[Piece, int]:
    """The pieces that came over these edges, and the checksum of each."""
    return {
        piece: value
        for number, edge in enumerate(edges)
        for piece, value in zip(pieces_of(edge.wanted), sums[number], strict=True)
    }


class VersionFetcher:
    """Fetches versions into a shadow; used from one thread at a time."""

    def __init__(
        self,
        roster: Roster,
        dialer: HolderDialer,
        wanted: WantedWeights,
        shadow: Shadow,
        buckets: BucketPool,
        patience: Patience,
    ) -> None:
        self._roster = roster
        self._dialer = dialer
        self._wanted = wanted
        self._shadow = shadow
        self._buckets = buckets
        self._patience = patience
        self._edges: list[Edge] = []
        self._pieces: list[Edge] = []
        self._cut: tuple[list[Edge], str] = [], ""
        self._sums: Mapping[int, Sequence[int]] = {}
        self._num_closings = 0
        self._num_built_on = 0
        self._turn = random.random()

    @property
    def content(self) -> Content:
        """What is in the shadow; comparable between receivers that fetched the same pieces."""
        edges, digest = self._cut
        if edges != self._pieces:
            state = xxhash.xxh3_64()
            for edge in self._pieces:
                state.update(edge.wanted.digest().encode())
            edges, digest = self._cut = list(self._pieces), state.hexdigest()
        return Content(digest, version_digest(self._sums))

    def fetch(
        self, at_least: int, num_threads: int, deadline: Deadline, reuse: ReusePolicy
    ) -> Fetched:
        """Have a version in the shadow.

        Args:
            at_least: The oldest that will do.
            num_threads: How many holders are read from at the same time.
            deadline: When to give up.
            reuse: What to make of the version that is there.

        Raises:
            WeightSyncError: why there is none.
        """
        failure: WeightSyncError | None = None
        num_closings = self._num_closings
        for _ in range(ATTEMPTS):
            try:
                if self._edges and self._roster.is_stale():
                    self._hang_up()
                if not self._edges:
                    self._find(at_least, deadline)
            except TransferError as error:
                if failure is None:
                    raise
                raise failure from error
            try:
                return self._attempt(at_least, num_threads, deadline, reuse)
            except (PeerLostError, VersionGoneError, BaseVersionError) as error:
                self._hang_up()
                failure = failure or error
                if num_closings != self._num_closings:
                    raise
            except BaseException:
                self._hang_up()
                raise
        raise failure or PeerLostError("no source")

    def check(self, held: HeldBoxes, deadline: Deadline) -> str:
        """Hold memory against the holders' memory where they still have the version.

        Where they do not, against what they said when they sent it.

        Raises:
            DigestError: it differs; names the tensor and the region.
        """
        for number, edge in enumerate(self._pieces):
            theirs = self._ask(edge, deadline)
            for index, piece in enumerate(pieces_of(edge.wanted)):
                expected = self._sums[number][index] if theirs is None else theirs[index]
                if piece_checksum(held, piece) != expected:
                    raise DigestError(f"{piece.name} {piece.box}: not what {edge.source.name} sent")
        return version_digest(self._sums)

    def follow(self, roster: Roster) -> None:
        """Fetch from others from now on."""
        self._hang_up()
        self._roster = roster

    def want(self, wanted: WantedWeights) -> None:
        """Fetch something else from now on."""
        self._hang_up()
        self._wanted = wanted

    def close(self) -> None:
        """Hang up; a `fetch` in another thread fails, a later one connects again."""
        self._num_closings += 1
        self._hang_up()

    def _hang_up(self) -> None:
        edges, self._edges = self._edges, []
        for edge in edges:
            if edge.session is not None:
                edge.session.close()

    def _find(self, at_least: int, deadline: Deadline) -> None:
        """Meet holders and plan; sessions are left in the edges, not open yet."""
        found = self._roster.find(at_least, deadline)
        used: list[str] = []
        try:
            assigned = self._plan(found) or [_asked_for_versions(found)]
            self._edges = [
                Edge(
                    source,
                    layout,
                    session=found.sessions.get(source.endpoint),
                    chunk_bytes=self._roster.chunk_bytes,
                )
                for source, layout in assigned
            ]
            with_senders = any(edge.source.role == "sender" for edge in self._edges)
            for edge in self._edges:  # They decide the version; others get it from them.
                edge.is_relay = with_senders and edge.source.role == "receiver"
                if edge.is_relay:
                    edge.session = None  # Met anew for each version, when it begins.
            used = [e.source.endpoint for e in self._edges if not e.is_relay]
        finally:
            for endpoint, session in found.sessions.items():
                if endpoint not in used:
                    session.close()

    def _plan(self, found: Found) -> list[tuple[Source, Layout]]:
        senders = Layout.merge([source.layout for source in (*found.sources, *found.others)])
        try:
            if self._wanted.specs is None and found.unreachable:
                self._know_all(senders)
            specs = self._wanted.on_wire(senders)
            if tuple(shard.spec for shard in self._shadow.shards) != specs:
                self._shadow.place(*self._wanted.place(specs))
            return self._roster.assign(specs, found)
        except PlanError as error:
            for lost in found.unreachable.values():
                raise type(lost)(
                    f"{lost}; without it: {error}" if senders.tensors else str(lost)
                ) from error
            raise

    def _know_all(self, senders: Layout) -> None:
        """With everything wanted, whoever is missing may have had what nobody else knows of."""
        known = [shard.spec for shard in self._shadow.shards]
        if not known:
            raise PlanError("what the unreachable sender has is not known")
        gone = [spec.name for spec in known if spec.name not in senders.tensors]
        if gone:
            raise PlanError(f"{gone[0]}: nobody else has it")

    def _attempt(
        self, at_least: int, num_threads: int, deadline: Deadline, reuse: ReusePolicy
    ) -> Fetched:
        for edge in self._edges:
            edge.num_sharing = min(num_threads, len(self._edges))
        first = [edge for edge in self._edges if not edge.is_relay]
        sessions = [self._open(edge, deadline) for edge in first]
        version = self._agree(first, at_least, deadline)
        run_id = sessions[0].run_id
        if any(session.run_id != run_id for session in sessions):
            raise VersionError(
                f"version {version} is of several runs of a trainer: "
                f"{sorted({session.run_id for session in sessions})}"
            )
        if self._is_here(version, run_id, first):
            for session in sessions:
                session.release(deadline)
            return Fetched(version, self._shadow.num_bytes, 0, version_digest(self._sums))
        offer = self._offer(version, reuse)
        self._num_built_on = 0 if offer is None else self._num_built_on + 1
        self._shadow.begin(version, run_id, deadline.within(self._patience.linger_s))
        staging = Staging(
            self._shadow, version, self._roster.instead, self._dialer, self._buckets, offer
        )
        try:
            patient = deadline.with_patience(self._patience.stall_s)
            # Who passes on goes by the plan, as those behind it do.
            turn = self._turn if self._roster.chunk_bytes is None else 0.0
            staging.run(self._edges, in_turn(self._edges, turn), num_threads, patient)
        except BaseException:
            self._shadow.give_up()
            self._suspect(staging)
            raise
        self._pieces, self._sums = list(self._edges), staging.sums
        self._shadow.settle(partial(_received, self._pieces, self._sums))
        if staging.failed:
            self._suspect(staging)
            self._hang_up()
        else:
            for session in sessions:
                session.release(deadline)
        return Fetched(
            version, self._shadow.num_bytes, staging.wire_bytes, version_digest(self._sums)
        )

    def _is_here(self, version: int, run_id: str, edges: Sequence[Edge]) -> bool:
        """Whether receivers alone offer what is here already, as it came.

        Two that took it from each other would each overwrite what the other reads, and lose it.
        """
        is_same = (self._shadow.whole_version, self._shadow.run_id) == (version, run_id)
        if not is_same or any(edge.source.role == "sender" for edge in edges):
            return False
        here = self._shadow.here()
        return all(
            [piece_checksum(here, p) for p in pieces_of(edge.wanted)] == list(self._sums[number])
            for number, edge in enumerate(self._pieces)
        )

    def _offer(self, version: int, reuse: ReusePolicy) -> Offer | None:
        """What is in the shadow, unless it is no version or time for a whole one."""
        base = self._shadow.whole_version
        is_anchor = self._num_built_on >= reuse.anchor_every
        if base is None or base == version or reuse.reused == "nothing" or is_anchor:
            return None
        return Offer(base, self._shadow.run_id, reuse.reused)

    def _suspect(self, staging: Staging) -> None:
        for endpoint, error in staging.failed.items():
            if isinstance(error, PeerLostError | DeadlineError):
                self._roster.suspect(endpoint, error)

    def _open(self, edge: Edge, deadline: Deadline) -> ReceiverSession:
        session = edge.session
        with self._suspecting(edge):
            try:
                if session is None:
                    edge.session = session = self._dialer.meet(edge.source.endpoint, deadline)
                if not session.is_open:
                    self._dialer.open(
                        session,
                        edge.wanted,
                        deadline,
                        chunk_bytes=edge.chunk_bytes,
                        num_sharing=edge.num_sharing,
                    )
            except DeadlineError as error:
                if time.monotonic() >= deadline.at:
                    raise
                # Its own time is over, and not that of the version, which others may have.
                raise PeerLostError(f"{edge.source.name}: {error}") from error
        return session

    def _agree(self, edges: Sequence[Edge], at_least: int, deadline: Deadline) -> int:
        """Have all holders pin the same version. They publish in step, so this ends soon."""
        for edge in edges:
            self._ask_pin(edge, VersionRange(at_least), deadline)
        pinned = [self._pinned(edge, at_least, deadline) for edge in edges]
        while min(pinned) != max(pinned):
            newest = VersionRange(max(pinned), prefer="oldest")
            for index, edge in enumerate(edges):
                if pinned[index] != newest.at_least:
                    self._ask_pin(edge, newest, deadline)
                    pinned[index] = self._pinned(edge, newest.at_least, deadline, elsewhere=True)
        return pinned[0]

    def _ask_pin(self, edge: Edge, wanted: VersionRange, deadline: Deadline) -> None:
        assert edge.session is not None
        with self._suspecting(edge):
            edge.session.ask_pin(wanted.at_least, wanted.prefer, deadline)

    def _pinned(
        self, edge: Edge, at_least: int, deadline: Deadline, *, elsewhere: bool = False
    ) -> int:
        with self._suspecting(edge):
            stall_s = self._patience.stall_s
            return edge.pinned(at_least, deadline, stall_s, elsewhere=elsewhere)

    @contextmanager
    def _suspecting(self, edge: Edge) -> Generator[None]:
        try:
            yield
        except PeerLostError as error:
            self._roster.suspect(edge.source.endpoint, error)
            raise

    def _ask(self, edge: Edge, deadline: Deadline) -> list[int] | None:
        """The holder's checksums of an edge; ``None`` if it cannot tell any more."""
        version = self._shadow.whole_version
        if edge.is_relay or edge.session is None or edge not in self._edges or version is None:
            return None
        try:
            edge.session.ask_pin(version, "newest", deadline, at_most=version)
            edge.pinned(version, deadline, self._patience.stall_s)
            sums = edge.session.checksums(edge.wanted, deadline)
            edge.session.release(deadline)
        except (PeerLostError, VersionGoneError):
            self._hang_up()
            return None
        return sums
