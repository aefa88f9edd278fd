"""Ranks read their own parts of a model of transformers, and write an export's files in turn."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from process_trees import run_tree
from safetensors import safe_open
from tiny_models import write_random

pytest.importorskip("peft")
SCRIPT = Path(__file__).with_name("own_shard_ranks.py")
SIZES = {
    "vocab_size": 66,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
TIED = SIZES | {"tie_word_embeddings": True}
SIGHT = {
    "text_config": SIZES
    | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
    "tie_word_embeddings": False,
}
FAMILIES = {
    # rotary buffers of two kinds, a scaled embedding that is also the head
    "gemma-3": lambda: transformers.Gemma3TextConfig(**TIED, head_dim=8, sliding_window=4),
    "qwen-3": lambda: transformers.Qwen3Config(**TIED, head_dim=8),
    # experts that files have one by one
    "qwen-3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    # experts that files have stacked, and attention without a kernel of torch
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    # an image between tokens
    "qwen-2.5-vl": lambda: transformers.Qwen2_5_VLConfig(**SIGHT),
    "phi-3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
}
ON_FOUR = ("qwen-2.5-vl", "phi-3")  # under fsdp2 x tp2
LARGE = SIZES | {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2048}


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 58, (2, 13), generator=generator)
    inputs: dict[str, torch.Tensor] = {"input_ids": tokens}
    if family == "qwen-2.5-vl":
        # one image of 4 x 4 patches for each row; 2 x 2 patches make a token
        tokens[:, 2], tokens[:, 3:7], tokens[:, 7] = 62, 60, 63
        inputs |= {
            "pixel_values": torch.randn(32, 3 * 2 * 4 * 4, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
            "mm_token_type_ids": (tokens == 60).int(),
        }
    return inputs


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("shards")
    for family, make in FAMILIES.items():
        write_random(make(), directory / family)
        torch.save(inputs_of(family), directory / f"{family}.pt")
    # 103 MB, of which the largest tensor is 4
    config = transformers.LlamaConfig(**LARGE | {"num_hidden_layers": 6, "head_dim": 128})
    transformers.LlamaForCausalLM(config).save_pretrained(directory / "large")
    cases = {"2": list(FAMILIES), "4": ON_FOUR}
    (directory / "cases.json").write_text(json.dumps(cases))
    run_tree(SCRIPT, directory, deadline_s=280)
    return directory


CASES = [(2, family) for family in FAMILIES] + [(4, family) for family in ON_FOUR]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "family"), CASES)
def test_every_rank_has_its_part_of_the_model_of_transformers(written, num_ranks, family):
    for rank in range(num_ranks):
        found = json.loads((written / f"{num_ranks}-{rank}.json").read_text())[family]
        assert found["names"] == []
        assert found["weights"] == 0
        assert found["logits"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_of_several_writers_loads_with_equal_logits(written, family):
    found = json.loads((written / "2-0.json").read_text())[family]
    assert found["loading"] == []
    assert found["exported"] < 1e-6
    index = json.loads((written / f"{family}-exported/model.safetensors.index.json").read_text())
    original = tensors_of(written / family)
    exported = tensors_of(written / f"{family}-exported")
    assert original.keys() == exported.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in original.values())
    assert all(torch.equal(exported[name], value) for name, value in original.items())
    half = tensors_of(written / f"{family}-half")
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in original.items())


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.mark.slow
def test_an_adapter_and_its_base_start_as_in_one_process(written):
    for rank in (0, 1):
        found = json.loads((written / f"2-{rank}.json").read_text())["adapter"]
        assert found["weights"] == 0


@pytest.mark.slow
def test_a_rank_needs_memory_for_its_part_and_not_for_the_whole(written):
    for rank in range(4):
        found = json.loads((written / f"memory-{rank}.json").read_text())
        whole = found["whole"]
        assert whole > 50e6
        # its quarter, and what reading one tensor takes
        assert found["loading"] < whole * 0.45, found
        # one layer of 8 MB in bfloat16, its copy in the making, and one gathered tensor
        assert found["exporting"] < whole * 0.9, found
