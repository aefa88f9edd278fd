"""The side that wants the weights and finds them in a directory or an object store."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from cosmos_weightsync.byte_rows import flat_bytes, lent_bytes
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import ConfigurationError, DigestError, StorageError, VersionError
from cosmos_weightsync.files.manifests import (
    Manifest,
    StoredBox,
    committed_versions,
    read_manifest,
    version_name,
)
from cosmos_weightsync.files.reading import BoxReader
from cosmos_weightsync.files.storage import Storage, open_storage, within
from cosmos_weightsync.files.writing import ChunkSums
from cosmos_weightsync.layout import Layout, ShardSpec, check_cast
from cosmos_weightsync.living import check_in_place
from cosmos_weightsync.planning import Piece, plan_transfer
from cosmos_weightsync.receiver import StagedVersion
from cosmos_weightsync.shards import Shard, check_separate, handed_over, torch_dtype
from cosmos_weightsync.versions import version_number
from cosmos_weightsync.wanted import fill

__all__ = ["FileReceiver", "FileReceiverConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReceiverConfig:
    """How versions are read.

    Attributes:
        num_threads: How many boxes are read at the same time.
        buffer_bytes: What each of these threads may use beside the shadow.
        poll_s: How often to look for a version that is not there yet.
        options: For the file system behind a URL.
    """

    num_threads: int = 4
    buffer_bytes: int = 16 << 20
    poll_s: float = 0.2
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.num_threads < 1 or self.buffer_bytes < 1 or self.poll_s <= 0:
            raise ConfigurationError("num_threads, buffer_bytes and poll_s must be positive")


class FileReceiver:
    """Like `WeightReceiver`, with a `FileSender`'s directory in place of senders.

    Only the chunks of files that hold a wanted box are read, and each is checked.

    Args:
        where: What the sender published to.
        wanted: Shards, specs, or ``None`` for everything, as in `WeightReceiver`.
        config: How to read.

    Raises:
        LayoutError: there is no place to put what is wanted.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Storage,
        *,
        wanted: Iterable[Shard | ShardSpec] | None = None,
        config: FileReceiverConfig | None = None,
    ) -> None:
        self._config = config or FileReceiverConfig()
        self._storage = open_storage(where, self._config.options)
        items = None if wanted is None else handed_over(wanted, (Shard, ShardSpec))
        self._targets = tuple(item for item in items or () if isinstance(item, Shard))
        for target in self._targets:
            check_separate(target)
        self._wanted = (
            None
            if items is None
            else tuple(item.spec if isinstance(item, Shard) else item for item in items)
        )
        self._shadow: tuple[Shard, ...] = ()
        self._sums: tuple[tuple[int, ...], ...] = ()
        self._staged: StagedVersion | None = None
        self._version: int | None = None
        self._committed: StagedVersion | None = None
        self._bytes_read = 0

    @property
    def version(self) -> int | None:
        """The version committed last; ``None`` before the first, and after one was broken off."""
        return self._version

    @property
    def staged(self) -> StagedVersion | None:
        """The version that `commit` would put to use, if there is one."""
        return self._staged

    @property
    def bytes_read(self) -> int:
        """What the last `stage` read, which is more than it wanted by parts of chunks."""
        return self._bytes_read

    def versions(self) -> list[int]:
        """The versions that can be had now, oldest first."""
        return committed_versions(self._storage)

    def stage(self, version: int = 0, *, timeout_s: float = 600.0) -> StagedVersion:
        """Read the newest version into the shadow; the weights in use are not touched.

        Args:
            version: The oldest version that will do; waited for.
            timeout_s: How long the whole may take.

        Raises:
            DeadlineError: no such version was published in time, or the store did not answer in it.
            CorruptFileError: a file is truncated or missing.
            DigestError: bytes are not what was written.
            PlanError: the version does not hold what is wanted.
            VersionError: the version is no whole number.
            LayoutError: the model has moved into other memory than it was described in.
        """
        started, version = time.monotonic(), version_number(version)
        check_in_place(self._targets)
        deadline = Deadline.after(timeout_s)
        storage = within(self._storage, deadline)
        self._staged = None
        while True:
            newest = self._await(storage, version, deadline)
            try:
                manifest = read_manifest(storage, version_name(newest))
                pieces = self._read(storage, manifest)
                break
            except StorageError:
                if newest in committed_versions(storage):
                    raise
                # Retired while it was being read; there is a newer one.
        num_bytes = sum(piece.num_bytes for piece in pieces)
        seconds = time.monotonic() - started
        self._sums = tuple(_sums_of(shard) for shard in self._shadow)
        self._staged = StagedVersion(
            version=manifest.version,
            num_bytes=num_bytes,
            wire_bytes=num_bytes,
            seconds=seconds,
            digest=manifest.digest,
        )
        return self._staged

    def staged_shards(self) -> tuple[Shard, ...]:
        """Views of the staged version, in the dtypes of the files.

        Raises:
            VersionError: nothing is staged.
        """
        if self._staged is None:
            raise VersionError("nothing is staged: 'stage' comes first, and must have succeeded")
        return self._shadow

    def commit(self) -> int:
        """Copy the staged version into the target tensors, if there are any.

        Raises:
            VersionError: nothing is staged.
            LayoutError: the model has moved into other memory than it was described in.
        """
        check_in_place(self._targets)
        shadow = self.staged_shards()
        self._version = None if self._targets else self._version
        fill(self._targets, shadow)
        version = self._staged.version if self._staged else -1
        self._version = version
        self._committed = self._staged
        return version

    def verify(self) -> str:
        """Read back what is in memory and compare it with what was read from the files.

        Returns:
            The digest of the version.

        Raises:
            VersionError: nothing is staged.
            DigestError: memory holds something else; names the first such tensor.
            LayoutError: the model has moved into other memory than it was described in.
        """
        check_in_place(self._targets)
        staged = self._staged
        shards = self.staged_shards()
        if self._committed is staged:
            live = {(t.spec.name, t.spec.box): t for t in self._targets}
            shards = tuple(
                found
                if (found := live.get((s.spec.name, s.spec.box))) and found.spec == s.spec
                else s
                for s in shards
            )
        for shard, sums in zip(shards, self._sums, strict=True):
            if _sums_of(shard) != sums:
                raise DigestError(
                    f"{shard.spec.name} {shard.spec.box}: memory does not hold the version staged"
                )
        return staged.digest if staged else ""

    def close(self) -> None:
        """Let go of the shadow. May be repeated."""
        self._staged = None
        self._shadow = ()

    def _await(self, storage: Storage, version: int, deadline: Deadline) -> int:
        while True:
            found = committed_versions(storage)
            if found and found[-1] >= version:
                return found[-1]
            what = f"version {version} to be published in {storage.url}"
            time.sleep(min(self._config.poll_s, deadline.remaining(what)))

    def _read(self, storage: Storage, manifest: Manifest) -> list[Piece]:
        offered = manifest.layout()
        wanted = offered.full_specs() if self._wanted is None else self._wanted
        self._make_shadow(offered, wanted)
        plan = plan_transfer(offered, Layout.from_ranks([wanted]))
        pieces = plan.pieces(receiver=0)
        held = HeldBoxes((s.spec.name, s.spec.box, s.tensor) for s in self._shadow)
        files = list(manifest.files)
        stored: dict[tuple[str, str], list[StoredBox]] = {}
        for box in manifest.boxes:
            stored.setdefault((box.stored.file, box.stored.spec.name), []).append(box)
        directory = version_name(manifest.version)
        reader = BoxReader(storage, directory, self._config.buffer_bytes)

        def read(piece: Piece) -> int:
            source = next(
                item
                for item in stored[files[piece.source], piece.name]
                if item.stored.spec.box.contains(piece.box)
            )
            return reader.read_into(source, piece.box, held.view(piece.name, piece.box))

        with ThreadPoolExecutor(self._config.num_threads, "weight-files") as pool:
            self._bytes_read = sum(pool.map(read, pieces))
        return pieces

    def _make_shadow(self, offered: Layout, wanted: Sequence[ShardSpec]) -> None:
        on_disk = tuple(
            ShardSpec(spec.name, spec.global_shape, spec.box, offered.tensors[spec.name].dtype)
            for spec in wanted
            if spec.name in offered.tensors and (spec.is_hollow or not spec.box.is_empty)
        )
        for spec in wanted:
            found = offered.tensors.get(spec.name)
            if found is not None:
                check_cast(spec, found.dtype, "the files have")
        if tuple(shard.spec for shard in self._shadow) != on_disk:
            self._shadow = ()
            self._shadow = tuple(
                Shard(spec, torch.empty(spec.box.shape, dtype=torch_dtype(spec.dtype)))
                for spec in on_disk
            )


def _sums_of(shard: Shard) -> tuple[int, ...]:
    sums = ChunkSums()
    flat = flat_bytes(shard.tensor.detach().cpu().contiguous())
    sums.add(lent_bytes(flat).data)
    return sums.result()
