"""The side that wants the weights: stage a version beside the one in use, then commit it."""

import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from cosmos_weightsync.chunks import HeldBoxes, piece_checksum, version_digest
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edges import BucketPool
from cosmos_weightsync.errors import (
    ConfigurationError,
    DigestError,
    LayoutError,
    PeerLostError,
    VersionError,
)
from cosmos_weightsync.frames import parse_endpoint
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.planning import plan_transfer
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.sender import is_loopback, standard_transports
from cosmos_weightsync.shards import Shard, torch_dtype
from cosmos_weightsync.transports import Transport

__all__ = ["ReceiverConfig", "StagedVersion", "WeightReceiver"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiverConfig:
    """How a receiver fetches.

    Attributes:
        transport: ``shared_memory``, ``tcp``, ``process_group``, or the name of one handed to the
            receiver. ``auto`` is shared memory from senders on a loopback address, else TCP.
        bucket_bytes: Small pieces arrive in buckets of this size; one per thread.
        num_threads: How many senders are read from at the same time.
        token: What the senders want to be shown.
        connect_timeout_s: How long meeting all senders may take.
    """

    transport: str = "auto"
    bucket_bytes: int = 16 << 20
    num_threads: int = 4
    token: str = ""
    connect_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1024 or self.num_threads < 1:
            raise ConfigurationError("bucket_bytes must be >= 1024 and num_threads >= 1")


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version that has arrived whole and verified, and is not in use yet.

    Attributes:
        version: Which; it may be newer than the one asked for.
        num_bytes: How many bytes were moved.
        seconds: How long that took, waiting for the version to be published included.
        digest: Equal for equal bytes from the same senders.
    """

    version: int
    num_bytes: int
    seconds: float
    digest: str


class WeightReceiver:
    """One rank of the receiving side; used from one thread at a time.

    It keeps one buffer of what it wants (the shadow), fills it by `stage` while the old weights
    are in use, and copies it over them by `commit`. A version is in use whole or not at all.
    Extra memory: the shadow, and ``num_threads`` buckets during `stage`.

    Args:
        endpoints: Of all sender ranks, in any order.
        wanted: What to fetch. Shards: `commit` copies into their tensors, casting where the
            dtype differs. Specs: only `staged_shards` gives access. ``None``: every tensor of
            the senders, whole.
        config: How to fetch.
        transports: More transports to choose from.

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
        self._endpoints = tuple(endpoints)
        if not self._endpoints:
            raise ConfigurationError("a receiver needs the endpoint of every sender rank")
        for endpoint in self._endpoints:
            parse_endpoint(endpoint)
        self._config = config or ReceiverConfig()
        self._transports = {item.name: item for item in (*standard_transports(), *transports)}
        if self._config.transport not in {"auto", *self._transports}:
            raise ConfigurationError(
                f"transport {self._config.transport!r} is none of {sorted(self._transports)}"
            )
        items = None if wanted is None else tuple(wanted)
        self._targets = tuple(item for item in items or () if isinstance(item, Shard))
        self._wanted = (
            None
            if items is None
            else tuple(item.spec if isinstance(item, Shard) else item for item in items)
        )
        self._sessions: list[ReceiverSession] = []
        self._buckets = BucketPool(self._config.bucket_bytes)
        self._shadow: tuple[Shard, ...] = ()
        self._sums: dict[tuple[int, int], int] = {}
        self._staged: StagedVersion | None = None
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version committed last, ``None`` before the first."""
        return self._version

    @property
    def staged(self) -> StagedVersion | None:
        """The version that `commit` would put to use, if there is one."""
        return self._staged

    def stage(self, version: int = 0, *, timeout_s: float = 600.0) -> StagedVersion:
        """Fetch a version into the shadow; the weights in use are not touched.

        Waits for the version to be published. All sender ranks give the same version: where
        some are ahead, the newer one is taken from all.

        Args:
            version: The oldest version that will do.
            timeout_s: How long the whole may take.

        Raises:
            PeerLostError: a sender cannot be reached, or died.
            DeadlineError: it took too long.
            DigestError: bytes changed on the way.
            PlanError: the senders do not have what is wanted.
        """
        started = time.monotonic()
        deadline = Deadline.after(timeout_s)
        self._staged = None
        try:
            agreed = self._agree_anew(version, deadline)
            self._sums = self._pull(deadline)
            for session in self._sessions:
                session.release(deadline)
        except BaseException:
            self.close()
            raise
        num_bytes = sum(piece.num_bytes for s in self._sessions for piece in s.pieces)
        digest = version_digest(self._sums)
        self._staged = StagedVersion(agreed, num_bytes, time.monotonic() - started, digest)
        return self._staged

    def staged_shards(self) -> tuple[Shard, ...]:
        """Views of the staged version, in the senders' dtypes; overwritten by the next `stage`.

        Raises:
            VersionError: nothing is staged.
        """
        if self._staged is None:
            raise VersionError("nothing is staged: 'stage' comes first, and must have succeeded")
        return self._shadow

    def commit(self) -> int:
        """Put the staged version to use: copy it into the target tensors, if there are any.

        Returns:
            The version in use from now on. Committing it again copies it again.

        Raises:
            VersionError: nothing is staged.
        """
        shadow = {(s.spec.name, s.spec.box): s.tensor for s in self.staged_shards()}
        with torch.no_grad():
            for target in self._targets:
                target.tensor.copy_(shadow[target.spec.name, target.spec.box])
        self._version = self._staged.version if self._staged else None
        return self._staged.version if self._staged else -1

    def verify(self) -> str:
        """Read back what is in memory and compare it with what the senders sent.

        After `commit`, target tensors of the senders' dtype are read, else the shadow.

        Returns:
            The digest of the version.

        Raises:
            DigestError: memory holds something else; it names the tensor and the region.
            VersionError: nothing is staged.
        """
        shadow = self.staged_shards()
        dtypes = {shard.spec.name: shard.tensor.dtype for shard in shadow}
        is_committed = self._staged is not None and self._version == self._staged.version
        targets = [t for t in self._targets if t.tensor.dtype == dtypes[t.spec.name]]
        places = (*(targets if is_committed else ()), *shadow)
        held = HeldBoxes((s.spec.name, s.spec.box, s.tensor) for s in places)
        for session in self._sessions:
            for index, piece in enumerate(session.pieces):
                if piece_checksum(held, piece) != self._sums[session.rank, index]:
                    raise DigestError(
                        f"{piece.name} {piece.box}: not what sender rank {session.rank} sent"
                    )
        return version_digest(self._sums)

    def close(self) -> None:
        """Hang up; a later `stage` connects again. May be repeated."""
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.close()

    def __enter__(self) -> "WeightReceiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _agree_anew(self, version: int, deadline: Deadline) -> int:
        """Agree on a version; connect first, or again when a sender hung up in the meantime."""
        if self._sessions:
            try:
                return self._agree(version, deadline)
            except PeerLostError:
                self.close()
        self._connect(deadline)
        return self._agree(version, deadline)

    def _agree(self, version: int, deadline: Deadline) -> int:
        """Have all senders pin the same version. They publish in step, so this ends soon."""
        pinned = [session.pin(version, "newest", deadline) for session in self._sessions]
        while min(pinned) != max(pinned):
            newest = max(pinned)
            for index, session in enumerate(self._sessions):
                if pinned[index] != newest:
                    pinned[index] = session.pin(newest, "oldest", deadline)
        return pinned[0]

    def _connect(self, deadline: Deadline) -> None:
        soon = Deadline(min(deadline.at, Deadline.after(self._config.connect_timeout_s).at))
        token = self._config.token
        sessions: list[ReceiverSession] = []
        try:
            for endpoint in self._endpoints:  # Kept one by one: a failure closes those before.
                sessions += [ReceiverSession(endpoint, token, soon)]
            sessions.sort(key=lambda session: session.rank)
            _check_complete(sessions)
            self._open(sessions, soon)
        except BaseException:
            for session in sessions:
                session.close()
            raise

    def _open(self, sessions: list[ReceiverSession], deadline: Deadline) -> None:
        senders = Layout.merge([session.layout for session in sessions])
        specs = senders.full_specs() if self._wanted is None else self._wanted
        receivers = Layout.from_ranks([specs])
        plan = plan_transfer(senders, receivers)
        self._allocate(specs, senders)
        loads = plan.edge_bytes()[:, 0]
        needed = [session for session in sessions if loads[session.rank] > 0]
        for session in sessions:
            if session not in needed:
                session.close()
        for session in needed:
            transport = self._transports[self._transport_for(session)]
            session.open(plan, (senders, receivers), transport, self._config.bucket_bytes, deadline)
        self._sessions = needed

    def _allocate(self, specs: Sequence[ShardSpec], senders: Layout) -> None:
        """Make the shadow, or keep the one there is when it fits; the senders' dtypes rule."""
        on_wire = tuple(
            ShardSpec(s.name, s.global_shape, s.box, senders.tensors[s.name].dtype) for s in specs
        )
        for spec, wire in zip(specs, on_wire, strict=True):
            if not self._targets and spec.dtype != wire.dtype:
                raise LayoutError(
                    f"{spec.name}: wanted as {spec.dtype}, senders send {wire.dtype}; set their "
                    "SenderConfig.wire_dtype, or hand over shards to cast into"
                )
        if tuple(shard.spec for shard in self._shadow) != on_wire:
            self._shadow = ()
            self._shadow = tuple(
                Shard(spec, torch.empty(spec.box.shape, dtype=torch_dtype(spec.dtype)))
                for spec in on_wire
            )

    def _transport_for(self, session: ReceiverSession) -> str:
        if self._config.transport != "auto":
            return self._config.transport
        is_here = is_loopback(parse_endpoint(session.endpoint)[0]) and sys.platform == "linux"
        return "shared_memory" if is_here and "shared_memory" in session.transports else "tcp"

    def _pull(self, deadline: Deadline) -> dict[tuple[int, int], int]:
        held = HeldBoxes((s.spec.name, s.spec.box, s.tensor) for s in self._shadow)
        sums: dict[tuple[int, int], int] = {}
        with ThreadPoolExecutor(self._config.num_threads, "weight-pull") as pool:
            futures = [
                pool.submit(session.pull, held, self._buckets, deadline)
                for session in self._sessions
            ]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in done if future.exception() is not None]
            if failed:
                self.close()  # Wakes the other threads.
                pool.shutdown(wait=True, cancel_futures=True)
                failed[0].result()
            for future in futures:
                sums.update(future.result())
        return sums


def _check_complete(sessions: Sequence[ReceiverSession]) -> None:
    expected = list(range(sessions[0].num_ranks))
    found = [session.rank for session in sessions]
    if found != expected:
        raise ConfigurationError(
            f"endpoints of sender ranks {found} were given, the sender has ranks {expected}"
        )
