"""Supervised fine-tuning of a diffusion model on captioned images, with the shared learner.

Every random number of a sample comes from (seed, step, position in the step): which rank or
micro-batch it falls into changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from cosmos_core.serving_config import DashboardConfig
from cosmos_parallel import (
    Learner,
    LearnerConfig,
    ParallelConfig,
    TrainingMesh,
    build_mesh,
)
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.caption_data import CaptionData
from cosmos_wfm.context import share_context
from cosmos_wfm.denoiser import ComputeConfig, shard_denoiser
from cosmos_wfm.encoding import EncodedCache, EncodedSample, SampleEncoder, cache_key
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.flow_batches import (
    NoisingConfig,
    noise_encoded,
)
from cosmos_wfm.flow_matching import FlowBatch, FlowMatchingConfig, flow_matching_loss
from cosmos_wfm.loading import load_adapter
from cosmos_wfm.ranges import check_at_least, check_finite, check_positive
from cosmos_wfm.seeds import seeded_generator
from cosmos_wfm.speed import SpeedMeter
from cosmos_wfm.training_checks import check_parallel, check_rates
from cosmos_wfm.training_data import DataConfig, LeftOut, open_data
from cosmos_wfm.training_run import (
    LoggerConfig,
    OnStep,
    RunControl,
    RunOutputs,
    TrainingRun,
    ValidationHooks,
)
from cosmos_wfm.tuning import LoraTuning, TuningConfig, recompute_blocks
from cosmos_wfm.uploads import UploadConfig
from cosmos_wfm.validation import ValidationConfig, named_scorer

_NOBODY, _ALONE = ValidationHooks(), RunControl()


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionSftConfig:
    """One fine-tuning run.

    Attributes:
        model: a local diffusers pipeline directory.
        data: the captioned images or videos, in files or shards.
        output: directory under which ``safetensors/step_<N>`` is written.
        cache: directory that keeps latents and embedded prompts, filled at first use; empty encodes
            each sample each time.
        num_steps: optimizer steps.
        batch_size: samples of a step, over all ranks.
        micro_batch_size: samples of one forward pass.
        caption_dropout: share of samples trained without prompt, for guidance.
        max_given_frames: most latent frames given as condition, where the model takes any, and as
            many as it takes (Cosmos-Predict2.5 two); each sample has from none to so many.
        save_every: steps between saves; 0 saves at the end only.
        checkpoint_every: steps between checkpoints to go on from; 0 writes one only on Ctrl-C.
        save_s: longest that the app lets a save, with its upload, or a checkpoint take.
        stall_s: longest that the app lets it take to load, and to get further after that, in a pass
            or in reading data, beside what has a time of its own.
        checkpoints: their directory or address (``s3://...``); empty for the output's own.
        upload: where saves go beside the output.
        loggers: which services the app sends figures and pictures to, beside the output.
        recompute: keep no activations of the denoiser's blocks, compute them again instead.
        validation: pictures that are drawn on the way.
        dashboard: the page of the run, which the app serves.
        seed: of order, noise, dropout, and what adapters begin with.
        compute: in which type the denoiser computes, compiled or not.
        tuning: adapters or all weights.
        flow: noise levels and loss weights.
        parallel: how ranks share the work: FSDP2, HSDP with ``dp_replicate``, tokens
            of a sample by ``cp``.
        learner: optimizer, schedule and clipping.
    """

    kind: Literal["wfm_sft"] = "wfm_sft"
    model: str
    data: DataConfig
    output: str
    cache: str = ""
    num_steps: int = 1000
    batch_size: int = 8
    micro_batch_size: int = 1
    caption_dropout: float = 0.1
    max_given_frames: int = 2
    save_every: int = 0
    checkpoint_every: int = 0
    save_s: float = 1800.0
    stall_s: float = 3600.0
    checkpoints: str = ""
    upload: UploadConfig | None = None
    loggers: tuple[LoggerConfig, ...] = ()
    recompute: bool = False
    validation: ValidationConfig | None = None
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    seed: int = 0
    compute: ComputeConfig = field(default_factory=ComputeConfig)
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
        check_at_least("sft", self, num_steps=1, batch_size=1, micro_batch_size=1, seed=0)
        check_at_least("sft", self, max_given_frames=0, save_every=0, checkpoint_every=0)
        check_positive("sft", self, "save_s", "stall_s")
        check_finite("sft", self, "save_s", "stall_s")
        check_rates(self.learner, self.num_steps)
        if not 0.0 <= self.caption_dropout <= 1.0:
            raise WfmConfigError(
                f"sft: caption_dropout is {self.caption_dropout}; it must be in [0, 1]"
            )


def train_sft(
    config: DiffusionSftConfig,
    *,
    mesh: TrainingMesh | None = None,
    resume: bool = False,
    on_step: OnStep = lambda step, report, figures: None,
    validation: ValidationHooks = _NOBODY,
    control: RunControl = _ALONE,
) -> Path:
    """Fine-tune and save; every rank of the mesh calls.

    Args:
        config: the run.
        mesh: the ranks that share it; ``None`` for this process alone.
        resume: go on from the newest checkpoint in the output directory, if there is one.
        on_step: called with the number of each finished step, from 1, the learner's report and the
            figures of its speed (``cosmos_wfm.speed``).
        validation: whom validations are handed to, and what rewards their samples; without that,
            the rewards of ``config.validation``.
        control: who stops it, and looks on while it works and writes.

    Returns:
        The directory of the last save, for diffusers to load.

    Raises:
        PipelineError: if the model cannot be loaded.
        CaptionDataError: if the data cannot be read.
        WfmConfigError: if image sizes do not fit the model, or the output directory has
            checkpoints and is not to be resumed, or has what another run saved.
        TrainingStoppedError: if it was asked to stop.
    """
    scorer = named_scorer(config.validation, validation.scorer)
    mesh = mesh or build_mesh(ParallelConfig())
    adapter, data = _opened(config, mesh)
    left_out = LeftOut(data, Path(config.output), mesh.process.rank)
    encoder = _encoder(config, adapter, data)
    learner = Learner(adapter.transformer, config.learner, mesh=mesh)
    loss = flow_matching_loss(adapter, config.flow)
    speed = SpeedMeter(adapter, mesh)

    def take(step: int) -> None:
        speed.begin()
        with speed.part("data_s"):
            batches = step_batches(config, encoder, step, mesh=mesh)
            left_out.write()
        filler = replace(batches[-1], weights=torch.zeros_like(batches[-1].weights))
        speed.begin_training()
        report = learner.step(batches, loss, filler=filler)
        on_step(step + 1, report, speed.figures(report, config.batch_size))

    run = TrainingRun(
        adapter=adapter,
        learner=learner,
        mesh=mesh,
        tuning=config.tuning,
        outputs=RunOutputs.of(config),
        validation=replace(validation, scorer=scorer),
        control=control,
    )
    return run.take_steps(take, resume=resume)


def _opened(
    config: DiffusionSftConfig, mesh: TrainingMesh
) -> tuple[DiffusionModelAdapter, CaptionData]:
    """Return the model, ready to be trained and sharded, and the data."""
    adapter = load_adapter(config.model)
    data = open_data(config.data, adapter, mesh)
    config.tuning.prepare(adapter, seed=config.seed)
    if config.recompute:
        recompute_blocks(adapter)
    adapter.pipeline.to(mesh.process.device)
    share_context(adapter.transformer, adapter.blocks, mesh)
    shard_denoiser(adapter.transformer, adapter.blocks, mesh, config.compute)
    return adapter, data


def step_batches(
    config: DiffusionSftConfig, encoder: SampleEncoder, step: int, *, mesh: TrainingMesh
) -> list[FlowBatch]:
    """Return this rank's micro-batches of a step, with noise and levels drawn.

    Samples of one size go together. A rank that has no sample of its own gets one of weight 0, so
    the list is never empty.
    """
    mine = range(config.batch_size)[mesh.data_rank :: mesh.data_size]
    own = list(mine) or [0]
    first = step * config.batch_size
    rows = encoder.rows([encoder.data.order(first + place, config.seed) for place in own])
    sizes: dict[torch.Size, list[tuple[int, EncodedSample]]] = {}
    for place, row in zip(own, rows, strict=True):
        sizes.setdefault(row.latents.shape, []).append((place, row))
    batches = [
        _batch(config, encoder, step, group[start : start + config.micro_batch_size])
        for group in sizes.values()
        for start in range(0, len(group), config.micro_batch_size)
    ]
    if not mine:
        batches = [replace(batches[0], weights=torch.zeros_like(batches[0].weights))]
    return batches


def _batch(
    config: DiffusionSftConfig,
    encoder: SampleEncoder,
    step: int,
    samples: Sequence[tuple[int, EncodedSample]],
) -> FlowBatch:
    noising = NoisingConfig(
        flow=config.flow,
        caption_dropout=config.caption_dropout,
        max_given_frames=config.max_given_frames,
    )
    batch = noise_encoded(
        encoder.adapter,
        [row for _, row in samples],
        [seeded_generator(config.seed, step, place) for place, _ in samples],
        noising,
        encoder.dropped,
    )
    orders = [
        encoder.data.order(step * config.batch_size + place, config.seed) for place, _ in samples
    ]
    return replace(batch, names=tuple(f"sample {order} of the data" for order in orders))


def fill_cache(
    config: DiffusionSftConfig,
    *,
    mesh: TrainingMesh | None = None,
    on_part: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, int]:
    """Encode every sample that the recipe's cache does not have; every rank calls, for its share.

    Args:
        config: the recipe, with a ``cache``.
        mesh: the ranks that share it; ``None`` for this process alone.
        on_part: called with the samples that this rank has done, and its share.

    Returns:
        Samples that this rank encoded, and samples of its share.

    Raises:
        WfmConfigError: if the recipe names no cache.
        CaptionDataError: if the data cannot be read.
    """
    if not config.cache:
        raise WfmConfigError("sft: cache names no directory; there is nothing to fill")
    mesh = mesh or build_mesh(ParallelConfig())
    adapter = load_adapter(config.model)
    config.tuning.prepare(adapter, seed=config.seed)
    adapter.pipeline.to(mesh.process.device)
    data = open_data(config.data, adapter, mesh)
    left_out = LeftOut(data, Path(config.output), mesh.process.rank)
    encoder = _encoder(config, adapter, data)
    share = range(len(data))[mesh.data_rank :: mesh.data_size]
    for start in range(0, len(share), config.micro_batch_size):
        encoder.rows(share[start : start + config.micro_batch_size])
        left_out.write()
        on_part(min(start + config.micro_batch_size, len(share)), len(share))
    mesh.barrier()
    return encoder.num_encoded, len(share)


def _encoder(
    config: DiffusionSftConfig, adapter: DiffusionModelAdapter, data: CaptionData
) -> SampleEncoder:
    cache = None
    if config.cache:
        key = cache_key(Path(config.model), config.data, adapter=type(adapter).__qualname__)
        cache = EncodedCache(Path(config.cache), key)
    return SampleEncoder(adapter, data, batch_size=config.micro_batch_size, cache=cache)
