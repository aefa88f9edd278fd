"""Five questions to a pipeline directory before a run is started on it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.errors import PipelineError
from cosmos_wfm.experts import denoisers_of
from cosmos_wfm.flow_matching import FlowBatch, FlowMatchingConfig, flow_matching_loss
from cosmos_wfm.loading import find_adapter, load_adapter, pipeline_class_name
from cosmos_wfm.sampling import SdeConfig, flow_schedule, log_prob, sample_sde, transition

_PROMPT = "a red square"
_RATIO_TOLERANCE = 1e-4
_LARGE_PATCH = 32
_LEVELS = (0.95, 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPoint:
    """One answer.

    Attributes:
        name: what was looked at.
        passed: whether it is as it must be.
        detail: what was found.
    """

    name: str
    passed: bool
    detail: str


def check_model(directory: str | Path, *, adapter: str = "") -> list[CheckedPoint]:
    """Check class name, components, embeddings, an SFT pass, and a rollout step with its RL pass.

    Stops at the first point that fails, as the later ones build on it.

    Args:
        directory: a local diffusers pipeline.
        adapter: ``module:Class`` of an adapter of your own.

    Returns:
        One point each, in that order; five of them if all is well.
    """
    directory = Path(directory)
    points: list[CheckedPoint] = []
    loaded: list[DiffusionModelAdapter] = []

    def load() -> str:
        loaded.append(load_adapter(directory, adapter=adapter))
        return ", ".join(sorted(loaded[0].pipeline.components))

    checks: list[tuple[str, Callable[[], str]]] = [
        ("class name", lambda: _check_class(directory, adapter)),
        ("components", load),
        ("embeddings", lambda: _check_embeddings(loaded[0])),
        ("SFT forward", lambda: _check_training(loaded[0])),
        ("rollout step and RL forward", lambda: _check_rl(loaded[0])),
    ]
    for name, check in checks:
        try:
            points.append(CheckedPoint(name=name, passed=True, detail=check()))
        except (
            PipelineError,
            OSError,
            ValueError,
            TypeError,
            RuntimeError,
            AttributeError,
        ) as error:
            detail = f"{type(error).__name__}: {error}"
            points.append(CheckedPoint(name=name, passed=False, detail=detail))
            break
    return points


def _check_class(directory: Path, adapter: str) -> str:
    name = pipeline_class_name(directory)
    find_adapter(name, adapter)
    return f"{name}, adapter {adapter or 'by class name'}"


def _check_embeddings(adapter: DiffusionModelAdapter) -> str:
    text = adapter.encode_text([_PROMPT, ""])
    latents = adapter.encode_pixels(_pixels(adapter))
    if not all(values.shape[0] == 2 and values.isfinite().all() for values in text.values()):
        raise PipelineError("text embeddings of two prompts are not two finite rows")
    if not latents.isfinite().all() or adapter.decode(latents).shape != _pixels(adapter).shape:
        raise PipelineError("pixels do not come back from the VAE in their own shape")
    shapes = {name: tuple(values.shape) for name, values in text.items()}
    return f"text {shapes}, latents {tuple(latents.shape)}"


def _check_training(adapter: DiffusionModelAdapter) -> str:
    """Look for gradients at a high and a low level: two denoisers may divide them."""
    adapter.transformer.requires_grad_(True)
    latents = adapter.encode_pixels(_pixels(adapter)).repeat_interleave(2, dim=0)
    batch = FlowBatch(
        latents=latents,
        noise=torch.zeros_like(latents),
        sigmas=torch.tensor(_LEVELS),
        text=adapter.encode_text([_PROMPT] * 2),
        weights=torch.ones(2),
    )
    part = flow_matching_loss(adapter, FlowMatchingConfig())(adapter.transformer, batch)
    part.total.backward()
    gradients: list[torch.Tensor] = []
    for name, module in denoisers_of(adapter).items():
        own = [p.grad for p in module.parameters() if p.grad is not None]
        if not own or not all(gradient.isfinite().all() for gradient in own):
            raise PipelineError(f"the loss has no finite gradient for {name}")
        gradients += own
    adapter.transformer.requires_grad_(False)
    return f"loss {part.total.item():.4g}, {len(gradients)} gradients"


def _check_rl(adapter: DiffusionModelAdapter) -> str:
    """Draw one noisy step, then look at its density again, with gradient: the ratio must be 1."""
    shape = adapter.latent_shape(_num_frames(adapter), *_pixels(adapter).shape[-2:])
    text = adapter.encode_text([_PROMPT])

    def velocity(latents: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
        return adapter.velocity(adapter.transformer, latents, sigmas, text)

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, *shape, generator=generator)
    sde = SdeConfig(num_noisy=1)
    latents, steps = sample_sde(velocity, noise, flow_schedule(2, adapter.shift), sde, [generator])
    adapter.transformer.requires_grad_(True)
    taken = steps[0]
    rows = [torch.tensor([v]) for v in (taken.sigma, taken.next_sigma, taken.noise_level)]
    again = transition(taken.latents, velocity(taken.latents, rows[0]), *rows)
    ratio = (log_prob(taken.following, again) - taken.log_probs).exp()
    ratio.sum().backward()
    adapter.transformer.requires_grad_(False)
    pixels = adapter.decode(latents)
    if not pixels.isfinite().all():
        raise PipelineError("two sampling steps give pixels that are not finite")
    if abs(ratio.item() - 1.0) > _RATIO_TOLERANCE:
        raise PipelineError(
            f"the ratio of an unchanged policy is {ratio.item():.6f}, not 1: rollout and training "
            "do not call the model alike"
        )
    return f"pixels {tuple(pixels.shape)}, ratio {ratio.item():.6f}"


def _num_frames(adapter: DiffusionModelAdapter) -> int:
    return 1 + adapter.temporal_factor


def _pixels(adapter: DiffusionModelAdapter) -> torch.Tensor:
    """Return a small grey image, four patches a side, or two latent frames of one."""
    size = (4 if adapter.size_multiple < _LARGE_PATCH else 2) * adapter.size_multiple
    frames = (_num_frames(adapter),) if adapter.temporal_factor else ()
    return torch.zeros(1, 3, *frames, size, size)
