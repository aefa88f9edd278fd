"""A run that is scaled and stopped from outside, and taken over by a controller that stood by."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from real_runs import SMALL, SOURCES, Run, Runner, assert_balanced

_LONG_S = 400.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def ask(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    command = [sys.executable, "-m", "cosmos_app", arguments[0], str(run.output), *arguments[1:]]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    from cosmos_app.event_log import read_events

    return [e for e in read_events(run.output / "events.jsonl") if e["type"] == kind]


@contextmanager
def policy_held(run: Run) -> Iterator[None]:
    """Stop the policy as soon as the rollout has all that it published; it goes on afterwards."""
    policy = run.child("policy-0")
    newest = lambda kind: max((e["version"] for e in events(run, kind)), default=-1)  # noqa: E731
    has_all = lambda: newest("VersionPublished") == newest("VersionLoaded") >= 0  # noqa: E731
    while True:
        os.kill(policy, signal.SIGSTOP)
        if is_soon(has_all, 3.0):
            break
        os.kill(policy, signal.SIGCONT)  # it was about to say or to send something
        time.sleep(0.5)
    try:
        yield
    finally:
        os.kill(policy, signal.SIGCONT)


def is_soon(is_true: Callable[[], bool], within_s: float) -> bool:
    """Whether it becomes true, and stays so for a moment."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if is_true():
            time.sleep(0.5)
            return is_true()
        time.sleep(0.05)
    return False


def test_a_run_is_scaled_up_and_down_taken_over_and_stopped_with_a_checkpoint(
    runner: Runner,
) -> None:
    run = runner.start(
        *SMALL,
        "trainer.steps=100000",
        "launch.standbys=1",
        "launch.restarts=3",
        "validation.before=false",
    )
    run.wait_for(lambda: run.steps_done() >= 1, _LONG_S)

    loads = lambda name: [e for e in events(run, "VersionLoaded") if e["replica"] == name]  # noqa: E731
    with policy_held(run):
        scaled = ask(run, "scale", "--rollouts", "2")
        assert scaled.returncode == 0, scaled.stderr
        run.wait_for(lambda: bool(loads("rollout-1")), _LONG_S)
    asked = [e for e in events(run, "LoadVersion") if e["replica"] == "rollout-1"]
    assert asked[0]["holder"] == "rollout-0"
    made = lambda name: [e for e in events(run, "GroupFinished") if e["replica"] == name]  # noqa: E731
    run.wait_for(lambda: bool(made("rollout-1")), _LONG_S)
    waits = lambda: [r for r in run.metrics("rollout") if "first_group_s" in r["values"]]  # noqa: E731
    run.wait_for(lambda: {r["replica"] for r in waits()} == {"rollout-0", "rollout-1"}, _LONG_S)
    assert all(0.0 < record["values"]["first_group_s"] < 10.0 for record in waits())
    told = json.loads(ask(run, "status", "--json").stdout)["replicas"]
    assert 0.0 < told["rollout-1"]["first_group_s"] < 10.0
    assert "wanted: 2" in ask(run, "status").stdout

    assert ask(run, "scale", "--rollouts", "1").returncode == 0
    left = lambda: [e for e in events(run, "ReplicaLeft") if e["replica"] == "rollout-1"]  # noqa: E731
    run.wait_for(lambda: bool(left()), _LONG_S)
    assert left()[-1]["reason"] == "stopped"

    os.kill(run.child("controller"), signal.SIGKILL)
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 2, _LONG_S)

    stopped = ask(run, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert run.finish() == 3, run.logs()
    assert run.report["finished"] == "cosmos-app stop"
    assert_balanced(run.report["books"])
    assert 0.0 < run.report["first_group_s"][0] < 10.0
    assert list((run.output / "checkpoints").iterdir())
    steps = [record["step"] for record in run.metrics("controller")]
    assert sorted(set(steps)) == list(range(max(steps) + 1))
