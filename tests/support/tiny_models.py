"""Tiny random models of transformers, as checkpoints of a test."""

from pathlib import Path

import torch
import transformers


def write_random(config: transformers.PretrainedConfig, path: Path, *, seed: int = 0) -> None:
    """Write a model of a config, float32 and wide enough in its weights that logits differ."""
    torch.manual_seed(seed)
    seeing = hasattr(config, "vision_config")
    kind = "AutoModelForImageTextToText" if seeing else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config).float()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(path)


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
