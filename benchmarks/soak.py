"""The soak: real runs whose processes are killed at random moments, and what became of it all.

    python benchmarks/soak.py [--kills 200] [--kills-per-run 50] [--seed 0] [--victims redis policy]
                              [--hangs 0.1] [--standbys 1] [--engine vllm] [--json out.json]

Each run is `cosmos-app run` of sums with a tiny model, the scripted engine and a random
choice of victims: controller, policy, a rollout, its engine's process (vLLM's; the scripted one
has none), a reward worker or the Redis server. Every few seconds one is killed with signal 9, or
stopped for good, which is to hang, also while the last one is being started again. The first is hit
as the run starts, before it has taken a step, and the last about the last step, as the run ends.
The launcher restarts what died and ends what hangs; a rollout does so with its reward workers. A
run passes if
it reaches its step count, every step was committed, the books balance with nothing dropped and
nothing in flight, each end of Redis was seen, and no more samples failed than reward workers were
hit. No sample may be lost or trained on twice: what the policy itself wrote down of each step, as
it was taken last, has to be every group that was issued, once, in equal shares. Every other run is
synchronous. What it trains on is then determined, so its final weights have to be those of the same
run without a kill, bit for bit: a sample that is out of order would show. (They are not compared
with vLLM, whose log-probs depend on the batch, nor where a reward failed because its worker was hit
just then.) With --json an interrupted soak goes on after it.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import end_on_sigterm, pids_of
from soak_judge import GROUPS, SAMPLES, judge, judge_others, judge_samples
from soak_weights import has_learnt, weights_of

from cosmos_app.event_log import parse_events
from cosmos_core.simulation import StepTaken, read_log

ROOT = Path(__file__).resolve().parent.parent
# How often each is chosen: a policy takes longest to come back, and nothing else is hit meanwhile.
VICTIMS = {"controller": 3, "policy": 1, "rollout": 2, "engine": 2, "reward": 3, "redis": 2}
_LONGEST_START_S = 300.0
_POLL_S = 0.2
# seconds in which somebody is hit, once a process is there, and once all but a step are taken
_AT_START_S, _AT_END_S = 4.0, 0.8
_KILLS_WITHOUT_A_STEP = 8
_BELOW_ROLLOUTS = {"reward": "forkserver", "engine": "EngineCore"}  # by their command lines
_ENDED = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
_ENGINES = {
    "scripted": "rollout.engine={kind='scripted', vocabulary_size=32, step_s=0.05}",
    "vllm": "rollout.engine={kind='vllm', dtype='float32', context_length=256}",
}
_AT_ONCE = "rollout.engine={kind='scripted', vocabulary_size=32, step_s=0.0}"
_SETTINGS = (
    "warmup.steps=0",
    "reward.rewards=[{kind='length', target=1, limit=16}]",
    f"trainer.groups_per_step={GROUPS}",
    f"trainer.samples_per_group={SAMPLES}",
    "trainer.checkpoint_every=5",
    "rollout.slots=4",
    "data.arithmetic.held_out=8",
    "validation.before=false",
    "validation.after=false",
    "model.tiny.num_layers=1",
    "model.tiny.hidden_size=32",
    "model.tiny.num_heads=2",
    "launch.restarts=1000",
    "launch.hung_s=5",
    "bus.lease_s=15",
    "dashboard.enabled=false",
    "sinks=[{kind='jsonl'}]",
)
_IN_STEP = ("staleness.depth=0", "staleness.bound=0")


@dataclass(kw_only=True, slots=True)
class Soaked:
    """What became of one run.

    Attributes:
        seed: of its victims and moments.
        steps: it was to take.
        is_in_step: whether it was synchronous.
        is_compared: whether its weights were compared with those of a run that was left alone.
        kills: how many of each kind; those that were stopped instead are among them.
        hangs: how many were, of each kind.
        failed: samples whose reward failed.
        seconds: it took.
        problems: what was wrong; empty if nothing was.
    """

    seed: int
    steps: int
    is_in_step: bool
    is_compared: bool = False
    kills: dict[str, int] = field(default_factory=dict)
    hangs: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Soak:
    """One run and who is killed in it.

    Args:
        output: its run directory; its log lies beside it.
        soaked: what to do; filled in.
        victims: kinds of processes to choose from.
        hangs: share of them that is stopped instead of killed.
        settings: of the recipe, beside those of all soaks.
    """

    def __init__(
        self,
        output: Path,
        soaked: Soaked,
        victims: Sequence[str] = (),
        hangs: float = 0.0,
        settings: Sequence[str] = (_AT_ONCE,),
    ) -> None:
        self.soaked = soaked
        self.output = output
        self._rng = random.Random(soaked.seed)
        self._victims = victims
        self._hangs = hangs
        self._kills: Counter[str] = Counter()
        self._hung: Counter[str] = Counter()
        self._steps = StepCount(output / "events.jsonl")
        self._log = output.with_suffix(".log").open("wb")
        command = [sys.executable, "-m", "cosmos_app", "run", str(ROOT / "configs/sums.toml")]
        shape = (f"output={output}", f"trainer.steps={soaked.steps}", *settings)
        pace = _IN_STEP if soaked.is_in_step else ()
        self._process = subprocess.Popen(
            [*command, *shape, *_SETTINGS, *pace],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def run(self, num_kills: int, pause_s: float, longest_s: float) -> Soaked:
        """Kill so many, ``pause_s`` apart on average, and say what became of it."""
        begun = time.monotonic()
        try:
            at_the_ends = 2 if num_kills > 2 else 0
            if at_the_ends:
                self._kill_at(self._has_begun, _AT_START_S)
            self._until(lambda: self._steps.read() >= 1, _LONGEST_START_S)
            self._kill_often(num_kills - at_the_ends, pause_s, longest_s)
            if at_the_ends:
                self._kill_at(self._is_at_the_last_step, _AT_END_S, longest_s)
            self._until(lambda: False, longest_s)
            self.soaked.problems += self._judge()
        except TimeoutError as error:
            self.soaked.problems.append(str(error))
        finally:
            self._end()
        self.soaked.kills, self.soaked.hangs = dict(self._kills), dict(self._hung)
        self.soaked.seconds = time.monotonic() - begun
        return self.soaked

    def _kill_often(self, num_kills: int, pause_s: float, longest_s: float) -> None:
        """Kill so many while steps are taken, or as many as there is time for until the last."""
        steps = [0] * _KILLS_WITHOUT_A_STEP
        for _ in range(num_kills):
            time.sleep(min(3 * pause_s, self._rng.expovariate(1 / pause_s)))
            due = steps[-_KILLS_WITHOUT_A_STEP] + 1  # kills alone must not keep it from going on
            self._until(lambda due=due: self._steps.read() >= due, longest_s)
            if self._is_at_the_last_step():
                break
            steps.append(self._steps.read())
            self._kill_one()

    def _kill_at(
        self, holds: Callable[[], bool], within_s: float, longest_s: float = _LONGEST_START_S
    ) -> None:
        """Kill one at a random moment after something holds, if the run has not ended by then."""
        self._until(holds, longest_s)
        time.sleep(self._rng.uniform(0.0, within_s))
        if self._process.poll() is None:
            self._kill_one()

    def _is_at_the_last_step(self) -> bool:
        return self._steps.read() >= self.soaked.steps - 1

    def _has_begun(self) -> bool:
        """Whether it has come so far that it is started again what is killed."""
        return any(self._living(victim) for victim in self._victims)

    def _until(self, holds: Callable[[], bool], longest_s: float) -> None:
        """Wait for a condition, or for the end of the run; a step begins the time anew."""
        step, deadline = -1, 0.0
        while self._process.poll() is None and not holds():
            if (now := self._steps.read()) > step:
                step, deadline = now, time.monotonic() + longest_s
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step}: nothing for {longest_s:g} s")
            time.sleep(_POLL_S)

    def _kill_one(self) -> None:
        """Kill or stop somebody who lives, first one of each kind.

        Of some kinds nobody may live, until they are started.
        """
        left = list(self._victims)
        while left:
            spared = [each for each in left if not self._kills[each]] or left
            (victim,) = self._rng.choices(spared, [VICTIMS[each] for each in spared])
            left.remove(victim)
            found = self._living(victim)
            if found:
                hangs = self._rng.random() < self._hangs
                os.kill(self._rng.choice(found), signal.SIGSTOP if hangs else signal.SIGKILL)
                self._kills[victim] += 1
                self._hung[victim] += hangs
                return

    def _judge(self) -> list[str]:
        """Return what is wrong with the run, which has ended."""
        if self._process.returncode != 0:
            return [f"exit code {self._process.returncode}"]
        report: dict[str, Any] = json.loads((self.output / "report.json").read_text())
        self.soaked.failed = sum(report["failures"].values())
        steps, files = self.soaked.steps, sorted((self.output / "spans").glob("policy-*.jsonl"))
        taken = [record for record in read_log(files) if isinstance(record, StepTaken)]
        return [
            *judge(self.output, report, steps),
            *judge_samples(taken, report["books"]["issued"], steps),
            *judge_others(report, self._kills),
        ]

    def _living(self, victim: str) -> list[int]:
        if victim == "redis":
            return [pid for pid in self._redis_pid() if status_of(pid) != psutil.STATUS_STOPPED]
        if victim in _BELOW_ROLLOUTS:
            rollouts = self._pids("rollout", "--replica")
            title = _BELOW_ROLLOUTS[victim]
            return [pid for rollout in rollouts for pid in processes_below(rollout, title)]
        return self._pids(victim)

    def _redis_pid(self) -> list[int]:
        """Return the server's process by the file it keeps: it rewrites its own command line."""
        file = self.output / "redis" / "redis.pid"
        text = file.read_text().strip() if file.exists() else ""
        return [int(text)] if text and status_of(int(text)) not in _ENDED else []

    def _pids(self, *words: str) -> list[int]:
        """Return the processes of this run whose command lines hold these words."""
        return [pid for pid in pids_of(str(self.output), *words) if pid != self._process.pid]

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            time.sleep(1.0)
            for pid in (*self._pids(), *self._redis_pid()):
                os.kill(pid, signal.SIGKILL)
            self._process.kill()
        self._process.wait()
        self._log.close()


