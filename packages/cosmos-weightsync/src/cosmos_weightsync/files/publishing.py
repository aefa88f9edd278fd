"""A trainer publishes versions as directories: every rank writes its own shards, once.

```
every rank: layout ─► who writes which box ─► own files ─► own part of the manifest ─┐
rank 0:     all parts ─► manifest ─► rename (or, in an object store, the manifest itself) ─► old
            versions removed
```
The ranks meet in the storage and nowhere else. A directory counts as a version once it has its
manifest under its final name, and that happens in one step.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    StorageError,
    VersionError,
    WeightSyncError,
)
from cosmos_weightsync.files.checkpoints import INDEX_NAME, read_whole
from cosmos_weightsync.files.manifests import (
    MANIFEST_NAME,
    Manifest,
    StoredBox,
    committed_versions,
    version_name,
)
from cosmos_weightsync.files.storage import Storage, open_storage
from cosmos_weightsync.files.writing import write_file
from cosmos_weightsync.layout import Layout, ShardSpec, check_once
from cosmos_weightsync.living import check_in_place
from cosmos_weightsync.shards import Shard, cast_spec, check_wire_dtype, handed_over
from cosmos_weightsync.versions import version_number

__all__ = ["FileSender", "FileSenderConfig"]

POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSenderConfig:
    """How versions are written.

    Attributes:
        wire_dtype: Floating tensors are cast to this: ``bfloat16``. Empty keeps what is in memory.
        keep: How many versions remain; older ones are removed after each publish.
        file_bytes: A rank begins another file after so many bytes.
        session: The same on all ranks, and another one after every restart, so that what a
            crashed run left half written is never taken for this run's. One rank needs none.
        timeout_s: How long the ranks wait for one another.
        options: For the file system behind a URL: ``endpoint_url``, ``key``, ``secret``, ...
    """

    wire_dtype: str = ""
    keep: int = 2
    file_bytes: int = 4 << 30
    session: str = ""
    timeout_s: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_wire_dtype(self.wire_dtype)
        if self.keep < 1 or self.file_bytes < 1:
            raise ConfigurationError("keep and file_bytes must be at least 1")


class FileSender:
    """One rank of a side that publishes to a directory or an object store.

    Args:
        shards: What this rank holds, from `shards_of`; views of the live parameters.
        where: A directory that all ranks see, or a URL such as ``s3://bucket/run``.
        rank: This rank's number.
        num_ranks: How many there are.
        config: How to write.

    Raises:
        ConfigurationError: the rank is out of range, or several ranks have no session.
        LayoutError: a region is in two of the shards.

    Example:
        >>> sender = FileSender(shards_of(model), "checkpoints")
        >>> sender.publish(7)     # checkpoints/v00000007 is there, whole, or not at all
    """

    def __init__(
        self,
        shards: Iterable[Shard],
        where: str | os.PathLike[str] | Storage,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        config: FileSenderConfig | None = None,
    ) -> None:
        config = config or FileSenderConfig()
        if not 0 <= rank < num_ranks:
            raise ConfigurationError(f"rank {rank} is not one of {num_ranks} ranks")
        if num_ranks > 1 and not config.session:
            raise ConfigurationError(
                "several ranks need a session: any string that is the same on all of them and "
                "new after every restart"
            )
        given: tuple[Shard, ...] = handed_over(shards, (Shard,))
        held = [s for s in given if s.spec.is_hollow or not s.spec.box.is_empty]
        check_once((shard.spec for shard in held), f"sender rank {rank} holds")
        self._config = config
        self._rank, self._num_ranks = rank, num_ranks
        self._session = config.session or secrets.token_hex(4)
        self._storage = open_storage(where, config.options)
        self._shards = tuple(held)
        self._held = HeldBoxes((s.spec.name, s.spec.box, s.tensor) for s in held)
        self._specs = tuple(cast_spec(shard.spec, config.wire_dtype) for shard in held)
        self._files: list[tuple[int, str, list[ShardSpec]]] | None = None
        self._tried, self._num_tries = -1, 0
        self._committed = -1

    def publish(self, version: int) -> str:
        """Write a version; all ranks call this, and it returns when the version is committed.

        Returns:
            The digest of the version.

        Raises:
            VersionError: the version is there already, or a newer one is, or it is negative.
            StorageFullError: there is no room; what was there before still is.
            DeadlineError: a rank did not write its part in time.
            LayoutError: the model has moved into other memory than it was described in.
        """
        deadline = Deadline.after(self._config.timeout_s)
        version = version_number(version)
        final = version_name(version)
        if version < 0:
            raise VersionError(f"version {version} is negative")
        if self._storage.size(f"{final}/{MANIFEST_NAME}") is not None:
            raise VersionError(f"{self._storage.url}/{final} is there already")
        newer = [number for number in committed_versions(self._storage) if number > version]
        if newer:
            raise VersionError(
                f"{self._storage.url} has version {newer[-1]}, which receivers would take in the "
                f"place of {version}: remove what an earlier run left, or publish elsewhere"
            )
        staging = f".staging-{final}-{self._session}" if self._storage.can_rename else final
        self._num_tries = self._num_tries + 1 if version == self._tried else 1
        self._tried = version
        # What a try that failed has left there is of other weights, or says that it failed.
        parts = f"{staging}/{self._parts}/{self._num_tries}"
        try:
            check_in_place(self._shards)
            return self._publish(version, (staging, parts), deadline)
        except BaseException as error:
            self._give_up((staging, parts), error)
            raise

    @property
    def _parts(self) -> str:
        """Where the ranks of this run meet, in the directory of a version."""
        return f".parts-{self._session}"

    def _publish(self, version: int, paths: tuple[str, str], deadline: Deadline) -> str:
        staging, parts = paths
        sizes: dict[str, int] = {}
        boxes: list[StoredBox] = []
        for owner, file, specs in self._agreed_files(parts, deadline):
            if owner == self._rank:
                path = f"{staging}/{file}"
                try:
                    sizes[file], found = write_file(
                        self._storage, path, specs, self._held, {"format": "pt"}
                    )
                except StorageError as error:
                    raise type(error)(f"sender rank {self._rank}: {error}") from error
                boxes.extend(found)
        own = {"files": sizes, "boxes": [box.to_json() for box in boxes]}
        if self._rank == 0:
            return self._commit(version, paths, own, deadline)
        self._storage.write(f"{parts}/part-{self._rank}.json", [json.dumps(own).encode()])
        return self._await_commit(version, parts, deadline)

    def _agreed_files(
        self, parts: str, deadline: Deadline
    ) -> list[tuple[int, str, list[ShardSpec]]]:
        """Every file of every rank; the same list on all ranks."""
        own = Layout.from_ranks([self._specs])
        if self._num_ranks > 1 and self._committed < 0:  # One that is committed all ranks knew.
            self._storage.write(f"{parts}/layout-{self._rank}.msgpack", [own.to_msgpack()])
        if self._files is None:
            layouts = [own]
            if self._num_ranks > 1:
                texts = self._gather(
                    f"{parts}/layout-", ".msgpack", range(self._num_ranks), deadline
                )
                layouts = [Layout.from_msgpack(text) for text in texts]
            merged = Layout.merge(layouts)
            self._files = _named(_assigned(merged), self._config.file_bytes)
        return self._files

    def _gather(
        self, prefix: str, suffix: str, ranks: Iterable[int], deadline: Deadline
    ) -> list[bytes]:
        found: list[bytes] = []
        for rank in ranks:
            path = f"{prefix}{rank}{suffix}"
            self._await(
                lambda path=path: self._storage.size(path) is not None,
                f"rank {rank} to write its part",
                prefix.rpartition("/")[0],
                deadline,
            )
            found.append(read_whole(self._storage, path))
        return found

    def _await(
        self, is_there: Callable[[], bool], what: str, parts: str, deadline: Deadline
    ) -> None:
        while not is_there():
            failed = [name for name in self._storage.names(parts) if name.startswith("failed-")]
            if failed:
                reason = read_whole(self._storage, f"{parts}/{failed[0]}").decode()
                raise PeerLostError(f"rank {failed[0].removeprefix('failed-')}: {reason}")
            time.sleep(min(POLL_S, deadline.remaining(what)))

    def _commit(
        self, version: int, paths: tuple[str, str], own: Mapping[str, Any], deadline: Deadline
    ) -> str:
        staging, parts = paths
        texts = self._gather(f"{parts}/part-", ".json", range(1, self._num_ranks), deadline)
        pieces = [own, *(json.loads(text) for text in texts)]
        files = {name: size for piece in pieces for name, size in piece["files"].items()}
        boxes = [StoredBox.from_json(row) for piece in pieces for row in piece["boxes"]]
        manifest = Manifest.of(version, dict(sorted(files.items())), boxes)
        index = _index(manifest)
        if index is not None:
            self._storage.write(f"{staging}/{INDEX_NAME}", [json.dumps(index, indent=1).encode()])
        self._storage.write(f"{staging}/{MANIFEST_NAME}", [manifest.encode()])
        if self._storage.can_rename:
            self._storage.remove(f"{staging}/{self._parts}")
            self._storage.rename(staging, version_name(version))
            self._committed = version
        else:
            self._committed = version
            self._storage.remove(f"{staging}/{self._parts}")
        self._retire(version)
        return manifest.digest

    def _await_commit(self, version: int, parts: str, deadline: Deadline) -> str:
        path = f"{version_name(version)}/{MANIFEST_NAME}"
        self._await(
            lambda: self._storage.size(path) is not None, "rank 0 to commit", parts, deadline
        )
        digest = Manifest.decode(read_whole(self._storage, path), path).digest
        self._committed = version
        return digest

    def _retire(self, version: int) -> None:
        """Remove what is too old, and what crashed runs left of versions before this one."""
        for old in committed_versions(self._storage)[: -self._config.keep]:
            if old < version:
                _remove_version(self._storage, version_name(old))
        for name in self._storage.names():
            if name.startswith((".staging-v", ".removed-v")):
                number = name.partition("-v")[2].partition("-")[0]
                if number.isdecimal() and int(number) <= version:
                    self._storage.remove(name)
            elif (  # Written in its place, and given up: it will not be published any more.
                not self._storage.can_rename
                and _number_of(name) in range(version)
                and self._storage.size(f"{name}/{MANIFEST_NAME}") is None
            ):
                self._storage.remove(name)

    def _give_up(self, paths: tuple[str, str], error: BaseException) -> None:
        """Tell the other ranks, as far as the storage still works; leave no half version."""
        staging, parts = paths
        try:
            is_told = isinstance(error, VersionError | PeerLostError | DeadlineError)
            if is_told or self._committed == self._tried:
                return
            if self._num_ranks == 1:
                self._storage.remove(staging)
            else:
                text = f"{type(error).__name__}: {error}"
                self._storage.write(f"{parts}/failed-{self._rank}", [text.encode()])
        except WeightSyncError as worse:
            error.add_note(f"cleaning up failed as well: {worse}")


def _assigned(layout: Layout) -> list[list[ShardSpec]]:
    """Every distinct box once, by the rank that has the least to write among those that hold it."""
    load = [0] * layout.num_ranks
    assigned: list[list[ShardSpec]] = [[] for _ in range(layout.num_ranks)]
    for name, entry in layout.tensors.items():
        geometry = layout.geometries[entry.geometry]
        holders: dict[Box, list[int]] = {}
        rows = zip(geometry.ranks, geometry.starts, geometry.stops, strict=True)
        for rank, start, stop in rows:
            box = Box(tuple(start.tolist()), tuple(stop.tolist()))
            holders.setdefault(box, []).append(int(rank))
        for box, ranks in holders.items():
            spec = ShardSpec(name, geometry.shape, box, entry.dtype)
            chosen = min(ranks, key=lambda rank: (load[rank], rank))
            load[chosen] += spec.num_bytes
            assigned[chosen].append(spec)
    assigned[0].extend(layout.hollow_specs())
    return assigned


def _named(
    assigned: list[list[ShardSpec]], file_bytes: int
) -> list[tuple[int, str, list[ShardSpec]]]:
    """Cut each rank's share into files and number them as Hugging Face does."""
    contents = [
        (rank, group) for rank, specs in enumerate(assigned) for group in _groups(specs, file_bytes)
    ]
    total = len(contents)
    if total == 1:
        return [(contents[0][0], "model.safetensors", contents[0][1])]
    return [
        (rank, f"model-{number:05d}-of-{total:05d}.safetensors", group)
        for number, (rank, group) in enumerate(contents, start=1)
    ]


