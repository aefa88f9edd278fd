"""The side that wants the weights: stage a version beside the one in use, then commit it."""

import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.ballots import Quorum
from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.dialing import HolderDialer
from cosmos_weightsync.errors import ConfigurationError, FencedError, VersionError
from cosmos_weightsync.fetching import Patience, VersionFetcher
from cosmos_weightsync.gathering import DirectorySources
from cosmos_weightsync.group_commit import commit_together
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.membership import Member
from cosmos_weightsync.receiver_config import ReceiverConfig
from cosmos_weightsync.receiver_server import serve_received
from cosmos_weightsync.reuse import ReusePolicy
from cosmos_weightsync.sender import standard_transports
from cosmos_weightsync.shadow import Shadow
from cosmos_weightsync.shards import Shard
from cosmos_weightsync.sources import ListedSources
from cosmos_weightsync.transports import Transport
from cosmos_weightsync.versions import version_number
from cosmos_weightsync.wanted import WantedWeights, fill

__all__ = ["ReceiverConfig", "StagedVersion", "WeightReceiver"]


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that has arrived whole and verified, and is not in use yet.

    Attributes:
        version: Which; it may be newer than the one asked for.
        num_bytes: How many bytes it has.
        wire_bytes: How many crossed the transports; less where something was reused.
        seconds: How long that took, waiting for the version to be published included.
        digest: Equal for equal bytes from the same senders.
        run_id: Of the trainer's run that published it; see `SenderConfig`.
    """

    version: int
    num_bytes: int
    wire_bytes: int
    seconds: float
    digest: str
    run_id: str = ""


class WeightReceiver:
    """One rank of the receiving side; used from one thread at a time.

    It keeps one buffer of what it wants (the shadow), fills it by `stage` while the old weights
    are in use, and copies it over them by `commit`. A version is in use whole or not at all.
    Extra memory: the shadow and `ReceiverConfig.bucket_bytes`. An in-place receiver has no shadow,
    and no version while it stages.

    A sender that dies is replaced, in the middle of a version, by whoever else has its regions.

    Args:
        endpoints: Of all sender ranks, in any order; or of receivers that serve. None with a
            directory, or where `connect` comes later: who serves can have readers before.
        wanted: What to fetch, every region once. Shards: `commit` copies into their tensors,
            casting where the dtype differs, among floating ones. Specs: only `staged_shards` gives
            access. ``None``: every tensor of the senders, whole.
        config: How to fetch.
        transports: More transports to choose from.

    Raises:
        ConfigurationError: an endpoint or the transport makes no sense.
        LayoutError: a region is wanted twice.

    Example:
        >>> receiver = WeightReceiver(endpoints, wanted=shards_of(model))
        >>> receiver.stage(7).version
        7
        >>> receiver.commit()
        7
    """

    def __init__(
        self,
        endpoints: Iterable[str] = (),
        *,
        wanted: Iterable[Shard | ShardSpec] | None = None,
        config: ReceiverConfig | None = None,
        transports: Sequence[Transport] = (),
    ) -> None:
        self._config = config = config or ReceiverConfig()
        known = (*standard_transports(), *transports)
        self._wanted = self._wants(wanted)
        self._dialer = dialer = HolderDialer(
            known,
            config.transport,
            token=config.token,
            bucket_bytes=config.bucket_bytes,
            connect_timeout_s=config.connect_timeout_s,
            device=self._wanted.device,
        )
        serves = bool(config.serve_host)
        listed = self._listed(endpoints, may_come_later=serves)
        self._shadow = shadow = Shadow()
        self._buckets = buckets = BucketPool(config.bucket_bytes, "the receiver")
        self._staged: StagedVersion | None = None
        self._version: int | None = None
        self._committed: StagedVersion | None = None
        self._server = serve_received(config, shadow, known) if serves else None
        self._attendance = self._attend() if listed is None else None
        self._fetcher = VersionFetcher(
            listed or self._found_sources(),
            dialer,
            self._wanted,
            shadow,
            buckets,
            Patience(config.stall_s, config.linger_s),
        )

    @property
    def version(self) -> int | None:
        """The version in use: committed last, ``None`` before the first.

        ``None`` also in between two versions: while an in-place receiver stages, and while `commit`
        copies, or once it was broken off, until it has succeeded.
        """
        if self._config.mode == "in_place" and self._shadow.whole_version != self._version:
            return None
        return self._version

    @property
    def staged(self) -> StagedVersion | None:
        """The version that `commit` would put to use, if there is one."""
        return self._staged

    @property
    def arrived_bytes(self) -> int:
        """How much of the version being staged has come so far; from any thread."""
        return self._shadow.arrived_bytes

    @property
    def endpoint(self) -> str:
        """Where other receivers can fetch what this one has.

        Raises:
            ConfigurationError: it serves nobody.
        """
        if self._server is None:
            raise ConfigurationError("set ReceiverConfig.serve_host for this receiver to serve")
        return self._server.endpoint

    def connect(self, endpoints: Iterable[str]) -> None:
        """Fetch from these from now on, instead of those that it was made with.

        What is in use stays, and so do `endpoint` and what is there: others go on fetching it. A
        version that was staged and not committed cannot be any more.

        Raises:
            ConfigurationError: an endpoint makes no sense, or there is a directory.
        """
        listed = self._listed(endpoints, may_come_later=False)
        if listed is None:
            raise ConfigurationError("a directory tells this receiver whom to fetch from")
        self._staged = None
        self._fetcher.follow(listed)

    def want(self, wanted: Iterable[ShardSpec]) -> None:
        """Fetch this from now on, instead of what it was made for; for a staged receiver.

        What is in use stays, as does `endpoint`; readers of what is there lose it with `stage`.

        Raises:
            ConfigurationError: it receives in place.
            LayoutError: a region is wanted twice.
        """
        if self._config.mode == "in_place":
            raise ConfigurationError("an in-place receiver fetches what it was made for")
        self._wanted = self._wants(wanted)
        self._staged = None
        self._fetcher.want(self._wanted)

    def stage(self, version: int = 0, *, timeout_s: float = 600.0) -> StagedVersion:
        """Fetch a version into the shadow; the weights in use are not touched.

        Waits for the version to be published. All sender ranks give the same version: where
        some are ahead, the newer one is taken from all. An in-place receiver's weights are
        touched, and are whole again when this returns.

        Args:
            version: The oldest version that will do.
            timeout_s: How long the whole may take.

        Raises:
            PeerLostError: a sender cannot be reached, or died, and nobody else has its part.
            DeadlineError: it took too long.
            DigestError: bytes changed on the way.
            PlanError: the senders do not have what is wanted.
            VersionError: the version is no whole number.
            LayoutError: the model has moved into other memory than it was described in.
        """
        started, version = time.monotonic(), version_number(version)
        self._wanted.check_in_place()
        self._staged = None
        config = self._config
        reuse = ReusePolicy(config.reuse, config.anchor_every)
        deadline = Deadline.after(timeout_s)
        try:
            fetched = self._fetcher.fetch(version, config.num_threads, deadline, reuse)
        finally:
            self._announce()
        self._staged = StagedVersion(
            version=fetched.version,
            num_bytes=fetched.num_bytes,
            wire_bytes=fetched.wire_bytes,
            seconds=time.monotonic() - started,
            digest=fetched.digest,
            run_id=self._shadow.run_id,
        )
        return self._staged

    def staged_shards(self) -> tuple[Shard, ...]:
        """Views of the staged version, in the senders' dtypes; overwritten by the next `stage`.

        Raises:
            VersionError: nothing is staged.
            FencedError: nothing is, and an in-place receiver's weights are of no version.
        """
        if self._staged is None:
            if self._config.mode == "in_place" and self.version is None:
                raise FencedError("the weights are of no version: 'stage' must succeed first")
            raise VersionError("nothing is staged: 'stage' comes first, and must have succeeded")
        return self._shadow.shards

    def commit(self) -> int:
        """Put the staged version to use: copy it into the target tensors, if there are any.

        Ranks that serve one model together commit each for itself, and should all have staged the
        same version: between them, or by `commit_together`.

        Returns:
            The version in use from now on. Committing it again copies it again.

        Raises:
            VersionError: nothing is staged.
            LayoutError: the model has moved into other memory than it was described in.
        """
        self._wanted.check_in_place()
        shadow = self.staged_shards()
        if self._config.mode == "staged":
            self._version = None if self._wanted.targets else self._version
            fill(self._wanted.targets, shadow)
        self._version = self._staged.version if self._staged else None
        self._committed = self._staged
        return self._staged.version if self._staged else -1

    def commit_together(self, quorum: Quorum | None = None, *, timeout_s: float = 60.0) -> int:
        """Commit the staged version as soon as enough receivers of the group have it too.

        Args:
            quorum: Equal for all receivers of the group; all that are registered if omitted.
            timeout_s: How long to wait for the others.

        Returns:
            The version in use from now on.

        Raises:
            DigestError: another of the group has other bytes of it; the version in use stays.
            QuorumError: the group does not commit it; the version in use stays.
            DeadlineError: the group did not decide in time; the version in use stays.
            VersionError: nothing is staged.
            ConfigurationError: there is no directory, or others want another quorum.
        """
        if self._attendance is None:
            raise ConfigurationError("set ReceiverConfig.directory to commit with others")
        self.staged_shards()
        assert self._staged is not None
        return commit_together(
            self._attendance,
            (self._staged.version, self._staged.run_id),
            quorum or Quorum(),
            self.commit,
            Deadline.after(timeout_s),
        )

    def decline(self, version: int, quorum: Quorum | None = None) -> None:
        """Tell the group that this receiver will not have a version, so that it need not wait.

        Args:
            version: Which.
            quorum: As in `commit_together`.

        Raises:
            ConfigurationError: there is no directory, or others want another quorum.
            DeadlineError: the directory does not answer.
        """
        if self._attendance is None:
            raise ConfigurationError("set ReceiverConfig.directory to commit with others")
        self._attendance.vote(version, "failed", quorum or Quorum(), Deadline.after(30.0))

    def verify(self, *, timeout_s: float = 600.0) -> str:
        """Read back what is in memory and compare it with what the senders have.

        A sender that still has the version is asked for the checksums of what it holds; for one
        that has not, those count that it sent along. After `commit`, target tensors of the
        senders' dtype are read, else the shadow.

        Args:
            timeout_s: How long the whole may take.

        Returns:
            The digest of the version.

        Raises:
            DigestError: memory holds something else; it names the tensor and the region.
            VersionError: nothing is staged.
            LayoutError: the model has moved into other memory than it was described in.
        """
        self._wanted.check_in_place()
        shadow = self.staged_shards()
        dtypes = {shard.spec.name: shard.tensor.dtype for shard in shadow}
        is_committed = self._committed is self._staged
        targets = [t for t in self._wanted.targets if t.tensor.dtype == dtypes[t.spec.name]]
        places = (*(targets if is_committed else ()), *shadow)
        held = HeldBoxes((s.spec.name, s.spec.box, s.tensor) for s in places)
        return self._fetcher.check(held, Deadline.after(timeout_s))

    def close(self, timeout_s: float = 10.0) -> None:
        """Hang up, on holders and on those who fetch from here. May be repeated.

        A later `stage` connects again; it does not serve again.

        Raises:
            DeadlineError: a thread did not end in time.
        """
        deadline = Deadline.after(timeout_s)
        self._fetcher.close()
        server, self._server = self._server, None
        try:
            if server is not None:
                self._shadow.close()
                server.close(deadline)
        finally:
            if self._attendance is not None:
                self._attendance.close(deadline)

    def __enter__(self) -> "WeightReceiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wants(self, wanted: Iterable[Shard | ShardSpec] | None) -> WantedWeights:
        memory = "shared" if self._config.serve_host else "private"
        return WantedWeights(wanted, self._config.mode, memory)

    def _listed(self, endpoints: Iterable[str], *, may_come_later: bool) -> ListedSources | None:
        """Sources at these endpoints; none where a directory tells them."""
        if isinstance(endpoints, str):
            raise ConfigurationError(f"endpoints are a list: [{endpoints!r}]")
        listed = tuple(endpoints)
        if not self._config.directory:
            if not listed and not may_come_later:
                raise ConfigurationError("a receiver needs the endpoint of every sender rank")
            return ListedSources(listed, self._dialer)
        if listed:
            raise ConfigurationError("endpoints beside a directory, which tells them")
        return None

    def _announce(self) -> None:
        """Tell the directory what can be had here."""
        if self._attendance is None:
            return
        version = self._shadow.whole_version
        if self._shadow.shards:
            self._attendance.describe(Layout.from_ranks([[s.spec for s in self._shadow.shards]]))
        content = None if version is None else self._fetcher.content
        self._attendance.hold(-1 if version is None else version, self._shadow.run_id, content)

    def _found_sources(self) -> DirectorySources:
        assert self._attendance is not None
        return DirectorySources(
            self._attendance,
            self._config.prefer,
            find_timeout_s=self._config.connect_timeout_s,
        )

    def _attend(self) -> Attendance:
        member = Member(
            id=secrets.token_hex(8),
            role="receiver",
            name=self._config.name or "receiver",
            group=self._config.group,
            endpoint=self._server.endpoint if self._server is not None else "",
            host=self._config.host or socket.gethostname(),
        )
        return Attendance(self._config.directory, member, self._config.token)
