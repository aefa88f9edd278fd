"""Runs of the real program in processes of its own, each with a deadline."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ForkedCommand
from processes import naming

ROOT = Path(__file__).parents[2]
QUICKSTART, SUMS = (ROOT / "configs" / f"{name}.toml" for name in ("quickstart", "sums"))
SOURCES = [*sorted((ROOT / "packages").glob("*/src")), ROOT / "apps" / "src"]

# A run in seconds: the reference engine, a handful of small steps, no warm-up.
SMALL = (
    "warmup.steps=0",
    "rollout.engine.kind=transformers",
    "rollout.replicas=1",
    "trainer.groups_per_step=8",
    "trainer.samples_per_group=4",
    "trainer.checkpoint_every=0",
    "rollout.slots=8",
    "data.arithmetic.held_out=16",
    "model.tiny.num_layers=1",
    "model.tiny.hidden_size=32",
    "model.tiny.num_heads=2",
)

# Of a run that nobody looks at: no answers to held-out prompts, no page, and files alone.
UNSEEN = (
    "validation.before=false",
    "validation.after=false",
    "dashboard.enabled=false",
    "sinks=[{kind='jsonl'}]",
)


@dataclass
class Run:
    """A started ``cosmos-app run``."""

    output: Path
    process: subprocess.Popen[str] | ForkedCommand
    text: str = ""

    def finish(self, deadline_s: float = 240.0) -> int:
        """Wait for the end; the whole session is killed at the deadline."""
        try:
            self.text = self.process.communicate(timeout=deadline_s)[0] or ""
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"{self.output} did not end in {deadline_s:g} s:\n{self.logs()}")
        assert self.process.returncode is not None
        return self.process.returncode

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.text = self.process.communicate()[0] or ""

    def logs(self) -> str:
        of_jobs = sorted(self.output.parent.glob(f"{self.output.name}.slurm-*.log"))
        parts = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in [*of_jobs, *sorted((self.output / "logs").glob("*.log"))]
        ]
        return "\n".join([self.text[-3000:], *parts])

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.output / "report.json").read_text())

    def metrics(self, role: str) -> list[dict[str, Any]]:
        path = self.output / "metrics.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        records = [json.loads(line) for line in whole.splitlines()]
        return [record for record in records if record["role"] == role]

    def steps_done(self) -> int:
        return max((record["step"] + 1 for record in self.metrics("controller")), default=0)

    def wait_for(self, condition: Callable[[], bool], deadline_s: float = 180.0) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the run ended or hung before the condition held:\n{self.logs()}")
            time.sleep(0.05)

    def child(self, name: str) -> int:
        """Return the process id of a replica that has to be running."""
        if found := self.children(name):
            return found[0]
        pytest.fail(f"{name} is not running:\n{self.logs()}")

    def children(self, name: str) -> list[int]:
        """Return the processes of a replica, found by their command line."""
        wanted = ("controller",) if name == "controller" else ("--replica", name)
        found = naming(*wanted, str(self.output))
        kept = naming("cosmos_app.kept")  # starts it, and is told to with the same words
        return [pid for pid in found if pid not in kept]


@dataclass
class Runner:
    """Starts runs and takes them down with the test.

    Attributes:
        folder: where they lie.
        forks: whether they are forked from a process that has imported everything, and not started
            as users start them.
        runs: so far.
    """

    folder: Path
    forks: bool = False
    runs: list[Run] = field(default_factory=list)

    def start(
        self,
        *overrides: str,
        name: str = "run",
        flags: Sequence[str] = (),
        recipe: Path = SUMS,
    ) -> Run:
        output = self.folder / name
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, SOURCES), os.environ.get("PYTHONPATH", "")]),
            "COLUMNS": "200",
        }
        words = ("run", str(recipe), f"output={output}", *overrides, *flags)
        run = Run(output, self._begin([sys.executable, "-m", "cosmos_app", *words], environment))
        self.runs.append(run)
        return run

    def _begin(
        self, argv: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str] | ForkedCommand:
        if self.forks:
            log = self.folder / f"said-{len(self.runs)}.txt"
            return ForkedCommand(argv, env=environment, cwd=self.folder, log=log)
        return subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            cwd=self.folder,
        )

    def complete(
        self,
        *overrides: str,
        name: str = "run",
        flags: Sequence[str] = (),
        recipe: Path = SUMS,
    ) -> Run:
        run = self.start(*overrides, name=name, flags=flags, recipe=recipe)
        code = run.finish()
        assert code == 0, run.logs()
        return run


def assert_balanced(books: dict[str, Any]) -> None:
    """Issued = consumed + dropped + in flight, in groups."""
    dropped, in_flight = sum(books["dropped"].values()), sum(books["in_flight"].values())
    assert books["issued"] == books["consumed"] + dropped + in_flight


def ordinal_of(key: str) -> int:
    """Return which prompt of its source a group, or the key of a sample, is of."""
    return int(key.split(".")[2])
