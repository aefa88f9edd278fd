"""What a controller keeps of the prompts that no checkpoint holds: all of them, in few bytes."""

import heapq
import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig
from cosmos_core.control.ordinals import pack_ordinals, unpack_ordinals
from cosmos_core.messages import (
    Event,
    Generate,
    GroupFinished,
    LoadVersion,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    StepFinished,
    Train,
    VersionLoaded,
    VersionPublished,
)

GROUPS_PER_STEP = 16


@given(st.sets(st.integers(0, 1 << 40)) | st.sets(st.integers(0, 50)))
def test_ordinals_come_back_as_they_were(ordinals: set[int]) -> None:
    assert unpack_ordinals(pack_ordinals(sorted(ordinals))) == sorted(ordinals)


def test_ordinals_in_a_row_are_two_numbers() -> None:
    packed = pack_ordinals(range(1000, 1100))
    assert msgspec.msgpack.decode(packed) == [1000, 100]
    assert msgspec.msgpack.decode(pack_ordinals((5, 6, 7, 10, 11))) == [5, 3, 2, 2]


def test_ordinals_of_an_earlier_version_s_state_are_read() -> None:
    assert unpack_ordinals((3, 4, 9)) == [3, 4, 9]


class Run:
    """A policy that takes steps at once, and a rollout whose answers have a long tail."""

    def __init__(self, num_steps: int) -> None:
        self.config = ControllerConfig(
            num_steps=num_steps,
            groups_per_step=GROUPS_PER_STEP,
            samples_per_group=1,
            min_group_samples=1,
            staleness=StalenessConfig(depth=2, bound=4),
            lease_s=1e9,
            first_lease_s=1e9,
        )
        self.controller = Controller(self.config)
        self.trained: dict[int, list[int]] = {}
        self._rng = random.Random(0)
        self._count = itertools.count()
        self._queue: list[tuple[float, int, Event]] = []
        self._version, self._now = 0, 0.0
        self.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=2 * GROUPS_PER_STEP))
        self.join(version=0)

    def join(self, version: int) -> None:
        self.tell(
            ReplicaJoined(replica="policy-0", role="policy", version=version, endpoints=("here",))
        )

    def run_to(self, step: int) -> None:
        while self.controller.state.step < step:
            self._now, _, event = heapq.heappop(self._queue)
            self.tell(event)

    def tell(self, event: Event) -> None:
        for _, command in self.controller.handle(event, self._now):
            match command:
                case Generate():
                    self._later(self._answer(command), self._rng.lognormvariate(0.0, 0.8))
                case LoadVersion():
                    self._version = command.version
                    loaded = VersionLoaded(
                        replica="rollout-0",
                        version=command.version,
                        transfer_s=0.0,
                        stall_s=0.0,
                        lineage=command.lineage,
                    )
                    self._later(loaded, 0.0)
                case Train():
                    self._train(command)
                case _:
                    pass

    def _later(self, event: Event, delay_s: float) -> None:
        heapq.heappush(self._queue, (self._now + delay_s, next(self._count), event))

    def _answer(self, order: Generate) -> GroupFinished:
        sample = SampleRef(
            sibling=0,
            status="completed",
            key=str(order.group),
            num_tokens=1,
            oldest_version=self._version,
            newest_version=self._version,
        )
        return GroupFinished(
            replica="rollout-0", group=order.group, attempt=order.attempt, samples=(sample,)
        )

    def _train(self, order: Train) -> None:
        self.trained[order.step] = [int(group[0].key.split(".")[2]) for group in order.groups]
        lineage = len(order.line)
        self._later(StepFinished(replica="policy-0", step=order.step, lineage=lineage), 0.5)
        published = VersionPublished(replica="policy-0", version=order.step + 1, lineage=lineage)
        self._later(published, 0.5)


def test_a_long_run_without_checkpoints_has_a_small_state() -> None:
    run = Run(num_steps=1000)
    run.run_to(100)
    before = len(run.controller.snapshot())
    run.run_to(900)
    grown = (len(run.controller.snapshot()) - before) / 800
    assert grown < 2 * GROUPS_PER_STEP, "bytes a step; written one by one they were nine a prompt"
    assert any(run.trained[step] != [*range(16 * step, 16 * step + 16)] for step in run.trained)


@pytest.mark.parametrize("is_read_back", [False, True])
def test_a_policy_that_comes_back_without_a_checkpoint_has_every_prompt_issued_again(
    is_read_back: bool,
) -> None:
    run = Run(num_steps=60)
    run.run_to(50)
    consumed = sorted(ordinal for step in range(50) for ordinal in run.trained[step])
    assert len(set(consumed)) == 50 * GROUPS_PER_STEP
    if is_read_back:
        run.controller = Controller.restore(run.config, run.controller.snapshot())
    run.tell(ReplicaLeft(replica="policy-0", reason="killed"))
    run.join(version=0)
    state = run.controller.state
    again = {o for o, group in state.groups.items() if group.attempt == group.first_attempt == 1}
    assert state.step == 0
    assert again == set(consumed)
    assert state.consumed_since_save == state.attempts_used == {}
    run.run_to(60)
    trained = sorted(ordinal for ordinals in run.trained.values() for ordinal in ordinals)
    assert trained == list(range(60 * GROUPS_PER_STEP))
