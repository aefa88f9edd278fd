"""Whether a model can have several samples in a row, from its config alone."""

from typing import TYPE_CHECKING

import torch

from cosmos_parallel.generic_weights import auto_class, supported_attention
from cosmos_parallel.mesh import ParallelConfig
from cosmos_parallel.models import ModelConfig, chosen_implementation
from cosmos_parallel.packed_attention import check_packable, use_packed_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_packing(config: "PretrainedConfig", held: ModelConfig, parallel: ParallelConfig) -> None:
    """Check, before anything is loaded, that a model held like this tells samples of a row apart.

    What fused kernels, ranks that divide the context and torchtitan's models can is known when
    they are loaded.

    Raises:
        PackingError: as ``check_packable``, of the model that would be loaded.
    """
    is_known = held.attention in ("sdpa", "eager") and parallel.cp == 1
    if not is_known or chosen_implementation(config, held, parallel) == "native":
        return
    attention = supported_attention(config, held.attention)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, attn_implementation=attention)
    use_packed_attention(model)
    check_packable(model)
