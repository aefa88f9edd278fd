"""From a pipeline directory to its adapter, chosen by what ``model_index.json`` says it is."""

import importlib
import json
import re
from collections.abc import Callable, Container, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.errors import PipelineError
from cosmos_wfm.families.cosmos_predict import (
    CosmosPredictAdapter,
    NoSafetyChecker,
    resize_without_torchvision,
)
from cosmos_wfm.families.sana import SanaAdapter
from cosmos_wfm.families.sana_video import SanaVideoAdapter
from cosmos_wfm.families.sd3 import Sd3Adapter
from cosmos_wfm.families.wan import WanAdapter
from cosmos_wfm.vocabularies import has_vocabulary

AdapterFactory = Callable[[Any], DiffusionModelAdapter]
ENTRY_POINTS = "cosmos_wfm.adapters"
COSMOS = "Cosmos2_5_PredictBasePipeline"

ADAPTERS: Mapping[str, AdapterFactory] = {
    "StableDiffusion3Pipeline": Sd3Adapter,
    "SanaPipeline": SanaAdapter,
    "SanaVideoPipeline": SanaVideoAdapter,
    COSMOS: CosmosPredictAdapter,
    "WanPipeline": WanAdapter,
}
"""Pipeline class name to the adapter that comes with this package."""

_MAY_LACK = {"StableDiffusion3Pipeline": ("text_encoder_3", "tokenizer_3")}
"""Parts without which a pipeline works: SD3 without T5 embeds zeros in its place."""

_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_)?model(?:\.(?P<variant>[^.-]+))?(?:-\d+-of-\d+)?\.safetensors"
)


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


def check_directory(directory: Path) -> str:
    """Refuse a directory that is no pipeline, or has weights that are cut off; none are read.

    Returns:
        The name of its pipeline's class.

    Raises:
        PipelineError: names the file.
    """
    name = pipeline_class_name(directory)
    for path in sorted(directory.glob("*/*.safetensors")):
        _check_weights(path)
    return name


def find_adapter(class_name: str, named: str = "") -> AdapterFactory:
    """Return what adapts a pipeline of this class.

    Args:
        class_name: the pipeline's.
        named: ``module:Class`` of somebody's own adapter, which is taken then; without one, an
            entry point of the group ``cosmos_wfm.adapters`` with the pipeline's class name comes
            after those of this package.

    Raises:
        PipelineError: if there is none, or what is named cannot be imported.
    """
    if named:
        return _import_adapter(named)
    if class_name in ADAPTERS:
        return ADAPTERS[class_name]
    for entry in entry_points(group=ENTRY_POINTS, name=class_name):
        return _import_adapter(entry.value)
    raise PipelineError(
        f"there is no adapter for {class_name}; there are adapters for "
        f"{', '.join(sorted(ADAPTERS))}; name your own as module:Class"
    )


def adapt_pipeline(pipeline: Any, *, adapter: str = "") -> DiffusionModelAdapter:
    """Adapt a diffusers pipeline that is loaded already; it is used as it is, not copied or frozen.

    Args:
        pipeline: of a class that there is an adapter for, or derived from one.
        adapter: ``module:Class`` of an adapter of your own; empty for the pipeline's class to say.

    Raises:
        PipelineError: if no adapter is for it.
    """
    names = [each.__name__ for each in type(pipeline).__mro__]
    name = next((each for each in names if each in ADAPTERS), names[0])
    if name == COSMOS:
        resize_without_torchvision()
    return find_adapter(name, adapter)(pipeline)


def load_adapter(
    directory: str | Path, dtype: torch.dtype = torch.float32, *, adapter: str = ""
) -> DiffusionModelAdapter:
    """Load a local pipeline, frozen and in evaluation mode, and adapt it.

    Args:
        directory: as ``save_pretrained`` wrote it; nothing is ever downloaded.
        dtype: of every component, whatever type it was saved in.
        adapter: ``module:Class`` of an adapter of your own; empty for the pipeline's class to say.

    Raises:
        PipelineError: if it is no pipeline directory, or one that no adapter is for.
    """
    directory = Path(directory)
    name = check_directory(directory)
    try:
        factory = find_adapter(name, adapter)
    except PipelineError as error:
        raise PipelineError(f"{directory} is a {name}: {error}") from error
    pipeline = _load_pipeline(directory, name, dtype)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.requires_grad_(False).eval()
    return factory(pipeline)


