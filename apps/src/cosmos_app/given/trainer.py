"""One rank of a run on given data: model, learner, task, checkpoints; its methods block.

All ranks of a replica call them in the same order. A step's examples are a function of the step
and the recipe alone, so they are the same whoever takes the step, and after a restart.
"""

import json

from cosmos_app.errors import WrongStreamError
from cosmos_app.exporting import export_trained
from cosmos_app.given.classifier import export_classifier
from cosmos_app.given.files import checkpoints_of, model_of
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
)


class GivenTrainer:
    """What a rank trains.

    Attributes:
        learner: the model and its optimizer.
        step: the step to take next.
    """

    def __init__(self, recipe: GivenRecipe, run: RunDirectory, mesh: TrainingMesh) -> None:
        """Load model, data and the newest checkpoint, if there is one.

        Raises:
            CheckpointError: if that cannot be loaded; nothing is begun anew.
            WrongStreamError: if it was saved on other examples.
        """
        self._recipe = recipe
        self._run = run
        self._mesh = mesh
        self._model_dir = model_of(recipe, run)
        self._task = open_task(recipe, self._model_dir, mesh)
        self._is_rewarding = isinstance(recipe, RewardModelRecipe)
        self._model = load_causal_lm(self._model_dir, mesh, held_training(recipe))
        self.learner = Learner(self._model, learner_config(recipe, run), mesh=mesh)
        self._store = CheckpointStore(
            checkpoints_of(recipe, run), mesh, retention=recipe.trainer.retention
        )
        self.step = 0
        self._saved: int | None = None
        if self._store.latest() is not None:
            checkpoint = self._store.load(self.learner)
            self._check_position(checkpoint.extra, checkpoint.path)
            self.step = checkpoint.step + 1
            self._saved = checkpoint.step

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
        self.step = seat.step + 1
        return {
            **_figures(report),
            **self._task.figures(report),
            "replicas": float(seat.size),
            "examples": float(self._task.num_examples),
        }

    def is_due(self, every: int) -> bool:
        """Whether what is done every so many steps is due after the last one."""
        return self.step == self._recipe.trainer.steps or (every > 0 and self.step % every == 0)

    def validate(self) -> float | None:
        """Return the loss over the examples kept back, of averaged weights if any are kept.

        ``None`` if there are no such examples.
        """
        with self.learner.averaged():
            self._task.prepare_held_out(self.learner)
            batches = self._task.held_out(rank=self._mesh.data_rank, size=self._mesh.data_size)
            if batches is None:
                return None
            found = self.learner.evaluate(
                batches, self._task.loss, filler=self._task.filler, scorers=self._task.scorers
            )
        return found.loss

    def save(self, score: float | None) -> None:
        """Begin to write a checkpoint after the last step taken, unless there is one.

        Raises:
            CheckpointWriteError: if the one before could not be written; called again, it begins
                this one.
        """
        if self.step - 1 != self._saved and self.step:
            if self._store.latest() != self.step - 1:  # by who was first before
                self._store.start_save(self.step - 1, self.learner, self._position(), score=score)
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

    def _position(self) -> bytes:
        """Return what the stream of examples depends on."""
        place = {
            "num_examples": self._task.num_examples,
            "batch_size": self._recipe.trainer.batch.batch_size,
            "seed": self._recipe.trainer.batch.seed,
        }
        return json.dumps(place).encode()

    def _check_position(self, extra: bytes, path: str) -> None:
        saved, mine = json.loads(extra), json.loads(self._position())
        changed = [
            f"{name} was {saved.get(name)} and is {value}"
            for name, value in mine.items()
            if saved.get(name) != value
        ]
        if changed:
            raise WrongStreamError(
                f"{path} was saved on another stream of examples ({'; '.join(changed)}): resume "
                "with the data and batch settings of that run, or begin a new one"
            )


def learner_config(recipe: GivenRecipe, run: RunDirectory) -> LearnerConfig:
    """Return the learner's settings, with a place in the run directory for bad steps."""
    return bad_steps_kept(recipe.learner, run, keep=recipe.trainer.keep_bad_steps)


def _figures(report: StepReport) -> dict[str, float]:
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "num_passes": float(report.num_passes),
        "train_s": report.seconds,
        "skipped": float(report.outcome != "updated"),
    }
