"""What held-out prompts of several data sets say of a version, and what sinks are told of it."""

from cosmos_core.bus.host import _record_of
from cosmos_core.control import Controller, ControllerConfig, ValidationResult
from cosmos_core.control.config import ValidationPlan
from cosmos_core.messages import Generate, GroupFinished, ReplicaJoined, SampleRef

NAMES = ("sums", "code", "sums", "", "code")
REWARDS = ((1.0, 0.0), (0.5, 0.5), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0))


def validated(num_samples: int) -> Controller:
    plan = ValidationPlan(num_prompts=len(NAMES), num_samples=num_samples)
    config = ControllerConfig(num_steps=3, groups_per_step=1, samples_per_group=2, validation=plan)
    controller = Controller(config)
    controller.handle(ReplicaJoined(replica="p", role="policy", endpoints=("x",)), 0.0)
    given = controller.handle(ReplicaJoined(replica="r", role="rollout", slots=9), 0.0)
    orders = [order for _, order in given if isinstance(order, Generate)]
    assert [order.group.source for order in orders] == ["validation"] * len(NAMES)
    for order in orders:
        which = order.group.ordinal
        answers = tuple(
            SampleRef(sibling=i, status="completed", key="k", reward=r, data_set=NAMES[which])
            for i, r in enumerate(REWARDS[which][:num_samples])
        )
        event = GroupFinished(replica="r", group=order.group, attempt=0, samples=answers)
        controller.handle(event, 1.0)
        if which == 1:  # half of it is remembered by a snapshot
            controller = Controller.restore(config, controller.snapshot())
    return controller


def test_each_data_set_has_the_mean_over_its_prompts() -> None:
    result = validated(2).validations[0]
    assert result.mean_reward == (0.5 + 0.5 + 1.0 + 0.0 + 0.5) / 5
    assert result.of_sets == {"code": 0.5, "sums": 0.75}


def test_sinks_are_told_of_a_validation_once_and_under_its_version() -> None:
    controller = validated(2)
    [result] = controller.take_stats()
    assert controller.take_stats() == []
    assert isinstance(result, ValidationResult)
    record = _record_of(result, "controller-1", {"ready": 3})
    assert (record.role, record.replica, record.step) == ("validation", "validation", 0)
    assert record.values == {
        "reward": 0.5,
        "best_reward": 0.7,
        "num_prompts": 5.0,
        "num_failed": 0.0,
        "data_set/code": 0.5,
        "data_set/sums": 0.75,
    }
    [result] = validated(1).take_stats()
    assert "best_reward" not in _record_of(result, "controller-1", {}).values
