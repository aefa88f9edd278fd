"""A validation without a run: what one replica is given, tried again, and what comes of it."""

import pytest

from cosmos_core.control import LoneRound, ValidationPlan
from cosmos_core.messages import Generate, GroupFailed, GroupFinished, SampleRef


def finished(order: Generate, *rewards: float | None, data_set: str = "") -> GroupFinished:
    samples = tuple(
        SampleRef(sibling=sibling, status="failed", failure="exact: ValueError")
        if reward is None
        else SampleRef(
            sibling=sibling, status="completed", num_tokens=1, reward=reward, data_set=data_set
        )
        for sibling, reward in enumerate(rewards)
    )
    return GroupFinished(
        replica="server", group=order.group, attempt=order.attempt, samples=samples
    )


def failed(order: Generate, drop_as: str = "") -> GroupFailed:
    return GroupFailed(
        replica="server", group=order.group, attempt=order.attempt, reason="x", drop_as=drop_as
    )


def test_prompts_are_given_out_as_there_is_room_and_their_rewards_are_averaged() -> None:
    plan = ValidationPlan(num_prompts=3, num_samples=2, before=False)
    asking = LoneRound(plan, replica="server", slots=2)
    first, second = asking.give_out()
    assert (first.group.source, first.group.round, first.num_samples) == ("validation", 0, 2)
    assert asking.give_out() == []
    asking.take_in(finished(first, 1.0, 0.0, data_set="a"))
    (third,) = asking.give_out()
    asking.take_in(finished(second, 0.25, 0.25, data_set="b"))
    assert (asking.num_left, list(asking.rewards), asking.result) == (1, [0.5, 0.25], None)
    asking.take_in(finished(third, None, 1.0, data_set="a"))
    result = asking.result
    assert result is not None
    assert (result.count, result.failed, result.num_samples) == (3, 0, 2)
    assert result.mean_reward == pytest.approx((0.5 + 0.25 + 1.0) / 3)
    assert result.best_reward == pytest.approx((1.0 + 0.25 + 1.0) / 3)
    assert result.of_sets == {"a": 0.75, "b": 0.25}
    assert (asking.num_left, asking.give_out()) == (0, [])


def test_what_fails_is_tried_again_a_few_times_but_not_a_prompt_that_is_wrong_itself() -> None:
    asking = LoneRound(ValidationPlan(num_prompts=2), replica="server", slots=4)
    unlucky, wrong = asking.give_out()
    asking.take_in(failed(wrong, drop_as="prompt too long"))
    attempts = [unlucky.attempt]
    asking.take_in(failed(unlucky))
    while asking.result is None:
        (again,) = asking.give_out()
        attempts.append(again.attempt)
        asking.take_in(finished(again, None))
    assert attempts == [0, 1, 2, 3, 4]
    assert (asking.result.count, asking.result.failed) == (0, 2)


def test_there_has_to_be_a_prompt() -> None:
    with pytest.raises(ValueError, match="needs a prompt"):
        LoneRound(ValidationPlan(), replica="server", slots=1)
