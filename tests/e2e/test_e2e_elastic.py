"""Policy replicas of a real run die, come back and are scaled while the others go on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from capabilities import skip_without
from one_thread import busiest_thread, can_stop_threads, is_computing, stopped
from real_runs import SMALL, SOURCES, Run, Runner, assert_balanced
from safetensors.torch import load_file

from cosmos_app.event_log import read_events

NUM_STEPS = 12
LENGTH = "{kind='length', target=0, limit=32}"
# rewards that always differ, plain descent: weights move, by as much on every machine
SETTINGS = (
    *SMALL,
    f"trainer.steps={NUM_STEPS}",
    "staleness.depth=0",
    "staleness.bound=0",
    "validation.before=false",
    f"reward.rewards=[{LENGTH}]",
    "learner.optimizer={kind='sgd', lr=0.1}",
)
ELASTIC = ("policy.replicas=2", "elastic.lease_s=5", "bus.lease_s=120")
_LONG_S = 300.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def exported(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.output / "export" / "model" / "model.safetensors")


def events(run: Run, kind: str, replica: str) -> list[dict[str, Any]]:
    path = run.output / "events.jsonl"
    return [e for e in read_events(path) if e["type"] == kind and e["replica"] == replica]


def taken_by(run: Run) -> dict[int, float]:
    """How many replicas took each step, as they say themselves."""
    return {r["step"]: r["values"]["replicas"] for r in run.metrics("policy")}


def join_before_more_is_generated(run: Run, joins: dict[str, int]) -> None:
    """Hold generation up until replicas have joined so often, or the run would end without them."""
    joined = lambda name: len(events(run, "ReplicaJoined", name))  # noqa: E731
    run.wait_for(lambda: any(joined(f"policy-{index}") for index in range(2)), _LONG_S)
    run.wait_for(lambda: bool(run.children("rollout-0")), _LONG_S)  # It may begin after these.
    rollout = run.child("rollout-0")
    os.kill(rollout, signal.SIGSTOP)
    try:
        run.wait_for(lambda: all(joined(name) >= n for name, n in joins.items()), _LONG_S)
    finally:
        os.kill(rollout, signal.SIGCONT)


def begun_by_two(runner: Runner, *settings: str, name: str) -> Run:
    """Start a run of two policies; return it when both have joined."""
    run = runner.start(*SETTINGS, "policy.replicas=2", *settings, name=name)
    join_before_more_is_generated(run, {"policy-0": 1, "policy-1": 1})
    return run


@contextlib.contextmanager
def newcomer_held(run: Run, name: str, killed: int) -> Iterator[None]:
    """Stop the process that a replica begins again as, which may be back before the next step."""
    found = list[int]()

    def is_there() -> bool:
        found[:] = [pid for pid in run.children(name) if pid != killed]
        return bool(found)

    run.wait_for(is_there, _LONG_S)
    os.kill(found[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(found[0], signal.SIGCONT)


def ask(run: Run, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    command, place, *options = arguments[0], str(run.output), *arguments[1:]
    words = [sys.executable, "-m", "cosmos_app", command, place, *options]
    told = subprocess.run(words, env=environment, check=True, timeout=120, capture_output=True)
    return told.stdout.decode()


def scale(run: Run, *arguments: str) -> None:
    ask(run, "scale", *arguments)


def status(run: Run) -> dict[str, Any]:
    return json.loads(ask(run, "status", "--json"))


def slow_rewards(folder: Path) -> str:
    """Return a setting: steps take a second, or on a busy machine all are over before two meet."""
    slow = folder / "slow.py"
    slow.write_text("import time\n\ndef slow(_):\n    time.sleep(0.06)\n    return 0.0\n")
    return f"reward.rewards=[{LENGTH}, {{kind='python', function='{slow}:slow', name='slow'}}]"


def test_the_others_go_on_when_a_policy_dies_and_it_joins_again_by_a_peers_weights(
    runner: Runner, tmp_path: Path
) -> None:
    """The weights at the end are those of one policy that nothing happened to."""
    pytest.importorskip("torchft")
    one = runner.complete(*SETTINGS, name="one")
    run = begun_by_two(runner, *ELASTIC, slow_rewards(tmp_path), name="elastic")
    run.wait_for(lambda: 2.0 in taken_by(run).values(), _LONG_S)
    killed = run.child("policy-0")
    os.kill(killed, signal.SIGKILL)
    before = max(taken_by(run))
    with newcomer_held(run, "policy-0", killed):
        run.wait_for(lambda: 1.0 in [n for s, n in taken_by(run).items() if s > before], _LONG_S)
    join_before_more_is_generated(run, {"policy-0": 2})
    assert run.finish(_LONG_S) == 0, run.logs()
    counts = taken_by(run)
    assert sorted(counts) == list(range(NUM_STEPS))
    assert counts[NUM_STEPS - 1] == 2.0
    assert [r["step"] for r in run.metrics("controller")] == list(range(NUM_STEPS))
    assert_balanced(run.report["books"])
    assert run.report["books"]["consumed"] == 8 * NUM_STEPS
    died = [i["name"] for i in run.report["incidents"]]
    assert died == ["policy-0"]  # the other one never began anew
    weights, expected = exported(run), exported(one)
    assert max(float((weights[n] - expected[n]).abs().max()) for n in expected) < 1e-5
    first = load_file(one.output / "model" / "model.safetensors")
    assert max(float((first[n] - expected[n]).abs().max()) for n in expected) > 1e-3


def test_policies_are_added_and_taken_away_while_a_run_goes_on(runner: Runner) -> None:
    pytest.importorskip("torchft")
    run = runner.start(
        *SETTINGS, *ELASTIC, "policy.replicas=1", "trainer.steps=100000", name="scaled"
    )
    run.wait_for(lambda: run.steps_done() >= 1, _LONG_S)
    scale(run, "--policies", "2")
    run.wait_for(lambda: 2.0 in taken_by(run).values(), _LONG_S)
    scale(run, "--policies", "1")

    def gone() -> list[dict[str, Any]]:
        """The later one; or the first, if it had not told of the step yet that both took."""
        return [e for name in ("policy-0", "policy-1") for e in events(run, "ReplicaLeft", name)]

    run.wait_for(lambda: bool(gone()), _LONG_S)
    assert [event["reason"] for event in gone()] == ["stopped"]
    run.wait_for(lambda: list(taken_by(run).values())[-1] == 1.0, _LONG_S)
    run.process.send_signal(signal.SIGINT)
    assert run.finish(_LONG_S) == 3, run.logs()
    assert run.report["incidents"] == []
    steps = [r["step"] for r in run.metrics("controller")]
    assert steps == list(range(len(steps)))
    assert_balanced(run.report["books"])


def test_a_policy_that_hung_while_its_run_fell_back_begins_again(runner: Runner) -> None:
    """It wakes with weights that are newer than the run's, of prompts that are issued again."""
    pytest.importorskip("torchft")
    run = begun_by_two(
        runner,
        "elastic.lease_s=5",
        "bus.lease_s=6",
        "launch.hung_s=600",
        "trainer.checkpoint_every=5",
        name="hung",
    )
    run.wait_for(lambda: run.steps_done() >= 6, _LONG_S)
    os.kill(rollout := run.child("rollout-0"), signal.SIGSTOP)  # or the run would end meanwhile
    os.kill(hung := run.child("policy-0"), signal.SIGSTOP)
    try:
        run.wait_for(lambda: "policy-0" not in status(run)["replicas"], _LONG_S)
        os.kill(run.child("policy-1"), signal.SIGKILL)
        run.wait_for(lambda: status(run)["line"] == [5], _LONG_S)
    finally:
        os.kill(hung, signal.SIGCONT)
        os.kill(rollout, signal.SIGCONT)
    assert run.finish(_LONG_S) == 0, run.logs()
    assert "policy-0" in [i["name"] for i in run.report["incidents"]], "it went on as it was"
    log = (run.output / "logs" / "policy-0.log").read_text()
    # asked to go on, as it meets the other, or in the midst of a step whose samples were trained on
    said = ("is lost: the run has fallen back", "fell back from", "payloads are not in the store")
    assert any(words in log for words in said), log[-3000:]
    saved = [
        *events(run, "CheckpointSaved", "policy-0"),
        *events(run, "CheckpointSaved", "policy-1"),
    ]
    last = [event["lineage"] for event in saved if event["step"] == NUM_STEPS - 1]
    assert set(last) == {1}
    books = run.report["books"]
    assert_balanced(books)
    assert books["consumed"] == 8 * NUM_STEPS
    counted = [r["step"] for r in run.metrics("controller")]
    begun_again = counted.index(5, counted.index(5) + 1)
    assert counted == [*range(begun_again), *range(5, NUM_STEPS)]


