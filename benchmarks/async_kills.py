"""What a kill costs: the default policy of the bubble benchmark, with one part killed now and then.

    python benchmarks/async_kills.py [--quick] [--seeds 0,1,2] [--kills 4] [--json out.json]

A rollout, the policy or the controller is killed (SIGKILL) at random moments and is there again as
soon as another process takes its name, imports done; what a launcher takes to import is in
``starts.py``. A kill costs the seconds by which the same number of steps takes longer than in the
run with the same lengths that nobody disturbs. The policy keeps a checkpoint of every step. Beside
each cost stands the simulator's, which is told how long somebody is away and nothing else.

At the end the books have to balance: every group that was issued is trained on or still there, none
was trained on twice in the steps that count, and every step is there once.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from async_arms import DEFAULT, Arm, Job, arms
from async_bubbles import (
    ROOT,
    Place,
    Worker,
    log_of,
    make_place,
    opened_run,
    start_controller,
)
from async_paced import GROUPS
from measure import end_on_sigterm

from cosmos_core.bus import Bus, RedisServer
from cosmos_core.messages import ReplicaLeft, StopRequested
from cosmos_core.simulation import (
    CONTROLLER,
    POLICY,
    LogRecord,
    Outage,
    StepTaken,
    simulate,
)

VICTIMS: Mapping[str, tuple[str, ...]] = {
    "nobody": (),
    "rollout": ("rollout-0", "rollout-1"),
    "controller": (CONTROLLER,),
    "policy": (POLICY,),
}
AWAY_S: Mapping[str, float] = {"rollout": 0.1, "policy": 0.1, "controller": 0.5}
"""From a kill until somebody of that name has joined, or decides; measured once."""
FIRST_S, EVERY_S, SPREAD_S = 2.0, 5.0, 2.0
"""Of kills, after the first step: kill ``n`` comes ``FIRST_S + n * EVERY_S`` later, or up to
``SPREAD_S`` after that."""
_COLUMNS = (
    *("killed", "kills", "s for each", "simulated"),
    *("groups", "lost", "trained twice", "steps missing"),
)
_POLL_S = 0.05
_READY_S = 300.0
_RUN_S = 300.0
_STOP_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Who is killed, and how many seconds after the first step."""

    name: str
    after_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        victim: a key of `VICTIMS`.
        seed: of lengths and kills.
        kills: how many.
        run_s: seconds from the end of the first step to that of the last.
        simulated_s: the same, simulated.
        issued: groups that were given out.
        lost: of those, neither trained on, as the policy tells, nor in flight.
        doubled: trained on more than once, in the steps that count.
        missing: steps that were not taken, or not on as many groups as they should.
    """

    victim: str
    seed: int
    kills: int
    run_s: float
    simulated_s: float
    issued: int
    lost: int
    doubled: int
    missing: int


def kills_of(victim: str, seed: int, num_kills: int) -> tuple[Kill, ...]:
    """Return who is killed when, the same for the same seed."""
    names = VICTIMS[victim]
    if not names:
        return ()
    numbers = random.Random(f"{victim}/{seed}")
    return tuple(
        Kill(
            name=names[number % len(names)],
            after_s=FIRST_S + number * EVERY_S + numbers.uniform(0, SPREAD_S),
        )
        for number in range(num_kills)
    )


def step_ends(log: Sequence[LogRecord]) -> dict[int, float]:
    """Return when each step was over, for the last time if it was taken anew."""
    return {record.step: record.end_s for record in log if isinstance(record, StepTaken)}


def seconds_of(ends: Mapping[int, float], steps: int) -> float:
    """Return the seconds from the end of the first of so many steps to that of the last."""
    return ends[steps - 1] - ends[0]


def simulated_seconds(arm: Arm, victim: str, kills: Sequence[Kill], steps: int) -> float:
    """Return what the simulator says of a run with these kills."""
    first_s = step_ends(simulate(arm.control, arm.system, steps=1))[0]
    outages = tuple(
        Outage(name=kill.name, at_s=first_s + kill.after_s, away_s=AWAY_S[victim]) for kill in kills
    )
    log = simulate(arm.control, replace(arm.system, outages=outages), steps=steps)
    return seconds_of(step_ends(log), steps)


class Crew:
    """Processes that wait for work, by the name that they have in a run."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._free: dict[str, list[Worker]] = {}

    async def prepare(self, wanted: Mapping[str, int]) -> None:
        """Have so many of each name, imports done."""
        for name, count in wanted.items():
            free = self._free.setdefault(name, [])
            started = [
                await Worker.start(name, self._place, self._log(name))
                for _ in range(count - len(free))
            ]
            for worker in started:
                await worker.until("ready", _READY_S)
            free += started

    def _log(self, name: str) -> Path:
        return self._place.out / f"{name}-{uuid.uuid4().hex[:8]}.log"

    def take(self, name: str) -> Worker:
        """Take one that is there."""
        return self._free[name].pop()

    def give_back(self, worker: Worker) -> None:
        """Have one wait for the next run."""
        self._free[worker.name].append(worker)

    async def stop(self) -> None:
        """End them all."""
        for workers in self._free.values():
            for worker in workers:
                await worker.stop()


