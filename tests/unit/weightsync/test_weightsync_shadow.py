"""What a receiver that passes versions on lets its readers see."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cosmos_weightsync import Box, ShardSpec, VersionGoneError
from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.holding import Reader, VersionRange
from cosmos_weightsync.shadow import Shadow
from cosmos_weightsync.wanted import WantedWeights

SPEC = ShardSpec("w", (4, 3), Box.full((4, 3)), "float32")


def arriving() -> tuple[Shadow, Arena | None]:
    shadow = Shadow()
    shards, arena = WantedWeights([SPEC], "staged", "shared").place([SPEC])
    shadow.place(shards, arena)
    shadow.begin(1, "run", Deadline.after(1))
    shadow.arriving().view("w", SPEC.box).fill_(7.0)
    shadow.arriving().arrived([("w", SPEC.box)], SPEC.num_bytes)
    return shadow, arena


def pinned(shadow: Shadow):
    return shadow.pin(VersionRange(0), Deadline.after(1), Reader("a reader", lambda: None))


def test_a_whole_version_can_be_mapped_by_other_processes():
    shadow, arena = arriving()
    shadow.settle(dict)
    held = pinned(shadow).boxes(Deadline.after(1))
    assert not held.is_arriving
    assert held.arena is arena
    assert arena is not None
    assert arena.offset_of(held.view("w", Box((2, 0), (3, 3)))) == 2 * 3 * 4
    assert torch.equal(held.view("w", SPEC.box), torch.full((4, 3), 7.0))


def test_a_version_that_arrives_is_passed_on_region_by_region():
    shadow, _ = arriving()
    held = pinned(shadow).boxes(Deadline.after(1))
    assert held.is_arriving
    assert held.view("w", SPEC.box).eq(7.0).all()


def test_a_reader_that_was_hung_up_on_is_not_given_the_memory_as_whole():
    shadow, _ = arriving()
    shadow.settle(dict)
    pin = pinned(shadow)
    shadow.taint()
    assert pin.boxes(Deadline.after(1)).is_arriving  # Looking at it is then an error.


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads give way to one another after each step, and not every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_whoever_comes_while_a_version_gives_way_is_not_given_the_next_as_that_one():
    shadow, _ = arriving()
    shadow.settle(dict)
    region = ("w", SPEC.box)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            pin = pinned(shadow)
            try:
                found = pin.boxes(Deadline.after(1)).view(*region).clone()
                pin.settle([region], Deadline.after(1))
            except VersionGoneError:
                continue  # it was overwritten meanwhile
            finally:
                pin.release()
            assert found.eq(float(pin.version)).all()

    shadow.here().view(*region).fill_(1.0)
    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(read) for _ in range(4)]
        try:
            for version in range(2, 1500):
                shadow.begin(version, "run", Deadline.after(0.0))
                shadow.arriving().view(*region).fill_(float(version))
                shadow.arriving().arrived([region], SPEC.num_bytes)
                shadow.settle(dict)
        finally:
            is_over.set()
        for each in reading:
            each.result(20)
