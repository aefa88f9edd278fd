"""How fast a step was: tokens per second and rank, and the share of the hardware's peak (MFU)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cosmos_parallel.mesh import TrainingMesh

# what transformers and torchtitan call the modules of which a token meets some
_EXPERTS = {"experts", "routed_experts"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """Floating-point operations of forward and backward, recomputation not counted.

    Attributes:
        per_token: in the matrices: 6 for each parameter that a token meets (Kaplan et al., 2020,
            section 2.1), the input embedding not among them.
        per_pair: in attention, for each pair of tokens of one sample; causal sparsity is not
            counted, as is usual.
    """

    per_token: float
    per_pair: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Speed of one rank, on average.

    Attributes:
        tokens_per_s: tokens of the samples, prompts too, padding not.
        flops_per_s: operations that the model needs for them.
        mfu: ``flops_per_s`` of the peak (model FLOPs utilisation, PaLM, appendix B); 0 where the
            peak is not known.
    """

    tokens_per_s: float
    flops_per_s: float
    mfu: float


def model_cost(model: nn.Module, mesh: TrainingMesh | None = None) -> ModelCost:
    """Return what a token costs in a Hugging Face causal language model, sharded or not.

    Of a mixture's experts, those that a token is routed to are counted. Parameters that are not
    trained count as much: this is a measure of the model, not of the method.

    Args:
        model: whole, or this rank's stages of it.
        mesh: with it every rank calls, and the stages of a pipeline are added up.
    """
    config: Any = model.config  # any Hugging Face configuration
    text = config.get_text_config()
    num_experts = _first(text, ("num_experts", "n_routed_experts", "num_local_experts"), 0)
    chosen = _first(text, ("num_experts_per_tok", "num_experts_per_token"), num_experts)
    share = chosen / num_experts if num_experts else 1.0
    met = 0.0
    for name, parameter in model.named_parameters():
        met += parameter.numel() * (share if _EXPERTS & set(name.split(".")) else 1.0)
    if not getattr(text, "tie_word_embeddings", False):
        embeddings = (part for part in model.modules() if isinstance(part, nn.Embedding))
        met -= sum(part.weight.numel() for part in embeddings)
    if mesh is not None:
        stages = mesh.sum_(torch.tensor(met, dtype=torch.float64, device=mesh.process.device))
        met = stages.item() / mesh.ranks_per_stage
    heads = _first(text, ("num_attention_heads", "n_head"), 1)
    width = _head_width(text, heads)
    layers = _first(text, ("num_hidden_layers", "n_layer"), 1)
    return ModelCost(per_token=6.0 * met, per_pair=12.0 * layers * heads * width)


def throughput(
    cost: ModelCost,
    *,
    num_tokens: float,
    num_pairs: float,
    rank_seconds: float,
    peak_flops: float = 0.0,
) -> Throughput:
    """Return the speed of a step.

    Args:
        cost: of the model.
        num_tokens: of all samples of the step.
        num_pairs: sum over the samples of the square of their length.
        rank_seconds: seconds of the step times the ranks that worked on it.
        peak_flops: of the device; see ``device_peak_flops``.
    """
    flops = (cost.per_token * num_tokens + cost.per_pair * num_pairs) / rank_seconds
    return Throughput(
        tokens_per_s=num_tokens / rank_seconds,
        flops_per_s=flops,
        mfu=flops / peak_flops if peak_flops else 0.0,
    )


def device_peak_flops(device: torch.device) -> float:
    """Return the bfloat16 peak of an accelerator as torchtitan knows it; 0 for a CPU."""
    if device.type != "cuda":
        return 0.0
    from torchtitan.tools.utils import get_peak_flops

    return float(get_peak_flops(torch.cuda.get_device_name(device)))


def _head_width(config: Any, heads: int) -> float:
    """Return the mean length of a head's key and value, which multiply each pair of tokens."""
    # where attention is latent, head_dim is that of the rotary part alone
    key, value = _first(config, ("qk_head_dim",), 0), _first(config, ("v_head_dim",), 0)
    if key and value:
        return (key + value) / 2
    return _first(config, ("head_dim",), 0) or _first(config, ("hidden_size", "n_embd"), 0) // heads


def _first(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if value is not None), otherwise)