class StepCount:
    """Counts the steps that a run's event log tells of, reading each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._steps = 0

    def read(self) -> int:
        """Return the highest number of steps so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
            self._offset += len(whole) + 1 if whole else 0
            for event in parse_events(whole.splitlines()):
                if event["type"] == "StepFinished":
                    self._steps = max(self._steps, event["step"] + 1)
        return self._steps


def status_of(pid: int) -> str:
    """Return in what state a process is; that of the dead where there is none."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def processes_below(rollout: int, title: str) -> list[int]:
    """Return what a rollout replica has started, directly or not, under such a title."""
    try:
        below = psutil.Process(rollout).children(recursive=True)
        return [each.pid for each in below if title in " ".join(each.cmdline())]
    except psutil.NoSuchProcess:
        return []


def left_alone(folder: Path, steps: int, longest_s: float) -> dict[str, bytes]:
    """Return the weights of a synchronous run that nobody disturbs; it is run once.

    Raises:
        RuntimeError: if even that does not end well, or leaves the weights as they were.
    """
    output = folder / f"alone-{steps}"
    if not (output / "export").exists():
        shutil.rmtree(output, ignore_errors=True)
        soaked = Soaked(seed=-1, steps=steps, is_in_step=True)
        problems = Soak(output, soaked).run(0, 1.0, longest_s).problems
        if problems:
            raise RuntimeError(f"a run without a kill failed: {'; '.join(problems)}; see {output}")
    if not has_learnt(output):
        raise RuntimeError(f"a run without a kill learnt nothing; see {output}")
    return weights_of(output)


def soak_once(folder: Path, soaked: Soaked, num_kills: int, options: argparse.Namespace) -> None:
    """Soak one run; what is left of one that passed is its log."""
    output = folder / f"run-{soaked.seed}"
    shutil.rmtree(output, ignore_errors=True)
    settings = (_ENGINES[options.engine], f"launch.standbys={options.standbys}")
    soak = Soak(output, soaked, options.victims, options.hangs, settings)
    soak.run(num_kills, options.pause, options.longest)
    is_same = soaked.is_in_step and options.engine == "scripted" and not soaked.failed
    if is_same and not soaked.problems:
        expected = left_alone(folder, soaked.steps, options.longest)
        soaked.is_compared = True
        if not expected or weights_of(output) != expected:
            soaked.problems.append("the weights are not those of a run without kills")
    if not soaked.problems:
        shutil.rmtree(output)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kills-per-run", type=int, default=50)
    parser.add_argument("--steps-per-kill", type=int, default=8)
    parser.add_argument("--pause", type=float, default=5.0, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; others follow")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=tuple(VICTIMS))
    parser.add_argument("--hangs", type=float, default=0.1, help="share stopped, not killed")
    parser.add_argument("--standbys", type=int, default=0, help="controllers that stand by")
    parser.add_argument("--engine", choices=_ENGINES, default="scripted", help="of rollouts")
    parser.add_argument("--longest", type=float, default=300.0, help="seconds without a step")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench/soak", help="scratch")
    parser.add_argument("--json", type=Path, help="what became of each run; resumed from if there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; return 0 if every run passed."""
    end_on_sigterm()
    options = parse(arguments)
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    runs: list[Soaked] = []
    if options.json and options.json.exists():
        runs = [Soaked(**each) for each in json.loads(options.json.read_text())]
    while (done := sum(sum(run.kills.values()) for run in runs)) < options.kills:
        num_kills = min(options.kills_per_run, options.kills - done)
        seed = options.seed + len(runs)
        steps = 8 + options.steps_per_kill * num_kills
        run = Soaked(seed=seed, steps=steps, is_in_step=seed % 2 == 0)
        soak_once(out, run, num_kills, options)
        runs.append(run)
        verdict = "; ".join(run.problems) or "passed"
        kind = "in step" if run.is_in_step else "ahead"
        print(
            f"seed {seed}, {kind}: {steps} steps, {run.kills}, of which hung {run.hangs}, "
            f"{run.failed} rewards failed, {run.seconds:.0f} s: {verdict}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps([asdict(each) for each in runs], indent=1))
        if not run.kills:
            break  # it never got so far
    failed = [run.seed for run in runs if run.problems]
    total = sum((Counter(run.kills) for run in runs), Counter[str]())
    hung = sum((Counter(run.hangs) for run in runs), Counter[str]())
    print(
        f"{total.total()} kills in {len(runs)} runs, {dict(total)}, of which hung {dict(hung)}; "
        f"failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
