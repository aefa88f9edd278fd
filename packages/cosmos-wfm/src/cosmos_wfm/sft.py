"""Supervised fine-tuning of a diffusion model on captioned images, with the shared learner.

Every random number of a sample comes from (seed, step, position in the step): which rank or
micro-batch it falls into changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from cosmos_parallel import (
    Learner,
    LearnerConfig,
    ParallelConfig,
    StepReport,
    TrainingMesh,
    build_mesh,
    shard_module,
)
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.captions import CaptionedImage, ImageCaptionsConfig
from cosmos_wfm.context import share_context
from cosmos_wfm.errors import PipelineError, WfmConfigError
from cosmos_wfm.families.shared import check_frames
from cosmos_wfm.flow_batches import (
    NoisingConfig,
    noised_batch,
    sample_index,
    seeded_generator,
)
from cosmos_wfm.flow_matching import FlowBatch, FlowMatchingConfig, flow_matching_loss
from cosmos_wfm.loading import load_adapter
from cosmos_wfm.training_run import RunOutputs, TrainingRun, check_parallel
from cosmos_wfm.tuning import LoraTuning, TuningConfig, recompute_blocks
from cosmos_wfm.validation import ValidationConfig
from cosmos_wfm.videos import VideoCaptionsConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionSftConfig:
    """One fine-tuning run.

    Attributes:
        model: a local diffusers pipeline directory.
        data: the captioned images or videos.
        output: directory under which ``safetensors/step_<N>`` is written.
        num_steps: optimizer steps.
        batch_size: samples of a step, over all ranks.
        micro_batch_size: samples of one forward pass.
        caption_dropout: share of samples trained without prompt, for guidance.
        max_given_frames: most latent frames given as condition, where the model takes any.
        save_every: steps between saves; 0 saves at the end only.
        checkpoint_every: steps between checkpoints to go on from; 0 writes none.
        recompute: keep no activations of the denoiser's blocks, compute them again instead.
        validation: pictures that are drawn on the way.
        seed: of order, noise and dropout.
        tuning: adapters or all weights.
        flow: noise levels and loss weights.
        parallel: how ranks share the work: FSDP2, HSDP with ``dp_replicate``, tokens
            of a sample by ``cp``.
        learner: optimizer, schedule and clipping.
    """

    kind: Literal["wfm_sft"] = "wfm_sft"
    model: str
    data: ImageCaptionsConfig | VideoCaptionsConfig
    output: str
    num_steps: int = 1000
    batch_size: int = 8
    micro_batch_size: int = 1
    caption_dropout: float = 0.1
    max_given_frames: int = 2
    save_every: int = 0
    checkpoint_every: int = 0
    recompute: bool = False
    validation: ValidationConfig | None = None
    seed: int = 0
    tuning: TuningConfig = field(default_factory=LoraTuning)
    flow: FlowMatchingConfig = field(default_factory=FlowMatchingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)

    def __post_init__(self) -> None:
        """Check counts and shares.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_parallel(self.parallel)
        for name in ("num_steps", "batch_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise WfmConfigError(f"sft: {name} is {getattr(self, name)}; it must be 1 or more")
        if not 0.0 <= self.caption_dropout <= 1.0:
            raise WfmConfigError(
                f"sft: caption_dropout is {self.caption_dropout}; it must be in [0, 1]"
            )


def train_sft(
    config: DiffusionSftConfig,
    *,
    mesh: TrainingMesh | None = None,
    resume: bool = False,
    on_step: Callable[[int, StepReport], None] = lambda step, report: None,
) -> Path:
    """Fine-tune and save; every rank of the mesh calls.

    Args:
        config: the run.
        mesh: the ranks that share it; ``None`` for this process alone.
        resume: go on from the newest checkpoint in the output directory, if there is one.
        on_step: called with the number of each finished step, from 1, and its report.

    Returns:
        The directory of the last save, for diffusers to load.

    Raises:
        PipelineError: if the model cannot be loaded.
        CaptionDataError: if the data cannot be read.
        WfmConfigError: if image sizes do not fit the model, or the output directory has
            checkpoints and is not to be resumed.
    """
    mesh = mesh or build_mesh(ParallelConfig())
    adapter = load_adapter(config.model)
    _check_size(config.data, adapter)
    data = config.data.build()
    config.tuning.prepare(adapter, seed=config.seed)
    if config.recompute:
        recompute_blocks(adapter)
    adapter.pipeline.to(mesh.process.device)
    share_context(adapter.transformer, adapter.blocks, mesh)
    shard_module(adapter.transformer, mesh, blocks=adapter.blocks)
    learner = Learner(adapter.transformer, config.learner, mesh=mesh)
    loss = flow_matching_loss(adapter, config.flow)

    def take(step: int) -> None:
        batches = step_batches(config, adapter, data, step, mesh=mesh)
        filler = replace(batches[-1], weights=torch.zeros_like(batches[-1].weights))
        on_step(step + 1, learner.step(batches, loss, filler=filler))

    outputs = RunOutputs(
        output=Path(config.output),
        num_steps=config.num_steps,
        save_every=config.save_every,
        checkpoint_every=config.checkpoint_every,
        validation=config.validation,
    )
    run = TrainingRun(
        adapter=adapter, learner=learner, mesh=mesh, tuning=config.tuning, outputs=outputs
    )
    return run.take_steps(take, resume=resume)


def step_batches(
    config: DiffusionSftConfig,
    adapter: DiffusionModelAdapter,
    data: Sequence[CaptionedImage],
    step: int,
    *,
    mesh: TrainingMesh,
) -> list[FlowBatch]:
    """Return this rank's micro-batches of a step, encoded, with noise and levels drawn.

    A rank that has no sample of its own gets one of weight 0, so the list is never empty.
    """
    mine = range(config.batch_size)[mesh.data_rank :: mesh.data_size]
    own = list(mine) or [0]
    batches: list[FlowBatch] = []
    for start in range(0, len(own), config.micro_batch_size):
        places = own[start : start + config.micro_batch_size]
        batches.append(_batch(config, adapter, data, step, places))
    if not mine:
        batches = [replace(batches[0], weights=torch.zeros_like(batches[0].weights))]
    return batches


def _batch(
    config: DiffusionSftConfig,
    adapter: DiffusionModelAdapter,
    data: Sequence[CaptionedImage],
    step: int,
    places: Sequence[int],
) -> FlowBatch:
    samples = [
        data[sample_index(len(data), step * config.batch_size + place, config.seed)]
        for place in places
    ]
    generators = [seeded_generator(config.seed, step, place) for place in places]
    noising = NoisingConfig(
        flow=config.flow,
        caption_dropout=config.caption_dropout,
        max_given_frames=config.max_given_frames,
    )
    return noised_batch(adapter, samples, generators, noising)


def _check_size(
    data: ImageCaptionsConfig | VideoCaptionsConfig, adapter: DiffusionModelAdapter
) -> None:
    multiple = adapter.size_multiple
    if data.height % multiple or data.width % multiple:
        raise WfmConfigError(
            f"data: {data.height}x{data.width} pixels, but this model needs multiples of {multiple}"
        )
    frames = data.frames if isinstance(data, VideoCaptionsConfig) else 1
    try:
        check_frames(frames, adapter.temporal_factor)
    except PipelineError as error:
        raise WfmConfigError(f"data: {error}") from error
