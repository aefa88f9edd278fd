"""A receiver's memory: one version arrives in it, is verified, and can be passed on meanwhile.

```
empty ─begin(v)─► arriving ─settle─► whole ─begin(w)─► arriving ─give_up─► lost ─begin─► …
                     │  readers of v see regions as    │ readers of v are waited for a little,
                     ▼  they arrive, and learn that    ▼ then hung up on
                        they are good when verified
```
There is one memory, so a reader of v is in the way of w. Readers are the smaller evil to lose:
whoever was hung up on gets the rest of v elsewhere.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.boxes import Box, subtract_all
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DeadlineError, PeerLostError, VersionGoneError
from cosmos_weightsync.holding import Reader, Region, VersionRange
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.shards import Shard
from cosmos_weightsync.version_checksums import VersionChecksums

__all__ = ["Shadow"]

State = Literal["empty", "arriving", "whole", "lost"]
Received = Callable[[], Mapping[Piece, int]]
"""Tells the pieces that a version came in, and the checksum of each."""


class Shadow:
    """Holds at most one version. Everything may be called from any thread.

    Attributes:
        num_bytes: Of the memory.
    """

    def __init__(self) -> None:
        self._shards: tuple[Shard, ...] = ()
        self._layout: Layout | None = None
        self._arriving = HeldBoxes(())
        self._here = HeldBoxes(())
        self.num_bytes = 0
        self._state: State = "empty"
        self._received: Received = dict[Piece, int]
        self._version = -1
        self._run_id = ""
        self._arrived = _Regions()
        self._verified = _Regions()
        self._arrived_bytes = 0
        self._pins: set[_Pin] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The memory, by what it is for."""
        return self._shards

    @property
    def whole_version(self) -> int | None:
        """The version that is there and verified, if one is."""
        with self._changed:
            return self._version if self._state == "whole" else None

    @property
    def run_id(self) -> str:
        """Of the trainer that made the version."""
        return self._run_id

    @property
    def arrived_bytes(self) -> int:
        """How much of the version that arrives, or arrived last, has come; not yet verified."""
        return self._arrived_bytes

    def place(self, shards: Iterable[Shard], arena: Arena | None = None) -> None:
        """Use this memory from now on, all of it in the arena; it holds no version yet."""
        with self._changed:
            self._evict(Deadline.after(0.0))
            self._shards = tuple(shards)
            self.num_bytes = sum(shard.spec.num_bytes for shard in self._shards)
            self._layout = Layout.from_ranks([[shard.spec for shard in self._shards]])
            self._arriving = HeldBoxes(self._held(), on_arrival=self._count)
            self._here = HeldBoxes(self._held(), arena=arena)
            self._state = "empty"
            self._changed.notify_all()

    def begin(self, version: int, run_id: str, linger: Deadline) -> None:
        """Let a version arrive; readers of the one before have until ``linger`` to finish."""
        with self._changed:  # all the time: nobody may come when the last has gone
            self._evict(linger)
            self._state = "arriving"
            self._version, self._run_id = version, run_id
            self._arrived, self._verified = _Regions(), _Regions()
            self._arrived_bytes = 0
            self._changed.notify_all()

    def arriving(self) -> HeldBoxes:
        """Where to put what arrives; counts it as arrived when told so."""
        return self._arriving

    def here(self) -> HeldBoxes:
        """The memory as it is."""
        return self._here

    def split(self, specs: Iterable[ShardSpec]) -> tuple[list[ShardSpec], list[ShardSpec]]:
        """Which parts of these regions have arrived, and which have not."""
        here: list[ShardSpec] = []
        missing: list[ShardSpec] = []
        with self._changed:
            for spec in specs:
                away = subtract_all(spec.box, self._arrived.of(spec.name))
                missing += [_part(spec, box) for box in away]
                here += [_part(spec, box) for box in subtract_all(spec.box, away)]
        return here, missing

    def verify(self, specs: Iterable[ShardSpec]) -> None:
        """These regions are what their holder has: readers may be told."""
        with self._changed:
            self._verified.add((spec.name, spec.box) for spec in specs)
            self._changed.notify_all()

    def taint(self) -> None:
        """Something that had arrived was wrong: hang up on all who may have read it."""
        with self._changed:
            self._drop_pins()

    def settle(self, received: Received) -> None:
        """All is there and verified.

        Args:
            received: What it came in, with the checksums; readers of it all are told no others.
        """
        with self._changed:
            self._here.checksums, self._received = None, received
            self._state = "whole"
            self._changed.notify_all()

    def give_up(self) -> None:
        """The rest will not come: what is here is of no use to anybody."""
        with self._changed:
            if self._state == "arriving":
                self._state = "lost"
                self._drop_pins()

    def close(self) -> None:
        """Hang up on all readers, for good. May be repeated."""
        with self._changed:
            self._is_closed = True
            self._drop_pins()

    def layout(self, deadline: Deadline) -> Layout:
        """What is held of every version; waits until it is known."""
        with self._changed:
            self._wait(lambda: self._layout is not None, "this receiver to meet a sender", deadline)
            if self._layout is None:
                raise PeerLostError("the receiver is closing")
            return self._layout

    def pin(self, wanted: VersionRange, deadline: Deadline, reader: Reader) -> "_Pin":
        """Hold the version for a reader; waits until it is one that will do."""

        def fits() -> bool:
            if self._state not in {"arriving", "whole"}:
                return False
            if wanted.at_most is not None and self._version > wanted.at_most:
                raise VersionGoneError(
                    f"the receiver has version {self._version}, not {wanted.at_most} any more"
                )
            return self._version in wanted

        with self._changed:
            self._wait(fits, f"version {wanted.at_least} to reach this receiver", deadline)
            if self._is_closed:
                raise PeerLostError("the receiver is closing")
            pin = _Pin(self, self._version, self._run_id, reader)
            self._pins.add(pin)
            return pin

    def await_region(self, pin: "_Pin", name: str, box: Box, deadline: Deadline) -> None:
        """Return once the region is there for this reader."""

        def is_there() -> bool:
            if pin not in self._pins:
                raise VersionGoneError(f"the receiver gave version {pin.version} up")
            return self._state == "whole" or not subtract_all(box, self._arrived.of(name))

        with self._changed:
            self._wait(is_there, f"{name} {box} to reach this receiver", deadline)

    def await_verified(self, pin: "_Pin", regions: Sequence[Region], deadline: Deadline) -> None:
        """Return once these regions are known to be good."""
        left = list(regions)

        def are_good() -> bool:
            if pin not in self._pins:
                raise VersionGoneError(f"the receiver gave version {pin.version} up")
            while left and not subtract_all(left[-1][1], self._verified.of(left[-1][0])):
                left.pop()
            return self._state == "whole" or not left

        with self._changed:
            self._wait(are_good, f"version {pin.version} to be verified", deadline)

    def unpin(self, pin: "_Pin") -> None:
        """A reader is done. May be repeated."""
        with self._changed:
            self._pins.discard(pin)
            self._changed.notify_all()

    def boxes_for(self, pin: "_Pin", deadline: Deadline) -> HeldBoxes:
        """The memory as one reader may see it.

        What is whole can be read where it lies: before it is overwritten the reader is hung up on.
        """
        with self._changed:
            if self._state == "whole" and pin in self._pins:
                if self._here.checksums is None:  # Most receivers have no readers.
                    specs = [shard.spec for shard in self._shards]
                    sums = VersionChecksums.of_received(self._received(), specs)
                    self._here.checksums = sums
                return self._here
        return HeldBoxes(
            self._held(),
            on_view=lambda name, box: self.await_region(pin, name, box, deadline),
        )

    def _held(self) -> list[tuple[str, Box, Tensor]]:
        return [(s.spec.name, s.spec.box, s.tensor) for s in self._shards]

    def _count(self, regions: Sequence[Region], num_bytes: int) -> bool:
        with self._changed:
            self._arrived.add(regions)
            self._arrived_bytes += num_bytes
            self._changed.notify_all()
            return bool(self._pins)

    def _evict(self, linger: Deadline) -> None:
        """Have no readers, at ``linger`` at the latest. Called with the lock held."""
        try:
            self._wait(lambda: not self._pins, "readers", linger)
        except DeadlineError:
            self._drop_pins()

    def _drop_pins(self) -> None:
        """Called with the lock held."""
        pins, self._pins = self._pins, set()
        for pin in pins:
            pin.reader.hang_up()
        self._changed.notify_all()

    def _wait(self, is_ready: Callable[[], bool], what: str, deadline: Deadline) -> None:
        """Wait with the lock held."""
        while not is_ready() and not self._is_closed:
            self._changed.wait(timeout=deadline.remaining(what))


