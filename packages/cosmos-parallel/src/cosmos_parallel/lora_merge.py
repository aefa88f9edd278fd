"""Adapters added to the weights they belong to: W + (alpha / rank) B A, layer by layer.

Merging begins at the weights on disk every time, never at an earlier merge, so nothing piles up.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from cosmos_parallel.errors import AdapterError

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_WEIGHTS = "adapter_model.safetensors"


def merged_weights(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the weights of every layer that has an adapter, with it added.

    Sums are made in float32 and have the dtype of the base's weights.

    Args:
        base: weights by the names of the checkpoint; more than those with an adapter will do.
        adapter: in the names of peft's files.
        config: peft's ``adapter_config.json``.

    Raises:
        AdapterError: if the adapter is not plain LoRA, or the base has not the layer it is for.
    """
    for setting in ("alpha_pattern", "use_dora", "lora_bias", "modules_to_save"):
        if config.get(setting):
            raise AdapterError(f"adapter: {setting} is set; only plain LoRA can be merged")
    merged: dict[str, Tensor] = {}
    for name in sorted(adapter):
        if not name.endswith(_A):
            continue
        layer = name.removeprefix(_PREFIX).removesuffix(_A)
        a, b = adapter[name].float(), adapter[name.removesuffix(_A) + _B].float()
        weight = base.get(f"{layer}.weight")
        added = b @ a if not config.get("fan_in_fan_out") else (b @ a).T
        if weight is None or weight.shape != added.shape:
            found = "no such weight" if weight is None else f"one of {tuple(weight.shape)}"
            raise AdapterError(
                f"adapter: {layer} is for a weight of {tuple(added.shape)}; the base has {found}"
            )
        rank = a.shape[0]
        divisor = math.sqrt(rank) if config.get("use_rslora") else rank
        scale = float(config["lora_alpha"]) / divisor
        merged[f"{layer}.weight"] = weight.float().add(added, alpha=scale).to(weight.dtype)
    if not merged:
        raise AdapterError("adapter: it has no LoRA tensors")
    return merged


def merge_directories(base: Path, adapter: Path, directory: Path) -> None:
    """Write a model directory with an adapter added to its weights, file by file.

    Peak memory is the largest file of the base and the adapter. The directory appears whole or not
    at all, and replaces one that is there.

    Args:
        base: a Hugging Face model directory; whatever else is in it is copied.
        adapter: as peft writes them.
        directory: where to; its parent is made.

    Raises:
        AdapterError: if the adapter does not fit the base.
        OSError: if the directory cannot be written.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / _WEIGHTS)
    directory.parent.mkdir(parents=True, exist_ok=True)
    done: set[str] = set()
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        writing = Path(scratch) / "new"
        writing.mkdir()
        for file in sorted(path for path in base.iterdir() if path.is_file()):
            if file.suffix != ".safetensors":
                shutil.copy2(file, writing / file.name)
                continue
            weights = load_file(file)
            mine = {name: part for name, part in tensors.items() if _weight_of(name) in weights}
            if mine:
                weights |= merged_weights(weights, mine, config)
                done |= mine.keys()
            whole = {name: value.contiguous() for name, value in weights.items()}
            save_file(whole, writing / file.name, metadata={"format": "pt"})
        left = sorted(tensors.keys() - done)
        if left:
            raise AdapterError(f"adapter: {base} has no weight for {left[0]}")
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        writing.rename(directory)


def _weight_of(name: str) -> str:
    """Return the checkpoint's name of the weight that a tensor of an adapter is for."""
    return name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B) + ".weight"


def load_weights(directory: Path) -> dict[str, Tensor]:
    """Return all weights of a model directory by the names of the checkpoint, in host memory."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    return weights
