"""Copies of this rank's shards, one per version, that training cannot change any more.

A buffer is free, or holds a version; a version is pinned while somebody reads it. `reserve` takes a
free buffer for the next version, so the newest can be had at all times; it allocates up to a limit,
then takes that of the newest version if nobody has begun to read it, and then there is none: it
waits for nobody. Whether to wait (`publish`) or to do without is for the caller.

```
free ─fill─► newest ─fill─► stale ─reserve─► reserved ─fill─► newest
               │ ▲            │ ▲              └─release─► as it was
           pin ▼ │ unpin  pin ▼ │ unpin         a pinned buffer is never reserved
```
A reader that has had a version for longer than it may is hung up on once its buffer is wanted.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from cosmos_weightsync.arenas import Arena, Memory
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DeadlineError, PeerLostError, VersionError, VersionGoneError
from cosmos_weightsync.followed import FollowedTensors, Placed
from cosmos_weightsync.holding import Reader, VersionRange
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import torch_dtype
from cosmos_weightsync.version_checksums import ChecksumCache

__all__ = ["Pin", "Published", "Snapshot", "SnapshotStore"]

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
        placed: Where ``held`` has its boxes.
        version: Which, or `NOT_WRITTEN`.
        pins: Of those who read it.
        was_read: Whether somebody has read this version, and so may still have it.
        is_reserved: Whether it is about to be written, so that nobody may begin to read it.
    """

    arena: Arena
    held: HeldBoxes
    followed: FollowedTensors
    placed: Sequence[Placed]
    version: int = NOT_WRITTEN
    pins: "list[Pin]" = field(default_factory=list["Pin"])
    was_read: bool = False
    is_reserved: bool = False


@dataclass(eq=False, frozen=True, slots=True)
class Pin:
    """A version held for one reader.

    Attributes:
        snapshot: What is read.
        version: Which that is.
        reader: By whom.
        until_s: When it has had the time it may take, by the store's clock.
    """

    snapshot: Snapshot
    version: int
    reader: Reader
    until_s: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of each shard's copy, in their order."""
        return self.snapshot.arena.tensors


