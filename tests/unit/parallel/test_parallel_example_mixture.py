"""Examples of several data sets: shares are kept, sets have their own epochs, nothing is stored."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_parallel import (
    ExampleMixture,
    SftBatchConfig,
    SftData,
    SftDataError,
    SftExample,
    step_batches,
    step_examples,
)

CONFIG = SftBatchConfig(batch_size=8, seed=3)
SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1.0), min_size=1, max_size=5)


def mixture_of(shares: dict[str, float], size: int = 3) -> ExampleMixture:
    return ExampleMixture(dict.fromkeys(shares, size), shares)


@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(0, 5000), st.integers(1, 1200))
def test_every_stretch_of_examples_has_the_shares(shares, start, length) -> None:
    mixture = mixture_of(shares)
    names = [name for name in shares for _ in range(3)]
    drawn = Counter(names[place] for place in mixture.places(range(start, start + length), 0))
    whole = sum(shares.values())
    for name, share in shares.items():
        # a turn more or less for each set, and shares are rounded to thousandths
        assert abs(drawn[name] - length * share / whole) <= len(shares) + length / 1000


def test_three_quarters_are_six_of_the_eight_of_every_step() -> None:
    mixture = ExampleMixture({"a": 5, "b": 100}, {"a": 3, "b": 1})
    for step in range(300):
        places = step_examples(mixture, CONFIG, step)
        assert sum(place < 5 for place in places) == 6


def test_a_small_set_repeats_reshuffled_while_a_large_one_is_in_its_first_epoch() -> None:
    mixture = ExampleMixture({"few": 7, "many": 500}, {"few": 3, "many": 1})
    drawn = [place for step in range(175) for place in step_examples(mixture, CONFIG, step)]
    few = [place for place in drawn if place < 7]
    many = [place for place in drawn if place >= 7]
    assert (
        mixture.drawn(len(drawn))
        == {"few": len(few), "many": len(many)}
        == {
            "few": 1050,
            "many": 350,
        }
    )
    assert len(set(many)) == 350  # none twice
    epochs = [tuple(few[i : i + 7]) for i in range(0, len(few), 7)]
    assert all(set(epoch) == set(range(7)) for epoch in epochs)
    assert len(set(epochs)) > 100


def test_a_step_follows_from_its_number_whatever_the_order_in_which_sets_are_named() -> None:
    sizes, shares = {"a": 11, "b": 4}, {"a": 0.5, "b": 0.25}
    in_order = [step_examples(ExampleMixture(sizes, shares), CONFIG, step) for step in range(200)]
    again = ExampleMixture(sizes, shares)
    assert [step_examples(again, CONFIG, step) for step in reversed(range(200))] == in_order[::-1]
    swapped = ExampleMixture({"b": 4, "a": 11}, {"b": 0.25, "a": 0.5})
    moved = [[(place + 4) % 15 for place in step] for step in in_order]
    assert [step_examples(swapped, CONFIG, step) for step in range(200)] == moved


def test_sets_of_one_size_come_in_orders_of_their_own() -> None:
    mixture = ExampleMixture({"a": 50, "b": 50}, {"a": 1, "b": 1})
    places = mixture.places(range(100), 0)
    assert [p for p in places if p < 50] != [p - 50 for p in places if p >= 50]


def test_one_data_set_has_the_order_it_always_had() -> None:
    drawn = [place for step in range(5) for place in step_examples(20, CONFIG, step)]
    expected = [np.random.default_rng([3, epoch]).permutation(20) for epoch in range(2)]
    assert drawn == np.concatenate(expected).tolist()


def test_batches_are_of_the_sets_whose_turn_it_is() -> None:
    examples = tuple(
        SftExample(token_ids=np.full(4, n, np.int32), trainable=np.ones(4, np.bool_))
        for n in range(6)
    )
    data = SftData(examples=examples, mixture=ExampleMixture({"a": 2, "b": 4}, {"a": 1, "b": 3}))
    shares = [step_batches(data, CONFIG, 5, rank=rank, size=2) for rank in range(2)]
    found = [int(row[0]) for part in shares for batch in part for row in batch.token_ids]
    assert sorted(found) == sorted(step_examples(data.mixture, CONFIG, 5))
    assert sum(number < 2 for number in found) == 2


@pytest.mark.parametrize(
    ("sizes", "shares", "problem"),
    [
        ({"a": 1, "b": 1}, {"a": 1.0}, "one share for each set"),
        ({"a": 1, "b": 0}, {"a": 1.0, "b": 1.0}, "data set 'b' has no example to train on"),
        ({"a": 1, "b": 1}, {"a": 1.0, "b": -1.0}, "'b' is -1.0; want a positive number"),
        ({"a": 1, "b": 1}, {"a": 1.0, "b": 1e-4}, "'b' has a share of 0.0001 of 1.0001"),
        ({}, {}, "no shares"),
    ],
)
def test_sets_that_cannot_take_turns_are_refused(sizes, shares, problem) -> None:
    with pytest.raises(SftDataError, match=problem):
        ExampleMixture(sizes, shares)
