"""One rank of a run on given data: model, learner, task, checkpoints; its methods block.

All ranks of a replica call them in the same order. A step's examples are a function of the step
and the recipe alone, so they are the same whoever takes the step, and after a restart.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from cosmos_app.checkpoint_places import checkpoints_of
from cosmos_app.errors import WrongStreamError
from cosmos_app.exporting import export_trained
from cosmos_app.given.classifier import export_classifier
from cosmos_app.given.encoded import encoded_of
from cosmos_app.given.files import model_of
from cosmos_app.given.recipe import GivenRecipe, RewardModelRecipe
from cosmos_app.given.tasks import open_task
from cosmos_app.held import held_training
from cosmos_app.settings import bad_steps_kept
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    CheckpointStore,
    CheckpointWriteError,
    Learner,
    LearnerConfig,
    Seat,
    StepReport,
    TrainingMesh,
    load_causal_lm,
    tell_passes,
)


class Validation(NamedTuple):
    """Mean losses over the examples kept back: of all, and of each data set that has a name."""

    loss: float
    data_sets: Mapping[str, float]


class GivenTrainer:
    """What a rank trains.

    Attributes:
        learner: the model and its optimizer.
        step: the step to take next.
        num_passes: forward passes so far; grows while a step or a validation is worked on.
        problem: what was not finite in the last step, so that it changed nothing; empty if all was.
    """

    def __init__(
        self,
        recipe: GivenRecipe,
        run: RunDirectory,
        mesh: TrainingMesh,
        while_writing: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Load model, data and the newest checkpoint, if there is one.

        Args:
            recipe: of the run.
            run: its directory.
            mesh: the ranks of this replica.
            while_writing: what each checkpoint is written inside of.

        Raises:
            CheckpointError: if that cannot be loaded; nothing is begun anew.
            WrongStreamError: if it was saved on other examples.
        """
        self._recipe = recipe
        self._run = run
        self._mesh = mesh
        self._model_dir = model_of(recipe, run)
        self._task = open_task(recipe, self._model_dir, mesh, encoded_of(run))
        self._is_rewarding = isinstance(recipe, RewardModelRecipe)
        self._model = load_causal_lm(self._model_dir, mesh, held_training(recipe))
        self.learner = Learner(self._model, learner_config(recipe, run), mesh=mesh)
        self._store = CheckpointStore(
            checkpoints_of(recipe.trainer, run),
            mesh,
            retention=recipe.trainer.retention,
            while_writing=while_writing,
        )
        self.num_passes = 0
        frozen = [scorer.model for scorer in self._task.scorers]
        tell_passes(self._count_pass, self._model, *frozen)
        self.step = 0
        self.problem = ""
        self._saved: int | None = None
        if self._store.latest_of_all() is not None:
            checkpoint = self._store.load(self.learner)
            self._check_position(checkpoint.extra, checkpoint.step, checkpoint.path)
            self.step = checkpoint.step + 1
            self._saved = checkpoint.step

    @property
    def is_waiting(self) -> bool:
        """Whether a step that it works on waits for other replicas."""
        others = self.learner.replica_group
        return others is not None and others.is_waiting

    def train(self, seat: Seat) -> dict[str, float]:
        """Take the step of ``seat`` on this rank's share; return its metrics.

        Raises:
            ReplicaLostError: if the step is void; nothing is updated.
        """
        mesh = self._mesh
        self._task.prepare(self.learner, seat.step)
        batches = self._task.batches(
            seat.step,
            rank=seat.index * mesh.data_size + mesh.data_rank,
            size=seat.size * mesh.data_size,
        )
        report = self.learner.step(
            batches, self._task.loss, filler=self._task.filler, scorers=self._task.scorers
        )
        self.step, self.problem = seat.step + 1, report.problem
        return {
            **_figures(report),
            **self._task.figures(report),
            "replicas": float(seat.size),
            "examples": float(len(self._task.data.train)),
            **self._epochs(),
        }

    def is_due(self, every: int) -> bool:
        """Whether what is done every so many steps is due after the last one."""
        return self.step == self._recipe.trainer.steps or (every > 0 and self.step % every == 0)

    def validate(self) -> Validation | None:
        """Return the loss over the examples kept back, of averaged weights if any are kept.

        ``None`` if there are no such examples.
        """
        with self.learner.averaged():
            self._task.prepare_held_out(self.learner)
            kept = self._task.held_out(rank=self._mesh.data_rank, size=self._mesh.data_size)
            found = {
                name: self.learner.evaluate(
                    batches, self._task.loss, filler=self._task.filler, scorers=self._task.scorers
                )
                for name, batches in kept.items()
            }
        if not found:
            return None
        weight = sum(each.weight for each in found.values())
        total = sum(each.loss * each.weight for each in found.values())
        return Validation(
            loss=total / weight if weight else 0.0,
            data_sets={name: each.loss for name, each in found.items() if name},
        )

    def save(self, score: float | None) -> None:
        """Begin to write a checkpoint after the last step taken, unless there is one.

        Raises:
            CheckpointWriteError: if the one before could not be written; called again, it begins
                this one.
        """
        if self.step - 1 != self._saved and self.step:
            if self._store.latest_of_all() != self.step - 1:  # by who was first before
                extra = self._position(self.step - 1)
                self._store.start_save(self.step - 1, self.learner, extra, score=score)
            self._saved = self.step - 1

    def save_now(self) -> str:
        """Write a checkpoint after the last step taken, unless there is one; wait until durable.

        Raises:
            CheckpointWriteError: if it could not be written.
        """
        try:
            self.save(None)
            return self._store.wait() or ""
        except CheckpointWriteError:
            self._saved = None
            raise

    def export(self) -> None:
        """Write the model as a Hugging Face directory, averaged if so kept, and an adapter too."""
        write = export_classifier if self._is_rewarding else export_trained
        with self.learner.averaged():
            write(
                self._model,
                self._run.export / "model",
                self._mesh,
                base=self._model_dir,
                training=self._recipe.model.training,
                dtype=self._recipe.trainer.export_dtype,
            )

    def close(self) -> None:
        """Wait for the checkpoint being written."""
        self._store.close()

    def _count_pass(self) -> None:
        self.num_passes += 1

    def _epochs(self) -> dict[str, float]:
        """Return how often each data set that takes turns has been gone through."""
        places = self._task.data.position(self._num_drawn(self.step)).items()
        return {
            f"epochs/{name}": place["drawn"] / place["num_examples"]
            for name, place in places
            if "drawn" in place
        }

    def _num_drawn(self, steps: int) -> int:
        return steps * self._recipe.trainer.batch.batch_size

    def _position(self, step: int) -> bytes:
        """Return what the stream of examples depends on, and where each data set is after a step.

        A run with one data set has no ``sets``: its examples follow from the step alone.
        """
        place = {
            "num_examples": len(self._task.data.train),
            "batch_size": self._recipe.trainer.batch.batch_size,
            "seed": self._recipe.trainer.batch.seed,
        }
        sets = self._task.data.position(self._num_drawn(step + 1))
        return json.dumps(place | ({"sets": sets} if sets else {})).encode()

    def _check_position(self, extra: bytes, step: int, path: str) -> None:
        saved, mine = (_flat(json.loads(each)) for each in (extra, self._position(step)))
        changed = [
            f"{name} was {saved.get(name)} and is {mine.get(name)}"
            for name in {**mine, **saved}
            if saved.get(name) != mine.get(name)
        ]
        if changed:
            raise WrongStreamError(
                f"{path} was saved on another stream of examples ({'; '.join(changed)}): resume "
                "with the data and batch settings of that run, or begin a new one"
            )


def _flat(place: Mapping[str, Any]) -> dict[str, int]:
    """Return a position with a name for each of its numbers, which says of which set it is."""
    return {name: value for name, value in place.items() if name != "sets"} | {
        f"{name} of data set {data_set!r}": value
        for data_set, of_set in place.get("sets", {}).items()
        for name, value in of_set.items()
    }


def learner_config(recipe: GivenRecipe, run: RunDirectory) -> LearnerConfig:
    """Return the learner's settings, with a place in the run directory for bad steps."""
    return bad_steps_kept(recipe.learner, run.path, keep=recipe.trainer.keep_bad_steps)


def _figures(report: StepReport) -> dict[str, float]:
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "num_passes": float(report.num_passes),
        "train_s": report.seconds,
        "skipped": float(report.outcome != "updated"),
    }
