"""Laying samples out as a batch."""

import numpy as np
import pytest
import torch

from cosmos_algos import (
    LabelledTokens,
    SampleWeights,
    TrajectoryError,
    collate,
    collate_labelled,
    empty_batch,
)
from cosmos_core.trajectory import Trajectory, VersionSpan


def sample(token_ids, trainable, logprobs, versions):
    return Trajectory(
        prompt_id="p",
        group="train.0.7",
        sibling=2,
        attempt=0,
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        trainable=np.array(trainable, np.bool_),
        versions=tuple(VersionSpan(*span) for span in versions),
        rewards={},
        reward=1.0,
        finish_reason="stop",
    )


LONG = sample([7, 8, 5, 6], [0, 0, 1, 1], [0, 0, -0.5, -0.25], [(-1, 2), (3, 1), (4, 1)])
SHORT = sample([9, 4], [0, 1], [0, -1.0], [(-1, 1), (4, 1)])


def weights(token, denominator):
    return SampleWeights(torch.tensor(token).double(), torch.tensor(denominator).double())


def test_every_column_is_about_predicting_the_next_token():
    batch = collate(
        [LONG, SHORT],
        torch.tensor([2.0, -1.0]),
        weights([0.5, 1.0], [1.0, 1.0]),
        pad_id=1,
        policy_version=5,
    )

    assert batch.token_ids.tolist() == [[7, 8, 5, 6], [9, 4, 1, 1]]
    assert batch.valid.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.targets.tolist() == [[8, 5, 6, 0], [4, 1, 1, 0]]
    assert batch.trainable.int().tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert batch.behaviour_logprobs.tolist() == [[0, -0.5, -0.25, 0], [-1, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 2, 2, 0], [-1, 0, 0, 0]]
    assert batch.token_weights.tolist() == [[0, 0.5, 0.5, 0], [1, 0, 0, 0]]
    assert batch.denominators.tolist() == [1, 1]
    assert batch.lags.tolist() == [[0, 2, 1, 0], [1, 0, 0, 0]]


def test_a_first_token_that_nothing_predicts_is_refused_by_name():
    broken = sample([7, 8], [1, 1], [-1, -1], [(0, 2)])

    with pytest.raises(TrajectoryError, match=r"group train\.0\.7 sibling 2: token 0 is trainable"):
        collate([broken], torch.tensor([1.0]), weights([1.0], [1.0]))


def test_samples_without_a_token_have_a_column_for_the_model_to_run_on():
    none = sample([], [], [], [])

    batches = [
        collate([none], torch.tensor([1.0]), weights([0.0], [0.0]), pad_id=3),
        collate_labelled(
            [LabelledTokens(token_ids=none.token_ids, trainable=none.trainable)],
            weights([0.0], [0.0]),
            pad_id=3,
        ),
    ]

    for batch in batches:
        assert batch.token_ids.tolist() == [[3]]
        assert not batch.valid.any()
        assert not batch.trainable.any()


def test_an_empty_batch_weighs_nothing():
    batch = empty_batch()

    assert batch.denominators.sum() == 0
    assert not batch.trainable.any()


def test_to_moves_every_tensor():
    moved = collate([SHORT], torch.tensor([1.0]), weights([1.0], [1.0])).to("meta")

    assert moved.token_ids.is_meta
    assert moved.denominators.is_meta
    assert moved.old_logprobs is None
