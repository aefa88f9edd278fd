"""The bubble benchmark: where the time of an asynchronous system goes, beside its simulation.

    python benchmarks/async_bubbles.py [--quick] [--seeds 0,1,2] [--figure out.png]
    python benchmarks/async_bubbles.py --environment-latency 0.5

Everything is real but the speed: the controller's process, Redis, a policy process and two or four
rollout processes with the loops of ``cosmos-app``, rewards in processes of their own, and weights
that are published, fetched and swapped in while tokens come. The learner takes real steps of a tiny
transformer and sleeps for what is left of the time that it is told, the engine sleeps for each
token, so that what both sides could do at best is known. Arms are interleaved, once with each seed,
which draws their lengths. The simulator is told the paces and the few milliseconds at the top of
``async_arms.py``, nothing of the run that it is compared with.

With a latency the default policy is run with an environment instead, as it is and with more in
flight: a sample has two turns, and the environment takes that long between them, on average.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from async_arms import DEFAULT, SPANS, SYNC, Arm, Job, arms
from async_learner import RECIPE
from async_many import many_markdown, simulate_many
from async_tables import Result, bubble_markdown, draw_timelines, missed_goals
from measure import end_on_sigterm
from transformers import AutoTokenizer

from cosmos_app.control_files import write_address, write_control
from cosmos_app.prepare import prepare_model, run_files
from cosmos_app.prepared_data import prepare_data
from cosmos_app.recipe import Recipe, load_recipe
from cosmos_core.bus import Bus, RedisServer
from cosmos_core.config import config_to_json
from cosmos_core.messages import StopRequested
from cosmos_core.rundir import RunDirectory
from cosmos_core.simulation import (
    CONTROLLER,
    POLICY,
    LogRecord,
    QueueDepths,
    StepTaken,
    figures_of,
    read_log,
    simulate,
    write_log,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
_CHAT_TEMPLATE = "{% for each in messages %}{{ each['content'] }}{{ eos_token }}{% endfor %}"
_POLL_S = 0.25
_START_S = 300.0
_RUN_S = 180.0
_STOP_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where runs are made.

    Attributes:
        out: scratch directory.
        redis_url: of the one server.
        recipe: what the role processes read of a recipe.
    """

    out: Path
    redis_url: str
    recipe: Recipe

    @property
    def files(self) -> Path:
        """Where prompts and model lie."""
        return self.out / "files"


class Worker:
    """A replica's process that lives through the whole benchmark."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, place: Place, log: Path) -> "Worker":
        """Start the process; `until` "ready" tells when it can work."""
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(HERE / "async_worker.py"),
                name,
                str(place.files),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        return cls(name, process)

    def give(self, job: Job) -> None:
        """Have it take part in a run."""
        assert self._process.stdin is not None
        line = json.dumps(json.loads(config_to_json(job)))
        self._process.stdin.write(line.encode() + b"\n")

    async def until(self, word: str, timeout_s: float) -> None:
        """Wait for a word of the process.

        Raises:
            RuntimeError: if it says something else, or ends.
        """
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        if line.strip() != word.encode():
            raise RuntimeError(f"{self.name}: said {line!r} where {word!r} was due; see its log")

    async def kill(self) -> None:
        """End the process as it would end by itself: at once, in the middle of anything."""
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        """End the process."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()


@contextlib.asynccontextmanager
async def worker_pool(place: Place, num_rollouts: int) -> AsyncGenerator[list[Worker]]:
    """Keep a policy process and some rollout processes, imports done."""
    names = [POLICY, *(f"rollout-{index}" for index in range(num_rollouts))]
    workers = [await Worker.start(name, place, place.out / f"{name}.log") for name in names]
    try:
        for worker in workers:
            await worker.until("ready", _START_S)
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


