"""Which weights are trained, and how they are saved so that diffusers loads them back."""

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_parallel import Learner, share_tensor_files
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.errors import SaveError, WfmConfigError
from cosmos_wfm.experts import denoisers_of, own_state

ADAPTER_NAME = "default"
LORA_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraTuning:
    """Train low-rank adapters; the output is ``lora/model.safetensors``.

    Attributes:
        rank: of each adapter.
        alpha: numerator of the scale alpha / rank; it is saved with the weights.
        targets: names of linear layers; empty for the model's own list.
    """

    kind: Literal["lora"] = "lora"
    rank: int = 32
    alpha: int = 64
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a rank that is none.

        Raises:
            WfmConfigError: if rank or alpha is below 1.
        """
        if self.rank < 1 or self.alpha < 1:
            raise WfmConfigError(f"lora: rank {self.rank} and alpha {self.alpha} must be positive")

    def prepare(self, adapter: DiffusionModelAdapter, *, seed: int) -> None:
        """Add trainable adapters to the transformer, which starts as it was (B = 0).

        The other factor is random: every rank has to draw the same one, hence the seed.

        Raises:
            WfmConfigError: if the model has no such layers, or none for one of the targets.
        """
        from peft import LoraConfig

        self._check_targets(adapter)

        adapter.transformer.requires_grad_(False)
        settings = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.targets or adapter.lora_targets),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for part in denoisers_of(adapter).values():
                try:
                    # peft's mixin is not in nn.Module's type
                    cast("Any", part).add_adapter(settings, adapter_name=ADAPTER_NAME)
                except ValueError as error:
                    raise WfmConfigError(
                        f"lora: {type(part).__name__} has no layers to adapt: {error} Leave "
                        f"targets empty for the model's own: {', '.join(adapter.lora_targets)}"
                    ) from error

    def _check_targets(self, adapter: DiffusionModelAdapter) -> None:
        """Refuse targets of which one fits nothing: peft is content if another one does."""
        names = [
            f".{n}" for part in denoisers_of(adapter).values() for n, _ in part.named_modules()
        ]
        wrong = [t for t in self.targets if not any(name.endswith(f".{t}") for name in names)]
        if wrong:
            raise WfmConfigError(
                f"lora: {type(adapter.transformer).__name__} has no layers to adapt called "
                f"{', '.join(wrong)}; leave targets empty for the model's own: "
                f"{', '.join(adapter.lora_targets)}"
            )

    def save(self, adapter: DiffusionModelAdapter, directory: Path, *, writes: bool) -> None:
        """Write ``directory/lora``, for ``load_lora_weights(directory/lora, ...)``.

        The adapter's settings go with the weights: without alpha, diffusers would load them at
        scale 1. A second denoiser has a file of its own, ``lora/transformer_2.safetensors``, that
        ``load_lora_weights(..., load_into_transformer_2=True)`` takes. Every rank calls; the one
        that ``writes`` does.
        """
        from peft import get_peft_model_state_dict

        state = whole_state(adapter.transformer, trained_only=True)
        if not writes:
            return

        def write(target: Path) -> None:
            for name, part in denoisers_of(adapter).items():
                layers = get_peft_model_state_dict(part, state_dict=own_state(adapter, state, name))
                settings = cast("Any", part).peft_config[ADAPTER_NAME].to_dict()
                adapter.pipeline.save_lora_weights(
                    target / "lora",
                    weight_name=lora_file(adapter, name),
                    **{
                        f"{adapter.denoiser}_lora_layers": layers,
                        f"{adapter.denoiser}_lora_adapter_metadata": settings,
                    },
                )

        _write_whole(directory, write)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullTuning:
    """Train every weight of the denoiser; the output is a whole pipeline directory."""

    kind: Literal["full"] = "full"

    def prepare(self, adapter: DiffusionModelAdapter, *, seed: int) -> None:
        """Let every weight of the transformer be trained."""
        adapter.transformer.requires_grad_(True)

    def save(self, adapter: DiffusionModelAdapter, directory: Path, *, writes: bool) -> None:
        """Write a pipeline for ``DiffusionPipeline.from_pretrained(directory)``.

        The weights go into a fresh transformer of the same settings, so that a sharded one is
        saved like a whole one. Every rank calls; the one that ``writes`` does.
        """
        state = whole_state(adapter.transformer)
        if not writes:
            return
        fresh: dict[str, Any] = dict.fromkeys(adapter.unsaved)
        for name, part in denoisers_of(adapter).items():
            with torch.device("meta"):
                fresh[name] = _unsharded_class(part).from_config(cast("Any", part).config)
            fresh[name].load_state_dict(own_state(adapter, state, name), assign=True)
            fresh[name].eval()
        with _components(adapter.pipeline, fresh):
            _write_whole(directory, adapter.pipeline.save_pretrained)


TuningConfig = LoraTuning | FullTuning


def recompute_blocks(adapter: DiffusionModelAdapter) -> None:
    """Have backward compute each block's activations again instead of keeping them.

    Raises:
        WfmConfigError: if the denoiser cannot.
    """
    for part in denoisers_of(adapter).values():
        try:
            # diffusers' mixin is not in nn.Module's type
            cast("Any", part).enable_gradient_checkpointing()
        except (AttributeError, ValueError) as error:
            name = type(part).__name__
            raise WfmConfigError(f"recompute: {name} does not support it: {error}") from error


def lora_file(adapter: DiffusionModelAdapter, name: str) -> str:
    """Return the file in ``lora/`` that has the adapters of the pipeline's denoiser ``name``."""
    return LORA_FILE if name == adapter.denoiser else f"{name}.safetensors"


def save_trained(
    tuning: TuningConfig, adapter: DiffusionModelAdapter, learner: Learner, directory: Path
) -> None:
    """Write what a learner trained, or the average it keeps of it; every rank calls."""
    averaged = learner.ema.in_place() if learner.ema is not None else nullcontext()
    with averaged:
        tuning.save(adapter, directory, writes=learner.mesh.process.rank == 0)


def whole_state(module: nn.Module, *, trained_only: bool = False) -> dict[str, Tensor]:
    """Return a module's weights on the CPU, gathered tensor by tensor if sharded; every rank calls.

    Args:
        module: plain, or under FSDP2.
        trained_only: leave out parameters that take no gradient (and buffers).
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    state: Mapping[str, Tensor] = module.state_dict()
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if trained_only and name not in trained:
            continue
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole[name] = full.detach().cpu().clone()
    return whole


@contextmanager
def _components(pipeline: Any, replaced: Mapping[str, Any]) -> Generator[None]:
    """Give a pipeline other components inside the block; its settings stay with it."""
    own = {name: getattr(pipeline, name) for name in replaced}
    pipeline.register_modules(**replaced)
    try:
        yield
    finally:
        pipeline.register_modules(**own)


def _unsharded_class(module: nn.Module) -> Any:
    """Return the diffusers class of a module; FSDP2 puts one of its own in front of it."""
    return next(c for c in type(module).__mro__ if c.__module__.startswith("diffusers."))


def _write_whole(directory: Path, write: Any) -> None:
    """Have ``write`` fill a directory beside the target, then put it in place: all or nothing.

    Raises:
        SaveError: if it cannot be written; what was begun is removed.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        share_tensor_files(partial)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except (OSError, SafetensorError) as error:  # the latter has a full disk in its text alone
        shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(f"{directory} cannot be written: {error}") from error
