"""Shares of a step: together the whole step, each weighed by all of it."""

import msgspec
import numpy as np
import pytest
import torch

from cosmos_algos import AggregationConfig, DrGrpoConfig, EmptyStepError, OpoConfig
from cosmos_app.errors import EmptyGroupError, MixedUpSampleError
from cosmos_app.step_share import (
    BatchPlan,
    batch_sizes,
    batches_of_share,
    read_samples,
    share_of_step,
    step_statistics,
)
from cosmos_core.messages import SampleRef, Train
from cosmos_core.trajectory import Trajectory, VersionSpan, encode_trajectory


def ref(key: str, reward: float, num_tokens: int, version: int = 0) -> SampleRef:
    return SampleRef(
        sibling=0,
        status="completed",
        key=key,
        num_tokens=num_tokens,
        reward=reward,
        oldest_version=version,
        newest_version=version + 1,
    )


def trajectory(length: int) -> Trajectory:
    return Trajectory(
        prompt_id="p",
        group="0",
        sibling=0,
        attempt=0,
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        trainable=np.arange(length) > 0,
        versions=(VersionSpan(0, length),),
        rewards={},
        reward=0.0,
        finish_reason="stop",
    )


ALGORITHM = DrGrpoConfig(aggregation=AggregationConfig()).build()
FAILED = SampleRef(sibling=2, status="failed", failure="reward exact: TimeoutError")
TRAIN = Train(
    step=3,
    groups=((ref("a", 1.0, 2, 3), ref("b", 0.0, 4, 2), FAILED), (ref("c", 1.0, 3, 3),)),
    publish=True,
)


def test_shares_have_as_many_tokens_to_pass_over_prompts_included() -> None:
    lengths = {"a": 900, "b": 100, "c": 500, "d": 500}  # of which 10 each are trained
    refs = tuple(msgspec.structs.replace(ref(key, 1.0, 10), length=n) for key, n in lengths.items())
    train = Train(step=0, groups=(refs,), publish=True)
    shares = [share_of_step(train, ALGORITHM, index=i, num_shares=2) for i in range(2)]
    assert sorted(sum(ref.length for ref in share.refs) for share in shares) == [1000, 1000]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 5])
def test_shares_partition_the_completed_samples(num_shares: int) -> None:
    shares = [
        share_of_step(TRAIN, ALGORITHM, index=i, num_shares=num_shares) for i in range(num_shares)
    ]
    keys = sorted(sample.key for share in shares for sample in share.refs)
    assert keys == ["a", "b", "c"]
    assert sum(float(share.weights.denominator.sum()) for share in shares) == 9.0


def test_advantages_are_relative_to_the_group_and_a_group_of_one_has_none() -> None:
    share = share_of_step(TRAIN, ALGORITHM, index=0, num_shares=1)
    advantages = dict(zip([s.key for s in share.refs], share.advantages.tolist(), strict=True))
    assert advantages == {"a": 0.5, "b": -0.5, "c": 0.0}


def test_a_share_without_samples_is_one_batch_of_weight_zero() -> None:
    share = share_of_step(TRAIN, ALGORITHM, index=4, num_shares=5)
    (batch,) = batches_of_share(
        share, [], BatchPlan(layout="packed", max_tokens=64), policy_version=3
    )
    assert torch.count_nonzero(batch.trainable) == 0
    assert float(batch.denominators.sum()) == 0.0


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ("packed", [[5], [4]]),  # 3 + 2 and 4 tokens in rows of their own length
        ("padded", [[4], [6]]),  # 4, then 3 and 2 in two rows of 3
    ],
)
def test_a_share_is_cut_to_the_budget_with_or_without_padding(layout, places) -> None:
    share = share_of_step(TRAIN, ALGORITHM, index=0, num_shares=1)
    trajectories = [trajectory(length) for length in (2, 4, 3)]
    plan = BatchPlan(layout=layout, max_tokens=6)
    batches = batches_of_share(share, trajectories, plan, policy_version=3)
    sizes = [batch_sizes(batch, None) for batch in batches]
    assert sorted(s["batch/places"].item() for s in sizes) == sorted(p for (p,) in places)
    assert sum(s["batch/tokens"].item() for s in sizes) == 9
    assert sum(s["batch/pairs"].item() for s in sizes) == 4 + 16 + 9
    assert sum(float(batch.denominators.sum()) for batch in batches) == 9.0


def test_statistics_count_staleness_from_the_oldest_token_of_a_group() -> None:
    values = step_statistics(TRAIN)
    assert values["reward"] == pytest.approx(2 / 3)
    assert values["staleness_mean"] == 0.5  # (3 - 2 and 3 - 3) / 2
    assert values["staleness_max"] == 1.0
    assert values["switched"] == 1.0
    assert values["zero_signal"] == 0.5


