"""What a run would be, found before it is one: its recipe against model, data and prompts.

No weights are read and nothing is trained. What ``train_sft`` and ``train_rl`` would refuse after
minutes of loading, or in the middle of the run, is refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.context import check_context
from cosmos_wfm.denoiser import float32_modules
from cosmos_wfm.drawing import SamplerConfig
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.families.shared import check_wan_vae
from cosmos_wfm.loading import check_directory, load_outline
from cosmos_wfm.places import check_writable
from cosmos_wfm.prompt_lengths import MOST_LOOKED_AT, cut_prompts
from cosmos_wfm.prompts import read_prompts
from cosmos_wfm.rewards import check_prompts, weighted_reward
from cosmos_wfm.rl_config import DiffusionRlConfig
from cosmos_wfm.sft import DiffusionSftConfig
from cosmos_wfm.training_data import check_data_there, check_sizes, sizes_of
from cosmos_wfm.tuning import recompute_blocks
from cosmos_wfm.uploads import check_upload

_FLOAT32_BYTES = 4
_MIB = 1 << 20
_BESIDE_WEIGHTS = 3
"""Gradients and two moments."""

Recipe = DiffusionSftConfig | DiffusionRlConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunForecast:
    """What a recipe would start.

    Attributes:
        pipeline: class of the model's pipeline.
        parameters: of its denoisers.
        trained_parameters: those that are trained.
        ranks: fewest processes that share the work; torchrun starts them if they are several.
        fills_ranks: whether any multiple of them may be started (``parallel.dp_shard = -1``).
        replicas: processes that draw samples, beside the ranks.
        memory_mib: of the denoisers' weights, of gradients and two moments, on each of so many
            ranks; without text encoder, VAE, copies to compare with, and activations.
        samples: of the data; 0 where there is none.
        epochs: how often each is trained on.
        prompts: of the prompt set; 0 where there is none.
        rounds: how often each is drawn for.
        cut: what is said of captions and prompts that are longer than the model takes.
    """

    pipeline: str
    parameters: int
    trained_parameters: int
    ranks: int
    fills_ranks: bool
    replicas: int = 0
    memory_mib: float
    samples: int = 0
    epochs: float = 0.0
    prompts: int = 0
    rounds: float = 0.0
    cut: tuple[str, ...] = ()


def forecast_run(config: Recipe) -> RunForecast:
    """Look at all that a recipe names, in this process alone.

    Data is opened as a run opens it: of shards the headers are read.

    Raises:
        PipelineError: if the model is no pipeline that can be trained, or ranks cannot share what
            it is to be trained on.
        WfmConfigError: if sizes, adapters, prompts or rewards do not fit, or a directory cannot be
            written to.
        CaptionDataError: if the data cannot be read.
    """
    _check_places(config)
    if isinstance(config, DiffusionSftConfig):
        return _forecast_sft(config)
    return _forecast_rl(config)


def check_files(config: Recipe) -> None:
    """Refuse names of what is not there: the part of a forecast that takes no time.

    Raises:
        PipelineError: if the model is no pipeline.
        WfmConfigError: if there are no such prompts, or a directory cannot be written to.
        CaptionDataError: if there is no such directory of data, nothing in it, or no shard.
    """
    _check_places(config)
    check_directory(Path(config.model))
    if isinstance(config, DiffusionRlConfig):
        read_prompts(Path(config.prompts), config.groups_per_step)
    if config.validation is not None:
        config.validation.with_prompts()
    if config.data is not None:
        check_data_there(config.data)


def _check_places(config: Recipe) -> None:
    if not config.output:
        raise WfmConfigError("output: names no directory to write to")
    check_writable("output", config.output)
    check_writable("checkpoints", config.checkpoints)
    if isinstance(config, DiffusionSftConfig):
        check_writable("cache", config.cache)
    check_upload(config.upload)


def _forecast_sft(config: DiffusionSftConfig) -> RunForecast:
    known = _examine(config, {})
    return replace(known, epochs=config.num_steps * config.batch_size / known.samples)


def _forecast_rl(config: DiffusionRlConfig) -> RunForecast:
    prompts = read_prompts(Path(config.prompts), config.groups_per_step)
    if config.reward_service is None:
        weighted_reward(config.rewards)  # a recipe has nobody to hand a scorer over
        check_prompts(config.rewards, prompts)
    known = _examine(config, {"sampler": config.sampler}, prompts)
    num = known.samples
    drawn, apart = config.num_steps * config.groups_per_step, config.disaggregated
    return replace(
        known,
        replicas=apart.replicas if apart is not None and apart.start else 0,
        epochs=drawn * config.samples_per_group / num if num else 0.0,
        prompts=len(prompts),
        rounds=drawn / len(prompts),
    )


def _examine(
    config: Recipe, samplers: Mapping[str, SamplerConfig], prompts: Sequence[str] = ()
) -> RunForecast:
    """Hold a recipe against its model, and open its data.

    Args:
        config: the recipe.
        samplers: what draws in each step, by its name in the recipe.
        prompts: of RL.
    """
    if config.validation is not None:
        config.validation.with_prompts()
        samplers = {**samplers, "validation.sampler": config.validation.sampler}
    adapter, parallel = load_outline(config.model), config.parallel
    for name, sampler in samplers.items():
        sampler.check_model(adapter, name)
    sizes = [(each.frames, each.height, each.width) for each in samplers.values()]
    if config.data is not None:
        check_sizes(config.data, adapter)
        sizes += sizes_of(config.data)
    for size in sizes:
        check_context(adapter, adapter.latent_shape(*size), parallel.cp)
    _prepare(config, adapter)
    counts = [(p.numel(), p.requires_grad) for p in adapter.transformer.parameters()]
    parameters, trained = (
        sum(n for n, _ in counts),
        sum(n for n, is_trained in counts if is_trained),
    )
    shards = max(1, parallel.dp_shard) * parallel.cp
    data = config.data.build() if config.data is not None else None
    captions = data.captions(MOST_LOOKED_AT) if data is not None else ()
    found = (cut_prompts(adapter, captions, "captions"), cut_prompts(adapter, prompts, "prompts"))
    held = _FLOAT32_BYTES * (parameters + _BESIDE_WEIGHTS * trained) / shards
    return RunForecast(
        pipeline=type(adapter.pipeline).__name__,
        parameters=parameters,
        trained_parameters=trained,
        ranks=shards * parallel.dp_replicate,
        fills_ranks=parallel.dp_shard < 0,
        memory_mib=held / _MIB,
        samples=len(data) if data is not None else 0,
        cut=tuple(each for each in found if each),
    )


def _prepare(config: Recipe, adapter: DiffusionModelAdapter) -> None:
    """Do to a model what a run does before its first step, but shard it."""
    config.tuning.prepare(adapter, seed=config.seed)
    if config.recompute:
        recompute_blocks(adapter)
    if config.compute.dtype != "float32":
        float32_modules(adapter.transformer, config.compute.keep_float32)
    if isinstance(config, DiffusionRlConfig):
        service = config.reward_service
        if service is not None and service.send == "latents":
            check_wan_vae(adapter)
