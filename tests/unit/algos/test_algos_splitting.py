"""Micro-batches and rank shares."""

import pytest

from cosmos_algos import AlgorithmConfigError, Share, split_batches, split_ranks


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        ([], 10, []),
        ([3, 9, 3, 8], 20, [[1, 3], [0, 2]]),
        # All fit in one: 4 rows of 5.
        ([5, 5, 5, 5], 20, [[0, 1, 2, 3]]),
        # One short of that: two and two, not three and one.
        ([5, 5, 5, 5], 19, [[0, 1], [2, 3]]),
        # Longer than the budget: alone.
        ([30, 2, 2], 10, [[0], [1, 2]]),
        ([1], 10, [[0]]),
    ],
)
def test_batches(lengths, max_tokens, expected):
    assert split_batches(lengths, max_tokens) == expected


def test_batches_are_few_within_budget_and_hold_everything_once():
    lengths = [(7 * index) % 53 + 1 for index in range(200)]

    batches = split_batches(lengths, 120)

    assert sorted(index for batch in batches for index in batch) == list(range(200))
    padded = [len(batch) * max(lengths[index] for index in batch) for batch in batches]
    assert max(padded) <= 120
    useful = sum(lengths) / sum(padded)
    assert useful > 0.9


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "expected"),
    [
        ([5, 1, 4, 2], 2, [[0, 1], [2, 3]]),
        # More ranks than samples: the last has nothing to do.
        ([3, 2], 3, [[0], [1], []]),
        ([], 2, [[], []]),
    ],
)
def test_ranks(lengths, num_ranks, expected):
    assert split_ranks(lengths, num_ranks) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": -1, "num_ranks": 4}, "share: rank -1 of num_ranks 4; ranks count from 0"),
        ({"rank": 1}, "share: rank 1 of num_ranks 1; .* is how many share the step"),
        ({"max_tokens": 0}, "share: max_tokens 0 must be 1 or more"),
    ],
)
def test_a_share_of_a_rank_that_is_none_is_refused(given, message):
    with pytest.raises(AlgorithmConfigError, match=message):
        Share(**{"max_tokens": 10, **given})