def test_one_that_hangs_in_a_step_is_begun_anew_and_the_others_have_waited_for_it(
    runner: Runner, tmp_path: Path
) -> None:
    """The thread that trains stands still, its signs of life go on: they are another thread's."""
    pytest.importorskip("torchft")
    if not can_stop_threads():
        skip_without("tracing")
    run = begun_by_two(
        runner,
        slow_rewards(tmp_path),
        "elastic.lease_s=10",  # longer than the other's own lease: it must not lose that
        "bus.lease_s=6",
        "launch.hung_s=6",
        "reward.timeout_s=5",
        "trainer.checkpoint_every=1000",
        name="stuck",
    )
    run.wait_for(lambda: run.steps_done() >= 3, _LONG_S)
    hang_in_a_step(run, run.child("policy-0"))
    join_before_more_is_generated(run, {"policy-0": 2})
    assert run.finish(_LONG_S) == 0, run.logs()
    died = [(i["name"], i["how"], i["outcome"]) for i in run.report["incidents"]]
    assert died == [("policy-0", "signal 9 (SIGKILL), as it hung", "restarted")], run.logs()
    assert "policy-1 hangs" not in run.text
    counted = [r["step"] for r in run.metrics("controller")]
    assert counted == list(range(NUM_STEPS)), "nobody fell back to a checkpoint"
    assert_balanced(run.report["books"])


def hang_in_a_step(run: Run, pid: int) -> None:
    """Stop the thread of policy-0 that trains, in a step, until the policy is killed."""
    thread = busiest_thread(pid)
    for _ in range(10):
        while not is_computing(pid, thread):
            pass
        with stopped(thread):
            if loses_its_lease(run, "policy-0"):
                run.wait_for(lambda: pid not in run.children("policy-0"), _LONG_S)
                return
    pytest.fail(f"it was never stopped in a step, only between two:\n{run.logs()}")


def loses_its_lease(run: Run, name: str) -> bool:
    """Whether a policy loses its lease, as one does that is in a step, and gets no further."""
    deadline = time.monotonic() + 20.0
    while name not in status(run).get("silent", {}):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
