"""The side that wants the weights: stage a version beside the one in use, then commit it."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.dialing import HolderDialer
from cosmos_weightsync.edges import BucketPool
from cosmos_weightsync.errors import ConfigurationError, FencedError, VersionError
from cosmos_weightsync.fetching import Patience, VersionFetcher
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.reuse import Reused, ReusePolicy
from cosmos_weightsync.sender import standard_transports
from cosmos_weightsync.server import Server, check_exposure
from cosmos_weightsync.serving import HolderIdentity, ServingSession
from cosmos_weightsync.shadow import Shadow
from cosmos_weightsync.shards import Shard
from cosmos_weightsync.sources import ListedSources
from cosmos_weightsync.transports import Transport
from cosmos_weightsync.wanted import Mode, WantedWeights

__all__ = ["ReceiverConfig", "StagedVersion", "WeightReceiver"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverConfig:
    """How a receiver fetches, and whether it passes on what it has.

    Attributes:
        transport: ``shared_memory``, ``tcp``, ``process_group``, or the name of one handed to the
            receiver. ``auto`` is shared memory from senders on a loopback address, else TCP.
        bucket_bytes: Small pieces arrive in buckets of this size; one per thread.
        num_threads: How many senders are read from at the same time.
        token: What the senders want to be shown, and what this receiver wants to be shown.
        connect_timeout_s: How long meeting a sender may take.
        mode: ``staged`` receives beside the weights in use. ``in_place`` receives into them,
            without a second copy: from the beginning of `WeightReceiver.stage` until
            `WeightReceiver.commit` the receiver has no version.
        serve_host: The address at which other receivers can fetch from this one, by the endpoint
            `WeightReceiver.endpoint`. Empty serves nobody.
        stall_s: A holder that is silent for so long while it should send counts as lost.
        linger_s: Others that still read the version before from this receiver when it stages the
            next may go on for so long; then they must get the rest elsewhere.
        reuse: ``nothing`` fetches every version whole. ``pieces`` leaves out what did not change
            at all, such as frozen parameters. ``changes`` fetches of the rest only the elements
            that changed, from senders that still have the version before (for this, see
            `SenderConfig.num_bases`), over transports that send messages; worth it where the
            network is slower than 2 GB/s or so.
        anchor_every: After so many versions in a row that reuse another, one is fetched whole.
    """

    transport: str = "auto"
    bucket_bytes: int = 16 << 20
    num_threads: int = 4
    token: str = ""
    connect_timeout_s: float = 60.0
    mode: Mode = "staged"
    serve_host: str = ""
    stall_s: float = 60.0
    linger_s: float = 5.0
    reuse: Reused = "nothing"
    anchor_every: int = 64

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1024 or self.num_threads < 1:
            raise ConfigurationError("bucket_bytes must be >= 1024 and num_threads >= 1")
        if self.serve_host:
            check_exposure(self.serve_host, self.token)
        ReusePolicy(self.reuse, self.anchor_every)


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that has arrived whole and verified, and is not in use yet.

    Attributes:
        version: Which; it may be newer than the one asked for.
        num_bytes: How many bytes it has.
        wire_bytes: How many crossed the transports; less where something was reused.
        seconds: How long that took, waiting for the version to be published included.
        digest: Equal for equal bytes from the same senders.
    """

    version: int
    num_bytes: int
    wire_bytes: int
    seconds: float
    digest: str


class WeightReceiver:
    """One rank of the receiving side; used from one thread at a time.

    It keeps one buffer of what it wants (the shadow), fills it by `stage` while the old weights
    are in use, and copies it over them by `commit`. A version is in use whole or not at all.
    Extra memory: the shadow, and ``num_threads`` buckets during `stage`. An in-place receiver has
    no shadow, and no version while it stages.

    A sender that dies is replaced, in the middle of a version, by whoever else has its regions.

    Args:
        endpoints: Of all sender ranks, in any order; or of receivers that serve.
        wanted: What to fetch, every region once. Shards: `commit` copies into their tensors,
            casting where the dtype differs. Specs: only `staged_shards` gives access. ``None``:
            every tensor of the senders, whole.
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
        endpoints: Iterable[str],
        *,
        wanted: Iterable[Shard | ShardSpec] | None = None,
        config: ReceiverConfig | None = None,
        transports: Sequence[Transport] = (),
    ) -> None:
        self._config = config = config or ReceiverConfig()
        known = (*standard_transports(), *transports)
        dialer = HolderDialer(
            known,
            config.transport,
            token=config.token,
            bucket_bytes=config.bucket_bytes,
            connect_timeout_s=config.connect_timeout_s,
        )
        self._wanted = WantedWeights(wanted, config.mode)
        self._shadow = Shadow()
        self._buckets = BucketPool(config.bucket_bytes)
        self._fetcher = VersionFetcher(
            ListedSources(endpoints, dialer),
            dialer,
            self._wanted,
            self._shadow,
            self._buckets,
            Patience(config.stall_s, config.linger_s),
        )
        self._staged: StagedVersion | None = None
        self._version: int | None = None
        self._server = self._serve(known) if config.serve_host else None

    @property
    def version(self) -> int | None:
        """The version in use: committed last, ``None`` before the first.

        ``None`` also while an in-place receiver is in between two versions.
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
        """
        started = time.monotonic()
        self._staged = None
        config = self._config
        reuse = ReusePolicy(config.reuse, config.anchor_every)
        deadline = Deadline.after(timeout_s)
        fetched = self._fetcher.fetch(version, config.num_threads, deadline, reuse)
        self._staged = StagedVersion(
            version=fetched.version,
            num_bytes=fetched.num_bytes,
            wire_bytes=fetched.wire_bytes,
            seconds=time.monotonic() - started,
            digest=fetched.digest,
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

        Returns:
            The version in use from now on. Committing it again copies it again.

        Raises:
            VersionError: nothing is staged.
        """
        shadow = {(s.spec.name, s.spec.box): s.tensor for s in self.staged_shards()}
        if self._config.mode == "staged":
            with torch.no_grad():
                for target in self._wanted.targets:
                    target.tensor.copy_(shadow[target.spec.name, target.spec.box])
        self._version = self._staged.version if self._staged else None
        return self._staged.version if self._staged else -1

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
        """
        shadow = self.staged_shards()
        dtypes = {shard.spec.name: shard.tensor.dtype for shard in shadow}
        is_committed = self._staged is not None and self._version == self._staged.version
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
        self._fetcher.close()
        server, self._server = self._server, None
        if server is not None:
            self._shadow.close()
            server.close(Deadline.after(timeout_s))

    def __enter__(self) -> "WeightReceiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, transports: Sequence[Transport]) -> Server:
        host = self._config.serve_host
        identity = HolderIdentity(
            role="receiver",
            rank=0,
            num_ranks=1,
            name="receiver",
            holder=self._shadow,
            transports={item.name: item for item in transports},
            token=self._config.token,
            host=host,
            buckets=self._buckets,
            idle_s=3600.0,
        )
        return Server((host, 0), lambda c: ServingSession(identity, c), "weight-receiver")
