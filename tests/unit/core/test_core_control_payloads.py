"""Which payloads nobody waits for any more."""

from cosmos_core.control import ControllerState, payload_key
from cosmos_core.control.payloads import is_over
from cosmos_core.control.state import GroupState, RoundState
from cosmos_core.messages import GroupId


def train(ordinal: int, attempt: int) -> str:
    return payload_key(GroupId("train", 0, ordinal), attempt, 1)


def answer(version: int, ordinal: int, attempt: int) -> str:
    return payload_key(GroupId("validation", version, ordinal), attempt, 0)


def test_of_a_group_in_flight_only_attempts_before_the_last_are_over() -> None:
    state = ControllerState(next_ordinal=5, groups={4: GroupState(ordinal=4, attempt=2)})
    assert [is_over(state, train(4, attempt)) for attempt in (0, 1, 2, 3)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_group_that_was_consumed_or_dropped_is_over_and_one_to_come_is_not() -> None:
    state = ControllerState(next_ordinal=5)
    assert is_over(state, train(4, 0))
    assert not is_over(state, train(5, 0))


def test_of_validations_only_the_open_round_is_waited_for() -> None:
    closed = ControllerState()
    opened = ControllerState(
        round=RoundState(version=3, since_s=0.0, waiting=[], first_attempt=2, attempts={7: 4})
    )
    assert is_over(closed, answer(3, 0, 2))
    assert is_over(opened, answer(2, 0, 2))
    assert is_over(opened, answer(3, 0, 1))
    assert not is_over(opened, answer(3, 0, 2))
    assert is_over(opened, answer(3, 7, 3))
    assert not is_over(opened, answer(3, 7, 4))


def test_a_key_of_another_form_is_left_alone() -> None:
    assert not is_over(ControllerState(next_ordinal=9), "train.0.1")