class Run:
    """One run with its processes, any of which may be replaced."""

    def __init__(self, arm: Arm, place: Place, crew: Crew, path: Path) -> None:
        self._arm = arm
        self._place = place
        self._crew = crew
        self._path = path
        self._controller: asyncio.subprocess.Process | None = None
        self._workers: dict[str, Worker] = {}

    async def finish(self, kills: Sequence[Kill], steps: int) -> Mapping[str, Any]:
        """Take so many steps, with these kills; return the last status."""
        with opened_run(self._arm, self._place, self._path) as job:
            namespace = (self._path / "namespace").read_text()
            try:
                async with await Bus.connect(self._place.redis_url, namespace) as bus:
                    await self._begin(job)
                    await self._disturb(bus, job, kills)
                    await _until_step(bus, steps)
                    await bus.send_event(StopRequested(reason="measured"))
                    return await self._end(bus)
            finally:
                if self._controller is not None and self._controller.returncode is None:
                    self._controller.kill()
                    await self._controller.wait()

    async def _begin(self, job: Job) -> None:
        self._controller = await start_controller(self._path)
        for name in (POLICY, *self._arm.system.rollout_names):
            self._replace(name, job)

    async def _disturb(self, bus: Bus, job: Job, kills: Sequence[Kill]) -> None:
        await _until_step(bus, 1)
        begun_s = time.monotonic()
        for kill in kills:
            await asyncio.sleep(max(0.0, begun_s + kill.after_s - time.monotonic()))
            if kill.name == CONTROLLER:
                assert self._controller is not None
                self._controller.kill()
                await self._controller.wait()
                self._controller = await start_controller(self._path)
            else:
                await self._workers[kill.name].kill()
                await bus.send_event(ReplicaLeft(replica=kill.name, reason="signal 9 (SIGKILL)"))
                self._replace(kill.name, job)

    async def _end(self, bus: Bus) -> Mapping[str, Any]:
        for worker in self._workers.values():
            await worker.until("done", _STOP_S)
            self._crew.give_back(worker)
        assert self._controller is not None
        await asyncio.wait_for(self._controller.wait(), _STOP_S)
        return await bus.read_status()

    def _replace(self, name: str, job: Job) -> None:
        worker = self._workers[name] = self._crew.take(name)
        worker.give(job)


async def _until_step(bus: Bus, step: int) -> None:
    """Wait until so many steps are done.

    Raises:
        TimeoutError: if they are not in time.
    """
    async with asyncio.timeout(_RUN_S):
        reached = 0
        while reached < step:
            await asyncio.sleep(_POLL_S)
            reached = (await bus.read_status()).get("step", 0)


