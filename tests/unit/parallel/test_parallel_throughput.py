"""What a token costs, against sums by hand and torch's own count."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cosmos_parallel import (
    ParallelConfig,
    Work,
    build_mesh,
    model_cost,
    num_patches,
    throughput,
)
from cosmos_parallel.throughput import peak_flops_of

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


LATENT = DeepseekV3Config(
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
    moe_intermediate_size=24,
    first_k_dense_replace=1,
)
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize("num_tokens", [10, 20])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen3ForCausalLM, Qwen3Config(**SIZES | {"num_key_value_heads": 2}, head_dim=16)),
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **MIXTURE, head_dim=16)),
        (DeepseekV3ForCausalLM, LATENT),
    ],
    ids=["dense", "mixture", "latent"],
)
def test_the_cost_of_a_sample_is_what_torch_counts(kind, config, num_tokens):
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind._from_config(config, **plain)
    ids = torch.arange(num_tokens)[None]
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, use_cache=False).logits.sum().backward()

    cost = model_cost(model)
    # torch counts products of matrices only, and no norms
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    expected = (cost.per_token - 6 * vectors) * num_tokens + cost.per_pair * num_tokens**2
    assert counted.get_total_flops() == expected


def test_layers_whose_heads_differ_multiply_their_own_widths():
    config = Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 2},
        layer_types=["sliding_attention", "full_attention"],
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        num_kv_shared_layers=0,
    )
    with torch.device("meta"):
        cost = model_cost(Gemma4ForCausalLM(config), build_mesh(ParallelConfig()))
    assert cost.per_pair == 4 * (8 + 16) * 2 * 2 * 3


def test_latent_attention_multiplies_whole_keys_and_values():
    with torch.device("meta"):
        cost = model_cost(DeepseekV3ForCausalLM(LATENT))
    # keys of 12 + 4 features and values of 10, of 4 heads in 3 layers
    assert cost.per_pair == 3 * 4 * (16 + 10) * 2 * 3


def test_speed_is_of_each_rank():
    config = Qwen3Config(**SIZES, head_dim=16)
    with torch.device("meta"):
        cost = model_cost(Qwen3ForCausalLM(config))
    work = Work(num_tokens=100, num_pairs=1000)
    speed = throughput(cost, work, rank_seconds=8.0, peak_flops=1e6)
    flops = (100 * cost.per_token + 1000 * cost.per_pair) / 8
    assert (speed.tokens_per_s, speed.flops_per_s) == (12.5, flops)
    assert speed.mfu == flops / 1e6


@pytest.mark.parametrize(
    ("name", "tera"),  # dense, of the makers' data sheets
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1300),
        ("NVIDIA L4", 0),  # not known: 121 it would be, and was held to be an A100's 312
        ("NVIDIA GeForce RTX 4090", 0),
    ],
)
def test_the_peak_of_a_device_is_its_own_or_not_told(name, tera):
    assert peak_flops_of(name) == tera * 1e12


@pytest.mark.parametrize("tied", [False, True])
def test_what_sees_is_paid_for_by_patches_and_not_by_tokens(tied):
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2}
    config = Qwen2VLConfig(text_config=SIZES, vision_config=vision, tie_word_embeddings=tied)
    with torch.device("meta"):
        cost = model_cost(Qwen2VLForConditionalGeneration(config))
    biases = 3 * 32  # of queries, keys and values
    layer = 4 * 32 * 32 + biases + 3 * 32 * 48 + 2 * 32
    assert cost.per_token == 6 * (3 * layer + 32 + 64 * 32)
    block = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16) + 4 * 16
    embedding = 3 * 2 * 14 * 14 * 16
    # a norm, and two matrices over four patches put together
    merger = 2 * 16 + (64 * 64 + 64) + (64 * 32 + 32)
    assert cost.per_patch == 6 * (2 * block + embedding + merger / 4)
    assert cost.per_patch_pair == 2 * 16 * 2 * 2 * 3
    # a picture of 4 x 6 patches, and a video of three frames of 2 x 2
    grids = torch.tensor([[1, 4, 6], [3, 2, 2]])
    assert num_patches({"image_grid_thw": grids}, config) == (36, 24**2 + 3 * 4**2)
    assert num_patches({}, config) == (0, 0)
    work = Work(num_tokens=100, num_pairs=1000, num_patches=36, num_patch_pairs=624)
    seen = 36 * cost.per_patch + 624 * cost.per_patch_pair
    expected = (100 * cost.per_token + 1000 * cost.per_pair + seen) / 2
    assert throughput(cost, work, rank_seconds=2.0).flops_per_s == pytest.approx(expected)


def test_pictures_of_one_size_are_cut_into_patches():
    config = LlavaConfig(vision_config={"model_type": "clip_vision_model", "patch_size": 14})
    pixels = torch.empty(3, 3, 28, 56, device="meta")
    assert num_patches({"pixel_values": pixels}, config) == (24, 3 * 8**2)
    with torch.device("meta"):
        cost = model_cost(LlavaForConditionalGeneration(config))
    assert cost.per_patch > 6 * 12 * 768**2
