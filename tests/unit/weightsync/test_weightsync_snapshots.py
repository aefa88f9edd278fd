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
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.encodings import Cast, EncodedShards, RowwiseFp8, encode
from cosmos_weightsync.snapshots import SnapshotStore


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


def test_a_pinned_version_outlives_any_number_of_newer_ones(store, live):
    publish(store, live, 1)
    first = store.pin(0, "newest", soon())
    for version in range(2, 9):
        publish(store, live, version)
    assert (first.version, first.tensors[0].tolist()) == (1, [1.0, 1.0, 1.0])
    assert store.pin(0, "newest", soon()).tensors[0].tolist() == [8.0, 8.0, 8.0]


def test_two_buffers_are_enough_for_a_reader_of_one_version_at_a_time(store, live):
    for version in range(1, 6):
        publish(store, live, version)
        store.unpin(store.pin(version, "newest", soon()))
    assert store.num_buffers == 2


def test_the_copy_is_cast_once(store, live):
    publish(store, live, 1)
    assert store.pin(1, "newest", soon()).tensors[0].dtype == torch.bfloat16


def test_publishing_gives_up_when_readers_hold_every_buffer(store, live):
    for version in (1, 2, 3):
        publish(store, live, version)
        store.pin(version, "newest", soon())
    with pytest.raises(DeadlineError, match=r"version 4 .* still read versions \[1, 2, 3\]"):
        publish(store, live, 4)


def test_publishing_goes_on_when_a_reader_finishes(store, live):
    held = []
    for version in (1, 2, 3):
        publish(store, live, version)
        held.append(store.pin(version, "newest", soon()))
    threading.Timer(0.1, lambda: store.unpin(held[1])).start()
    store.publish(4, soon())
    assert store.pin(4, "newest", soon()).version == 4


def test_the_oldest_that_will_do_can_be_asked_for(store, live):
    publish(store, live, 1)
    publish(store, live, 2)
    assert store.pin(1, "oldest", soon()).version == 1
    assert store.pin(1, "newest", soon()).version == 2


def test_pinning_waits_for_the_version(store, live):
    threading.Timer(0.1, lambda: publish(store, live, 5)).start()
    assert store.pin(5, "newest", soon()).version == 5


def test_pinning_gives_up_in_time(store):
    with pytest.raises(DeadlineError, match="version 1 to be published"):
        store.pin(1, "newest", soon(0.1))


def test_closing_wakes_who_waits(store):
    threading.Timer(0.1, store.close).start()
    with pytest.raises(PeerLostError):
        store.pin(1, "newest", soon())


def test_values_that_cannot_be_encoded_cost_no_version(live):
    """With all others pinned, the newest version's buffer is the one that would be written."""
    matrix = torch.zeros(2, 4)
    shard = Shard(ShardSpec("w", (2, 4), Box.full((2, 4)), "float32"), matrix)
    store = SnapshotStore(encode([shard], [RowwiseFp8(names=("w",))]), max_snapshots=2)
    publish(store, matrix, 1)
    store.pin(1, "newest", soon())
    publish(store, matrix, 2)
    matrix[0, 0] = math.nan
    with pytest.raises(EncodingError, match="w"):
        store.publish(3, soon())
    assert store.newest_version == 2
    assert store.pin(2, "newest", soon()).tensors[0].tolist() == [[448.0] * 4] * 2


class SometimesFull:
    """A source whose copies fail where there is no memory."""

    is_cuda = False
    may_spoil = False

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
    store.pin(1, "newest", soon())
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