class _Regions:
    """Regions by name; sorted only once somebody asks, as mostly nobody does."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[Box]] = {}
        self._unsorted: list[Iterable[Region]] = []

    def add(self, regions: Iterable[Region]) -> None:
        self._unsorted.append(regions)

    def of(self, name: str) -> Sequence[Box]:
        for regions in self._unsorted:
            for region, box in regions:
                self._boxes.setdefault(region, []).append(box)
        self._unsorted = []
        return self._boxes.get(name, ())


class _Pin:
    """A `cosmos_weightsync.holding.PinnedVersion` of a shadow."""

    def __init__(self, shadow: Shadow, version: int, run_id: str, reader: Reader) -> None:
        self._shadow = shadow
        self._version = version
        self._run_id = run_id
        self.reader = reader

    @property
    def version(self) -> int:
        return self._version

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def is_whole(self) -> bool:
        return self._shadow.whole_version == self._version

    def boxes(self, deadline: Deadline) -> HeldBoxes:
        return self._shadow.boxes_for(self, deadline)

    def settle(self, regions: Sequence[Region], deadline: Deadline) -> None:
        self._shadow.await_verified(self, regions, deadline)

    def release(self) -> None:
        self._shadow.unpin(self)


def _part(spec: ShardSpec, box: Box) -> ShardSpec:
    return ShardSpec(spec.name, spec.global_shape, box, spec.dtype)
