"""Which directory a run goes to."""

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cosmos_app.frame import open_run
from cosmos_app.recipe import load_recipe
from cosmos_core.rundir import RunInUseError

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


def test_a_run_goes_beside_one_that_is_live_or_over_and_says_so(tmp_path: Path) -> None:
    recipe = replace(load_recipe(QUICKSTART), output=tmp_path / "run")
    said = io.StringIO()
    console = Console(file=said, width=40)
    with open_run(recipe, console, resume=False) as first:
        assert first.path == recipe.output
        with open_run(recipe, console, resume=False) as second:
            assert second.path == tmp_path / "run-2"
        with pytest.raises(RunInUseError, match=f"process {os.getpid()} on "):
            open_run(recipe, console, resume=True)
    open_run(recipe, console, resume=False).close()
    live, over = said.getvalue().splitlines()
    assert live.startswith(f"{first.path} is in use by process {os.getpid()} on ")
    assert live.endswith(f"; this one goes to {second.path}")
    assert over == f"{first.path} holds an earlier run; this one goes to {tmp_path / 'run-3'}"
