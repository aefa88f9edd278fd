"""The steps of a run, and what is written on the way: saves, checkpoints, pictures to look at.

<output>/safetensors/step_<N>/   what diffusers loads
<output>/checkpoints/            what the run goes on from, on any number of ranks
<output>/validation/step_<N>/    grid.png, videos, and each sample with an index
<upload>/step_<N>/               the first again, in an object store

All randomness of a step comes from its number, so a run that goes on takes the steps that it would
have taken.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from cosmos_core.metrics import MlflowSinkConfig, TensorBoardSinkConfig, WandbSinkConfig
from cosmos_parallel import (
    CheckpointStore,
    Learner,
    StepReport,
    TrainingMesh,
    tell_passes,
)
from cosmos_wfm.adapter import DiffusionModelAdapter, pipeline_modules
from cosmos_wfm.errors import NoRewardsError, TrainingStoppedError, WfmConfigError
from cosmos_wfm.gallery import thin_galleries, write_gallery
from cosmos_wfm.sample_rewards import (
    SampleScorer,
    ask_for_rewards,
    collect_rewards,
    reward_figures,
)
from cosmos_wfm.tuning import LoraTuning, TuningConfig, save_trained
from cosmos_wfm.uploads import UploadConfig, upload_directory
from cosmos_wfm.validation import ValidationConfig, draw_samples, prompts_text, write_samples

_PROMPTS = "prompts.txt"
OnStep = Callable[[int, StepReport, Mapping[str, float]], None]
"""Told of a finished step, counted from 1, the learner's report and the run's own figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """What a validation left.

    Attributes:
        step: after which.
        directory: its pictures, videos and index.
        figures: means of rewards by name, and how many samples' rewards failed
            (``cosmos_wfm.sample_rewards``), and seconds of all of it; empty where nobody rewards.
        problems: why rewards failed, each once.
    """

    step: int
    directory: Path
    figures: Mapping[str, float]
    problems: Sequence[str]


