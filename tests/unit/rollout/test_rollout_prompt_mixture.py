"""Prompts of several data sets: shares are kept, every row has its turn, nothing needs a state."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_rollout import PromptDataError, PromptMixture, PromptRow, PromptSet


def rows(name: str, count: int) -> PromptSet:
    return PromptSet(
        [
            PromptRow(prompt_id=f"{name}{i}", prompt="", fields={"data_set": name})
            for i in range(count)
        ]
    )


SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1.0), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(0, 5000), st.integers(1, 1200))
def test_every_stretch_of_prompts_has_the_shares(shares, start, length) -> None:
    mixture = PromptMixture({name: rows(name, 3) for name in shares}, shares)
    drawn = Counter(mixture.row(start + i).data_set for i in range(length))
    whole = sum(shares.values())
    for name, share in shares.items():
        wanted = length * share / whole
        assert abs(drawn[name] - wanted) <= len(shares) + length / 1000


def test_every_set_goes_through_its_own_epochs_whatever_the_others_do() -> None:
    mixture = PromptMixture(
        {"few": rows("few", 7), "many": rows("many", 50)}, {"few": 3, "many": 1}
    )
    drawn = [mixture.row(i) for i in range(2800)]
    assert [row.data_set for row in drawn] == [mixture.data_set(i) for i in range(2800)]
    for name, size in (("few", 7), ("many", 50)):
        mine = [row.prompt_id for row in drawn if row.data_set == name]
        assert len(mine) == {"few": 2100, "many": 700}[name]
        epochs = [mine[i : i + size] for i in range(0, len(mine), size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_a_row_follows_from_its_ordinal_alone() -> None:
    sets, shares = {"a": rows("a", 11), "b": rows("b", 4)}, {"a": 0.5, "b": 0.25}
    in_order = [PromptMixture(sets, shares).row(i).prompt_id for i in range(3000)]
    again = PromptMixture(dict(reversed(sets.items())), shares)
    assert [again.row(i).prompt_id for i in reversed(range(3000))] == in_order[::-1]


@pytest.mark.parametrize(
    ("sets", "shares", "problem"),
    [
        ({"a": 1, "b": 1}, {"a": 1.0}, "one share for each set"),
        ({}, {}, "one share for each set"),
        (
            {"a": 1, "b": 1},
            {"a": 1.0, "b": 1e-4},
            "'b' has a share of 0.0001 of 1.0001; less than one",
        ),
    ],
)
def test_shares_that_no_set_can_have_are_refused(sets, shares, problem) -> None:
    with pytest.raises(PromptDataError, match=problem):
        PromptMixture({name: rows(name, size) for name, size in sets.items()}, shares)
