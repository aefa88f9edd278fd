"""What a receiver that passes versions on lets its readers see."""

import torch

from cosmos_weightsync import Box, ShardSpec
from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.holding import VersionRange
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
    return shadow.pin(VersionRange(0), Deadline.after(1), lambda: None)


def test_a_whole_version_can_be_mapped_by_other_processes():
    shadow, arena = arriving()
    shadow.settle()
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
    shadow.settle()
    pin = pinned(shadow)
    shadow.taint()
    assert pin.boxes(Deadline.after(1)).is_arriving  # Looking at it is then an error.
