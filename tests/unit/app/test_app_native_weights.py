"""Weights of torchtitan's implementation are served as the checkpoint has them, name by name."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import tiny_kimi, tiny_muse, write_random

from cosmos_app.recipe import Recipe
from cosmos_app.roles.weights import trained_shards
from cosmos_parallel import ModelConfig, ParallelConfig, build_mesh, load_causal_lm
from cosmos_weightsync import Box, converted_shards

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
STATES = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "shared_expert_intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("Llama", False),
        ("Qwen2", False),
        ("Qwen3", True),
        ("Qwen3Moe", False),
        ("Qwen3_5Text", False),
        ("Qwen3_5MoeText", False),
    ],
)
def test_what_is_served_is_the_checkpoint(tmp_path, kind, tied):
    config = getattr(transformers, f"{kind}Config")(
        **SIZES | (STATES if kind.startswith("Qwen3_5") else {}), tie_word_embeddings=tied
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(tmp_path)
    native = load_causal_lm(
        tmp_path, build_mesh(ParallelConfig()), ModelConfig(implementation="native")
    )
    stored = load_file(tmp_path / "model.safetensors")
    found = {name: torch.full_like(value, torch.nan) for name, value in stored.items()}
    for shard in converted_shards(native, native.to_hf):
        whole = found[shard.spec.name]
        box = shard.spec.box.relative_to(Box.full(whole.shape))
        assert whole[box].isnan().all()  # nothing twice
        whole[box] = shard.tensor
    assert all(torch.equal(found[name], value) for name, value in stored.items())


@pytest.mark.parametrize("config", [tiny_kimi(), tiny_muse()], ids=["kimi", "muse"])
def test_what_sees_is_served_with_the_words(tmp_path, config):
    write_random(config, tmp_path)
    native = load_causal_lm(
        tmp_path, build_mesh(ParallelConfig()), ModelConfig(implementation="native")
    )
    served = {shard.spec.name: shard.tensor for shard in trained_shards(native, Recipe())}
    stored = load_file(tmp_path / "model.safetensors")
    # corrections of routers are not trained, and lose by the precision of the wire
    corrections = {name for name in stored if name.endswith("e_score_correction_bias")}
    assert served.keys() == stored.keys() - corrections
    assert all(torch.equal(tensor, stored[name]) for name, tensor in served.items())
