"""When a run is said to stand still, and what is said of it."""

from typing import Any

from cosmos_app.standing_still import Stillness, waited_for

WAITS = "step 3 on policy-0 for {:.1f} s"


def status(consumed: int, *, step: int = 1, **others: Any) -> dict[str, Any]:
    return {"step": step, "books": {"consumed": consumed}, "time_s": 0.0, **others}


def said_until(still: Stillness, waiting: str, *, begin_s: float, end_s: float) -> list[str]:
    """Look once a second while nothing happens; return what was said."""
    found = list[str]()
    at_s = begin_s
    while at_s <= end_s:
        if said := still.look(status(7), waiting.format(at_s - begin_s), at_s):
            found.append(said)
        at_s += 1.0
    return found


def test_a_run_in_which_nothing_happens_says_once_what_it_waits_for() -> None:
    still = Stillness(0.0)
    assert said_until(still, WAITS, begin_s=0.0, end_s=60.0) == [
        "nothing has happened for 10 s; the run waits for step 3 on policy-0 for 10.0 s"
    ]


def test_something_else_that_is_waited_for_is_told_too_and_that_it_goes_on() -> None:
    still = Stillness(0.0)
    _ = said_until(still, WAITS, begin_s=0.0, end_s=20.0)
    assert said_until(still, "a rollout replica to join", begin_s=21.0, end_s=60.0) == [
        "nothing has happened for 31 s; the run waits for a rollout replica to join",
    ]
    assert still.look(status(8), "events", 61.0) == "it goes on after 61 s"
    assert still.look(status(8), "events", 62.0) == ""


def test_a_run_that_gets_further_says_nothing_however_long_its_steps_are() -> None:
    """From the third step of half a minute on: so long is known to be usual then."""
    still, told = Stillness(0.0), list[float]()
    for at_s in range(600):
        seen = status(at_s // 30, step=1 + at_s // 30)
        if still.look(seen, WAITS.format(at_s % 30), float(at_s)).startswith("nothing"):
            told.append(at_s)
    assert told == [10, 40]


def test_one_long_pause_does_not_hide_the_next() -> None:
    still = Stillness(0.0)
    assert still.look(status(1), "events", 0.0) == ""
    assert still.look(status(2), "events", 500.0) == ""
    assert still.patience_s == 10.0


def test_tries_that_come_to_nothing_are_no_progress() -> None:
    still, told = Stillness(0.0), list[str]()
    for at_s in range(12):
        seen = status(7, counters={"retries": at_s, "loads_failed": at_s, "loads": 3})
        told.append(still.look(seen, "version 4 to load on rollout-0", float(at_s)))
    assert told[10].endswith("the run waits for version 4 to load on rollout-0")


def test_who_is_started_and_not_there_is_named_with_a_log() -> None:
    seen = status(0, waiting_for="a rollout replica to join", replicas={"policy-0": {}})
    started = ["controller", "policy-0", "rollout-0", "rollout-1"]
    assert waited_for(seen, started, 1.0) == (
        "a rollout replica to join; not there yet: rollout-0, rollout-1 (logs/rollout-0.log)"
    )
    busy = status(0, waiting_for="step 3 on policy-0", replicas={"policy-0": {}})
    assert waited_for(busy, started, 1.0) == "step 3 on policy-0"


def test_a_controller_that_says_nothing_is_what_a_run_waits_for() -> None:
    assert waited_for({}, [], 0.0) == "its controller to begin (logs/controller.log)"
    seen = status(0, waiting_for="events")
    assert waited_for(seen, [], 9.0) == "events"
    assert waited_for(seen, [], 15.0).startswith("its controller, which is silent for 15 s")


def test_a_run_that_is_over_is_waited_for_by_nobody() -> None:
    still = Stillness(0.0)
    seen = status(7, finished="all steps done")
    assert [still.look(seen, "nothing", float(at_s)) for at_s in range(30)] == [""] * 30
