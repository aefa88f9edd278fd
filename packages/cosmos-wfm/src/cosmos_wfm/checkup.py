"""Five questions to a pipeline directory before a run is started on it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.errors import PipelineError
from cosmos_wfm.flow_matching import FlowBatch, FlowMatchingConfig, flow_matching_loss
from cosmos_wfm.loading import ADAPTERS, load_adapter, pipeline_class_name

_PROMPT = "a red square"


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


def check_model(directory: str | Path) -> list[CheckedPoint]:
    """Check class name, components, embedding shapes, a training pass and a sampling step.

    Stops at the first point that fails, as the later ones build on it.

    Args:
        directory: a local diffusers pipeline.

    Returns:
        One point each, in that order; five of them if all is well.
    """
    directory = Path(directory)
    points: list[CheckedPoint] = []
    loaded: list[DiffusionModelAdapter] = []

    def load() -> str:
        loaded.append(load_adapter(directory))
        return ", ".join(sorted(loaded[0].pipeline.components))

    checks: list[tuple[str, Callable[[], str]]] = [
        ("class name", lambda: _check_class(directory)),
        ("components", load),
        ("embeddings", lambda: _check_embeddings(loaded[0])),
        ("training pass", lambda: _check_training(loaded[0])),
        ("sampling step", lambda: _check_sampling(loaded[0])),
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


def _check_class(directory: Path) -> str:
    name = pipeline_class_name(directory)
    if name not in ADAPTERS:
        raise PipelineError(f"{name} has no adapter; there are {', '.join(sorted(ADAPTERS))}")
    return name


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
    adapter.transformer.requires_grad_(True)
    latents = adapter.encode_pixels(_pixels(adapter))
    batch = FlowBatch(
        latents=latents,
        noise=torch.zeros_like(latents),
        sigmas=torch.tensor([0.5]),
        text=adapter.encode_text([_PROMPT]),
        weights=torch.ones(1),
    )
    part = flow_matching_loss(adapter, FlowMatchingConfig())(adapter.transformer, batch)
    part.total.backward()
    gradients = [p.grad for p in adapter.transformer.parameters() if p.grad is not None]
    if not gradients or not all(gradient.isfinite().all() for gradient in gradients):
        raise PipelineError("the loss has no finite gradient")
    adapter.transformer.requires_grad_(False)
    return f"loss {part.total.item():.4g}, {len(gradients)} gradients"


@torch.no_grad()
def _check_sampling(adapter: DiffusionModelAdapter) -> str:
    latents = torch.zeros_like(adapter.encode_pixels(_pixels(adapter)))
    sigmas = adapter.schedule(4)
    text = adapter.encode_text([_PROMPT])
    velocity = adapter.velocity(adapter.transformer, latents, sigmas[:1], text)
    pixels = adapter.decode(latents + (sigmas[1] - sigmas[0]) * velocity)
    if not pixels.isfinite().all():
        raise PipelineError("one sampling step gives pixels that are not finite")
    return f"sigma {sigmas[0]:.3f} to {sigmas[1]:.3f}, pixels {tuple(pixels.shape)}"


def _pixels(adapter: DiffusionModelAdapter) -> torch.Tensor:
    """Return a small grey image: four patches a side."""
    size = 4 * adapter.size_multiple
    return torch.zeros(1, 3, size, size)
