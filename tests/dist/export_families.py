"""Tiny models of families that are exported for vLLM, as checkpoints, and what they are asked."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from seeing import write_pictures, write_seeing_model
from tiny_models import name_as_published, write_random

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # 512 + 64: the one width that latent attention has a kernel for
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # the widths that there is a kernel for
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-2,
}
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
MARKS = {"image_token_id": 64, "video_token_id": 65}
SEEING = {
    "qwen3_5": {"vision_config": VISION | {"num_position_embeddings": 16}},
    "qwen3_5_moe": {"vision_config": VISION | {"num_position_embeddings": 16}},
    # by vLLM's names too, in which four patches are one token
    "muse_glimmer": {
        "vision_config": _EYES | {"output_dim": 128, "adapter_dim": 32},
        "out_hidden_size": 128,
        "projector_hidden_size": 32,
    },
    "kimi_k25": {"vision_config": _EYES, "projection_hidden_size": 32},
}
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
FAMILIES = {
    "llama-2": ("LlamaConfig", {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
    # two heads for each of keys, and frequencies of which some are divided
    "llama-3": ("LlamaConfig", WIDE | {"rope_parameters": SCALED, "rms_norm_eps": 1e-5}),
    "qwen2": ("Qwen2Config", WIDE),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "moonlight": ("DeepseekV3Config", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 32}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 32, "sliding_window": 4, **EXPERTS}),
    # transformers' default attention drops the bound of its scores
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    # frequencies by the longest sequence that is served
    "phi3": (
        "Phi3Config",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 16,
                "long_factor": [2.0 + index for index in range(16)],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    # with a part that sees, which is exported as it was read, and asked for text
    "qwen3_5": ("Qwen3_5Config", STATES),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        STATES
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "muse_glimmer": (
        "MuseGlimmerConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 4,
            "pad_token_id": None,
            "final_logit_softcapping": 2.0,
            "output_multiplier": 0.7,
        },
    ),
    "kimi_k25": (
        "Kimi_K25Config",
        {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 32, "pad_token_id": None},
    ),
}
CONTEXT = 96
PROMPT = torch.randint(3, 64, (72,), generator=torch.Generator().manual_seed(3)).tolist()
# a Qwen2.5-VL of its own, a token for each letter, which is shown a picture of four
SHOWN = "qwen2_5_vl"
PICTURE = "green-56x56.png"
SPELT = "<|vision_start|><|image_pad|><|vision_end|> " + "What is this hue, and how large? " * 2
ROWS = (
    {"prompt": "hue?", "response": "blue", "images": ["blue-56x28.png", "red-28x28.png"]},
    {"prompt": "and one without?", "response": "none"},
)


def write_original(family: str, folder: Path) -> None:
    """Write a checkpoint with random weights, and how it is held to be trained and served."""
    original = folder / "original"
    implementation = "transformers" if family in ("gemma2", "phi3", SHOWN) else "native"
    if family == SHOWN:
        _write_shown(original)
    else:
        _random_model(family).save_pretrained(original)
    if family == "kimi_k25":
        name_as_published(original)
    held = {"implementation": implementation, "context_length": CONTEXT}
    (folder / "held.json").write_text(json.dumps(held))


def _write_shown(folder: Path) -> None:
    write_seeing_model(folder)
    write_random(transformers.AutoConfig.from_pretrained(folder), folder)
    # as published: vLLM scales pixels by the mean that is named there
    processor = folder / "preprocessor_config.json"
    scaled = json.loads(processor.read_text()) | {"image_mean": [0.48] * 3, "image_std": [0.27] * 3}
    processor.write_text(json.dumps(scaled))
    write_pictures(folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def _random_model(family: str) -> Any:
    kind, more = FAMILIES[family]
    sizes, make = SIZES | more, transformers.AutoModelForCausalLM
    config = getattr(transformers, kind)
    if family in SEEING:
        sizes["vocab_size"] += len(MARKS)
        made = config(text_config=sizes, tie_word_embeddings=False, **SEEING[family], **MARKS)
        make = transformers.AutoModelForImageTextToText
    else:
        made = config(**sizes)
    torch.manual_seed(0)
    model = make.from_config(made).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model
