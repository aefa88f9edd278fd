"""How many parameters a model has and how many are trained, from its config alone."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from cosmos_parallel.freezing import freeze, frozen_names
from cosmos_parallel.generic_weights import auto_class
from cosmos_parallel.lora import add_lora
from cosmos_parallel.models import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ParameterCounts(NamedTuple):
    """Parameters of a model.

    Attributes:
        whole: of the model, without adapters.
        trained: those that take a gradient: adapters, or all that are not frozen.
    """

    whole: int
    trained: int


def count_parameters(config: "PretrainedConfig", held: ModelConfig) -> ParameterCounts:
    """Count the parameters of a model of transformers without making them.

    Args:
        config: the model's own.
        held: what is frozen and what adapters there are. A value head is not counted.

    Raises:
        FreezeError: if there is nothing that a pattern of ``freeze`` could mean.
        AdapterError: if the adapters fit no layer.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
        whole = sum(parameter.numel() for parameter in model.parameters())
        frozen = frozen_names(model, held.freeze)
        freeze(model, frozen)
        if held.lora is not None:
            add_lora(model, held.lora, frozen)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return ParameterCounts(whole, trained)
