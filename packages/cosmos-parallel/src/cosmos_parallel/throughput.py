"""How fast a step was: tokens per second and rank, and the share of the hardware's peak (MFU)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_parallel.families import is_tied, layer_configs
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.rotary_axes import sees

# what transformers and torchtitan call the modules of which a token meets some
_EXPERTS = {"experts", "routed_experts"}
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_OF_AN_A100 = 312e12
_MERGERS = {"merger", "deepstack_merger_list"}  # work on several patches put together


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """Floating-point operations of forward and backward, recomputation not counted.

    Attributes:
        per_token: in the matrices: 6 for each parameter that a token meets (Kaplan et al., 2020,
            section 2.1), the input embedding not among them.
        per_pair: in attention, for each pair of tokens of one sample; causal sparsity is not
            counted, as is usual.
        per_patch: in the matrices of the part that sees, for each patch of a picture or frame.
        per_patch_pair: in that part's attention, for each pair of patches of one frame; windows
            are not looked at, as causal sparsity is not.
    """

    per_token: float
    per_pair: float
    per_patch: float = 0.0
    per_patch_pair: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a model is given.

    Attributes:
        num_tokens: of the samples.
        num_pairs: sum over the samples of the square of their tokens.
        num_patches: of pictures and frames of videos.
        num_patch_pairs: sum over pictures and frames of the square of their patches.
    """

    num_tokens: float
    num_pairs: float
    num_patches: float = 0.0
    num_patch_pairs: float = 0.0


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
    chosen = _first(text, _CHOSEN, num_experts)
    share = chosen / num_experts if num_experts else 1.0
    sight = _part_that_sees(model, config)
    seeing = set() if sight is None else set(sight.parameters())
    met = 0.0
    for name, parameter in model.named_parameters():
        if parameter not in seeing:
            met += parameter.numel() * (share if _EXPERTS & set(name.split(".")) else 1.0)
    if not is_tied(config):
        embeddings = (part for part in model.modules() if isinstance(part, nn.Embedding))
        met -= sum(part.weight.numel() for part in embeddings if part.weight not in seeing)
    per_patch, per_patch_pair = (0.0, 0.0) if sight is None else _sight_cost(sight, config)
    if mesh is not None:
        device = mesh.process.device
        stages = mesh.sum_(torch.tensor(met, dtype=torch.float64, device=device))
        met = stages.item() / mesh.ranks_per_stage
        seen = torch.tensor([per_patch, per_patch_pair], dtype=torch.float64, device=device)
        per_patch, per_patch_pair = mesh.max_(seen).tolist()  # one stage has the part that sees
    layers = layer_configs(text)
    widths = sum(map(_heads_width, layers)) / len(layers)
    return ModelCost(
        per_token=6.0 * met,
        per_pair=12.0 * _first(text, ("num_hidden_layers", "n_layer"), 1) * widths,
        per_patch=per_patch,
        per_patch_pair=per_patch_pair,
    )


def num_patches(inputs: Mapping[str, Tensor], config: Any) -> tuple[float, float]:
    """Return how many patches a model's part that sees works on, and pairs of them in one frame.

    Args:
        inputs: of a model, by its own names (see ``PictureReader.inputs``); empty without pictures.
        config: the model's Hugging Face config.
    """
    frames: list[tuple[int, int]] = []  # how many, of how many patches each
    if "image_grid_thw" in inputs:
        frames = [(t, h * w) for t, h, w in inputs["image_grid_thw"].tolist()]
    elif "pixel_values" in inputs:
        *many, _, height, width = inputs["pixel_values"].shape
        side = int(config.vision_config.patch_size)
        frames = [(math.prod(many), (height // side) * (width // side))]
    patches = sum(count * size for count, size in frames)
    return float(patches), float(sum(count * size**2 for count, size in frames))


def throughput(
    cost: ModelCost, work: Work, *, rank_seconds: float, peak_flops: float = 0.0
) -> Throughput:
    """Return the speed of a step.

    Args:
        cost: of the model.
        work: of all samples of the step.
        rank_seconds: seconds of the step times the ranks that worked on it.
        peak_flops: of the device; see ``device_peak_flops``.
    """
    flops = (
        cost.per_token * work.num_tokens
        + cost.per_pair * work.num_pairs
        + cost.per_patch * work.num_patches
        + cost.per_patch_pair * work.num_patch_pairs
    ) / rank_seconds
    return Throughput(
        tokens_per_s=work.num_tokens / rank_seconds,
        flops_per_s=flops,
        mfu=flops / peak_flops if peak_flops else 0.0,
    )


def device_peak_flops(device: torch.device) -> float:
    """Return the bfloat16 peak of an accelerator; 0 for a CPU and where none is known."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else 0.0


@cache  # torchtitan asks a program for the machine's devices
def peak_flops_of(name: str) -> float:
    """Return the bfloat16 peak of a device by its name, as torchtitan knows it.

    It holds what it does not know to be an A100, of which nobody could tell; that is a 0 here. An
    L40S it knows by a name that no driver gives it.
    """
    from torchtitan.tools.utils import get_peak_flops

    found = float(get_peak_flops(name.replace("L40S", "l40s")))
    return 0.0 if found == _OF_AN_A100 and "A100" not in name else found


def _part_that_sees(model: Any, config: Any) -> nn.Module | None:
    if not sees(config) or not hasattr(model, "get_encoder"):  # torchtitan's reads words only
        return None
    found: nn.Module = model.get_encoder(modality="image")  # of any Hugging Face model
    return None if found is model else found


def _sight_cost(sight: nn.Module, config: Any) -> tuple[float, float]:
    """Return operations for each patch, and for each pair of patches of one frame."""
    vision = config.vision_config
    merged = _first(vision, ("spatial_merge_size",), 1) ** 2
    met = 0.0
    for name, parameter in sight.named_parameters():
        met += parameter.numel() / (merged if _MERGERS & set(name.split(".")) else 1)
    layers = _first(vision, ("depth", "num_hidden_layers"), 1)
    # where there is an embed_dim, hidden_size is that of the decoder
    return 6.0 * met, 12.0 * layers * _first(vision, ("embed_dim", "hidden_size"), 0)


def _heads_width(layer: Any) -> float:
    """Return the mean length of all heads' keys and values, which multiply each pair of tokens."""
    heads = _first(layer, ("num_attention_heads", "n_head"), 1)
    # where attention is latent, head_dim is that of the rotary part alone
    key, value = _first(layer, ("qk_head_dim",), 0), _first(layer, ("v_head_dim",), 0)
    if key and value:
        return heads * (key + value) / 2
    width = _first(layer, ("head_dim",), 0)
    return heads * (width or _first(layer, ("hidden_size", "n_embd"), 0) // heads)


def _first(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if value is not None), otherwise)
