"""Benchmarks in their smallest form, as processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked_runs import preloader

from cosmos_app.fork_orders import PRELOADER

ROOT = Path(__file__).resolve().parents[2]


def measured(script: str, folder: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a benchmark in its smallest form; return what it printed and its numbers."""
    numbers = folder / "numbers.json"
    options = ["--quick", "--out", str(folder / "out"), "--json", str(numbers), *arguments]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *options],
        env={**os.environ, "HF_HUB_OFFLINE": "1", PRELOADER: preloader()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(numbers.read_text())
