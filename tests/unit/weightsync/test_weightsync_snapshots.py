"""Snapshots: what is being read is never written, and publishing waits for nobody else."""

import math
import threading
from collections.abc import Sequence

import pytest
import torch

from cosmos_weightsync import (
    Box,
    DeadlineError,
    EncodingError,
    PeerLostError,
    Shard,
    ShardSpec,
    VersionError,
    VersionGoneError,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.encodings import Cast, EncodedShards, RowwiseFp8, encode
from cosmos_weightsync.holding import Reader, VersionRange
from cosmos_weightsync.snapshots import Pin, SnapshotStore


@pytest.fixture
def live() -> torch.Tensor:
    return torch.zeros(3)


@pytest.fixture
def store(live: torch.Tensor) -> SnapshotStore:
    shard = Shard(ShardSpec("w", (3,), Box.full((3,)), "float32"), live)
    return SnapshotStore(encode([shard], [Cast(dtype="bfloat16")]), max_snapshots=3)


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline.after(seconds)


def publish(store: SnapshotStore, live: torch.Tensor, version: int) -> None:
    live.fill_(float(version))
    store.publish(version, soon(0.2))


def pin(
    store: SnapshotStore, at_least: int, *, seconds: float = 10.0, name: str = "somebody"
) -> Pin:
    return store.pin(VersionRange(at_least), soon(seconds), Reader(name, lambda: None))


def test_a_pinned_version_outlives_any_number_of_newer_ones(store, live):
    publish(store, live, 1)
    first = pin(store, 0)
    for version in range(2, 9):
        publish(store, live, version)
    assert (first.version, first.tensors[0].tolist()) == (1, [1.0, 1.0, 1.0])
    assert pin(store, 0).tensors[0].tolist() == [8.0, 8.0, 8.0]


def test_two_buffers_are_enough_for_a_reader_of_one_version_at_a_time(store, live):
    for version in range(1, 6):
        publish(store, live, version)
        store.unpin(pin(store, version))
    assert store.num_buffers == 2


def test_the_copy_is_cast_once(store, live):
    publish(store, live, 1)
    assert pin(store, 1).tensors[0].dtype == torch.bfloat16


def test_publishing_gives_up_when_readers_hold_every_buffer(store, live):
    for version, name in ((1, "a"), (2, "b"), (3, "a")):
        publish(store, live, version)
        pin(store, version, name=name)
    with pytest.raises(DeadlineError, match=r"version 4 .* still read versions \[1, 2, 3\]: a, b$"):
        publish(store, live, 4)


def test_nothing_is_reserved_and_nobody_waited_for_when_readers_hold_every_buffer(store, live):
    held = []
    for version, name in ((1, "a"), (2, "b"), (3, "c")):
        publish(store, live, version)
        held.append(pin(store, version, name=name))
    assert store.reserve(4) is None
    assert store.readers() == ("version 1 by a", "version 2 by b", "version 3 by c")
    store.unpin(held[1])
    live.fill_(5.0)
    buffer = store.reserve(5)
    assert buffer is not None
    store.fill(buffer, 5)
    assert (store.newest_version, store.num_buffers) == (5, 3)
    assert [p.tensors[0][0].item() for p in (held[0], held[2], pin(store, 4))] == [1.0, 3.0, 5.0]


def test_readers_of_two_versions_leave_a_buffer_for_every_other(store, live):
    for version in (1, 2):
        publish(store, live, version)
        pin(store, version)
    for version in range(3, 20):
        buffer = store.reserve(version)
        assert buffer is not None
        store.fill(buffer, version)
    assert (store.newest_version, store.num_buffers) == (19, 3)


def test_what_was_reserved_and_is_released_can_be_had_as_before(store, live):
    for version in (1, 2):
        publish(store, live, version)
        pin(store, version)
    publish(store, live, 3)
    buffer = store.reserve(4)
    assert buffer is not None
    assert buffer.version == 3, "the newest, as all others are read"
    with pytest.raises(DeadlineError):
        pin(store, 3, seconds=0.05)
    threading.Timer(0.1, lambda: store.release(buffer)).start()
    assert pin(store, 3).tensors[0].tolist() == [3.0, 3.0, 3.0]
    assert store.reserve(4) is None


def test_who_reads_for_too_long_is_hung_up_on_once_the_buffer_is_wanted(live):
    shard = Shard(ShardSpec("w", (3,), Box.full((3,)), "float32"), live)
    now, hung_up = 0.0, []
    encoded = encode([shard], [Cast(dtype="bfloat16")])
    store = SnapshotStore(encoded, max_snapshots=2, read_s=60.0, clock=lambda: now)
    pins = {}
    for version, name in ((1, "slow"), (2, "quick")):
        publish(store, live, version)
        reader = Reader(name, lambda name=name: hung_up.append(name))
        pins[name] = store.pin(VersionRange(version), soon(), reader)
        now += 30.0
    now = 59.0
    assert store.reserve(3) is None
    assert hung_up == []
    now = 60.0
    assert store.reserve(3) is None
    assert hung_up == ["slow"]
    store.unpin(pins["slow"])  # as the thread that converses with it does then
    assert store.reserve(3) is not None


def test_publishing_outlives_a_reader_that_is_too_slow(live):
    shard = Shard(ShardSpec("w", (3,), Box.full((3,)), "float32"), live)
    encoded = encode([shard], [Cast(dtype="bfloat16")])
    store = SnapshotStore(encoded, max_snapshots=2, read_s=0.1)
    for version in (1, 2):
        store.publish(version, soon())
        pins = []
        reader = Reader("slow", lambda pins=pins: store.unpin(pins.pop()) if pins else None)
        pins.append(store.pin(VersionRange(version), soon(), reader))
    store.publish(3, soon())
    assert store.newest_version == 3


def test_a_version_to_build_on_is_not_spared_if_the_next_would_have_no_buffer(live):
    shard = Shard(ShardSpec("w", (3,), Box.full((3,)), "float32"), live)
    store = SnapshotStore(encode([shard], [Cast(dtype="bfloat16")]), max_snapshots=2)
    publish(store, live, 1)
    publish(store, live, 2)
    base = VersionRange.exactly(1, is_spare=True)
    newest = pin(store, 2)
    with pytest.raises(VersionGoneError, match="version 1 makes room for the next"):
        store.pin(base, soon(), newest.reader)
    store.unpin(newest)
    held = store.pin(base, soon(), newest.reader)
    store.unpin(held)
    by_itself = pin(store, 2)
    store.unpin(by_itself)
    older = store.pin(VersionRange.exactly(1), soon(), newest.reader)
    assert store.pin(base, soon(), newest.reader).version == older.version, "somebody reads it"


def test_publishing_goes_on_when_a_reader_finishes(store, live):
    held = []
    for version in (1, 2, 3):
        publish(store, live, version)
        held.append(pin(store, version))
    threading.Timer(0.1, lambda: store.unpin(held[1])).start()
    store.publish(4, soon())
    assert pin(store, 4).version == 4


def test_the_oldest_that_will_do_can_be_asked_for(store, live):
    publish(store, live, 1)
    publish(store, live, 2)
    oldest = VersionRange(1, prefer="oldest")
    assert store.pin(oldest, soon(), Reader("somebody", lambda: None)).version == 1
    assert pin(store, 1).version == 2


def test_pinning_waits_for_the_version(store, live):
    threading.Timer(0.1, lambda: publish(store, live, 5)).start()
    assert pin(store, 5).version == 5


def test_pinning_gives_up_in_time(store):
    with pytest.raises(DeadlineError, match="version 1 to be published"):
        pin(store, 1, seconds=0.1)


def test_closing_wakes_who_waits(store):
    threading.Timer(0.1, store.close).start()
    with pytest.raises(PeerLostError):
        pin(store, 1)


def test_values_that_cannot_be_encoded_cost_no_version(live):
    """With all others pinned, the newest version's buffer is the one that would be written."""
    matrix = torch.zeros(2, 4)
    shard = Shard(ShardSpec("w", (2, 4), Box.full((2, 4)), "float32"), matrix)
    store = SnapshotStore(encode([shard], [RowwiseFp8(names=("w",))]), max_snapshots=2)
    publish(store, matrix, 1)
    pin(store, 1)
    publish(store, matrix, 2)
    matrix[0, 0] = math.nan
    with pytest.raises(EncodingError, match="w"):
        store.publish(3, soon())
    assert store.newest_version == 2
    assert pin(store, 2).tensors[0].tolist() == [[448.0] * 4] * 2


class SometimesFull:
    """A source whose copies fail where there is no memory."""

    is_cuda = False

    def __init__(self, source: EncodedShards) -> None:
        self._source = source
        self.specs = source.specs
        self.is_full = False

    def prepare(self, *, spoils: bool = False):
        return self._write if self.is_full else self._source.prepare(spoils=spoils)

    def _write(self, tensors: Sequence[torch.Tensor], followed: object) -> None:
        raise MemoryError


def test_after_an_unforeseen_failure_the_newest_version_is_one_that_can_be_had(live):
    shard = Shard(ShardSpec("w", (3,), Box.full((3,)), "float32"), live)
    source = SometimesFull(encode([shard], [Cast(dtype="")]))
    store = SnapshotStore(source, max_snapshots=2)
    publish(store, live, 1)
    pin(store, 1)
    publish(store, live, 2)
    source.is_full = True
    with pytest.raises(MemoryError):
        publish(store, live, 3)
    assert store.newest_version == 1
    source.is_full = False
    with pytest.raises(VersionError, match="version 2 comes after version 2"):
        publish(store, live, 2)  # Somebody may have had the other one.
    publish(store, live, 3)
    assert store.newest_version == 3


@pytest.mark.parametrize("version", [3, 2, -1])
def test_versions_only_grow(store, live, version):
    publish(store, live, 3)
    with pytest.raises(VersionError, match=f"version {version} comes after version 3"):
        store.publish(version, soon())