CUT = msgspec.structs.replace(ref("cut", 0.0, 9, 1), truncated=True)
WITH_CUT = Train(
    step=3,
    groups=((ref("a", 1.0, 2, 3), ref("b", 0.5, 4, 2), CUT), (ref("c", 1.0, 3, 3),)),
    publish=True,
)


def test_a_baseline_by_lengths_has_the_length_of_what_was_cut_off() -> None:
    share = share_of_step(WITH_CUT, OpoConfig().build(), index=0, num_shares=1, mask_truncated=True)
    advantages = dict(zip([s.key for s in share.refs], share.advantages.tolist(), strict=True))
    baseline = (2 * 1.0 + 4 * 0.5 + 9 * 0.0) / (2 + 4 + 9)
    assert advantages == pytest.approx({"a": 1.0 - baseline, "b": 0.5 - baseline, "c": 0.0})


@pytest.mark.parametrize("num_shares", [1, 2, 3])
def test_samples_that_were_cut_off_are_compared_with_and_never_trained(num_shares: int) -> None:
    shares = [
        share_of_step(WITH_CUT, ALGORITHM, index=i, num_shares=num_shares, mask_truncated=True)
        for i in range(num_shares)
    ]
    found = {
        sample.key: advantage
        for share in shares
        for sample, advantage in zip(share.refs, share.advantages.tolist(), strict=True)
    }
    assert found == {"a": 0.5, "b": 0.0, "c": 0.0}  # the mean of the group has the cut one's 0
    assert sum(float(share.weights.denominator.sum()) for share in shares) == 2 + 4 + 3
    assert step_statistics(WITH_CUT, mask_truncated=True)["masked"] == 0.25


def test_samples_that_were_cut_off_are_trained_unless_asked_otherwise() -> None:
    share = share_of_step(WITH_CUT, ALGORITHM, index=0, num_shares=1)
    assert sorted(sample.key for sample in share.refs) == ["a", "b", "c", "cut"]
    values = step_statistics(WITH_CUT)
    assert (values["truncated"], values["masked"]) == (0.25, 0.0)


def test_a_step_of_nothing_but_samples_that_were_cut_off_is_empty() -> None:
    train = Train(step=3, groups=((CUT, CUT),), publish=True)
    share = share_of_step(train, ALGORITHM, index=0, num_shares=1, mask_truncated=True)
    assert share.refs == ()
    assert step_statistics(train, mask_truncated=True)["masked"] == 1.0


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (((),), EmptyGroupError, "step 3: group 0 of 1 has no completed sample: none; it has to"),
        (
            (TRAIN.groups[0], (FAILED, FAILED)),
            EmptyGroupError,
            r"group 1 of 2 .* all 2 failed \(reward exact: TimeoutError\)",
        ),
        ((), EmptyStepError, "the step has no samples"),
    ],
)
def test_a_group_or_step_of_nothing_is_an_error_on_every_rank(groups, error, message) -> None:
    train = Train(step=3, groups=groups, publish=True)
    for index in range(2):
        with pytest.raises(error, match=message):
            share_of_step(train, ALGORITHM, index=index, num_shares=2)


def test_staleness_is_that_of_samples_with_a_trained_token() -> None:
    untrained = msgspec.structs.replace(ref("u", 0.0, 0), oldest_version=-1, newest_version=-1)
    train = Train(step=3, groups=((ref("a", 1.0, 2, 3), untrained), (untrained,)), publish=True)
    values = step_statistics(train)
    assert (values["staleness_mean"], values["staleness_max"]) == (0.0, 0.0)


STORED = trajectory(4)
AS_IT_IS = SampleRef(sibling=0, status="completed", key="0.0.0", num_tokens=3)


def test_samples_are_read_as_what_they_were_fetched_as() -> None:
    (read,) = read_samples([AS_IT_IS], [encode_trajectory(STORED)])
    assert read.group == STORED.group
    assert read.token_ids.tolist() == STORED.token_ids.tolist()


@pytest.mark.parametrize(
    "said",
    [{"key": "1.0.0"}, {"key": "0.1.0"}, {"num_tokens": 4}, {"newest_version": 1}],
    ids=["group", "attempt", "tokens", "version"],
)
def test_a_sample_that_is_not_what_it_was_fetched_as_is_refused(said: dict[str, object]) -> None:
    ref = msgspec.structs.replace(AS_IT_IS, **said)
    with pytest.raises(MixedUpSampleError, match=r"is 0\.0\.0, 3 tokens of versions 0 to 0"):
        read_samples([ref], [encode_trajectory(STORED)])
