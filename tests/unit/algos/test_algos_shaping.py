"""Length shaping, dynamic sampling and shared prefixes on tables worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cosmos_algos import (
    AlgorithmConfigError,
    OverlongConfig,
    budget_rewards,
    capped_budget_rewards,
    groups_with_signal,
    length_rewards,
    overlong_penalties,
    prefix_tree_mask,
    prefix_tree_positions,
    prefixes_trained_once,
    shared_prefix_masks,
    without_truncated,
)
from cosmos_core.trajectory import UNSAMPLED, TeacherScores, Trajectory, VersionSpan


def test_the_overlong_penalty_grows_over_the_buffer():
    config = OverlongConfig(max_tokens=100, buffer=20)

    penalties = overlong_penalties([10, 80, 85, 90, 100, 150], config)

    assert penalties == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_a_buffer_outside_the_response_is_refused():
    with pytest.raises(AlgorithmConfigError, match="buffer 30 must be in 1 to max_tokens 20"):
        OverlongConfig(max_tokens=20, buffer=30)


def test_truncated_samples_have_no_trained_tokens():
    assert without_truncated([3, 9, 4], ["stop", "length", "abort"]) == [3, 0, 4]


def test_length_rewards_are_relative_to_the_group_and_never_praise_a_wrong_answer():
    rewards = length_rewards(
        [10, 20, 30, 10, 7], [True, True, True, False, True], ["a", "a", "a", "a", "b"]
    )

    # λ = 0.5, 0, -0.5; the short wrong one min(0, 0.5); a group of one length has 0.
    assert rewards == [0.5, 0.0, -0.5, 0.0, 0.0]


def test_budgets():
    assert budget_rewards([1.0, 1.0], [90, 120], [100, 100], rate=0.01) == pytest.approx([0.9, 0.8])
    # 0.01 · 10 + 0.5, clipped at 1 and 0; a wrong answer stays 0.
    assert capped_budget_rewards(
        [1.0, 1.0, 1.0, 0.0], [90, 0, 160, 90], [100] * 4, rate=0.01
    ) == pytest.approx([0.6, 1.0, 0.0, 0.0])


def test_a_group_has_signal_when_two_rewards_differ():
    rewards = [1.0, 0.1, 0.0, 0.1, math.nan, 1.0, 2.0, 3.0, 3.0]
    groups = ["a", "b", "a", "b", "c", "c", "d", "d", "e"]

    assert groups_with_signal(rewards, groups) == ["a", "d"]
    assert groups_with_signal(rewards, groups, most=1) == ["a"]


def test_each_prefix_is_trained_in_the_first_sample_that_has_it():
    samples = [[1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 3], [9]]
    arrays = [np.array(sample, np.int32) for sample in samples]

    masks = shared_prefix_masks(arrays, ["a", "a", "a", "b", "a"])

    assert [mask.astype(int).tolist() for mask in masks] == [
        [1, 1, 1],
        [0, 0, 1],
        [0, 0, 0, 1],
        [1, 1, 1],  # another group
        [1],
    ]


def branch(tokens: list[int], group: str) -> Trajectory:
    """Return a sample whose first token is the prompt."""
    trainable = np.arange(len(tokens)) > 0
    scores = np.where(trainable, np.float32(-1.0), np.float32(0.0))
    return Trajectory(
        prompt_id="p",
        group=group,
        sibling=0,
        attempt=0,
        token_ids=np.array(tokens, np.int32),
        logprobs=scores,
        trainable=trainable,
        versions=(VersionSpan(UNSAMPLED, 1), VersionSpan(2, len(tokens) - 1)),
        rewards={},
        reward=1.0,
        finish_reason="stop",
        teacher=TeacherScores(
            logprobs=scores,
            top_logprobs=np.zeros((len(tokens), 0), np.float32),
            top_token_ids=np.zeros((len(tokens), 0), np.int32),
        ),
    )


def test_branches_train_what_they_share_in_the_first_of_them():
    branches = [branch([7, 1, 2], "a"), branch([7, 1, 3, 4], "a"), branch([7, 1, 2], "a")]

    first, second, same = prefixes_trained_once([*branches, branch([7, 1], "b")])[:3]

    assert [t.trainable.astype(int).tolist() for t in (first, second, same)] == [
        [0, 1, 1],
        [0, 0, 1, 1],
        [0, 0, 0],
    ]
    assert second.logprobs.tolist() == [0.0, 0.0, -1.0, -1.0]
    assert second.teacher is not None
    assert second.teacher.logprobs.tolist() == [0.0, 0.0, -1.0, -1.0]
    assert second.versions == branches[1].versions


def test_what_an_earlier_branch_has_as_context_is_trained_in_the_one_that_said_it():
    whole, said = branch([7, 1, 2, 3], "a"), branch([7, 1, 2], "a")
    marks = np.array([False, False, False, True])
    history = replace(whole, trainable=marks, logprobs=np.where(marks, np.float32(-1.0), 0.0))

    trained = prefixes_trained_once([history, said, said, whole])

    assert [t.trainable.astype(int).tolist() for t in trained] == [
        [0, 0, 0, 1],
        [0, 1, 1],
        [0, 0, 0],
        [0, 0, 0, 0],
    ]


def test_samples_that_saw_other_pictures_have_no_prefix_in_common():
    branches = [branch([7, 1, 2], "a"), branch([7, 1, 2], "a"), branch([7, 1, 2], "a")]
    seen = [replace(b, images=(p,)) for b, p in zip(branches, ("x", "y", "x"), strict=True)]
    trained = [t.trainable.astype(int).tolist() for t in prefixes_trained_once(seen)]
    assert trained == [[0, 1, 1], [0, 1, 1], [0, 0, 0]]


def test_continuations_see_the_prefix_and_themselves():
    segments = torch.tensor([0, 0, 1, 1, 2, -1])

    mask = prefix_tree_mask(segments)

    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert prefix_tree_positions(segments)[:5].tolist() == [0, 1, 2, 3, 2]
