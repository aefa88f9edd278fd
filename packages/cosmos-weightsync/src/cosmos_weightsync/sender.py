"""The trainer's side: publish a version, go on training, let receivers fetch it."""

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.encodings import Cast, EncodedShards, encode
from cosmos_weightsync.errors import ConfigurationError, VersionError
from cosmos_weightsync.frames import parse_endpoint
from cosmos_weightsync.layout import Layout, check_once
from cosmos_weightsync.membership import Member
from cosmos_weightsync.published import PublishedVersions
from cosmos_weightsync.runs import new_run_id
from cosmos_weightsync.server import Server, check_address, check_exposure
from cosmos_weightsync.serving import HolderIdentity, ServingSession
from cosmos_weightsync.settings import check_choice, check_wait
from cosmos_weightsync.shards import Shard, check_wire_dtype
from cosmos_weightsync.snapshots import SnapshotStore
from cosmos_weightsync.transports import (
    CrossMemoryTransport,
    CudaIpcTransport,
    NixlTransport,
    ProcessGroupTransport,
    SharedMemoryTransport,
    TcpTransport,
    Transport,
)
from cosmos_weightsync.versions import version_number

__all__ = ["Publication", "SenderConfig", "WeightSender", "standard_transports"]

SnapshotMemory = Literal["shared", "private"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderConfig:
    """How a sender rank serves.

    Attributes:
        wire_dtype: Floating tensors are cast to this once, when published: ``bfloat16``. Empty
            sends what is in memory.
        bucket_bytes: Small pieces are packed into a bucket of this size. All receivers share it:
            where many fetch at the same time, some wait for others.
        max_snapshots: Copies of this rank's shards that may exist, at least 2. A third is
            allocated only when receivers read two versions at the same time. With n of them
            receivers may read n - 1 versions at the same time, and the next still has a buffer.
        num_bases: Versions that receivers have fetched and that are kept for these to ask for
            changes only (`ReceiverConfig.reuse`); each is one more copy of this rank's shards.
            With 0, only what happens to be there still is built on: enough for receivers that
            fetch every version before the next is published.
        bind_host: The address to listen on, and the one receivers are told.
        token: Receivers must show it. Must be given if ``bind_host`` is not loopback.
        publish_timeout_s: How long `WeightSender.publish` may wait for a free buffer.
        read_timeout_s: How long one receiver may read one version while its buffer is wanted for
            the next; one that is slower is hung up on, and may come again. Give more than
            receivers give themselves (``timeout_s`` of `WeightReceiver.stage`).
        run_id: Equal on all ranks of one run of the trainer and on no other run: versions of two
            runs that carry the same number are then never mixed. If empty, senders make one: a
            single rank by itself, several with `torch.distributed`, where all ranks make their
            senders in the same order. Several ranks without `torch.distributed` have none.
        directory: The endpoint of a `WeightDirectory` to register with, and its token is
            ``token``. Empty registers nowhere: receivers are told `WeightSender.endpoint`.
        idle_s: A receiver that asks for nothing for so long is hung up on; it may call again.
        snapshot_memory: ``shared`` is what `shared_memory` maps. ``private`` lies in huge pages
            where the system has them; `cross_memory` reads these up to twice as fast, and
            `shared_memory` copies twice.
    """

    wire_dtype: str = ""
    bucket_bytes: int = 16 << 20
    max_snapshots: int = 3
    num_bases: int = 0
    bind_host: str = "127.0.0.1"
    token: str = ""
    publish_timeout_s: float = 300.0
    read_timeout_s: float = 600.0
    run_id: str = ""
    directory: str = ""
    idle_s: float = 3600.0
    snapshot_memory: SnapshotMemory = "shared"

    def __post_init__(self) -> None:
        check_wire_dtype(self.wire_dtype)
        if self.bucket_bytes < 1024 or self.max_snapshots < 2 or self.num_bases < 0:
            raise ConfigurationError(
                "bucket_bytes must be >= 1024, max_snapshots >= 2 and num_bases >= 0"
            )
        check_choice("snapshot_memory", self.snapshot_memory, SnapshotMemory)
        check_wait("idle_s", self.idle_s)
        check_wait("read_timeout_s", self.read_timeout_s)
        check_exposure(self.bind_host, self.token)
        check_address(self.bind_host)
        if self.directory:
            parse_endpoint(self.directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """What became of a version that was not to wait for receivers.

    Attributes:
        version: Which.
        is_published: Whether receivers can have it; else it was skipped.
        readers: Which versions had all buffers of this rank when it was skipped, and who reads
            them; empty if it was published, or only other ranks had no buffer.
    """

    version: int
    is_published: bool
    readers: tuple[str, ...] = ()


def standard_transports() -> tuple[Transport, ...]:
    """The transports that need no set-up by the user and can work here."""
    own = (
        SharedMemoryTransport(),
        CrossMemoryTransport(),
        TcpTransport(),
        ProcessGroupTransport(),
    )
    return (
        *own,
        *((NixlTransport(),) if NixlTransport.is_installed() else ()),
        *((CudaIpcTransport(),) if torch.cuda.is_available() else ()),
    )


class WeightSender:
    """One rank of the sending side.

    Every rank of the trainer makes one, all publish the same versions in the same order, and
    receivers get the endpoints of all of them.

    Args:
        shards: What this rank holds, from `shards_of`; views of the live parameters. From
            `encode` where some are published quantised.
        rank: This rank's number on the sending side.
        num_ranks: How many there are.
        config: How to serve.
        transports: What receivers may choose from.

    Raises:
        ConfigurationError: the rank is out of range, or the address cannot be listened on.
        LayoutError: a region is in two of the shards.

    Example:
        >>> sender = WeightSender(shards_of(model), rank=rank, num_ranks=2)
        >>> sender.publish(7)      # returns when the copy is made
        >>> optimizer.step()       # receivers still get version 7
    """

    def __init__(
        self,
        shards: Iterable[Shard] | EncodedShards,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        config: SenderConfig | None = None,
        transports: Sequence[Transport] = (),
    ) -> None:
        config = config or SenderConfig()
        if not 0 <= rank < num_ranks:
            raise ConfigurationError(f"rank {rank} is not one of {num_ranks} ranks")
        self._config = config
        self._process = os.getpid()
        self._run_id = config.run_id or new_run_id(rank, num_ranks)
        self._source = source = _published(shards, config.wire_dtype)
        check_once(source.specs, f"sender rank {rank} holds")
        self._layout = Layout.from_ranks([(*source.specs, *source.hollow)])
        self._snapshots = SnapshotStore(
            source,
            max_snapshots=config.max_snapshots,
            num_bases=config.num_bases,
            memory=config.snapshot_memory,
            read_s=config.read_timeout_s,
        )
        identity = HolderIdentity(
            role="sender",
            rank=rank,
            num_ranks=num_ranks,
            name=f"sender rank {rank}",
            holder=PublishedVersions(self._snapshots, self._layout, self._run_id),
            transports={item.name: item for item in (*standard_transports(), *transports)},
            token=config.token,
            host=config.bind_host,
            buckets=BucketPool(config.bucket_bytes, f"sender rank {rank}"),
            idle_s=config.idle_s,
        )
        self._server = Server(
            (config.bind_host, 0),
            lambda connection: ServingSession(identity, connection),
            "weight-sender",
        )
        self._attendance = self._attend(rank, num_ranks) if config.directory else None

    @property
    def endpoint(self) -> str:
        """Where receivers find this rank: ``host:port``."""
        return self._server.endpoint

    @property
    def run_id(self) -> str:
        """What tells this run's versions from those of another run; see `SenderConfig`."""
        return self._run_id

    @property
    def layout(self) -> Layout:
        """What this rank offers, in the dtype that goes over the wire."""
        return self._layout

    @property
    def newest_version(self) -> int | None:
        """The version published last, ``None`` before the first."""
        return self._snapshots.newest_version

    @property
    def num_sessions(self) -> int:
        """How many receivers are connected now."""
        return self._server.num_open

    @property
    def num_snapshots(self) -> int:
        """How many copies of this rank's shards are allocated now."""
        return self._snapshots.num_buffers

    def publish(self, version: int) -> None:
        """Copy the shards, cast to the wire dtype; when this returns training may go on.

        Replaces a version that no receiver has begun to fetch; one that is being fetched stays
        whole until it has been. Where receivers read as many versions as there are buffers, this
        waits for one of them; `try_publish` does not. Called from one thread.

        Raises:
            VersionError: the version is not newer than the last, the sender is closed, or this is a
                child of the process that made it.
            LayoutError: the model has moved into other memory than it was described in.
            DeadlineError: receivers hold all buffers and none was freed in time; names them.
        """
        version = self._checked(version)
        self._snapshots.publish(version, Deadline.after(self._config.publish_timeout_s))
        self._tell(version)

    def try_publish(self, version: int, *, agree: Callable[[bool], bool] = bool) -> Publication:
        """Copy the shards as `publish` does, or skip the version: receivers are not waited for.

        It is skipped where receivers read as many versions as there are buffers. They finish with
        what they read, and get the next version that is published; the same version may be tried
        again as long as the shards are as they were.

        Args:
            version: Newer than the last that was published.
            agree: Told whether this rank has a buffer, returns whether all ranks have, on each of
                them: no version is then published by some ranks only, which no receiver gets
                whole. Called once by each rank. For one rank it is what the rank says.

        Raises:
            VersionError: as `publish`.
            LayoutError: as `publish`.

        Example:
            >>> def agree(is_free: bool) -> bool:
            ...     free = torch.tensor(int(is_free))
            ...     dist.all_reduce(free, dist.ReduceOp.MIN)
            ...     return bool(free)
            >>> sender.try_publish(7, agree=agree)
            Publication(version=7, is_published=True, readers=())
        """
        version = self._checked(version)
        buffer = self._snapshots.reserve(version)
        readers = self._snapshots.readers() if buffer is None else ()
        try:
            is_published = agree(buffer is not None) and buffer is not None
        except BaseException:
            if buffer is not None:
                self._snapshots.release(buffer)
            raise
        if buffer is not None:
            if not is_published:
                self._snapshots.release(buffer)
            else:
                self._snapshots.fill(buffer, version)
                self._tell(version)
        return Publication(version=version, is_published=is_published, readers=readers)

    def close(self, timeout_s: float = 10.0) -> None:
        """Hang up on every receiver and end all threads. May be repeated.

        Raises:
            DeadlineError: a thread did not end in time.
        """
        deadline = Deadline.after(timeout_s)
        try:
            if self._attendance is not None:
                self._attendance.close(deadline)
        finally:
            self._snapshots.close()
            self._server.close(deadline)

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, version: int) -> int:
        version = version_number(version)
        if os.getpid() != self._process:
            raise VersionError(
                f"version {version}: this process is a fork of {self._process}, from which "
                "receivers fetch: publish there, or make a sender here"
            )
        self._source.check_in_place()
        return version

    def _tell(self, version: int) -> None:
        if self._attendance is not None:
            self._attendance.hold(version, self._run_id)

    def _attend(self, rank: int, num_ranks: int) -> Attendance:
        member = Member(
            id=secrets.token_hex(8),
            role="sender",
            rank=rank,
            num_ranks=num_ranks,
            name=f"sender rank {rank}",
            endpoint=self.endpoint,
            host=socket.gethostname(),
            run_id=self._run_id,
        )
        attendance = Attendance(self._config.directory, member, self._config.token)
        attendance.describe(self._layout)
        attendance.hold(-1, self._run_id)
        return attendance


def _published(shards: Iterable[Shard] | EncodedShards, wire_dtype: str) -> EncodedShards:
    if not isinstance(shards, EncodedShards):
        return encode(shards, [Cast(dtype=wire_dtype)])
    if wire_dtype:
        raise ConfigurationError(
            f"wire_dtype {wire_dtype!r} beside encoded shards: add Cast({wire_dtype!r}) to the "
            "encodings instead"
        )
    return shards