class SnapshotStore:
    """The versions one sender rank can serve.

    Args:
        source: What to copy.
        max_snapshots: How many buffers may be allocated, at least 2.
        num_bases: How many versions that were read are kept beyond these, as long as they are not
            older than the last so many: receivers that have one need only what changed since.
        memory: What the buffers are made of; pinned for a source on a CUDA device.
        read_s: How long one reader may have a version of which the buffer is wanted.
        clock: Seconds that never run backwards.
    """

    def __init__(
        self,
        source: Published,
        *,
        max_snapshots: int,
        num_bases: int = 0,
        memory: Memory = "shared",
        read_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._max_snapshots = max_snapshots + num_bases
        self._num_bases = num_bases
        self._memory: Memory = memory
        self._read_s = read_s
        self._clock = clock
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

    def readers(self) -> tuple[str, ...]:
        """Say of each version that is being read by whom."""
        with self._changed:
            read = sorted((b for b in self._buffers if b.pins), key=lambda buffer: buffer.version)
            return tuple(f"version {b.version} by {_names(b.pins)}" for b in read)

    def publish(self, version: int, deadline: Deadline) -> None:
        """Copy the shards as they are now; when this returns they may change.

        Raises:
            EncodingError: the values cannot be encoded; the version before stays the newest.
            VersionError: the version is not newer than the one before, or negative, or the store
                was closed.
            DeadlineError: every buffer is being read and none was freed in time; by whom.
        """
        while (buffer := self.reserve(version)) is None:
            self._wait_for_a_reader(version, deadline)
        self.fill(buffer, version)

    def reserve(self, version: int) -> Snapshot | None:
        """Take a buffer for a version, if there is one that nobody reads; never waits.

        Readers that have had theirs for too long are hung up on where there is none, which frees
        one soon after.

        Returns:
            What is to be given to `fill`, or to `release`; ``None`` if every buffer is being read.

        Raises:
            VersionError: as `publish`.
        """
        with self._changed:
            self._check_next(version)
            buffer = self._free_buffer()
            if buffer is not None:
                buffer.is_reserved = True
                return buffer
            now = self._clock()
            late = [p.reader for b in self._buffers for p in b.pins if p.until_s <= now]
        for reader in late:
            reader.hang_up()
        return None

    def release(self, buffer: Snapshot) -> None:
        """Let a reserved buffer be as it was. May be repeated."""
        with self._changed:
            buffer.is_reserved = False
            self._changed.notify_all()

    def fill(self, buffer: Snapshot, version: int) -> None:
        """Copy the shards as they are now into a reserved buffer.

        Raises:
            EncodingError: the values cannot be encoded; the version before stays the newest.
        """
        try:
            # The newest can be had as long as nothing is wrong with the next.
            is_newest = buffer.version == self._last != NOT_WRITTEN
            write = self._source.prepare(spoils=not is_newest)
            with self._changed:
                buffer.version = NOT_WRITTEN
                buffer.was_read = False
            checksums = self._checksums.start()
            buffer.followed.expect(checksums.expected)
            write(buffer.arena.tensors, buffer.followed)
            checksums.learn(buffer.followed.values)
            with self._changed:
                if buffer.placed is not buffer.followed.placed:
                    buffer.placed = buffer.followed.placed
                    buffer.held = HeldBoxes(buffer.placed, arena=buffer.arena)
                buffer.held.checksums = checksums
                buffer.version = self._last = version
        finally:
            self.release(buffer)

    def pin(self, wanted: VersionRange, deadline: Deadline, reader: Reader) -> Pin:
        """Take hold of a version for reading; wait until there is one.

        Args:
            wanted: Which will do. One to spare is not given if the next version would have no
                buffer then.
            deadline: When to give up.
            reader: Who is to read it.

        Raises:
            DeadlineError: no such version was published in time.
            VersionGoneError: only newer ones are left, or it cannot be spared.
            PeerLostError: the store was closed.
        """
        pick = max if wanted.prefer == "newest" else min
        with self._changed:
            while True:
                if self._is_closed:
                    raise PeerLostError("the sender is closing")
                fit = [buffer for buffer in self._buffers if buffer.version in wanted]
                free = [buffer for buffer in fit if not buffer.is_reserved]
                if free:
                    return self._pin(pick(free, key=lambda b: b.version), wanted, reader)
                if not fit and wanted.at_most is not None and self._last > wanted.at_most:
                    gone = f"version {wanted.at_most} was superseded by {self._last}"
                    raise VersionGoneError(gone)
                left = deadline.remaining(f"version {wanted.at_least} to be published")
                self._changed.wait(timeout=left)

    def unpin(self, pin: Pin) -> None:
        """Give a pinned version back."""
        with self._changed:
            pin.snapshot.pins.remove(pin)
            pin.snapshot.was_read = True
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody who waits; nothing can be pinned any more. May be repeated."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _pin(self, buffer: Snapshot, wanted: VersionRange, reader: Reader) -> Pin:
        """Called with the lock held."""
        num_read = sum(bool(other.pins) for other in self._buffers)
        if wanted.is_spare and not buffer.pins and num_read + 1 >= self._max_snapshots:
            raise VersionGoneError(f"version {buffer.version} makes room for the next")
        pin = Pin(buffer, buffer.version, reader, self._clock() + self._read_s)
        buffer.pins.append(pin)
        return pin

    def _check_next(self, version: int) -> None:
        if version <= self._last or version < 0:
            raise VersionError(
                f"version {version} comes after version {self._last}: each must be newer than the "
                "one before, by however much"
            )
        if self._is_closed:
            raise VersionError(f"version {version} comes after the sender was closed")

    def _free_buffer(self) -> Snapshot | None:
        """A buffer nobody reads, if there is one; called with the lock held."""
        free = [b for b in self._buffers if not b.pins and not b.is_reserved]
        stale = [b for b in free if b.version < self._last or self._last == NOT_WRITTEN]
        spare = self._without_bases(stale)
        if spare:
            return min(spare, key=lambda buffer: buffer.version)
        if len(self._buffers) < self._max_snapshots:
            self._buffers.append(self._allocate())
            return self._buffers[-1]
        return min(free, key=lambda buffer: buffer.version, default=None)

    def _wait_for_a_reader(self, version: int, deadline: Deadline) -> None:
        """Return when one may have finished, or has had its time."""
        with self._changed:
            if not all(buffer.pins for buffer in self._buffers) or self._is_closed:
                return
            pins = [pin for buffer in self._buffers for pin in buffer.pins]
            try:
                left = deadline.remaining("a receiver to finish reading")
            except DeadlineError as error:
                held = sorted(buffer.version for buffer in self._buffers)
                raise DeadlineError(
                    f"version {version} has no buffer: receivers still read versions {held}: "
                    f"{_names(pins)}"
                ) from error
            now = self._clock()
            until_late = min((p.until_s - now for p in pins if p.until_s > now), default=left)
            self._changed.wait(timeout=min(left, until_late))

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
        followed = FollowedTensors(arena.tensors, specs, may_arrange=True)
        return Snapshot(arena, HeldBoxes((), arena=arena), followed, ())


def _names(pins: Sequence[Pin]) -> str:
    """Who they are of, each once."""
    return ", ".join(dict.fromkeys(pin.reader.name for pin in pins))