def look_away(validated: Validated) -> None:
    """Do nothing with a validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationHooks:
    """Whom a run hands its validations to, on rank 0.

    Attributes:
        told: called after each.
        scorer: rewards samples; ``None`` leaves it to the recipe.
    """

    told: Callable[[Validated], None] = look_away
    scorer: SampleScorer | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunControl:
    """Who stops a run, and who looks on while it works and writes; on every rank.

    Attributes:
        stopping: asked before each step whether the run is to stop, with a checkpoint; one rank's
            word is enough.
        while_writing: what each save, with its upload, and each checkpoint is written inside of;
            the latter in the thread that writes.
        told: called again and again while it gets further, after each pass of a part of the model;
            not while it writes, and not while it waits for rewards or for samples.
    """

    stopping: Callable[[], bool] = lambda: False
    while_writing: Callable[[], AbstractContextManager[object]] = nullcontext
    told: Callable[[], None] | None = None


LoggerConfig = TensorBoardSinkConfig | WandbSinkConfig | MlflowSinkConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutputs:
    """What a run writes, and how often.

    Attributes:
        output: the run's directory.
        num_steps: optimizer steps in all.
        save_every: steps between saves; 0 saves at the end only.
        checkpoint_every: steps between checkpoints; 0 writes one only where the run is stopped.
        validation: pictures; ``None`` draws none.
        checkpoints: where checkpoints are, a directory or an address that fsspec knows; empty for
            the run's directory.
        upload: where saves go as well; ``None`` leaves them where they are.
        micro_batch_size: samples of one pass, of pictures too.
    """

    output: Path
    num_steps: int
    save_every: int
    checkpoint_every: int
    validation: ValidationConfig | None
    checkpoints: str = ""
    upload: UploadConfig | None = None
    micro_batch_size: int = 1

    @classmethod
    def of(cls, recipe: "_WritingRecipe") -> "RunOutputs":
        """Return what a recipe says of them."""
        return cls(
            output=Path(recipe.output),
            num_steps=recipe.num_steps,
            save_every=recipe.save_every,
            checkpoint_every=recipe.checkpoint_every,
            validation=recipe.validation and recipe.validation.with_prompts(),
            checkpoints=recipe.checkpoints,
            upload=recipe.upload,
            micro_batch_size=recipe.micro_batch_size,
        )

    @property
    def checkpoint_place(self) -> Path | str:
        """Where checkpoints are."""
        return self.checkpoints or self.output / "checkpoints"

    @property
    def saves(self) -> Path:
        """The directory of saves."""
        return self.output / "safetensors"


class _WritingRecipe(Protocol):
    """The fields of `RunOutputs` in a recipe."""

    @property
    def output(self) -> str: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def save_every(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def validation(self) -> ValidationConfig | None: ...
    @property
    def checkpoints(self) -> str: ...
    @property
    def upload(self) -> UploadConfig | None: ...
    @property
    def micro_batch_size(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingRun:
    """A model in training; every rank of its mesh has one and calls alike.

    Attributes:
        adapter: the model.
        learner: trains it.
        mesh: the ranks.
        tuning: what of it is trained, and how that is saved.
        outputs: what is written.
        resumed: called when a checkpoint was loaded.
        validation: whom validations are handed to.
        control: who stops it, and looks on while it works and writes.
        copies: of the denoiser, which make passes as well.
    """

    adapter: DiffusionModelAdapter
    learner: Learner
    mesh: TrainingMesh
    tuning: TuningConfig
    outputs: RunOutputs
    resumed: Callable[[], None] = lambda: None
    validation: ValidationHooks = field(default_factory=ValidationHooks)
    control: RunControl = field(default_factory=RunControl)
    copies: Sequence[nn.Module] = ()

    def take_steps(self, step: Callable[[int], None], *, resume: bool) -> Path:
        """Take the steps that are left, and write what is due.

        Args:
            step: takes the step of a number, from 0.
            resume: go on from the newest checkpoint, if there is one.

        Returns:
            The directory of the last save, for diffusers to load.

        Raises:
            WfmConfigError: if there are checkpoints of another run and ``resume`` is not set, or
                saves of one without checkpoints.
            TrainingStoppedError: if it was asked to stop; a checkpoint has what it has done.
            NoRewardsError: if a step raises it; likewise.
            CheckpointError: if a checkpoint cannot be read or written.
            SaveError: if a save cannot be written.
            UploadError: if a save cannot be uploaded.
        """
        outputs = self.outputs
        if self.control.told is not None:
            tell_passes(self.control.told, *pipeline_modules(self.adapter), *self.copies)
        store, done = self._open(resume=resume)
        kept = done
        try:
            if done >= outputs.num_steps:  # it may have been killed before its last save
                return self.save(done)
            if done:
                self._make_up(done)
            else:
                self._validate(0)
            for number in range(done, outputs.num_steps):
                try:
                    self._check_go_on(done)
                    step(number)
                except (TrainingStoppedError, NoRewardsError):  # of every rank, before it trains
                    if done > kept:
                        store.start_save(done, self.learner, self._scale())
                    raise
                done = number + 1
                if _due(done, outputs.checkpoint_every, last=False):
                    store.start_save(done, self.learner, self._scale())
                    kept = done
                if _due(done, outputs.save_every, last=done == outputs.num_steps):
                    self.save(done)
                self._validate(done)
        finally:
            store.close()
        return self._save_directory(outputs.num_steps)

    def save(self, step: int) -> Path:
        """Write what was trained after ``step`` steps, averaged if the learner keeps an average."""
        target = self._save_directory(step)
        upload = self.outputs.upload
        due = upload is not None and (upload.saves == "all" or self._is_last(step))
        with self.control.while_writing():
            save_trained(self.tuning, self.adapter, self.learner, target)
            if upload is not None and due and self.mesh.process.rank == 0:
                upload_directory(target, f"{upload.url.rstrip('/')}/{target.name}")
            self.mesh.barrier()
        return target

    def _save_directory(self, step: int) -> Path:
        return self.outputs.saves / f"step_{step}"

    def _check_go_on(self, done: int) -> None:
        """Raise if any rank was asked to stop; every rank calls."""
        asked = torch.tensor(int(self.control.stopping()), device=self.mesh.process.device)
        if self.mesh.max_(asked):
            raise TrainingStoppedError(
                f"{self.outputs.output}: stopped after step {done} of {self.outputs.num_steps}; "
                "--resume goes on from there"
            )

    def _open(self, *, resume: bool) -> tuple[CheckpointStore, int]:
        place = self.outputs.checkpoint_place
        store = CheckpointStore(place, self.mesh, while_writing=self.control.while_writing)
        newest = store.latest_of_all()
        if newest is not None and resume:
            return store, self._load(store, newest)
        with ExitStack() as undo:
            undo.callback(store.close)
            _refuse_others(self.outputs, newest, self.mesh)
            undo.pop_all()
        return store, 0

    def _load(self, store: CheckpointStore, newest: int) -> int:
        """Restore the newest checkpoint and return its step; without its save, if that was due.

        Raises:
            WfmConfigError: if its adapters were trained at another scale.
        """
        with ExitStack() as undo:
            undo.callback(store.close)
            kept, own = store.extra(newest), self._scale()
            if kept and kept != own:
                raise WfmConfigError(
                    f"{self.outputs.output}: adapters were trained with {kept.decode()}, and the "
                    f"recipe says {own.decode() or 'none'}, at which they are others; go on with "
                    "what they were trained with"
                )
            done = store.load(self.learner).step
            self.resumed()
            undo.pop_all()
        return done

    def _scale(self) -> bytes:
        """Return what a checkpoint's adapters mean besides their numbers."""
        tuning = self.tuning
        return f"alpha {tuning.alpha}".encode() if isinstance(tuning, LoraTuning) else b""

    def _make_up(self, done: int) -> None:
        """Write what was due after the step that a run goes on from, if it was killed before."""
        outputs, config = self.outputs, self.outputs.validation
        here = self.mesh.process.rank == 0
        uploads = outputs.upload is not None and outputs.upload.saves == "all"
        saves = _due(done, outputs.save_every, last=False)
        saves = saves and (uploads or not self._save_directory(done).is_dir())
        draws = config is not None and _due(done, config.every, last=False)
        draws = draws and not (self._pictures(done) / _PROMPTS).is_file()
        wanted = torch.tensor([saves and here, draws and here], device=self.mesh.process.device)
        saves, draws = self.mesh.max_(wanted.int()).tolist()  # as the first rank sees it
        if saves:
            self.save(done)
        if draws:
            self._validate(done)

    def _pictures(self, done: int) -> Path:
        return self.outputs.output / "validation" / f"step_{done}"

    def _validate(self, done: int) -> None:
        config = self.outputs.validation
        if config is None or not (done == 0 or _due(done, config.every, last=self._is_last(done))):
            return
        begun, ema = time.monotonic(), self.learner.ema
        with ema.in_place() if ema is not None else nullcontext():
            pixels = draw_samples(self.adapter, config, at_once=self.outputs.micro_batch_size)
        if self.mesh.process.rank == 0:
            self.validation.told(self._validated(done, config, pixels, begun))
        self.mesh.barrier()

    def _validated(
        self, done: int, config: ValidationConfig, pixels: Tensor, begun: float
    ) -> Validated:
        """Write samples while they are rewarded, then their index; return what came of it."""
        scorer, directory = self.validation.scorer, self._pictures(done)
        asked = [
            [ask_for_rewards(scorer, sample, prompt) for sample in row]
            for row, prompt in zip(pixels, config.prompts, strict=True)
            if scorer is not None
        ]
        write_samples(pixels, directory, fps=config.fps)
        rewards = collect_rewards(asked, config.deadline_s)
        write_gallery(pixels, directory, config, step=done, rewards=rewards)
        thin_galleries(directory.parent, config.keep)
        (directory / _PROMPTS).write_text(prompts_text(config.prompts), encoding="utf-8")
        figures: dict[str, float] = {}
        if rewards:
            seconds = {"validation/seconds": time.monotonic() - begun}
            figures = {**reward_figures(rewards), **seconds}
        problems = {why: None for row in rewards for each in row for why in each.problems}
        return Validated(step=done, directory=directory, figures=figures, problems=tuple(problems))

    def _is_last(self, done: int) -> bool:
        return done == self.outputs.num_steps


def check_is_new(outputs: RunOutputs, mesh: TrainingMesh) -> None:
    """Check that a run that begins would write over nothing of another; every rank calls.

    Raises:
        WfmConfigError: if there are checkpoints of one, or saves.
    """
    store = CheckpointStore(outputs.checkpoint_place, mesh)
    newest = store.latest_of_all()
    store.close()
    _refuse_others(outputs, newest, mesh)


def _refuse_others(outputs: RunOutputs, newest: int | None, mesh: TrainingMesh) -> None:
    if newest is not None:
        raise WfmConfigError(
            f"{outputs.output} has checkpoints of a run, the newest of step {newest}; go "
            "on with --resume, or name another output"
        )
    saves = sorted(outputs.saves.glob("step_*"))
    mesh.barrier()  # nobody saves before all have looked
    if saves:
        raise WfmConfigError(
            f"{outputs.output} has what a run saved ({saves[0].name}); name another output, or "
            "remove it"
        )


def _due(done: int, every: int, *, last: bool) -> bool:
    return last or (every > 0 and done % every == 0)