async def run_arm(
    arm: Arm, place: Place, workers: Sequence[Worker], name: str, seconds: float
) -> list[LogRecord]:
    """Run an arm for so long after its first steps; return the log of everybody."""
    path = place.out / "runs" / name
    with opened_run(arm, place, path) as job:
        busy = workers[: 1 + arm.system.rollouts]
        namespace = (path / "namespace").read_text()
        async with _controller(path), await Bus.connect(place.redis_url, namespace) as bus:
            for worker in busy:
                worker.give(job)
            depths = await _watch(bus, arm, seconds)
            await bus.send_event(StopRequested(reason="measured"))
            for worker in busy:
                await worker.until("done", _STOP_S)
    write_log(path / SPANS / "controller.jsonl", depths)
    return taken_before(log_of(path), depths[-1].time_s)


@contextlib.contextmanager
def opened_run(arm: Arm, place: Place, path: Path) -> Generator[Job]:
    """Make a run's directory anew, with all that is read there; yield what workers are told."""
    shutil.rmtree(path, ignore_errors=True)
    recipe = recipe_of(arm, place)
    with RunDirectory.create(path, config_json=recipe, now_s=time.time()) as run:
        write_control(run, arm.control, b"")
        write_address(run, place.redis_url, uuid.uuid4().hex)
        yield Job(run_dir=str(path), files_dir=str(place.files), recipe=recipe, system=arm.system)


def log_of(path: Path) -> list[LogRecord]:
    """Return what everybody wrote of a run."""
    return read_log(sorted((path / SPANS).iterdir()))


def taken_before(log: Sequence[LogRecord], stopped_s: float) -> list[LogRecord]:
    """Return a log without the steps that ended later: engines drain then, and are idle."""
    return [r for r in log if not isinstance(r, StepTaken) or r.end_s <= stopped_s]


def recipe_of(arm: Arm, place: Place) -> str:
    """Return what the role processes read of an arm's recipe, as JSON."""
    rollout = replace(place.recipe.rollout, slots=arm.system.slots)
    return config_to_json(replace(place.recipe, rollout=rollout))


