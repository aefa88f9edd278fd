"""The benchmark of kills in its smallest form: everybody is killed once, and nothing is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import preloader

from cosmos_app.fork_orders import PRELOADER

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_whoever_is_killed_every_step_is_taken_once_on_groups_of_its_own(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    script = ROOT / "benchmarks" / "async_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--out", str(tmp_path), "--json", str(numbers)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", PRELOADER: preloader()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(numbers.read_text())
    assert [(each["victim"], each["kills"]) for each in outcomes] == [
        ("nobody", 0),
        ("rollout", 1),
        ("controller", 1),
        ("policy", 1),
    ]
    for each in outcomes:
        assert each["issued"] > 0
        assert each["lost"] == each["doubled"] == each["missing"] == 0
    assert "| policy | 1 |" in done.stdout
