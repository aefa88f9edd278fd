"""Admission and step formation, against values worked out by hand and against enumeration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_core.control import Load, StalenessConfig, policy_of
from cosmos_core.control.staleness import first_overdue
from cosmos_core.control.state import GroupState


def can_schedule(deadlines: list[int], step: int, room: int) -> bool:
    """Fill the steps one by one, earliest deadline first, and see whether one comes too late."""
    left = sorted(deadlines)
    while left:
        if left[0] < step:
            return False
        left, step = left[room:], step + 1
    return True


@given(
    deadlines=st.lists(st.integers(0, 8), max_size=14),
    step=st.integers(0, 5),
    room=st.integers(1, 4),
)
def test_feasibility_by_counts_is_feasibility_by_filling_the_steps(deadlines, step, room) -> None:
    due = {deadline: deadlines.count(deadline) for deadline in deadlines}
    is_feasible = first_overdue(due, step, room) is None
    # Filling takes whole steps: one that is not full is formed too, which never helps the others.
    assert is_feasible == can_schedule(deadlines, step, room)


def load(step: int, generating: dict[int, int], ready: dict[int, int]) -> Load:
    return Load(step, 2, generating, ready)


@pytest.mark.parametrize(
    ("generating", "ready", "deadline", "expected"),
    [
        ({}, {}, 5, True),
        ({}, {}, 4, False),  # due before the next step
        ({5: 1}, {5: 1}, 5, False),  # step 5 is full
        ({5: 1}, {5: 1}, 6, True),
        ({6: 3}, {5: 1}, 6, False),  # 5 groups into steps 5 and 6, which hold 4
        ({6: 3}, {5: 1}, 7, True),
        ({6: 3}, {5: 1}, 5, False),  # it would fit into step 5, but push another past step 6
    ],
)
def test_block_gives_a_prompt_out_only_if_all_deadlines_hold(
    generating, ready, deadline, expected
) -> None:
    policy = policy_of(StalenessConfig(depth=1, bound=2))
    assert policy.may_dispatch(load(5, generating, ready), deadline) == expected


def groups(*entries: tuple[int, str, int]) -> list[GroupState]:
    return [GroupState(ordinal=o, stage=stage, version=v) for o, stage, v in entries]  # type: ignore[arg-type]


def count(found: list[GroupState], stage: str, bound: int) -> dict[int, int]:
    due: dict[int, int] = {}
    for group in found:
        if group.stage == stage:
            due[group.version + bound] = due.get(group.version + bound, 0) + 1
    return due


def choose(config: StalenessConfig, step: int, found: list[GroupState]) -> list[int] | None:
    chosen = policy_of(config).choose(
        load(step, count(found, "generating", config.bound), count(found, "ready", config.bound)),
        lambda: found,
    )
    return None if chosen is None else [group.ordinal for group in chosen]


def test_block_waits_for_a_straggler_that_is_due_now() -> None:
    found = groups((0, "generating", 3), (1, "ready", 4), (2, "ready", 4))
    assert choose(StalenessConfig(depth=1, bound=2), 5, found) is None


def test_block_does_not_wait_for_one_that_is_due_later() -> None:
    found = groups((0, "generating", 4), (1, "ready", 4), (2, "ready", 3))
    assert choose(StalenessConfig(depth=1, bound=2), 5, found) == [2, 1]


def test_block_waits_when_what_is_left_would_not_fit_into_the_steps_after() -> None:
    # Step 5 would take two; three are due by step 6, which holds two.
    found = groups(*((i, "generating", 4) for i in range(3)), (3, "ready", 5), (4, "ready", 5))
    assert choose(StalenessConfig(depth=1, bound=2), 5, found) is None


@pytest.mark.parametrize("policy", ["drop", "count"])
def test_other_policies_leave_stragglers_behind(policy) -> None:
    found = groups((0, "generating", 3), (1, "ready", 4), (2, "ready", 4))
    config = StalenessConfig(depth=1, bound=2, policy=policy)
    assert choose(config, 5, found) == [1, 2]


def test_only_drop_and_block_let_a_group_expire() -> None:
    for name, expected in (("drop", True), ("block", True), ("count", False), ("window", False)):
        policy = policy_of(StalenessConfig(policy=name))  # type: ignore[arg-type]
        assert policy.is_expired(load(5, {}, {4: 1}), 4) == expected


def test_window_takes_only_the_oldest_issued() -> None:
    # A window of 1.5 steps of two: the three oldest, of which one is not ready.
    config = StalenessConfig(policy="window", window=0.5)
    found = groups((0, "generating", 0), (1, "ready", 0), (2, "generating", 0), (3, "ready", 0))
    assert choose(config, 5, found) is None
    found[2].stage = "ready"
    assert choose(config, 5, found) == [1, 2]


def test_a_window_without_end_takes_whatever_is_ready() -> None:
    config = StalenessConfig(policy="window", window=float("inf"))
    found = groups(*((i, "generating", 0) for i in range(9)), (9, "ready", 0), (10, "ready", 0))
    assert choose(config, 5, found) == [9, 10]


def test_a_window_of_a_tenth_of_fifty_is_five_groups() -> None:
    policy = policy_of(StalenessConfig(policy="window", window=0.1))
    found = groups(
        *((i, "generating", 0) for i in range(6)), *((i, "ready", 0) for i in range(6, 56))
    )
    assert policy.choose(Load(5, 50, {4: 6}, {4: 50}), lambda: found) is None, "49 of the oldest 55"
    found[5].stage = "ready"
    chosen = policy.choose(Load(5, 50, {4: 5}, {4: 51}), lambda: found)
    assert chosen is not None
    assert [group.ordinal for group in chosen] == list(range(5, 55))


@pytest.mark.parametrize(("depth", "bound"), [(-1, 0), (3, 2)])
def test_a_depth_that_the_bound_cannot_follow_is_refused(depth, bound) -> None:
    with pytest.raises(ValueError, match=f"depth is {depth} and bound {bound}"):
        StalenessConfig(depth=depth, bound=bound)