async def start_controller(path: Path) -> asyncio.subprocess.Process:
    """Start the controller of a run; it need not wait for the lease of one before it."""
    command = (sys.executable, "-m", "cosmos_app", "controller", str(path), "--name", CONTROLLER)
    with (path / "controller.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)


@contextlib.asynccontextmanager
async def _controller(path: Path) -> AsyncGenerator[None]:
    process = await start_controller(path)
    try:
        yield
        await asyncio.wait_for(process.wait(), _STOP_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _watch(bus: Bus, arm: Arm, seconds: float) -> list[QueueDepths]:
    """Note the controller's queues until the arm has run for long enough."""
    depths: list[QueueDepths] = []
    deadline = time.monotonic() + _RUN_S
    until, step = float("inf"), 0
    while time.monotonic() < until or step < arm.skip + 2:
        await asyncio.sleep(_POLL_S)
        status = await bus.read_status()
        if status:
            depths.append(_depths(status))
            step = status["step"]
            if step >= arm.skip and until == float("inf"):
                until = time.monotonic() + seconds
        if time.monotonic() > deadline:
            raise RuntimeError(f"{arm.name}: not done in {_RUN_S:g} s: {status}")
    return depths


def _depths(status: Mapping[str, Any]) -> QueueDepths:
    books, counters = status["books"], status["counters"]
    free = [r["slots"] - r["busy"] for r in status["replicas"].values() if r["role"] == "rollout"]
    return QueueDepths(
        time_s=time.monotonic(),
        **books["in_flight"],
        denied=sum(free),
        dropped=sum(books["dropped"].values()),
        consumed=books["consumed"],
        generated_samples=counters["generated_samples"],
        generated_tokens=counters["generated_tokens"],
    )


def judge(arm: Arm, seed: int, log: Sequence[LogRecord]) -> Result:
    """Return what a run and its simulation, over as many steps, came to."""
    real = figures_of(log, arm.capacity, skip=arm.skip)
    steps = arm.skip + real.steps
    predicted = figures_of(
        simulate(arm.control, arm.system, steps=steps), arm.capacity, skip=arm.skip
    )
    return Result(arm=arm.name, seed=seed, bound_s=arm.bound_s, real=real, predicted=predicted)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two arms, with an environment one, once"
    )
    parser.add_argument("--seeds", default="0,1,2", help="of lengths; empty: no runs")
    parser.add_argument("--seconds", type=float, default=7.5, help="measured in each run")
    parser.add_argument("--arms", default="", help="names with semicolons; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench/async", help="scratch")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("--join", action="store_true", help="with the runs that --json holds")
    parser.add_argument(
        "--environment-latency",
        type=float,
        default=0.0,
        metavar="S",
        help="run the arms with an environment that takes so many seconds",
    )
    parser.add_argument("--replicas", type=int, default=1000, help="of the simulation alone")
    parser.add_argument("--figure", type=Path, help="draw a timeline of each arm here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal is missed")
    return parser.parse_args(arguments)


def make_place(out: Path, redis_url: str) -> Place:
    """Make the prompts and the model that all runs share."""
    some = next(iter(arms(0).values()))
    recipe = load_recipe(
        ROOT / "configs/sums.toml",
        [
            "warmup.steps=0",
            "rollout.engine={kind='scripted'}",
            f"rollout.sampling.max_new_tokens={some.system.lengths.longest}",
            f"trainer.groups_per_step={some.control.groups_per_step}",
            f"trainer.samples_per_group={some.control.samples_per_group}",
            f"output={str(out)!r}",
        ],
    )
    place = Place(out=out, redis_url=redis_url, recipe=recipe)
    files = run_files(recipe, place.files)
    files.train.parent.mkdir(parents=True, exist_ok=True)
    prepare_data(recipe, files)
    prepare_model(recipe, files)
    _write_chat_template(files.model)
    (place.files / RECIPE).write_text(config_to_json(recipe))
    return place


def _write_chat_template(model: Path) -> None:
    """Let an environment talk to the model, whose tokenizer comes without a template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(model)


def _chosen(options: argparse.Namespace) -> tuple[list[str], list[int], float]:
    """Return the names of arms, the seeds, and the seconds of each run."""
    latency_s = options.environment_latency
    if options.quick:
        return list(arms(0, latency_s))[:1] if latency_s else [SYNC, DEFAULT], [0], 4.0
    names = options.arms.split(";") if options.arms else list(arms(0, latency_s))
    return names, [int(seed) for seed in options.seeds.split(",")], options.seconds


async def measure(options: argparse.Namespace, redis_url: str, results: list[Result]) -> None:
    """Run the chosen arms, interleaved, each compared with its simulation; add to ``results``."""
    place = make_place(options.out.resolve(), redis_url)
    names, seeds, seconds = _chosen(options)
    first = arms(0, options.environment_latency)
    rollouts = max(first[name].system.rollouts for name in names)
    logs: dict[str, list[LogRecord]] = {}
    async with worker_pool(place, rollouts) as workers:
        for seed in seeds:
            for number, name in enumerate(names):
                arm = arms(seed, options.environment_latency)[name]
                logs[name] = await run_arm(arm, place, workers, f"{number}-{seed}", seconds)
                results.append(judge(arm, seed, logs[name]))
                print(results[-1].line, flush=True)
                if options.json:
                    options.json.write_bytes(msgspec.json.encode(results))
            if options.figure:
                shown = {name: (first[name].capacity, log) for name, log in logs.items()}
                draw_timelines(shown, options.figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the arms and print their table."""
    end_on_sigterm()
    options = _parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    if options.join and options.json.exists():
        results = msgspec.json.decode(options.json.read_bytes(), type=list[Result])
    started = time.monotonic()
    if options.seeds:
        server = RedisServer.start(options.out / "redis")
        try:
            asyncio.run(measure(options, server.url, results))
        finally:
            server.stop()
    print(bubble_markdown(results))
    if not (options.quick or options.environment_latency):
        print("\n" + many_markdown(simulate_many(options.replicas)))
    print(f"\n{time.monotonic() - started:.0f} s in all", flush=True)
    if options.strict and (missed := missed_goals(results)):
        sys.exit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
