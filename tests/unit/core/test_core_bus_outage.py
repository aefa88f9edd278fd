"""An outage of the server is told once, by the first of the calls that wait, and so is its end."""

import pytest

pytest.importorskip("redis")

from cosmos_core.bus.patience import Outage, Patience


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_what_a_call_failed_of_before_others_were_answered_is_not_told_anew() -> None:
    clock, said = Clock(), list[str]()
    outage = Outage("here", said.append, clock)
    first, second = Patience(60.0, clock), Patience(60.0, clock)
    clock.now_s = 11.0
    assert not first.is_over()
    outage.note(TimeoutError("no word"), first)
    outage.end()  # the first is answered at its next try
    clock.now_s = 11.5
    assert not second.is_over()
    outage.note(TimeoutError("no word"), second)  # it had been asked before the server went on
    outage.end()
    told = ["Redis at here does not answer (no word); it is tried for another 49 s"]
    assert said == [*told, "Redis at here answers again"]

    clock.now_s = 14.0
    assert not second.is_over()
    outage.note(TimeoutError("no word"), second)  # nobody has been answered for 2.5 s
    assert len(said) == 3
