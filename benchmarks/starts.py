"""How soon replicas of a run are there, at first and after a death: `python benchmarks/starts.py`.

The smallest run of sums, one policy and one rollout, of which the rollout is killed
(SIGKILL) when two steps are done. `forked`: replicas come from a process that has imported what
they need, as `launch.preload` has it; `started`: each imports by itself. Runs are interleaved.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from measure import Usage, end_on_sigterm, measure, pids_of

from cosmos_app.event_log import parse_events

T = TypeVar("T")
RECIPE = Path(__file__).resolve().parents[1] / "configs" / "sums.toml"
SMALL = (
    "warmup.steps=0",
    "rollout.replicas=1",
    "rollout.slots=8",
    "trainer.groups_per_step=8",
    "trainer.samples_per_group=4",
    "trainer.checkpoint_every=0",
    "data.arithmetic.held_out=16",
    "model.tiny.num_layers=1",
    "model.tiny.hidden_size=32",
    "model.tiny.num_heads=2",
    "trainer.steps=6",
)
ARMS = {"forked": "launch.preload=true", "started": "launch.preload=false"}
VICTIM = "rollout-0"
_KILLED_AFTER = 2
_DEADLINE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one run showed.

    Attributes:
        usage: of the whole run.
        first_step_s: from the command to the first step that was taken.
        back_s: from the kill to the replica that took the dead one's place.
        samples_s: from the kill to the first samples that it made.
        first_group_s: from when a rollout joined to its first group, the longest of the run.
    """

    usage: Usage
    first_step_s: float
    back_s: float
    samples_s: float
    first_group_s: float


class Killer(threading.Thread):
    """Kills the rollout of a run once.

    Attributes:
        at_s: when, on the wall clock; 0 if it did not.
    """

    def __init__(self, output: Path) -> None:
        super().__init__(daemon=True)
        self.at_s = 0.0
        self._output = output
        self._over = threading.Event()

    def run(self) -> None:
        log = self._output / "events.jsonl"
        while not self._over.wait(0.02):
            text = log.read_bytes() if log.exists() else b""
            if text.count(b'"StepFinished"') < _KILLED_AFTER:
                continue
            for pid in pids_of("rollout", str(self._output), VICTIM):
                self.at_s = time.time()
                os.kill(pid, signal.SIGKILL)
                return

    def end(self) -> None:
        self._over.set()
        self.join()


def run_once(arm: str, engine: str, folder: Path) -> Found:
    """Run it to its end, killing the rollout on the way."""
    output = folder / "run"
    killer = Killer(output)
    killer.start()
    try:
        usage = measure(
            [
                *(sys.executable, "-m", "cosmos_app", "run", str(RECIPE), f"output={output}"),
                *(*SMALL, ARMS[arm], f"rollout.engine.kind={engine}"),
            ],
            environment={},
            log=folder / "log",
            deadline_s=_DEADLINE_S,
        )
    finally:
        killer.end()
    events = parse_events((output / "events.jsonl").read_bytes().splitlines())
    after = [event for event in events if event["time_s"] > killer.at_s]
    return Found(
        usage=usage,
        first_step_s=_first(events, "StepFinished") - usage.started_s,
        back_s=_first([e for e in after if e.get("replica") == VICTIM], "ReplicaJoined")
        - killer.at_s,
        samples_s=_first(after, "GroupFinished") - killer.at_s,
        first_group_s=json.loads((output / "report.json").read_text())["first_group_s"][1],
    )


def _first(events: Sequence[dict[str, object]], kind: str) -> float:
    return next(float(str(event["time_s"])) for event in events if event["type"] == kind)


def cell(values: Sequence[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def options_of(description: str | None) -> argparse.ArgumentParser:
    """Return the options that benchmarks of starts have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    return parser


def interleaved(
    arms: Iterable[str], run: Callable[[str, Path], T], options: argparse.Namespace
) -> dict[str, list[T]]:
    """Return what the runs of each arm showed, each in a folder of its own."""
    end_on_sigterm()
    found: dict[str, list[T]] = {arm: [] for arm in arms}
    for _ in range(1 if options.quick else options.rounds):
        for arm, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run(arm, Path(folder)))
    return found


def print_table(head: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Print a row for each arm below a head, which ends in what `usage_cells` gives."""
    print(head)
    print("|---" * (head.count("|") - 1) + "|")
    for arm, cells in rows.items():
        print(f"| {arm} | {' | '.join(cells)} |", flush=True)


def usage_cells(usages: Sequence[Usage]) -> tuple[str, str, str]:
    """Return CPU seconds, memory, and how many cores others kept busy."""
    return (
        cell([usage.cpu_s for usage in usages], 1),
        cell([usage.peak_pss_mib for usage in usages], 0),
        f"{statistics.median(usage.others_cpus for usage in usages):.2f}",
    )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    options = parser.parse_args()
    found = interleaved(ARMS, lambda arm, folder: run_once(arm, options.engine, folder), options)
    print_table(
        "| replicas | s to the first step | s from a kill until it is back | until it samples "
        "| s from joining to a first group | CPU s of the run | peak PSS MiB | others |",
        {
            arm: (
                cell([run.first_step_s for run in runs], 1),
                cell([run.back_s for run in runs], 1),
                cell([run.samples_s for run in runs], 1),
                cell([run.first_group_s for run in runs], 1),
                *usage_cells([run.usage for run in runs]),
            )
            for arm, runs in found.items()
        },
    )


if __name__ == "__main__":
    main()
