"""Loading checkpoint tensors into a running vLLM model, exactly, on CPU too.

The one module that depends on how a version of vLLM reloads weights; written for 0.32 and 0.33.
vLLM's layerwise reload restores every layer to its state before post-processing, loads, and
post-processes again. Two things it forgets on CPU, where weights are repacked after loading:

* Experts are packed on the first load only, since the fused-MoE method keeps its kernel; later
  loads put unpacked weights where packed ones are read. Forgetting the kernel packs again.
* A head tied to the embedding keeps a packed copy of the old embedding in a closure. Building
  the closure again, once everything is loaded, reads the new one.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from cosmos_weightsync.errors import UnknownTensorError

__all__ = ["begin_reload", "end_reload", "load_tensors"]


def begin_reload(model: nn.Module) -> frozenset[str]:
    """Make the model ready to take checkpoint tensors; it cannot run until `end_reload`.

    Returns:
        The parameters that must be loaded; of tied ones the first.
    """
    names = frozenset(name for name, _ in model.named_parameters())
    if current_platform.is_cpu():
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                setattr(method, "moe_kernel", None)  # noqa: B010 - a field of vLLM's, not ours
    with torch.no_grad():
        initialize_layerwise_reload(model)
    return names


def load_tensors(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], required: frozenset[str]
) -> None:
    """Load a whole checkpoint through the model's own loader.

    Args:
        model: A model that `begin_reload` has prepared.
        tensors: In checkpoint names.
        required: What `begin_reload` returned.

    Raises:
        UnknownTensorError: a parameter of the model got nothing.
    """
    with torch.no_grad():
        loaded = model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
    missing = sorted(required - loaded) if isinstance(loaded, set) else []
    if missing:
        raise UnknownTensorError(
            f"{len(missing)} parameters of the model got nothing, such as {missing[0]}: do the "
            "senders publish checkpoint names?"
        )


def end_reload(model: nn.Module, model_config: ModelConfig) -> None:
    """Post-process what was loaded; the model can run again."""
    with torch.no_grad():
        finalize_layerwise_reload(model, model_config)
        if current_platform.is_cpu():
            for module in model.modules():
                if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                    module.quant_method.process_weights_after_loading(module)
