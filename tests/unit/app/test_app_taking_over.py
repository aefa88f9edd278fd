"""Who comes first after a replica died tells of the step that the dead one told nobody of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_app.given.files import prepare_model
from cosmos_app.given.role import GivenProcess, Replicas
from cosmos_app.recipes import load_any_recipe
from cosmos_core.config import config_to_json
from cosmos_core.metrics import MetricRecord
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import Learner, Seat, TrainingMesh

ROOT = Path(__file__).parents[3]
STEPS = 4
DEATH = 2  # the other replica takes part in steps 0 and 1


class OneThatDies:
    """Replicas of which the first dies between two steps."""

    def meet(self, learner: Learner, step: int, *, wants_stop: bool = False) -> Seat:
        del learner
        index, names = (0, ("b",)) if step >= DEATH else (1, ("a", "b"))
        return Seat(step=step, index=index, names=names, wants_stop=wants_stop)

    def lose(self) -> None:
        raise AssertionError("nothing is lost")

    def close(self) -> None:
        pass


class Survivor(GivenProcess):
    def _open_replicas(self, mesh: TrainingMesh) -> Replicas:
        del mesh
        return OneThatDies()


class Told:
    """What was sent, as a bus takes it."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def send_metrics(self, records: list[MetricRecord]) -> None:
        self.steps += [record.step for record in records]
        assert all("loss" in record.values for record in records)


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_step_that_the_dead_told_nobody_of_is_told(tmp_path: Path, is_told: bool) -> None:
    torch.set_num_threads(1)
    recipe = load_any_recipe(
        ROOT / "configs" / "sft.toml",
        [
            f"data.path={ROOT / 'configs' / 'data' / 'sums.jsonl'}",
            f"trainer.steps={STEPS}",
            "trainer.checkpoint_every=2",
            "trainer.validate_every=0",
            "trainer.batch.batch_size=4",
            "data.held_out=1",
        ],
    )
    recipe = replace(recipe, policy=replace(recipe.policy, replicas=1))
    created = RunDirectory.create(tmp_path / "run", config_json=config_to_json(recipe), now_s=0.0)
    with created as run:
        prepare_model(recipe, run)
        before = [0, 1] if is_told else [0]
        run.metrics.write_text(
            "".join(
                f'{{"time_s":1.0,"role":"controller","replica":"a","step":{step},"values":{{}}}}\n'
                for step in before
            )
        )
        told: Any = Told()
        await Survivor(recipe, run, told, "b").run()
        assert told.steps == ([2, 3] if is_told else [1, 2, 3])
        saved = sorted(path.name for path in run.checkpoints.iterdir())
        assert len(saved) == (1 if is_told else 2), saved
