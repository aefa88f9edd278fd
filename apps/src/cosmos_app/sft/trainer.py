"""One rank of a supervised run: model, learner, data, checkpoints; its methods block.

All ranks of a replica call them in the same order. A step's examples are a function of the step
and the recipe alone, so they are the same whoever takes the step, and after a restart.
"""

import json
from dataclasses import asdict

from cosmos_app.errors import RunError
from cosmos_app.sft.files import checkpoints_of, load_examples, model_of
from cosmos_app.sft.recipe import SftRecipe
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    CheckpointStore,
    Learner,
    Seat,
    StepReport,
    TrainingMesh,
    empty_batch,
    export_hf,
    load_causal_lm,
    sft_loss,
    step_batches,
    validate,
)


class SftTrainer:
    """What a rank trains.

    Attributes:
        learner: the model and its optimizer.
        step: the step to take next.
    """

    def __init__(self, recipe: SftRecipe, run: RunDirectory, mesh: TrainingMesh) -> None:
        """Load model, data and the newest checkpoint, if there is one.

        Raises:
            CheckpointError: if that cannot be loaded; nothing is begun anew.
            RunError: if it was saved on other examples.
        """
        self._recipe = recipe
        self._run = run
        self._mesh = mesh
        self._model_dir = model_of(recipe, run)
        self._data, self._held_out = load_examples(recipe, self._model_dir)
        self._model = load_causal_lm(self._model_dir, mesh, recipe.model.training)
        self.learner = Learner(self._model, recipe.learner, mesh=mesh)
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
        batches = step_batches(
            self._data,
            self._recipe.trainer.batch,
            seat.step,
            rank=seat.index * mesh.data_size + mesh.data_rank,
            size=seat.size * mesh.data_size,
        )
        report = self.learner.step(batches, sft_loss, filler=empty_batch())
        self.step = seat.step + 1
        return {**_figures(report), "replicas": float(seat.size)}

    def is_due(self, every: int) -> bool:
        """Whether what is done every so many steps is due after the last one."""
        return self.step == self._recipe.trainer.steps or (every > 0 and self.step % every == 0)

    def validate(self) -> float | None:
        """Return the loss over the examples kept back; ``None`` if there are none."""
        if self._held_out is None:
            return None
        return validate(self.learner, self._held_out, self._recipe.trainer.batch).loss

    def save(self, score: float | None) -> None:
        """Begin to write a checkpoint after the last step taken, unless there is one."""
        if self.step - 1 != self._saved and self.step:
            self._saved = self.step - 1
            self._store.start_save(self.step - 1, self.learner, self._position(), score=score)

    def export(self) -> None:
        """Write the model as a Hugging Face directory."""
        export_hf(
            self._model,
            self._run.export / "model",
            self._mesh,
            tokenizer_dir=self._model_dir,
            dtype=self._recipe.trainer.export_dtype,
        )

    def close(self) -> None:
        """Wait for the checkpoint being written."""
        self._store.close()

    def _position(self) -> bytes:
        """Return what the stream of examples depends on."""
        place = {
            "num_examples": len(self._data.examples),
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
            raise RunError(
                f"{path} was saved on another stream of examples ({'; '.join(changed)}): resume "
                "with the data and batch settings of that run, or begin a new one"
            )


def _figures(report: StepReport) -> dict[str, float]:
    plain = asdict(report)
    names = ("loss", "grad_norm", "lr", "num_passes")
    figures = {name: float(plain[name]) for name in names}
    return {
        **figures,
        "trained_tokens": report.weight,
        "tokens": report.metrics["num_tokens"],
        "useful_tokens": report.mean("num_tokens", over="num_places"),
        "accuracy": report.mean("num_correct"),
        "tokens_per_second": report.per_second("num_tokens"),
        "train_s": report.seconds,
        "skipped": float(report.outcome != "updated"),
    }
