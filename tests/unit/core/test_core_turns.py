"""Turns of data sets: shares are kept in every stretch, and nothing needs a state."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_core.turns import ShareError, Turn, Turns, evenly_spread, turns_of

SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1.0), min_size=1, max_size=5)


def test_turns_are_whole_and_all_given_out() -> None:
    assert turns_of({"a": 1, "b": 1, "c": 1}) == {"a": 334, "b": 333, "c": 333}
    assert turns_of({"a": 7.0}) == {"a": 1000}


def test_three_to_one_is_three_of_every_four() -> None:
    turns = Turns({"a": 3, "b": 1})
    assert [turns.at(i).name for i in range(8)] == list("aabaaaba")
    assert turns.at(1000) == Turn("a", 750)


@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(0, 5000))
def test_a_set_has_had_the_turns_that_its_next_is_numbered_by(shares, ordinal) -> None:
    turns = Turns(shares)
    had = turns.before(ordinal)
    assert sum(had.values()) == ordinal
    assert had == dict.fromkeys(shares, 0) | Counter(turns.at(i).name for i in range(ordinal))
    name, number = turns.at(ordinal)
    assert number == had[name]


def test_what_there_is_of_each_name_is_evenly_spread() -> None:
    spread = evenly_spread({"a": 1, "b": 2})
    assert spread == [("b", 0), ("a", 0), ("b", 1)]


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        ({}, "there are no shares"),
        ({"a": 1.0, "b": 0.0}, "'b' is 0.0; want a positive number"),
        ({"a": 1.0, "b": -2.0}, "'b' is -2.0; want a positive number"),
        ({"a": float("nan")}, "'a' is nan"),
        ({"a": float("inf")}, "'a' is inf"),
        ({"a": 1.0, "b": 1e-4}, "'b' has a share of 0.0001 of 1.0001; less than one in 1000"),
    ],
)
def test_shares_that_no_set_can_have_are_refused(shares, problem) -> None:
    with pytest.raises(ShareError, match=problem):
        turns_of(shares)
