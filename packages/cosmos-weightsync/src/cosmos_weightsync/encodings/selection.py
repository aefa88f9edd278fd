"""Which tensors of a module to publish: all that train, or those of one LoRA adapter.

Each function gives (name, tensor) pairs or shards for `shards_of` and `encode`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import LayoutError
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import Shard, live_tensors, shards_of_live

__all__ = [
    "ADAPTER_CONFIG",
    "LORA_PARTS",
    "adapter_config",
    "adapter_files",
    "adapter_shards",
    "trainable",
]

ADAPTER_CONFIG = "adapter_config.json"
"""The file peft keeps beside an adapter's tensors; travels as a tensor of bytes of this name."""

LORA_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_bias")
"""Parts of the names of an adapter's tensors."""

_BIASES = {"all": ".bias", "lora_only": ".base_layer.bias"}
"""Ends of the names of those that train beside an adapter, by its option ``bias``."""


class AdapterConfig(Protocol):
    """What peft's configurations can do."""

    def to_dict(self) -> dict[str, Any]:
        """Every field."""
        ...


def trainable(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters that train, for `shards_of`; receivers must have the rest already.

    To give newcomers the rest too, publish the whole module, and have receivers set
    ``ReceiverConfig(reuse="pieces")``: what does not train is then fetched once.

    Example:
        >>> sender = WeightSender(shards_of(trainable(model)))
    """
    return ((live.name, live.tensor) for live in live_tensors(module) if live.tensor.requires_grad)


def adapter_shards(module: nn.Module, adapter: str = "default") -> tuple[Shard, ...]:
    """The tensors of one LoRA adapter in the names of peft's files, and its configuration.

    Works on a module that peft has put an adapter into; peft itself is not needed.

    Args:
        module: A ``PeftModel``.
        adapter: The adapter's name.

    Raises:
        LayoutError: the module has no such adapter, or none that is plain LoRA.
    """
    config = adapter_config(module, adapter)
    for option in ("use_dora", "trainable_token_indices", "modules_to_save"):
        if config.get(option):
            raise LayoutError(f"adapter {adapter!r}: {option} is not plain LoRA; publish the model")
    _check_biases(module, adapter, str(config.get("bias")))
    lives = [
        replace(live, name=saved)
        for live in live_tensors(module, tied="each")
        if (saved := _saved_name(live.name, adapter)) is not None
    ]
    if not lives:
        raise LayoutError(f"adapter {adapter!r} has no LoRA tensors")
    content = json.dumps({**config, "inference_mode": True}, default=_plain, sort_keys=True)
    file = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
    shape = (file.numel(),)
    about = Shard(ShardSpec(ADAPTER_CONFIG, shape, Box.full(shape), "uint8"), file)
    return (*(shard for live in lives for shard in shards_of_live(live)), about)


def _check_biases(module: nn.Module, adapter: str, option: str) -> None:
    """Refuse an adapter beside which biases of the model train; peft saves them with it."""
    end = _BIASES.get(option)
    if end is None:
        return
    for live in live_tensors(module):
        if live.name.endswith(end) and not any(p in LORA_PARTS for p in live.name.split(".")):
            raise LayoutError(
                f"adapter {adapter!r}: bias={option!r} trains {live.name}, which is no LoRA "
                "tensor; publish the model, by merged_shards"
            )


def adapter_config(module: nn.Module, adapter: str) -> Mapping[str, Any]:
    """What peft was told of an adapter.

    Raises:
        LayoutError: the module has no such adapter.
    """
    parts = (part for part in module.modules() if hasattr(part, "peft_config"))
    configs: Mapping[str, AdapterConfig] = getattr(next(parts, None), "peft_config", {})
    if adapter not in configs:
        raise LayoutError(f"no adapter {adapter!r}; the module has {sorted(configs)}")
    return configs[adapter].to_dict()


def adapter_files(staged: Iterable[Shard]) -> tuple[dict[str, Tensor], str]:
    """An adapter as peft saves it, from the shards a receiver has staged.

    Returns:
        The tensors of ``adapter_model.safetensors``, and the text of ``adapter_config.json``.

    Raises:
        LayoutError: the configuration is not there, or a tensor is not whole.
    """
    tensors = {shard.spec.name: shard for shard in staged}
    if ADAPTER_CONFIG not in tensors:
        raise LayoutError(f"{ADAPTER_CONFIG} is not among the {len(tensors)} staged tensors")
    for name, shard in tensors.items():
        if shard.spec.box != Box.full(shard.spec.global_shape):
            raise LayoutError(f"{name}: {shard.spec.box} of {shard.spec.global_shape} is staged")
    text = bytes(tensors.pop(ADAPTER_CONFIG).tensor.tolist()).decode()
    return {name: shard.tensor.contiguous() for name, shard in tensors.items()}, text


def _saved_name(name: str, adapter: str) -> str | None:
    """``….lora_A.default.weight`` is saved as ``….lora_A.weight``."""
    parts = name.split(".")
    for index, (kind, owner) in enumerate(pairwise(parts)):
        if kind in LORA_PARTS and owner == adapter:
            return ".".join((*parts[: index + 1], *parts[index + 2 :]))
    return None


def _plain(value: object) -> object:
    """Sets and enums of the configuration as JSON."""
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    return getattr(value, "value", str(value))
