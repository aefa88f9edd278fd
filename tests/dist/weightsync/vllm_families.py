"""Tiny random checkpoints of every model family that vLLM is tested with, in checkpoint names."""

import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from vllm.model_executor.models.registry import ModelRegistry

DENSE = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,  # 512 + 64: the one width that latent attention has a kernel for.
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,  # What AMX multiplies at once.
    "v_head_dim": 32,
    "head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    **EXPERTS,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "qwen2.5": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),  # 64 // 2 is 32.
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, "decoder_sparse_step": 1, **EXPERTS}),
    "qwen2.5-vl": ("qwen2_5_vl", {"vision_config": VISION}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 32}),
    "moonlight": ("deepseek_v3", LATENT),
    "mistral": ("mistral", {}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}),
    "phi2": ("phi", {"num_attention_heads": 2, "num_key_value_heads": 2}),  # 64 // 2 is 32.
    "phi3": ("phi3", {}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2, "tie_word_embeddings": True}),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 128, "num_local_experts": 4}),
}
_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
_LATENT_BLOCKS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
OF_BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", _BLOCKS),
    "qwen3-moe": ("qwen3_moe", {**FAMILIES["qwen3-moe"][1], **_BLOCKS}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, **_BLOCKS, **_LATENT_BLOCKS}),
}
"""The same with matrices that two workers can cut into blocks of 128 by 128, as FP8 scales them."""
FAMILIES.update({f"{family}-of-blocks": options for family, options in OF_BLOCKS.items()})
STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
# with a language model of its own kind, and what else is set
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5", STATES, {"vision_config": VISION | {"num_position_embeddings": 16}}),
    "qwen3.5-moe": (
        "qwen3_5_moe",
        {**STATES, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
        {"vision_config": VISION | {"num_position_embeddings": 16}},
    ),
    "muse-glimmer": (
        "muse_glimmer",
        {"sliding_window": 4, "pad_token_id": None},
        {
            # by vLLM's names too, in which four patches are one token
            "vision_config": {**_EYES, "output_dim": 128, "adapter_dim": 32},
            "out_hidden_size": 128,
            "projector_hidden_size": 32,
        },
    ),
    "kimi-2.5": (
        "kimi_k25",
        {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 32, "pad_token_id": None},
        {"vision_config": _EYES, "projection_hidden_size": 32},
    ),
}


def dtype_of(family: str) -> str:
    """Float32; bfloat16 of latent attention on a CPU with AMX, whose kernels know no other."""
    options = FAMILIES[family][1] if family in FAMILIES else SEEING[family][1]
    is_latent = "kv_lora_rank" in options
    return "bfloat16" if is_latent and torch.cpu._is_amx_tile_supported() else "float32"


def _seeing(family: str) -> torch.nn.Module:
    kind, text, more = SEEING[family]
    marks = {"image_token_id": 248, "video_token_id": 249, "tie_word_embeddings": False}
    config = AutoConfig.for_model(kind, text_config={**DENSE, **text}, **more, **marks)
    return AutoModelForImageTextToText.from_config(config)


def write_checkpoint(family: str, seed: int, folder: Path) -> None:
    """What `save_pretrained` writes of a model in float32, under its published names."""
    torch.manual_seed(seed)
    if family in SEEING:
        _seeing(family).float().save_pretrained(folder)
        write_tokenizer(folder)
        if family.startswith("kimi"):
            from tiny_models import name_as_published

            name_as_published(folder)
        return
    kind, options = FAMILIES[family]
    if kind == "qwen2_5_vl":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # 64 // 2 is 32.
        rope = {"type": "mrope", "mrope_section": [4, 6, 6]}
        text = {**DENSE, **heads, "rope_scaling": rope}
        config = AutoConfig.for_model(kind, **text, text_config=text, **options)
        model = AutoModelForImageTextToText.from_config(config)
        write_tokenizer(folder)
    else:
        config = AutoConfig.for_model(kind, **{**DENSE, **options})
        model = AutoModelForCausalLM.from_config(config)
    model.float().save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """Token 7 is the word "7"; the first are what Qwen2.5-VL marks images with."""
    marks = ["vision_start", "vision_end", "image_pad", "video_pad", "vision_pad"]
    words = {f"<|{mark}|>": index for index, mark in enumerate(marks)}
    words |= {str(index): index for index in range(len(words), DENSE["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="9"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def import_without_torchvision() -> None:
    """A model of images and text imports torchvision to cut up images; nothing here sees one."""
    is_installed = importlib.util.find_spec("torchvision") is not None
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        if not is_installed:
            sys.modules[name] = module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = []
    if not is_installed:
        sys.modules["torchvision.transforms.v2"].functional = types.ModuleType("functional")


def register_here(folder: Path) -> None:
    """Have vLLM look at the model's class in this process rather than in one of its own."""
    for name in json.loads((folder / "config.json").read_text())["architectures"]:
        if "VL" in name or name.startswith(("Qwen3_5", "MuseGlimmer", "KimiK25")):
            import_without_torchvision()
        known = ModelRegistry.models[name]
        if hasattr(known, "load_model_cls"):
            ModelRegistry.register_model(name, known.load_model_cls())
