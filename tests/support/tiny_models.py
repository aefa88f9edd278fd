"""Tiny random models of transformers, as checkpoints of a test."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_random(config: transformers.PretrainedConfig, path: Path, *, seed: int = 0) -> None:
    """Write a model of a config, float32 and wide enough in its weights that logits differ."""
    torch.manual_seed(seed)
    seeing = hasattr(config, "vision_config")
    kind = "AutoModelForImageTextToText" if seeing else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config).float()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(path)
    if config.model_type == "kimi_k25":
        name_as_published(path)


def name_as_published(path: Path) -> None:
    """Give the tensors of a Kimi checkpoint their published names.

    transformers writes ``blocks`` for all layers, where only those that see are called so, leaves
    its own prefix to one norm, takes what cuts pictures up for a part of the encoder, and spells
    the architecture by its own class.
    """
    config = path / "config.json"
    config.write_text(config.read_text().replace('"Kimi_K25For', '"KimiK25For'))
    file = path / "model.safetensors"
    tensors = load_file(file)
    for theirs, published in (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("model.mm_projector.", "mm_projector."),
        ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
    ):
        tensors = {name.replace(theirs, published): each for name, each in tensors.items()}
    save_file(tensors, file, {"format": "pt"})


def stack_experts(path: Path) -> None:
    """Put the matrices of a Qwen3.5-MoE checkpoint's experts together as they are published.

    transformers writes them one by one, where it made them itself.
    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    for first in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        experts = first.removesuffix("0.gate_proj.weight")
        count = sum(name.startswith(experts) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}{e}.{kind}_proj.weight") for e in range(count)])
            for kind in ("gate", "up", "down")
        )
        tensors[f"{experts}gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{experts}down_proj"] = down
    save_file(tensors, file, {"format": "pt"})


def tiny_config(model_type: str) -> transformers.PretrainedConfig:
    """Return a config of any decoder of text, with sizes made small where it has them."""
    kind = transformers.CONFIG_MAPPING[model_type]
    usual = kind()
    small = {
        name: value for name, value in _SIZES.items() if getattr(usual, name, None) is not None
    }
    if hasattr(usual, "kv_lora_rank"):  # every head has keys of its own
        small["num_key_value_heads"] = small["num_attention_heads"]
    if hasattr(usual, "head_dim"):
        small["head_dim"] = 8
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(getattr(usual, name, None) or ()))
        if kinds:
            small[name] = [kinds[0], kinds[-1]]
    return kind(**small)


_SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def tiny_kimi() -> transformers.Kimi_K25Config:
    """Return a Kimi K2.5 whose words are tokens 0 to 63."""
    sizes = {
        "vocab_size": 66,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
        "pad_token_id": 0,  # its row gets no gradient
    }
    rope = {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    words = transformers.DeepseekV3Config(**_SIZES | sizes, rope_parameters=rope)
    return transformers.Kimi_K25Config(
        text_config=words.to_dict(),
        vision_config=_SIGHT,
        projection_hidden_size=16,
        image_token_id=64,
        video_token_id=65,
        tie_word_embeddings=False,
    )


def tiny_muse() -> transformers.MuseGlimmerConfig:
    """Return a Muse Glimmer whose words are tokens 0 to 63: three windows, and a layer without."""
    return transformers.MuseGlimmerConfig(
        text_config={
            **_SIZES,
            "vocab_size": 66,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 4,
            "pad_token_id": 0,
            "final_logit_softcapping": 2.0,
            "output_multiplier": 0.7,
        },
        vision_config=_SIGHT,
        out_hidden_size=64,
        projector_hidden_size=16,
        image_token_id=64,
        video_token_id=65,
    )


def random_qwen3(
    seed: int, *, vocabulary: int, context: int, tied: bool = False
) -> transformers.Qwen3ForCausalLM:
    """Return a Qwen3 with heads that vLLM takes; two seeds disagree about every token."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return transformers.Qwen3ForCausalLM(config)
