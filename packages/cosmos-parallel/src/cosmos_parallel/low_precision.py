"""Matrices multiplied in 8 bits while weights, gradients and optimizer stay as they are (torchao).

Inputs, weights and incoming gradients of a linear layer are scaled and cast for each product:
``tensorwise`` by one scale for a tensor, ``rowwise`` by one for a row, ``mxfp8`` by one power of
two for 32 values (OCP MX). Parameters keep their names and types, so sharding, checkpoints, export
and weight sync see no difference.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from cosmos_core.choices import check_choice
from cosmos_parallel.errors import PrecisionError

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]
_MULTIPLES = {"mxfp8": 32}
_NEEDED: dict[str, tuple[int, int]] = {"mxfp8": (10, 0)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecisionConfig:
    """Which layers multiply in 8 bits, and how they are scaled.

    Attributes:
        recipe: of the scales; ``rowwise_with_gw_hp`` keeps the product that makes the weight's
            gradient in high precision.
        leave: a layer with one of these in its name stays as it is.
        emulate: round as the hardware would and multiply in high precision; slow, runs anywhere.
    """

    recipe: Recipe = "rowwise"
    leave: tuple[str, ...] = ("lm_head", "output", "lora_", "router")
    emulate: bool = False

    def __post_init__(self) -> None:
        """Look the recipe up.

        Raises:
            PrecisionError: if there is none of the name.
        """
        check_choice("low_precision: recipe", self.recipe, Recipe, error=PrecisionError)


def use_low_precision(
    model: nn.Module, config: LowPrecisionConfig, device: torch.device
) -> list[str]:
    """Have a model's linear layers multiply in 8 bits, in place; every rank calls.

    Layers whose sides are no multiples of 16 (32 for ``mxfp8``) stay as they are.

    Args:
        model: not sharded by FSDP2 yet.
        config: which and how.
        device: where it will run.

    Returns:
        The names of the layers that changed.

    Raises:
        PrecisionError: if torchao is not installed, the device has no such products, or no layer
            would change.
    """
    _check_device(config, device)
    multiple = _MULTIPLES.get(config.recipe, 16)
    names = [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and not any(part in name for part in config.leave)
        and layer.in_features % multiple == 0
        and layer.out_features % multiple == 0
    ]
    if not names:
        raise PrecisionError(
            f"low_precision: no linear layer outside of {', '.join(config.leave)} has sides that "
            f"are multiples of {multiple}"
        )
    try:
        if config.recipe == "mxfp8":
            _convert_mx(model, names, emulate=config.emulate)
        else:
            _convert_float8(model, names, config)
    except ImportError as error:
        raise PrecisionError("low_precision needs torchao: pip install torchao") from error
    return names


def _check_device(config: LowPrecisionConfig, device: torch.device) -> None:
    if config.emulate:
        return
    needed = _NEEDED.get(config.recipe, (8, 9))
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if found < needed:
        has = f"capability {found[0]}.{found[1]}" if device.type == "cuda" else "none"
        raise PrecisionError(
            f"low_precision: {config.recipe} needs a GPU of compute capability {needed[0]}."
            f"{needed[1]} or later, and {device} has {has}; emulate = true runs anywhere, slowly"
        )


def _convert_float8(model: nn.Module, names: list[str], config: LowPrecisionConfig) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = set(names)
    convert_to_float8_training(
        model,
        config=replace(Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate),
        module_filter_fn=lambda layer, name: name in chosen,
    )


def _convert_mx(model: nn.Module, names: list[str], *, emulate: bool) -> None:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernel = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        with torch.device("meta"):
            changed = MXFP8Linear(
                layer.in_features,
                layer.out_features,
                bias="bias" in dict(layer.named_parameters()),
                kernel_preference=kernel,
            )
        changed.weight, changed.bias = layer.weight, layer.bias
        model.set_submodule(name, changed)
