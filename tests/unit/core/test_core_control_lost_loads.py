"""Loads that are under way when policy replicas fall back, and validations by lost weights."""

from typing import TypeVar

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig, ValidationPlan
from cosmos_core.messages import (
    CancelGroup,
    Command,
    Event,
    Generate,
    GroupFinished,
    LoadVersion,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    StepFinished,
    VersionLoaded,
    VersionPublished,
)

Order = TypeVar("Order", Generate, LoadVersion, CancelGroup)


class Run:
    """A controller, one policy replica, and one rollout replica that answers by hand."""

    def __init__(self, validation: ValidationPlan | None = None, max_attempts: int = 5) -> None:
        self.controller = Controller(
            ControllerConfig(
                num_steps=9,
                groups_per_step=1,
                samples_per_group=2,
                staleness=StalenessConfig(depth=1, bound=2, policy="count"),
                validation=validation or ValidationPlan(),
                max_attempts=max_attempts,
            )
        )
        self.orders: list[Command] = []
        self.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=4))
        self.join(0)

    @property
    def lineage(self) -> int:
        return len(self.controller.state.line)

    def tell(self, event: Event) -> None:
        self.orders += [command for _, command in self.controller.handle(event, 0.0)]

    def take(self, kind: type[Order]) -> list[Order]:
        found = [order for order in self.orders if isinstance(order, kind)]
        self.orders = [order for order in self.orders if not isinstance(order, kind)]
        return found

    def join(self, version: int) -> None:
        self.tell(
            ReplicaJoined(replica="policy-0", role="policy", version=version, endpoints=("p",))
        )

    def fall_back(self, version: int) -> None:
        self.tell(ReplicaLeft(replica="policy-0", reason="killed"))
        self.join(version)

    def answer(self, asked: Generate, version: int, reward: float = 1.0) -> None:
        key = f"{asked.group}/{asked.attempt}"
        samples = tuple(
            SampleRef(
                sibling=sibling,
                status="completed",
                key=f"{key}/{sibling}",
                num_tokens=1,
                reward=reward,
                oldest_version=version,
                newest_version=version,
            )
            for sibling in range(asked.num_samples)
        )
        name, group, attempt = "rollout-0", asked.group, asked.attempt
        self.tell(GroupFinished(replica=name, group=group, attempt=attempt, samples=samples))

    def loaded(self, version: int, lineage: int) -> None:
        self.tell(
            VersionLoaded(
                replica="rollout-0", version=version, transfer_s=0.0, stall_s=0.0, lineage=lineage
            )
        )

    def train(self, version: int) -> None:
        """Take a step on an answer of a version."""
        step = self.controller.state.step
        asked = next(a for a in self.take(Generate) if a.group.source == "train")
        self.answer(asked, version)
        self.tell(StepFinished(replica="policy-0", step=step, lineage=self.lineage))
        self.tell(VersionPublished(replica="policy-0", version=step + 1, lineage=self.lineage))


def test_who_was_given_newer_weights_than_it_was_ordered_is_told_to_load_again() -> None:
    """It was ordered those that the run fell back to, and its source had later ones by then."""
    run = Run()
    run.train(0)
    assert [order.version for order in run.take(LoadVersion)] == [1]
    run.train(0)
    run.fall_back(1)
    run.loaded(2, lineage=0)
    assert [order.lineage for order in run.take(LoadVersion)] == [1]
    run.loaded(1, lineage=1)
    assert run.take(Generate)


def validating(run: Run) -> Generate:
    (asked,) = (asked for asked in run.take(Generate) if asked.group.source == "validation")
    return asked


def test_a_late_answer_of_lost_weights_is_none_of_the_next_validation_of_that_number() -> None:
    """Replicas repeat what they have answered once, if asked for the same attempt."""
    run = Run(ValidationPlan(num_prompts=1, before=False, every=1))
    run.train(0)
    run.loaded(1, lineage=0)
    lost = validating(run)
    run.fall_back(0)
    run.loaded(0, lineage=1)
    run.train(0)
    run.loaded(1, lineage=1)
    asked = validating(run)
    assert asked.group == lost.group
    run.answer(lost, version=1, reward=-1.0)
    assert 1 not in run.controller.validations
    run.answer(asked, version=1, reward=0.5)
    assert run.controller.validations[1].mean_reward == 0.5


def asked_before_any_training(max_attempts: int = 5) -> tuple[Run, Generate]:
    run = Run(ValidationPlan(num_prompts=1), max_attempts=max_attempts)
    (asked,) = run.take(Generate)
    return run, asked


def test_a_validation_is_asked_again_of_who_has_loaded_lost_weights_meanwhile() -> None:
    """That is no fault of the prompt: it has as many attempts as before."""
    run, asked = asked_before_any_training(max_attempts=1)
    run.controller.state.line = (0,)
    run.loaded(3, lineage=0)
    assert [c.group for c in run.take(CancelGroup)] == [asked.group]
    assert run.take(LoadVersion)
    run.answer(asked, version=0, reward=-1.0)
    run.loaded(0, lineage=1)
    (again,) = run.take(Generate)
    run.answer(again, version=0, reward=0.5)
    result = run.controller.validations[0]
    assert (result.mean_reward, result.count, result.failed) == (0.5, 1, 0)


def test_an_answer_with_tokens_of_other_weights_is_no_answer_of_a_validation() -> None:
    run, asked = asked_before_any_training()
    run.answer(asked, version=1, reward=-1.0)
    assert run.controller.validations == {}
    (again,) = run.take(Generate)
    run.answer(again, version=0, reward=0.5)
    assert run.controller.validations[0].mean_reward == 0.5