def _groups(specs: list[ShardSpec], file_bytes: int) -> Iterator[list[ShardSpec]]:
    group: list[ShardSpec] = []
    filled = 0
    for spec in specs:
        if group and filled + spec.num_bytes > file_bytes:
            yield group
            group, filled = [], 0
        group.append(spec)
        filled += spec.num_bytes
    if group:
        yield group


def _index(manifest: Manifest) -> dict[str, Any] | None:
    """What Hugging Face's loaders look for; only where every tensor is whole."""
    specs = [(box.stored.spec, box.stored.file) for box in manifest.boxes]
    if any(spec.box != Box.full(spec.global_shape) for spec, _ in specs):
        return None
    return {
        "metadata": {"total_size": manifest.num_bytes},
        "weight_map": {spec.name: file for spec, file in specs},
    }


def _number_of(name: str) -> int:
    """Of the version whose directory this is; -1 if it is none."""
    return int(name[1:]) if name.startswith("v") and name[1:].isdecimal() else -1


def _remove_version(storage: Storage, name: str) -> None:
    """Never leave a directory that looks like a version and is not one."""
    if storage.can_rename:
        aside = f".removed-{name}-{secrets.token_hex(4)}"
        storage.rename(name, aside)
        storage.remove(aside)
    else:
        storage.remove(f"{name}/{MANIFEST_NAME}")
        storage.remove(name)
