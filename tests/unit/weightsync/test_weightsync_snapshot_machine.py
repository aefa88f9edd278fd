"""The snapshots of a sender rank against any order of readers and publications.

Whatever happens: a pinned version stays as it was, nobody is waited for, a version is refused only
while every buffer is being read, and one that was not published leaves all others as they were.
"""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cosmos_weightsync import Box, DeadlineError, Shard, ShardSpec, VersionGoneError
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.encodings import Cast, encode
from cosmos_weightsync.holding import Reader, VersionRange
from cosmos_weightsync.snapshots import Pin, Snapshot, SnapshotStore

READ_S = 10.0


class Publishing(RuleBasedStateMachine):
    """One thread that publishes, and readers; the clock goes when told to."""

    @initialize(max_snapshots=st.integers(2, 3), num_bases=st.integers(0, 1))
    def begin(self, max_snapshots: int, num_bases: int) -> None:
        self.now = 0.0
        self.live = torch.zeros(3)
        shard = Shard(ShardSpec("w", (3,), Box.full((3,)), "float32"), self.live)
        self.most = max_snapshots + num_bases
        self.store = SnapshotStore(
            encode([shard], [Cast(dtype="")]),
            max_snapshots=max_snapshots,
            num_bases=num_bases,
            read_s=READ_S,
            clock=lambda: self.now,
        )
        self.next = self.newest = 0
        self.reserved: Snapshot | None = None
        self.pins: list[Pin] = []
        self.hung_up: list[Pin] = []
        self.store.publish(0, Deadline.after(1.0))

    # ---------------------------------------------------------------- who publishes

    @precondition(lambda self: self.reserved is None)
    @rule(further=st.integers(1, 3))
    def reserve(self, further: int) -> None:
        version = self.next + further
        late = [pin for pin in self.pins if pin.until_s <= self.now]
        self.reserved = self.store.reserve(version)
        read = {pin.snapshot for pin in self.pins}
        if self.reserved is None:
            assert len(read) == self.most
            assert set(self.hung_up) == set(late)
            for pin in late:  # as the threads do that converse with them
                self.unpin(pin)
        else:
            assert self.reserved not in read
            assert self.hung_up == []
            self.next = version
        self.hung_up = []

    @precondition(lambda self: self.reserved is None)
    @rule(is_read=st.booleans())
    def publish(self, is_read: bool) -> None:
        self.reserve(1)
        if self.reserved is not None:
            self.fill()
            if is_read:
                self.pin(0, exactly=True, oldest=False, is_spare=False)

    @precondition(lambda self: self.reserved is not None)
    @rule()
    def fill(self) -> None:
        assert self.reserved is not None
        self.live.fill_(float(self.next))
        self.store.fill(self.reserved, self.next)
        self.newest, self.reserved = self.next, None

    @precondition(lambda self: self.reserved is not None)
    @rule()
    def release(self) -> None:
        assert self.reserved is not None
        self.store.release(self.reserved)
        self.reserved = None

    # ---------------------------------------------------------------- who reads

    @rule(
        back=st.integers(0, 3),
        exactly=st.booleans(),
        oldest=st.booleans(),
        is_spare=st.booleans(),
    )
    def pin(self, back: int, exactly: bool, oldest: bool, is_spare: bool) -> None:
        wanted = max(0, self.newest - back)
        found = VersionRange(
            wanted,
            at_most=wanted if exactly else None,
            prefer="oldest" if oldest else "newest",
            is_spare=is_spare,
        )
        held: list[Pin] = []
        reader = Reader("somebody", lambda: self.hung_up.extend(held))
        others = {pin.snapshot for pin in self.pins}
        try:
            pin = self.store.pin(found, Deadline.after(0.001), reader)
        except (DeadlineError, VersionGoneError):
            is_coming = self.reserved is not None and self.reserved.version == self.newest
            assert exactly or is_spare or is_coming
            return
        held.append(pin)
        self.pins.append(pin)
        assert pin.version in found
        assert pin.snapshot is not self.reserved
        if is_spare and pin.snapshot not in others:
            assert len(others) + 1 < self.most, "the next has a buffer"

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 20))
    def finish_reading(self, which: int) -> None:
        self.unpin(self.pins[which % len(self.pins)])

    def unpin(self, pin: Pin) -> None:
        self.pins.remove(pin)
        self.store.unpin(pin)

    @rule(seconds=st.sampled_from([0.0, READ_S / 2, READ_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def what_is_read_stays_as_it_was(self) -> None:
        for pin in getattr(self, "pins", []):
            assert pin.snapshot.version == pin.version
            assert pin.tensors[0].tolist() == [float(pin.version)] * 3

    @invariant()
    def the_newest_can_be_had(self) -> None:
        if hasattr(self, "store"):
            assert self.store.newest_version == self.newest
            assert self.store.num_buffers <= self.most


def test_whatever_readers_do_publishing_waits_for_nobody_and_changes_nothing_they_read() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Publishing,
        settings=settings(
            max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=checks
        ),
    )
