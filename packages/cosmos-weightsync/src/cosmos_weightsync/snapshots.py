"""Copies of this rank's shards, one per version, that training cannot change any more.

A buffer is free, or holds a version; a version is pinned while somebody reads it. `publish` writes
into a free buffer, so the newest version can be had at all times; it allocates up to a limit, then
overwrites the newest version if nobody has begun to read it, then waits for a reader to finish.

```
free ─publish─► newest ─publish─► stale ─publish─► (overwritten)
                  │ ▲               │ ▲
              pin ▼ │ unpin     pin ▼ │ unpin      a pinned buffer is never written
```
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from cosmos_weightsync.arenas import Arena, Memory
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DeadlineError, PeerLostError, VersionError, VersionGoneError
from cosmos_weightsync.followed import FollowedTensors
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import torch_dtype
from cosmos_weightsync.version_checksums import ChecksumCache

__all__ = ["Published", "Snapshot", "SnapshotStore"]

NOT_WRITTEN = -1


class Published(Protocol):
    """Where a version comes from."""

    @property
    def specs(self) -> tuple[ShardSpec, ...]:
        """What receivers see."""
        ...

    @property
    def is_cuda(self) -> bool:
        """Whether the live values lie on a CUDA device."""
        ...

    @property
    def may_spoil(self) -> bool:
        """Whether ``prepare(spoils=True)`` is another than ``prepare()``."""
        ...

    def prepare(
        self, *, spoils: bool = False
    ) -> Callable[[Sequence[Tensor], FollowedTensors | None], None]:
        """Look at the values as they are now, and return what writes them.

        That fills one contiguous tensor for each of `specs`, all of them complete on return; the
        followed ones fill them, or are told that they are full.

        Args:
            spoils: What is returned may find too late that values cannot be encoded, and raise
                with the tensors spoiled, where that is faster.

        Raises:
            EncodingError: the values cannot be encoded.
        """
        ...


@dataclass(eq=False, slots=True)
class Snapshot:
    """One buffer. Its fields change under the store's lock only; read it while pinned.

    Attributes:
        arena: Its memory.
        held: The same as boxes, with the checksums of the version it holds.
        followed: The tensors as they are written and hashed.
        version: Which, or `NOT_WRITTEN`.
        num_pins: How many read it.
        was_read: Whether somebody has read this version, and so may still have it.
    """

    arena: Arena
    held: HeldBoxes
    followed: FollowedTensors
    version: int = NOT_WRITTEN
    num_pins: int = 0
    was_read: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The copies, in the order of the shards."""
        return self.arena.tensors


