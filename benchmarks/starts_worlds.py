"""How soon rollouts of a world model are there after a death: `python benchmarks/starts_worlds.py`.

DiffusionNFT of a tiny Stable Diffusion 3 with two rollout replicas, of which one is killed
(SIGKILL) when it has drawn two micro-batches. `forked`: replicas come from a process that has
imported what they need, as `disaggregated.preload` has it; `started`: each imports by itself. Runs
are interleaved.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from measure import CommandFailedError, Usage, measure, pids_of
from starts import cell, interleaved, options_of, print_table, usage_cells

from cosmos_wfm import tiny_sd3_pipeline

RECIPE = """
kind = "wfm_rl"
num_steps = 40
groups_per_step = 2
samples_per_group = 4
micro_batch_size = 2
rewards = {prompt_colour = 1.0}
sampler = {num_steps = 3, height = 16, width = 16}
algorithm = {kind = "nft"}
tuning = {kind = "lora", rank = 2, alpha = 4}
disaggregated = {replicas = 2}
"""
ARMS = {"forked": "disaggregated.preload=true", "started": "disaggregated.preload=false"}
VICTIM = "replica0"
_DRAWN = " drawn"
_KILLED_AFTER = 2
_DEADLINE_S = 600.0
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one run showed.

    Attributes:
        usage: of the whole run.
        first_s: from the command to the first micro-batch of the replica that is killed.
        back_s: from the kill to the first one of its successor.
    """

    usage: Usage
    first_s: float
    back_s: float


class Killer(threading.Thread):
    """Kills a replica of a run once, and sees when it draws.

    Attributes:
        first_s: when it drew first, on the wall clock.
        at_s: when it was killed.
        back_s: when its successor drew.
    """

    def __init__(self, output: Path) -> None:
        super().__init__(daemon=True)
        self.first_s = self.at_s = self.back_s = 0.0
        self._output = output
        self._over = threading.Event()

    def run(self) -> None:
        log = self._output / "disaggregated" / f"{VICTIM}.log"
        before = 0
        while not self._over.wait(_LOOK_S) and not self.back_s:
            drawn = log.read_text().count(_DRAWN) if log.exists() else 0
            if drawn and not self.first_s:
                self.first_s = time.time()
            if not self.at_s and drawn >= _KILLED_AFTER:
                before = self._kill(log)
            elif self.at_s and drawn > before:
                self.back_s = time.time()

    def _kill(self, log: Path) -> int:
        """Kill it; return how many it had drawn."""
        for pid in pids_of("rollout", str(self._output), VICTIM):
            self.at_s = time.time()
            os.kill(pid, signal.SIGKILL)
        return log.read_text().count(_DRAWN)

    def end(self) -> None:
        self._over.set()
        self.join()


def run_once(arm: str, folder: Path) -> Found:
    """Run it to its end, killing a replica on the way."""
    tiny_sd3_pipeline(num_layers=1).save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("a red square\na blue square\n")
    (folder / "recipe.toml").write_text(RECIPE)
    output = folder / "run"
    killer = Killer(output)
    killer.start()
    places = (f"model={folder / 'model'}", f"prompts={folder / 'prompts.txt'}", f"output={output}")
    try:
        usage = measure(
            [
                *(sys.executable, "-m", "cosmos_app", "run", str(folder / "recipe.toml")),
                *(*places, ARMS[arm]),
            ],
            environment={"OMP_NUM_THREADS": "1"},
            log=folder / "log",
            deadline_s=_DEADLINE_S,
        )
    finally:
        killer.end()
    if not killer.back_s:
        raise CommandFailedError(f"{output}: it was over before {VICTIM} drew again")
    return Found(
        usage=usage,
        first_s=killer.first_s - usage.started_s,
        back_s=killer.back_s - killer.at_s,
    )


def main() -> None:
    found = interleaved(ARMS, run_once, options_of(__doc__).parse_args())
    print_table(
        "| replicas | s to the first draw | s from a kill to a draw | CPU s of the run "
        "| peak PSS MiB | others |",
        {
            arm: (
                cell([run.first_s for run in runs], 1),
                cell([run.back_s for run in runs], 1),
                *usage_cells([run.usage for run in runs]),
            )
            for arm, runs in found.items()
        },
    )


if __name__ == "__main__":
    main()
