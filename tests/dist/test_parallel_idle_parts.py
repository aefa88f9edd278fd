"""FSDP2 over mixtures of which a rank's tokens go through some parts, and another's do not."""

import json
from pathlib import Path

import pytest
import transformers
from process_trees import run_tree
from tiny_models import write_random

RANKS = Path(__file__).with_name("idle_ranks.py")
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}
MODELS = {
    "longcat": lambda: transformers.LongcatFlashConfig(
        **SIZES,
        num_layers=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=4,
        moe_topk=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        head_dim=8,
    ),
    "deepseek-4": lambda: transformers.DeepseekV4Config(
        **SIZES,
        num_hidden_layers=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        index_head_dim=8,
        index_n_heads=2,
        index_topk=4,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=8,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    ),
}
TWO = {"degrees": {}, "num_ranks": 2}
CASES = {
    "longcat-fsdp2": {"model": "longcat", **TWO},
    "longcat-recomputed-fsdp2": {"model": "longcat", "checkpointing": "full", **TWO},
    "longcat-adapters-fsdp2": {"model": "longcat", "lora": True, **TWO},
    "longcat-fsdp2-tp2": {"model": "longcat", "degrees": {"tp": 2}, "num_ranks": 4},
    "deepseek-4-fsdp2": {"model": "deepseek-4", **TWO},
}
ALONE = {"degrees": {}, "num_ranks": 1}
REFERENCES = {
    "longcat": {"model": "longcat", **ALONE},
    "longcat-adapted": {"model": "longcat", "lora": True, **ALONE},
    "deepseek-4": {"model": "deepseek-4", **ALONE},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("idle")
    for name, config in MODELS.items():
        write_random(config(), directory / name)
    cases = {**REFERENCES, **CASES}
    lines = "\n".join(json.dumps({"name": name, **case}) for name, case in cases.items())
    run_tree(RANKS, directory, deadline_s=280, given=lines)
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in cases}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_whose_tokens_go_nowhere_take_the_steps_of_one_process(results, name):
    model = CASES[name]["model"]
    reference = results[f"{model}-adapted" if CASES[name].get("lora") else model]
    assert "error" not in reference, reference["error"]
    assert "error" not in results[name], results[name]["error"]
    found, expected = results[name]["steps"]["reports"], reference["steps"]["reports"]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
