"""What somebody who drives the controller by hand is told: no mistake waits in silence."""

from collections.abc import Mapping

import msgspec
import pytest

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig, ValidationPlan
from cosmos_core.control.state import ControllerState
from cosmos_core.messages import (
    CheckpointSaved,
    Generate,
    GroupFinished,
    GroupId,
    LoadVersion,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    Stop,
    Tick,
    VersionPublished,
    decode_event,
)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "rollouts", "slots": 4}, "replica r: role is 'rollouts'; want one of"),
        ({"role": "rollout"}, "rollout replica r: slots is 0; want 1 or more"),
    ],
)
def test_a_replica_that_could_never_work_is_refused(fields: Mapping[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplicaJoined(replica="r", **fields)  # pyright: ignore[reportArgumentType]
    sent = msgspec.msgpack.encode({"type": "ReplicaJoined", "replica": "r", **fields})
    with pytest.raises(msgspec.ValidationError):
        decode_event(sent)


def test_weights_that_nobody_serves_are_what_is_waited_for() -> None:
    staleness = StalenessConfig(depth=0, bound=0)
    config = ControllerConfig(
        num_steps=9, groups_per_step=1, samples_per_group=2, staleness=staleness
    )
    controller = Controller(config)
    controller.handle(ReplicaJoined(replica="p", role="policy", version=1), 0.0)
    controller.handle(VersionPublished(replica="p", version=1), 0.0)
    controller.handle(ReplicaJoined(replica="r", role="rollout", slots=1, version=-1), 0.0)
    assert controller.waiting_for(1.0) == (
        "endpoints of version 1: the policy replicas that have it joined with none"
    )


def test_a_run_that_would_drop_every_group_is_refused() -> None:
    with pytest.raises(ValueError, match="every group would be dropped; want 2 samples or more"):
        ControllerConfig(num_steps=1, groups_per_step=1, samples_per_group=1, drop_zero_signal=True)


def answer(
    order: Generate, replica: str, rewards: tuple[float, float] = (0.0, 0.0)
) -> GroupFinished:
    samples = tuple(
        SampleRef(
            sibling=i, status="completed", key=f"{order.group}.{i}", num_tokens=1, reward=reward
        )
        for i, reward in enumerate(rewards)
    )
    return GroupFinished(replica=replica, group=order.group, attempt=order.attempt, samples=samples)


def test_a_run_whose_groups_all_have_equal_rewards_says_so_and_goes_on() -> None:
    config = ControllerConfig(
        num_steps=9, groups_per_step=2, samples_per_group=2, drop_zero_signal=True
    )
    controller = Controller(config)
    controller.handle(ReplicaJoined(replica="p", role="policy", endpoints=("here",)), 0.0)
    orders = controller.handle(ReplicaJoined(replica="a", role="rollout", slots=1), 0.0)
    for num_dropped in range(1, 31):
        ((_, order),) = orders
        assert isinstance(order, Generate)
        orders = controller.handle(answer(order, "a"), 1.0)
        said = controller.waiting_for(1.0)
        if num_dropped < 20:
            assert said == f"group train.0.{num_dropped} on a for 0.0 s"
            continue
        assert said == (
            f"a group whose rewards differ: those of the last {num_dropped} in a row were all "
            "equal, and trainer.drop_zero_signal drops such groups"
        )
    assert controller.status(1.0)["waiting_for"] == said
    assert controller.books().dropped == {"no signal": 30}
    restored = Controller.restore(config, controller.snapshot())
    assert (restored.waiting_for(1.0), restored.state.stopping) == (said, "")
    ((_, order),) = orders
    assert isinstance(order, Generate)
    restored.handle(answer(order, "a", rewards=(0.0, 1.0)), 2.0)
    assert restored.waiting_for(2.0) == "group train.0.31 on a for 0.0 s"


def joined(*rollouts: str, validation: ValidationPlan | None = None) -> Controller:
    """Return a controller of a policy replica p, and of rollouts with a slot each."""
    controller = Controller(
        ControllerConfig(
            num_steps=9,
            groups_per_step=1,
            samples_per_group=2,
            validation=validation or ValidationPlan(),
            lease_s=10.0,
            first_lease_s=20.0,
        )
    )
    p = ReplicaJoined(replica="p", role="policy", endpoints=("here",), incarnation="p1")
    controller.handle(p, 0.0)
    for name in rollouts:
        controller.handle(ReplicaJoined(replica=name, role="rollout", slots=1), 0.0)
    return controller


def test_who_lost_the_lease_is_named_until_it_joins_again_or_is_known_to_have_ended() -> None:
    controller = joined("a", "b")
    controller.handle(Tick(), 20.0)
    assert controller.status(20.0)["silent"] == {}
    controller.handle(Progress(replica="p", count=1), 20.0)
    controller.handle(Tick(), 23.0)
    assert controller.status(25.0)["silent"] == {"a": 2.0, "b": 2.0}
    assert controller.waiting_for(25.0) == (
        "a rollout replica to join; a lost its lease 2.0 s ago, without progress; "
        "b lost its lease 2.0 s ago, without progress"
    )
    controller.handle(ReplicaJoined(replica="a", role="rollout", slots=1), 26.0)
    controller.handle(ReplicaLeft(replica="b", reason="signal 9 (SIGKILL)"), 26.0)
    assert controller.status(26.0)["silent"] == {}
    controller.handle(Tick(), 40.0)
    assert controller.waiting_for(41.0) == (
        "1 of 1 policy replicas to join; p lost its lease 1.0 s ago, without progress"
    )


def test_the_first_group_of_a_replica_is_timed_from_when_it_joined() -> None:
    controller = joined()
    orders = controller.handle(ReplicaJoined(replica="a", role="rollout", slots=1), 3.0)
    assert controller.status(4.0)["replicas"]["a"]["first_group_s"] is None
    for now in (5.0, 9.0):
        ((_, order),) = [(n, o) for n, o in orders if isinstance(o, Generate)]
        orders = controller.handle(answer(order, "a"), now)
    assert controller.status(9.0)["replicas"]["a"]["first_group_s"] == 2.0
    assert controller.status(9.0)["replicas"]["p"]["first_group_s"] is None
    ((_, order),) = [(n, o) for n, o in orders if isinstance(o, Generate)]
    controller.handle(ReplicaJoined(replica="a", role="rollout", slots=1), 10.0)
    controller.handle(answer(order, "a"), 10.0)
    told = controller.status(10.0)["replicas"]["a"]["first_group_s"]
    assert told is None, "what it was given before it joined again"


def test_a_validation_holds_only_who_answers_it_back_from_newer_weights() -> None:
    controller = joined("a", "b", validation=ValidationPlan(num_prompts=1))
    opened = controller.state.round
    assert opened is not None
    (busy,) = opened.given.values()
    (free,) = {"a", "b"} - {busy}
    orders = controller.handle(VersionPublished(replica="p", version=1), 2.0)
    assert [name for name, order in orders if isinstance(order, LoadVersion)] == [free]
    ask = Generate(group=GroupId("validation", 0, 0), attempt=0, num_samples=1)
    orders = controller.handle(answer(ask, busy), 3.0)
    assert [name for name, order in orders if isinstance(order, LoadVersion)] == [busy]


def test_a_run_that_goes_on_beyond_its_steps_validates_its_version_once_and_ends() -> None:
    staleness = StalenessConfig(depth=0, bound=0)
    config = ControllerConfig(
        num_steps=5,
        groups_per_step=1,
        samples_per_group=2,
        staleness=staleness,
        validation=ValidationPlan(num_prompts=1, before=False),
    )
    controller = Controller(config, ControllerState(step=7, saved=7))
    controller.handle(ReplicaJoined(replica="p", role="policy", version=7), 0.0)
    joining = ReplicaJoined(replica="r", role="rollout", slots=2, version=7)
    ((_, order),) = controller.handle(joining, 0.0)
    assert order == Generate(group=GroupId("validation", 7, 0), attempt=0, num_samples=1)
    sample = SampleRef(sibling=0, status="completed", reward=0.5)
    answered = GroupFinished(replica="r", group=order.group, attempt=0, samples=(sample,))
    told = controller.handle(answered, 1.0)
    assert [(name, type(command)) for name, command in told] == [("p", Stop), ("r", Stop)]
    controller.handle(CheckpointSaved(replica="p", step=6, path="somewhere"), 2.0)
    assert controller.finished == "all steps done"
    assert controller.validations[7].mean_reward == 0.5


def test_by_default_thirty_silent_seconds_are_death_and_the_prompts_go_to_others() -> None:
    controller = Controller(ControllerConfig(num_steps=9, groups_per_step=2, samples_per_group=2))
    controller.handle(ReplicaJoined(replica="p", role="policy", endpoints=("here",)), 0.0)
    told = controller.handle(ReplicaJoined(replica="a", role="rollout", slots=2), 0.0)
    given = [order.group for name, order in told if name == "a" and isinstance(order, Generate)]
    assert [group.ordinal for group in given] == [0, 1]
    for name in ("a", "p"):
        controller.handle(Progress(replica=name, count=1), 100.0)
    controller.handle(ReplicaJoined(replica="b", role="rollout", slots=9), 100.0)
    for name in ("b", "p"):
        controller.handle(Progress(replica=name, count=2), 129.0)
    assert controller.handle(Tick(), 129.9) == []
    assert controller.status(129.9)["silent"] == {}
    again = [Generate(group=group, attempt=1, num_samples=2) for group in given]
    assert controller.handle(Tick(), 130.1) == [("b", order) for order in again]
    assert set(controller.status(130.1)["silent"]) == {"a"}
