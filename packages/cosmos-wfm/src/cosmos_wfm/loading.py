"""From a pipeline directory to its adapter, chosen by what ``model_index.json`` says it is."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.errors import PipelineError
from cosmos_wfm.sd3 import Sd3Adapter

ADAPTERS: Mapping[str, Callable[[Any], DiffusionModelAdapter]] = {
    "StableDiffusion3Pipeline": Sd3Adapter,
}
"""Pipeline class name to adapter."""


def pipeline_class_name(directory: Path) -> str:
    """Return ``_class_name`` of a pipeline directory.

    Raises:
        PipelineError: if there is no readable ``model_index.json``.
    """
    index = directory / "model_index.json"
    if not index.is_file():
        raise PipelineError(
            f"{directory} is no diffusers pipeline: it has no model_index.json "
            "(DiffusionPipeline.save_pretrained writes one)"
        )
    try:
        return str(json.loads(index.read_text())["_class_name"])
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"{index} names no pipeline class: {error!r}") from error


def load_adapter(
    directory: str | Path, dtype: torch.dtype = torch.float32
) -> DiffusionModelAdapter:
    """Load a local pipeline, frozen and in evaluation mode, and adapt it.

    Args:
        directory: as ``save_pretrained`` wrote it; nothing is ever downloaded.
        dtype: of every component.

    Raises:
        PipelineError: if it is no pipeline directory, or one that no adapter is for.
    """
    directory = Path(directory)
    name = pipeline_class_name(directory)
    if name not in ADAPTERS:
        raise PipelineError(
            f"{directory} is a {name}; there are adapters for {', '.join(sorted(ADAPTERS))}"
        )
    import diffusers

    pipeline = getattr(diffusers, name).from_pretrained(directory, local_files_only=True)
    pipeline.to(dtype)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.requires_grad_(False).eval()
    return ADAPTERS[name](pipeline)