def judge(
    arm: Arm, path: Path, status: Mapping[str, Any], *, seconds: Mapping[str, float]
) -> Mapping[str, Any]:
    """Return what the controller's books say beside what the policy says it trained on."""
    books = status["books"]
    taken = [json.loads(line) for line in (path / GROUPS).read_text().splitlines()]
    groups = {each["step"]: each["groups"] for each in taken}  # of a step taken anew: the last
    of_steps = [groups.get(step, []) for step in range(status["step"])]
    trained = [group for each in of_steps for group in each]
    kept = sum(books["in_flight"].values())
    return {
        **seconds,
        "issued": books["issued"],
        "lost": books["issued"] - len(set(trained)) - kept,
        "doubled": len(trained) - len(set(trained)),
        "missing": sum(len(each) != arm.control.groups_per_step for each in of_steps),
    }


async def measure(options: argparse.Namespace, redis_url: str) -> list[Outcome]:
    """Run everything, interleaved."""
    place = make_place(options.out, redis_url)
    crew = Crew(place)
    outcomes: list[Outcome] = []
    try:
        for seed in options.seeds:
            for victim in VICTIMS:
                outcomes.append(await _measure_one(options, place, crew, victim, seed))
                print(outcomes[-1], flush=True)
                if options.json:
                    options.json.write_bytes(msgspec.json.encode(outcomes))
    finally:
        await crew.stop()
    return outcomes


async def _measure_one(
    options: argparse.Namespace, place: Place, crew: Crew, victim: str, seed: int
) -> Outcome:
    arm = arms(seed)[DEFAULT]
    arm = replace(arm, control=replace(arm.control, checkpoint_every=1))
    kills = kills_of(victim, seed, options.kills)
    steps = round((FIRST_S + options.kills * EVERY_S + SPREAD_S) / arm.bound_s)
    names = (POLICY, *arm.system.rollout_names)
    await crew.prepare({name: 1 + sum(kill.name == name for kill in kills) for name in names})
    path = place.out / "runs" / f"{victim}-{seed}"
    status = await Run(arm, place, crew, path).finish(kills, steps)
    ends = step_ends(log_of(path))
    seconds = {
        "run_s": seconds_of(ends, steps),
        "simulated_s": simulated_seconds(arm, victim, kills, steps),
    }
    found = judge(arm, path, status, seconds=seconds)
    return Outcome(victim=victim, seed=seed, kills=len(kills), **found)


def kills_markdown(outcomes: Sequence[Outcome]) -> str:
    """Return a table: what a kill cost, in runs and simulated, and what became of the groups."""
    alone = {each.seed: each for each in outcomes if each.victim == "nobody"}
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|---" * len(_COLUMNS) + "|",
    ]
    for victim in VICTIMS:
        found = [each for each in outcomes if each.victim == victim]
        costs, said = [], []
        for each in found:
            quiet = alone[each.seed]
            costs.append((each.run_s - quiet.run_s) / max(1, each.kills))
            said.append((each.simulated_s - quiet.simulated_s) / max(1, each.kills))
        cost = f"{statistics.median(costs):.2f} ({min(costs):.2f}-{max(costs):.2f})"
        cells = [
            victim,
            str(sum(each.kills for each in found)),
            cost if victim != "nobody" else "-",
            f"{statistics.median(said):.2f}" if victim != "nobody" else "-",
            *(
                str(sum(getattr(each, name) for each in found))
                for name in ("issued", "lost", "doubled", "missing")
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, one kill each")
    parser.add_argument("--seeds", default="0,1,2", help="of lengths and moments")
    parser.add_argument("--kills", type=int, default=4, help="in each run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench/async-kills", help="scratch")
    parser.add_argument("--json", type=Path, help="write every number here")
    options = parser.parse_args(arguments)
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    options.out = options.out.resolve()
    if options.quick:
        options.seeds, options.kills = options.seeds[:1], 1
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and print its table."""
    end_on_sigterm()
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    server = RedisServer.start(options.out / "redis")
    try:
        outcomes = asyncio.run(measure(options, server.url))
    finally:
        server.stop()
    print(kills_markdown(outcomes))
    if any(each.lost or each.doubled or each.missing for each in outcomes):
        sys.exit("something was lost, or trained on twice")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
