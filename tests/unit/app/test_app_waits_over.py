"""What replicas wait for as they begin, until its deadline: they end, or begin otherwise."""

import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("cosmos_parallel")

from cosmos_app.errors import RunError
from cosmos_app.preloaded import Preloaded, PreloadLostError, Shared
from cosmos_app.recipe import PolicyConfig, Recipe
from cosmos_app.roles.elastic import open_replicas
from cosmos_app.roles.meeting import meet_replicas
from cosmos_app.roles.process import RunContext
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import ElasticConfig, ProcessContext


def test_elastic_policies_without_a_meeting_place_give_up_and_say_so(tmp_path: Path) -> None:
    with (
        RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run,
        pytest.raises(RunError, match=r"policy-1 waited 0\.6 s for the meeting place of its run"),
    ):
        open_replicas(run, "policy-1", cast("Any", None), ElasticConfig(), meet_s=0.6)


@pytest.mark.parametrize("left_behind", ["", "127.0.0.1:9:77"])
def test_policies_whose_first_does_not_come_give_up_and_name_it(
    tmp_path: Path, left_behind: str
) -> None:
    """Also where one that died has left its address."""
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        if left_behind:
            (run.path / "meeting.0").write_text(left_behind)
        recipe = Recipe(policy=PolicyConfig(replicas=2))
        context = RunContext(
            run=run, recipe=recipe, files=cast("Any", None), redis_url="", namespace="run"
        )
        began_s = time.monotonic()
        with pytest.raises(RunError, match=r"policy-1 waited 1 s for policy-0 at .*meeting\.0"):
            meet_replicas(context, 1, ProcessContext(), meet_s=1.0)
        assert time.monotonic() - began_s < 20.0


async def test_imports_that_never_end_are_given_up_and_replicas_start_by_themselves(
    tmp_path: Path,
) -> None:
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(3600)\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    preloaded = Preloaded(Shared(modules=["endless"]), path, longest_imports_s=1.0)
    command = (sys.executable, "-m", "cosmos_app", "policy", "--help")
    assert preloaded.takes(command)
    with pytest.raises(PreloadLostError):
        await preloaded.start(command, {**os.environ}, tmp_path / "log")
    assert not preloaded.takes(command)
    await preloaded.close()
