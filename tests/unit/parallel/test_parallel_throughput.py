"""What a token costs, against sums by hand."""

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cosmos_parallel import ParallelConfig, build_mesh, model_cost, throughput

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_meets_every_matrix_once_and_the_embedding_as_a_head_only(tied):
    config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=tied)
    with torch.device("meta"):
        cost = model_cost(Qwen3ForCausalLM(config), build_mesh(ParallelConfig()))
    attention, feed_forward, norms = 4 * 32 * 64, 3 * 32 * 48, 2 * 32 + 2 * 16
    assert cost.per_token == 6 * (3 * (attention + feed_forward + norms) + 32 + 64 * 32)
    # two products of 64 features for each pair, forward once and backward twice
    assert cost.per_pair == 3 * 64 * 2 * 2 * 3


def test_latent_attention_multiplies_whole_keys_and_values():
    config = DeepseekV3Config(
        **SIZES,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=10,
    )
    with torch.device("meta"):
        cost = model_cost(DeepseekV3ForCausalLM(config))
    # keys of 12 + 4 features and values of 10, of 4 heads in 3 layers
    assert cost.per_pair == 3 * 4 * (16 + 10) * 2 * 3


def test_speed_is_of_each_rank():
    config = Qwen3Config(**SIZES, head_dim=16)
    with torch.device("meta"):
        cost = model_cost(Qwen3ForCausalLM(config))
    speed = throughput(cost, num_tokens=100, num_pairs=1000, rank_seconds=8.0, peak_flops=1e6)
    flops = (100 * cost.per_token + 1000 * cost.per_pair) / 8
    assert (speed.tokens_per_s, speed.flops_per_s) == (12.5, flops)
    assert speed.mfu == flops / 1e6
