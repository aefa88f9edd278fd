"""The bubble benchmark in its smallest form: real processes around a paced engine and learner."""

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


def test_real_runs_keep_the_bound_and_give_what_their_simulation_gives(tmp_path: Path) -> None:
    """Times are not asserted, the machine may be busy; everything else holds at any speed."""
    numbers = tmp_path / "numbers.json"
    script = ROOT / "benchmarks" / "async_bubbles.py"
    options = ["--quick", "--out", str(tmp_path / "out"), "--json", str(numbers)]
    done = subprocess.run(
        [sys.executable, str(script), *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1", PRELOADER: preloader()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    synchronous, default = json.loads(numbers.read_text())
    assert [synchronous["arm"], default["arm"]] == ["sync, disaggregated", "depth 2, bound 4"]
    for result, bound in ((synchronous, 0), (default, 4)):
        real = result["real"]
        assert real["steps"] >= 2
        assert real["staleness_first"]["max"] <= bound
        assert real["staleness_last"]["max"] <= real["staleness_first"]["max"]
        assert real["dropped"] == 0
        assert 0 <= real["policy_idle"] < 1
        assert 0 < real["swap_ms"]["p50"] <= real["swap_ms"]["max"]
    assert synchronous["real"]["step_s"] > default["predicted"]["step_s"]
    assert "| sync, disaggregated |" in done.stdout