def load_outline(directory: str | Path) -> DiffusionModelAdapter:
    """Adapt a local pipeline none of whose weights are read: for sizes, layers and plans.

    Denoisers and VAE are on the meta device, what embeds prompts is not there. A pipeline that
    somebody else's adapter is for is loaded as ``load_adapter`` does.

    Raises:
        PipelineError: if it is no pipeline directory, one that no adapter is for, or weights of it
            are missing.
    """
    directory = Path(directory)
    name = pipeline_class_name(directory)
    if name not in ADAPTERS:
        return load_adapter(directory)
    check_directory(directory)
    index = json.loads((directory / "model_index.json").read_text())
    outlines: dict[str, object] = {}
    for component, named in index.items():
        if isinstance(named, list) and named[0] in ("diffusers", "transformers"):
            found: Any = getattr(importlib.import_module(named[0]), named[1], None)
            if isinstance(found, type) and issubclass(found, nn.Module):
                outlines[component] = _outline(directory / component, found)
    return ADAPTERS[name](_load_pipeline(directory, name, torch.float32, outlines))


def _outline(directory: Path, component: Any) -> nn.Module | None:
    """Return a diffusers module without weights, and ``None`` for one of transformers.

    Raises:
        PipelineError: if there is no configuration, or no file of weights.
    """
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        raise PipelineError(f"{directory} has no weights (*.safetensors) of {component.__name__}")
    if not hasattr(component, "load_config"):
        return None
    try:
        config = component.load_config(directory, local_files_only=True)
    except OSError as error:
        raise PipelineError(f"{directory} cannot be read: {error}") from error
    with torch.device("meta"):
        return component.from_config(config)


def _load_pipeline(
    directory: Path,
    name: str,
    dtype: torch.dtype,
    instead: Mapping[str, object] | None = None,
) -> Any:
    """Load a pipeline, all components but those that are given."""
    diffusers: Any = importlib.import_module("diffusers")  # a lazy module that checkers misread
    # in so many words: without, transformers takes the type on disk, and diffusers float32
    extra: dict[str, object] = {"dtype": dtype, **(instead or {})}
    if name == COSMOS:
        resize_without_torchvision()
        extra["safety_checker"] = NoSafetyChecker()
    if name in ADAPTERS:
        extra = {**_not_there(directory, name), **extra}
        _check_components(directory, left_out=extra)
    if variant := _variant(directory):
        extra["variant"] = variant
    pipeline_class = getattr(diffusers, name, diffusers.DiffusionPipeline)
    try:
        pipeline = pipeline_class.from_pretrained(directory, local_files_only=True, **extra)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise PipelineError(f"{directory} cannot be loaded: {error}") from error
    if dtype is not torch.float32:
        pipeline.to(dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _not_there(directory: Path, name: str) -> dict[str, object]:
    """Return the parts that a pipeline may lack and does, which diffusers wants to be told."""
    index: Mapping[str, object] = json.loads((directory / "model_index.json").read_text())
    mine = _MAY_LACK.get(name, ())
    return {part: None for part in mine if index.get(part) in (None, [None, None])}


def _variant(directory: Path) -> str:
    """Return the variant (``fp16``) that weights of a pipeline are there in only; else nothing.

    diffusers then takes it for all components that have it.
    """
    found: dict[Path, set[str | None]] = {}
    for path in directory.glob("*/*.safetensors"):
        if match := _WEIGHTS.fullmatch(path.name):
            found.setdefault(path.parent, set()).add(match["variant"])
    needed = {name for names in found.values() if None not in names for name in names}
    return min((name for name in needed if name is not None), default="")


def _check_components(directory: Path, *, left_out: Container[str]) -> None:
    """Refuse a directory that lacks a part: a tokenizer without files would be made of none.

    Raises:
        PipelineError: names the part.
    """
    index: Mapping[str, object] = json.loads((directory / "model_index.json").read_text())
    for component, named in index.items():
        if not isinstance(named, list) or component in left_out:
            continue
        class_name, place = str(cast("list[object]", named)[-1]), directory / component
        if named[0] is not None and not place.is_dir():
            raise PipelineError(f"{directory} has no {component}/, the {class_name} of its index")
        if "Tokenizer" in class_name and not has_vocabulary(place):
            raise PipelineError(f"{place} has no vocabulary (tokenizer.json or the model's own)")


def _check_weights(path: Path) -> None:
    """Refuse a file that is cut off: its header says how long it is."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise PipelineError(f"{path} is no whole file of weights: {error}") from error


def _import_adapter(named: str) -> AdapterFactory:
    module, _, attribute = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PipelineError(f"adapter {named} is no module:Class: {error}") from error
    return found
