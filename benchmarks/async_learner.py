"""The learner of the bubble benchmark: real steps of a tiny transformer, slept out to a known time.

Forward, backward, optimizer and the weights that are published are those of a run; what a step
takes beyond them is slept between the passes and the update, up to a time that the clock says.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cosmos_algos import SftConfig
from cosmos_app.held import held_training
from cosmos_app.recipe import Recipe
from cosmos_app.roles.batch_plan import batch_plan
from cosmos_app.roles.weights import trained_shards
from cosmos_app.step_share import StepShare, batches_of_share
from cosmos_core.config import config_from_json
from cosmos_core.trajectory import Trajectory
from cosmos_parallel import Learner, ParallelConfig, build_mesh, load_causal_lm
from cosmos_weightsync import Shard

RECIPE = "recipe.json"
"""What role processes read of the recipe, beside the model."""
_UPDATE_S = 0.02
"""Left for the update, which takes a few milliseconds."""


def sleep_until(moment_s: float) -> None:
    """Sleep until the monotonic clock says so."""
    left = moment_s - time.monotonic()
    if left > 0:
        time.sleep(left)


class TinyLearner:
    """The run's tiny model and a `Learner` of it.

    It is taught what was sampled, so that every step changes the weights, whatever the rewards.

    Args:
        files: where model and recipe lie.
    """

    def __init__(self, files: Path) -> None:
        recipe = config_from_json(Recipe, (files / RECIPE).read_text())
        mesh = build_mesh(ParallelConfig())
        model: Any = load_causal_lm(files / "model", mesh, held_training(recipe))
        self._model = model
        self._plan = batch_plan(model, recipe, None)
        self._learner = Learner(model, recipe.learner, mesh=mesh)
        self._loss = SftConfig().loss
        self._until_s = 0.0
        self._passed: Callable[[float], None] = lambda _: None
        self._learner.optimizer.register_step_pre_hook(self._sleep)
        self.shards: Sequence[Shard] = trained_shards(model, recipe)

    def step(
        self,
        share: StepShare,
        trajectories: Sequence[Trajectory],
        *,
        version: int,
        until_s: float,
        passed: Callable[[float], None],
    ) -> None:
        """Take a step that ends at a time, or as soon after it as it can.

        Args:
            share: of the step.
            trajectories: of the share.
            version: of the weights now.
            until_s: monotonic seconds.
            passed: called at the end of the passes, sleep included, with the time.
        """
        self._until_s, self._passed = until_s - _UPDATE_S, passed
        batches = batches_of_share(share, trajectories, self._plan, policy_version=version)
        report = self._learner.step(batches, self._loss)
        assert report.outcome == "updated", report
        sleep_until(until_s)

    def _sleep(self, *_: object) -> None:
        sleep_until(self._until_s)
        self._passed(time.monotonic())
