"""Who is asked the prompts of a validation, and what becomes of it when one of them is no help."""

import itertools

import msgspec
import pytest
from control_answers import answered

from cosmos_core.control import (
    FAILURES_ALLOWED,
    Controller,
    ControllerConfig,
    StalenessConfig,
    ValidationPlan,
)
from cosmos_core.control.rounds import SOURCE
from cosmos_core.messages import (
    Command,
    Event,
    Generate,
    GroupFailed,
    LoadVersion,
    ReplicaJoined,
    ReplicaLeft,
    StepFinished,
    Train,
    VersionLoaded,
    VersionPublished,
)

VERSION = 1
"""Which is validated: a run begins with it, as one that is resumed does."""


class Run:
    """A controller, its rollouts, and what they were asked; time goes by a second an event."""

    def __init__(self, *rollouts: str, prompts: int, slots: int = 4, bound: int = 8) -> None:
        plan = ValidationPlan(num_prompts=prompts, before=False, after=False, every=1)
        config = ControllerConfig(
            num_steps=99,
            groups_per_step=2,
            samples_per_group=2,
            staleness=StalenessConfig(depth=1, bound=bound),
            validation=plan,
        )
        self.controller = Controller(config)
        self.controller.state.step = VERSION
        self.asked: dict[str, list[Generate]] = {name: [] for name in rollouts}
        self.loads: list[str] = []
        self.trains: list[Train] = []
        self.time = itertools.count()
        policy = ReplicaJoined(replica="p", role="policy", version=VERSION, endpoints=("here",))
        self.tell(policy)
        self.tell(VersionPublished(replica="p", version=VERSION))
        for name in rollouts:
            joined = ReplicaJoined(replica=name, role="rollout", slots=slots, version=VERSION)
            self.tell(joined)

    def tell(self, event: Event) -> None:
        self.obey(self.controller.handle(event, float(next(self.time))))

    def obey(self, orders: list[tuple[str, Command]]) -> None:
        for name, order in orders:
            match order:
                case Generate():
                    self.asked[name].append(order)
                case LoadVersion():
                    self.loads.append(name)
                case Train():
                    self.trains.append(order)
                case _:
                    pass

    def held(self, name: str, *, validation: bool) -> list[Generate]:
        return [g for g in self.asked[name] if (g.group.source == SOURCE) == validation]

    def answer(self, name: str, asked: Generate) -> None:
        self.asked[name].remove(asked)
        version = self.controller.state.replicas[name].version
        self.tell(answered(name, asked, version, reward=0.5))

    def load(self, name: str, version: int) -> None:
        self.tell(VersionLoaded(replica=name, version=version, transfer_s=0.0, stall_s=0.0))

    def fail(self, name: str, asked: Generate) -> None:
        self.asked[name].remove(asked)
        self.tell(
            GroupFailed(replica=name, group=asked.group, attempt=asked.attempt, reason="engine")
        )


def test_half_of_the_rollouts_answer_with_all_of_their_places_and_the_others_load_what_comes() -> (
    None
):
    run = Run("a", "b", prompts=9)
    answering = {name for name in "ab" if run.held(name, validation=True)}
    assert len(answering) == 1
    (first,) = answering
    (other,) = {"a", "b"} - answering
    while run.held(first, validation=False):
        run.answer(first, run.held(first, validation=False)[0])
    assert len(run.held(first, validation=True)) == 4
    run.tell(VersionPublished(replica="p", version=VERSION + 1))
    assert run.loads == [other]


def test_one_alone_leaves_half_of_its_places_to_training_as_far_as_the_bound() -> None:
    run = Run("a", prompts=9, bound=1)
    assert len(run.held("a", validation=True)) == 2
    while not run.trains:
        run.answer("a", run.held("a", validation=False)[0])
    assert len(run.held("a", validation=True)) == 2
    run.tell(StepFinished(replica="p", step=VERSION))
    while run.held("a", validation=False):
        run.answer("a", run.held("a", validation=False)[0])
    assert len(run.held("a", validation=True)) == 4, "training may have no more of its version"


def test_who_fails_at_everything_answers_no_more_and_another_does() -> None:
    run = Run("a", "b", prompts=1, slots=1)
    (broken,) = (name for name in "ab" if run.held(name, validation=True))
    (other,) = {"a", "b"} - {broken}
    for _ in range(FAILURES_ALLOWED):
        (asked,) = run.asked[broken]
        run.fail(broken, asked)
    assert not run.asked[broken], "it rests"
    run.answer(other, run.asked[other][0])
    assert [asked.group.source for asked in run.asked[other]] == [SOURCE]
    run.answer(other, run.asked[other][0])
    assert run.controller.validations[VERSION].count == 1


def test_a_round_whose_only_answerer_has_gone_begins_again_with_what_others_hold() -> None:
    run = Run("a", "b", prompts=2)
    (first,) = (name for name in "ab" if run.held(name, validation=True))
    (other,) = {"a", "b"} - {first}
    run.tell(VersionPublished(replica="p", version=VERSION + 1))
    run.load(other, VERSION + 1)
    assert not run.held(other, validation=True)
    run.tell(ReplicaLeft(replica=first, reason="gone"))
    run.controller.state.step = VERSION + 1
    for asked in run.held(other, validation=False):
        run.answer(other, asked)
    assert {asked.group.round for asked in run.held(other, validation=True)} == {VERSION + 1}


def test_a_controller_goes_on_with_a_round_that_one_of_a_release_before_has_begun() -> None:
    run = Run("a", "b", prompts=2)
    (first,) = (name for name in "ab" if run.held(name, validation=True))
    state = msgspec.msgpack.decode(run.controller.snapshot())
    for unknown in ("chosen", "chosen_slots"):
        del state["round"][unknown]
    restored = Controller.restore(run.controller.config, msgspec.msgpack.encode(state))
    assert restored.state.round is not None
    assert restored.state.round.chosen == {first: 2}
    assert restored.snapshot() == run.controller.snapshot()


@pytest.mark.parametrize("bound", [1, 3])
def test_a_step_says_for_how_long_a_validation_held_it_up(bound: int) -> None:
    """From when the policy has nothing to do until the answer that lets the rollout load."""
    run = Run("a", prompts=1, bound=bound)
    (held_out,) = run.held("a", validation=True)
    for _ in range(bound + 1):
        while run.controller.state.training is None:
            run.answer("a", run.held("a", validation=False)[0])
        run.tell(StepFinished(replica="p", step=run.controller.state.step))
    assert not run.held("a", validation=False)
    for _ in range(6):
        run.tell(VersionPublished(replica="p", version=run.controller.state.step))
    run.answer("a", held_out)
    run.load("a", run.controller.state.step)
    while run.controller.state.training is None:
        run.answer("a", run.held("a", validation=False)[0])
    assert [train.validated_s for train in run.trains] == [0.0] * (bound + 1) + [7.0]
