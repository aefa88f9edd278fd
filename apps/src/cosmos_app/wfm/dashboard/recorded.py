"""What the directory of a world model's run has, known without loading any of its libraries."""

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from cosmos_core.rundir import RunDirectory

_MARKER = "run.json"
_RECIPE = "recipe.json"
_MOST_BYTES = 1 << 18


def is_world_model_run(path: Path) -> bool:
    """Return whether a directory is that of a world model's run, which has no marker."""
    return (path / _RECIPE).is_file() and not (path / _MARKER).exists()


def open_world_model_run(path: Path) -> RunDirectory:
    """Return the paths of a run, which nobody locks."""
    return RunDirectory(path.absolute(), time.time(), None)


def recipe_file(run: RunDirectory) -> Path:
    """Return where the run's recipe is."""
    return run.path / _RECIPE


def read_recipe_tables(run: RunDirectory) -> dict[str, Any]:
    """Return the recipe's tables, maybe of another version; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(recipe_file(run).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def planned_steps(run: RunDirectory) -> int:
    """Return how many steps the recipe wants; 0 if it does not say."""
    found = read_recipe_tables(run).get("num_steps")
    return found if isinstance(found, int) and found > 0 else 0


def world_model_status(run: RunDirectory) -> dict[str, Any]:
    """Return what ``status`` shows: the figures of the newest step; empty before there is one.

    A run that has taken all of its steps has ``finished``; of one that was ended nothing tells.
    """
    try:
        with run.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            *whole, _ = file.read().split(b"\n")
            time_s = os.fstat(file.fileno()).st_mtime
    except OSError:
        return {}
    figures = [found for line in whole if (found := read_figures(line))]
    if not figures:
        return {}
    step, num_steps = figures[-1][0], planned_steps(run)
    values = {name: value for at, row in figures if at == step for name, value in row.items()}
    status = {"step": step, "num_steps": num_steps, "time_s": time_s, "values": values}
    return {**status, **({"finished": "done"} if 0 < num_steps <= step else {})}


def read_figures(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return the step and the finite figures of a line of metrics; ``None`` if it is none."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    values = {
        str(name): float(value)
        for name, value in row.items()
        if name != "step" and type(value) in (int, float) and math.isfinite(value)
    }
    return row["step"], values
