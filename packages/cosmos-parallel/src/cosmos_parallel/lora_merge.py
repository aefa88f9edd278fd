"""Adapters added to the weights they belong to: W + (alpha / rank) B A, layer by layer.

Merging begins at the weights on disk every time, never at an earlier merge, so nothing piles up.
peft adapts experts by the stack, with factors for each of them; checkpoints have them one by one.
"""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_parallel.errors import AdapterError
from cosmos_parallel.generic_weights import names_in_files
from cosmos_parallel.tensor_files import save_tensors

_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_WEIGHTS = "adapter_model.safetensors"
_OF_MISTRAL = re.compile(r"consolidated.*\.safetensors(\.index\.json)?")
_STACK = re.compile(r"(.+\.experts)((?:\.base_layer)*)")
# what transformers joins in each of an expert's tensors, one below the other
_JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def merged_weights(
    base: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor],
    config: Mapping[str, Any],
    names: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Return the weights of every layer that has an adapter, with it added.

    Sums are made in float32 and have the dtype of the base's weights.

    Args:
        base: weights by the names of the checkpoint; more than those with an adapter will do.
        adapter: in the names of peft's files.
        config: peft's ``adapter_config.json``.
        names: what the checkpoint calls tensors of the model, where that differs
            (`names_in_files`).

    Raises:
        AdapterError: if the adapter is not plain LoRA, or the base has not the layer it is for.
    """
    called = names or {}
    additions = {called.get(name, name): each for name, each in _additions(adapter, config).items()}
    return {name: _added(base.get(name), name, addition) for name, addition in additions.items()}


@dataclass(frozen=True, slots=True)
class _Addition:
    """``scale * b @ a``, to be added to a matrix; transposed if that is stored so.

    peft says of all layers alike whether they are. Where it says it, a layer that the product fits
    as it is, and only so, is none of those: the output head of GPT-2.
    """

    a: Tensor
    b: Tensor
    scale: float
    is_transposed: bool = False

    def matrix(self, wanted: torch.Size | None) -> Tensor:
        product = self.scale * (self.b.float() @ self.a.float())
        fits_as_it_is = product.shape == wanted and product.T.shape != wanted
        return product.T if self.is_transposed and not fits_as_it_is else product


def _added(weight: Tensor | None, name: str, addition: _Addition) -> Tensor:
    matrix = addition.matrix(None if weight is None else weight.shape)
    if weight is None or weight.shape != matrix.shape:
        found = "no such weight" if weight is None else f"one of {tuple(weight.shape)}"
        raise AdapterError(
            f"adapter: {name} is to be a weight of {tuple(matrix.shape)}; the base has {found}"
        )
    return weight.float().add(matrix).to(weight.dtype)


def _additions(adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, _Addition]:
    """Return what is added to each weight, by the checkpoint's name of it."""
    for setting in ("use_dora", "lora_bias", "modules_to_save"):
        if config.get(setting):
            raise AdapterError(f"adapter: {setting} is set; only plain LoRA can be merged")
    found: dict[str, _Addition] = {}
    stacks: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name in sorted(adapter):
        if name.endswith(_EMBEDDING_A):
            layer = name.removeprefix(_PREFIX).removesuffix(_EMBEDDING_A)
            a, b = adapter[name], adapter[name.removesuffix(_EMBEDDING_A) + _EMBEDDING_B]
            found[f"{layer}.weight"] = _Addition(a, b, _scale(layer, a.shape[0], config), True)
        if not name.endswith(_A):
            continue
        layer = name.removeprefix(_PREFIX).removesuffix(_A)
        a, b = adapter[name], adapter[name.removesuffix(_A) + _B]
        if stack := _STACK.fullmatch(layer):
            stacks.setdefault(stack[1], []).append((a, b))
        else:
            scale = _scale(layer, a.shape[0], config)
            found[f"{layer}.weight"] = _Addition(a, b, scale, bool(config.get("fan_in_fan_out")))
    for stack, pairs in stacks.items():
        for tensor, (a, b) in _told_apart(stack, pairs, config).items():
            found |= _of_experts(stack, tensor, a, b, config)
    if not found:
        raise AdapterError("adapter: it has no LoRA tensors")
    return found


