"""What a run is put through in `test_e2e_eventful`, and what is seen of it meanwhile."""

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory_held import rss_mib, stored
from processes import descendants, is_alive
from real_runs import SMALL, Run

from cosmos_app.control_files import read_address
from cosmos_app.event_log import read_events
from cosmos_core.bus import Bus
from cosmos_core.rundir import RunDirectory

GROUPS, SAMPLES, EVERY = 8, 4, 6
LEASE_S, HELD_S = 5.0, 20.0
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
        calm: steps taken until anybody hung.
        stopped: from when until when a learner, or a rollout of two, was missing: seconds since
            the epoch.
        silent_s: from the moment when a rollout was stopped until it had lost its lease.
        held: groups in flight while the learner was stopped.
        stored: of what in Redis there was how much when all waited for the learner, and when it
            had been stopped for long.
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
    calm: int = 0
    stopped: list[tuple[float, float]] = field(default_factory=list)
    silent_s: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    stored: list[dict[str, int]] = field(default_factory=list)
    growth_mib: dict[str, float] = field(default_factory=dict)
    first_group_s: dict[str, float] = field(default_factory=dict)


def ask(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return a run's status, and which samples lie in Redis."""
    url, namespace = read_address(RunDirectory.open(run.output))

    async def read() -> tuple[dict[str, Any], list[str]]:
        async with await Bus.connect(url, namespace) as bus:
            return await bus.read_status(), await bus.payload_keys()

    return asyncio.run(read())


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_events(run.output / "events.jsonl") if e["type"] == kind]


def hang_rollouts(run: Run, seen: Seen) -> None:
    """Stop both: one goes on after it has lost its lease, the other never does."""
    first, second = run.child("rollout-0"), run.child("rollout-1")
    seen.calm, begun_s = run.steps_done(), time.time()
    os.kill(first, signal.SIGSTOP)
    os.kill(second, signal.SIGSTOP)
    stopped = time.monotonic()

    def are_silent() -> bool:
        silent = ask(run)[0]["silent"]
        passed_s = time.monotonic() - stopped
        seen.silent_s = {name: passed_s - since_s for name, since_s in silent.items()}
        return {"rollout-0", "rollout-1"} <= silent.keys()

    try:
        run.wait_for(are_silent)
    finally:
        os.kill(first, signal.SIGCONT)
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 2)
    run.wait_for(lambda: run.children("rollout-1") not in ([], [second]))
    told = lambda: ask(run)[0]["replicas"].get("rollout-1", {})  # noqa: E731
    run.wait_for(lambda: told().get("first_group_s") is not None)
    seen.stopped.append((begun_s, time.time()))


def hold_learner(run: Run, redis: int, seen: Seen) -> None:
    """Stop it until all others wait for it, and then for long enough that what grows is seen."""
    pids = {name: run.child(name) for name in NAMES if name != "policy-0"} | {"redis": redis}
    os.kill(policy := run.child("policy-0"), signal.SIGSTOP)
    stopped, begun_s = time.monotonic(), time.time()
    held: list[dict[str, int]] = [{}, {}]

    def is_full() -> bool:
        held.append(ask(run)[0]["books"]["in_flight"])
        time.sleep(0.5)
        return held[-1] == held[-2] == held[-3]

    try:
        run.wait_for(is_full)
        before = {name: rss_mib(pid) for name, pid in pids.items()}
        seen.stored.append(stored(run))
        time.sleep(max(stopped + HELD_S - time.monotonic(), 4.0))
        seen.stored.append(stored(run))
        seen.growth_mib = {name: rss_mib(pid) - before[name] for name, pid in pids.items()}
        status, _ = ask(run)
        seen.held = status["books"]["in_flight"]
        rollouts = {n: r for n, r in status["replicas"].items() if r["role"] == "rollout"}
        seen.first_group_s = {name: r["first_group_s"] for name, r in rollouts.items()}
    finally:
        os.kill(policy, signal.SIGCONT)
        seen.stopped.append((begun_s, time.time()))
    taken = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= taken + 2)


def press_twice(run: Run, seen: Seen) -> None:
    """Press Ctrl-C twice with all in flight; the first one waits for a learner that hangs."""
    family = descendants(run.process.pid).union(*map(run.children, NAMES))
    begun_s = time.time()
    os.kill(run.child("policy-0"), signal.SIGSTOP)
    run.wait_for(lambda: ask(run)[0]["books"]["in_flight"]["ready"] == 2 * GROUPS)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    run.process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    seen.code = run.finish()
    seen.stopped.append((begun_s, time.time()))
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
        f"bus.lease_s={LEASE_S}",
        "launch.hung_s=20",  # longer than the learner is stopped
        "rollout.replicas=2",
        "trainer.checkpoint_every=4",
        "trainer.drop_zero_signal=true",
    )