class SnapshotStore:
    """The versions one sender rank can serve.

    Args:
        source: What to copy.
        max_snapshots: How many buffers may be allocated, at least 2.
        num_bases: How many versions that were read are kept beyond these, as long as they are not
            older than the last so many: receivers that have one need only what changed since.
        memory: What the buffers are made of; pinned for a source on a CUDA device.
    """

    def __init__(
        self,
        source: Published,
        *,
        max_snapshots: int,
        num_bases: int = 0,
        memory: Memory = "shared",
    ) -> None:
        self._source = source
        self._max_snapshots = max_snapshots + num_bases
        self._num_bases = num_bases
        self._memory: Memory = memory
        self._checksums = ChecksumCache(source.specs)
        self._buffers: list[Snapshot] = []
        self._last = NOT_WRITTEN
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def newest_version(self) -> int | None:
        """The newest version that can be had, ``None`` before the first."""
        with self._changed:
            newest = max((buffer.version for buffer in self._buffers), default=NOT_WRITTEN)
        return None if newest == NOT_WRITTEN else newest

    @property
    def num_buffers(self) -> int:
        """How many copies of this rank's shards are allocated."""
        return len(self._buffers)

    def publish(self, version: int, deadline: Deadline) -> None:
        """Copy the shards as they are now; when this returns they may change.

        Raises:
            EncodingError: the values cannot be encoded; the version before stays the newest.
            VersionError: the version is not newer than the one before, or negative, or the store
                was closed.
            DeadlineError: every buffer is being read and none was freed in time.
        """
        with self._changed:
            self._check_next(version)
        write = self._source.prepare(spoils=True)  # raises before the newest may be overwritten
        with self._changed:
            self._check_next(version)
            buffer = self._free_buffer(version, deadline)
            is_newest = buffer.version == self._last != NOT_WRITTEN
            if is_newest and self._source.may_spoil:  # It can be had as long as nothing is wrong.
                write = self._source.prepare()
            buffer.version = NOT_WRITTEN
            buffer.was_read = False
        buffer.held.checksums = checksums = self._checksums.start()
        buffer.followed.expect(checksums.expected)
        write(buffer.tensors, buffer.followed)
        checksums.learn(buffer.followed.values)
        with self._changed:
            buffer.version = self._last = version
            self._changed.notify_all()

    def pin(
        self,
        at_least: int,
        prefer: Literal["newest", "oldest"],
        deadline: Deadline,
        *,
        at_most: int | None = None,
    ) -> Snapshot:
        """Take hold of a version for reading; wait until there is one.

        Args:
            at_least: The oldest version that will do.
            prefer: Which of those that will do.
            deadline: When to give up.
            at_most: The newest that will do; any when omitted.

        Raises:
            DeadlineError: no such version was published in time.
            VersionGoneError: only newer ones are left.
            PeerLostError: the store was closed.
        """
        pick = max if prefer == "newest" else min
        newest = math.inf if at_most is None else at_most
        with self._changed:
            while True:
                if self._is_closed:
                    raise PeerLostError("the sender is closing")
                fit = [b for b in self._buffers if max(at_least, 0) <= b.version <= newest]
                if fit:
                    chosen = pick(fit, key=lambda buffer: buffer.version)
                    chosen.num_pins += 1
                    return chosen
                if self._last > newest:
                    raise VersionGoneError(f"version {at_most} was superseded by {self._last}")
                left = deadline.remaining(f"version {at_least} to be published")
                self._changed.wait(timeout=left)

    def unpin(self, snapshot: Snapshot) -> None:
        """Give a pinned version back."""
        with self._changed:
            snapshot.num_pins -= 1
            snapshot.was_read = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody who waits; nothing can be pinned any more. May be repeated."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check_next(self, version: int) -> None:
        if version <= self._last or version < 0:
            raise VersionError(
                f"version {version} comes after version {self._last}: each must be newer than the "
                "one before, by however much"
            )
        if self._is_closed:
            raise VersionError(f"version {version} comes after the sender was closed")

    def _free_buffer(self, version: int, deadline: Deadline) -> Snapshot:
        """A buffer nobody reads; called, and returns, with the lock held."""
        while True:
            free = [b for b in self._buffers if b.num_pins == 0]
            stale = [b for b in free if b.version < self._last or self._last == NOT_WRITTEN]
            spare = self._without_bases(stale)
            if spare:
                return min(spare, key=lambda buffer: buffer.version)
            if len(self._buffers) < self._max_snapshots:
                self._buffers.append(self._allocate())
                return self._buffers[-1]
            if free:
                return min(free, key=lambda buffer: buffer.version)
            if self._is_closed:
                raise PeerLostError("the sender is closing")
            try:
                left = deadline.remaining("a receiver to finish reading")
            except DeadlineError as error:
                held = sorted(buffer.version for buffer in self._buffers)
                raise DeadlineError(
                    f"version {version} has no buffer: receivers still read versions {held}"
                ) from error
            self._changed.wait(timeout=left)

    def _without_bases(self, stale: Sequence[Snapshot]) -> list[Snapshot]:
        """All but the newest versions that a reader may want to build on."""
        read = [buffer for buffer in stale if buffer.was_read]
        read.sort(key=lambda buffer: buffer.version)
        bases = read[-self._num_bases :] if self._num_bases else []
        return [buffer for buffer in stale if buffer not in bases]

    def _allocate(self) -> Snapshot:
        specs = self._source.specs
        arena = Arena(
            [spec.box.shape for spec in specs],
            [torch_dtype(spec.dtype) for spec in specs],
            memory="pinned" if self._source.is_cuda else self._memory,
        )
        boxes = ((s.name, s.box, t) for s, t in zip(specs, arena.tensors, strict=True))
        followed = FollowedTensors(arena.tensors, specs)
        return Snapshot(arena, HeldBoxes(boxes, arena=arena), followed)