def _told_apart(
    stack: str, pairs: list[tuple[Tensor, Tensor]], config: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors of each tensor of some experts; peft's names only say how they nest."""
    adapted = [name for name in config.get("target_parameters") or () if name in _JOINED]
    if len(pairs) == len(adapted) == 1:
        return {adapted[0]: pairs[0]}
    if len(pairs) > len(_JOINED):
        raise AdapterError(f"adapter: {stack} has {len(pairs)} adapters, where two are known")
    for (a_up, b_up), (a_down, b_down) in permutations(pairs, 2):
        width, hidden = a_up.shape[1], a_down.shape[1]
        if (b_up.shape[0], b_down.shape[0]) == (2 * hidden, width):
            return {"gate_up_proj": (a_up, b_up), "down_proj": (a_down, b_down)}
    raise AdapterError(f"adapter: {stack} is adapted in a way that cannot be merged")


def _of_experts(
    stack: str, tensor: str, a: Tensor, b: Tensor, config: Mapping[str, Any]
) -> Iterator[tuple[str, _Addition]]:
    """Yield what is added to each matrix of each expert.

    Args:
        stack: the experts' name.
        tensor: what they are stacked in.
        a: of all experts, one below the other, [experts * rank, in].
        b: of all experts, theirs side by side for each rank, [out, rank * experts].
        config: peft's.
    """
    rank = int(_pattern_of(f"{stack}.{tensor}", config.get("rank_pattern"), config["r"]))
    num_experts, parts = a.shape[0] // rank, _JOINED[tensor]
    scale = _scale(f"{stack}.{tensor}", rank, config)
    for expert in range(num_experts):
        mine = a[expert * rank : (expert + 1) * rank]
        rows = b.unflatten(1, (rank, num_experts))[:, :, expert].chunk(len(parts))
        for part, half in zip(parts, rows, strict=True):
            yield f"{stack}.{expert}.{part}.weight", _Addition(mine, half, scale)


def _scale(layer: str, rank: int, config: Mapping[str, Any]) -> float:
    alpha = float(_pattern_of(layer, config.get("alpha_pattern"), config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern_of(layer: str, patterns: Mapping[str, float] | None, otherwise: float) -> float:
    """Return a setting that peft's config may give some layers by regular expressions."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer):
            return value
    return otherwise


def merge_directories(base: Path, adapter: Path, directory: Path) -> None:
    """Write a model directory with an adapter added to its weights, file by file.

    Peak memory is the largest file of the base and the adapter. The directory appears whole or not
    at all, and replaces one that is there.

    Args:
        base: a Hugging Face model directory; whatever else is in it is copied, but for its weights
            in the format of Mistral (``consolidated*.safetensors``), which engines would prefer.
        adapter: as peft writes them.
        directory: where to; its parent is made.

    Raises:
        AdapterError: if the adapter does not fit the base.
        OSError: if the directory cannot be written.
    """
    from safetensors.torch import load_file

    config = json.loads((adapter / "adapter_config.json").read_text())
    additions = _additions(load_file(adapter / _WEIGHTS), config)
    called = names_in_files(base)
    additions = {called.get(name, name): addition for name, addition in additions.items()}
    directory.parent.mkdir(parents=True, exist_ok=True)
    done: set[str] = set()
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        writing = Path(scratch) / "new"
        writing.mkdir()
        for file in sorted(path for path in base.iterdir() if path.is_file()):
            if _OF_MISTRAL.fullmatch(file.name):
                continue
            if file.suffix != ".safetensors":
                shutil.copy2(file, writing / file.name)
                continue
            weights = load_file(file)
            for name in additions.keys() & weights.keys():
                weights[name] = _added(weights[name], name, additions[name])
                done.add(name)
            whole = {name: value.contiguous() for name, value in weights.items()}
            save_tensors(whole, writing / file.name, {"format": "pt"})
        left = sorted(additions.keys() - done)
        if left:
            raise AdapterError(f"adapter: {base} has no weight {left[0]}")
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        writing.rename(directory)


def load_weights(directory: Path) -> dict[str, Tensor]:
    """Return all weights of a model directory by the names of the checkpoint, in host memory."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    return weights
