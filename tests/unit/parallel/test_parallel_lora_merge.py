"""Adapters added to weights: as peft adds them, and refused where they do not fit."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from cosmos_parallel import (
    AdapterError,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    build_mesh,
    export_lora,
    load_causal_lm,
    merge_directories,
    merged_weights,
)

peft = pytest.importorskip("peft")
# peft says so where it cannot look a base model up
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")


def move_adapters(model: torch.nn.Module, *, std: float) -> None:
    """Give both factors of adapters values at which they count."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=std)


def assert_same_logits(model: Any, merged: Any, tokens: torch.Tensor, *, atol: float) -> None:
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        found = merged(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_weights_with_an_adapter_are_those_of_peft(model_directory, tmp_path, rank_stabilised):
    base = model_directory("Qwen3", tied=False)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", use_rslora=rank_stabilised
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    merge_directories(base, tmp_path / "adapter", tmp_path / "merged")
    expected = model.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


def test_experts_with_adapters_are_those_that_were_trained(model_directory, tmp_path):
    """peft has the factors of all experts in one tensor, and does not say of which."""
    base, mesh = model_directory("Qwen3Moe", tied=False), build_mesh(ParallelConfig())
    model = load_causal_lm(base, mesh, ModelConfig(lora=LoraConfig(rank=4, alpha=6.0))).eval()
    move_adapters(model, std=0.1)
    assert any(".experts." in name for name, _ in model.named_parameters() if ".lora_" in name)
    export_lora(model, tmp_path / "adapter", mesh, base=base)
    merge_directories(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.randint(0, model.config.vocab_size, (2, 9))
    assert_same_logits(model, merged, tokens, atol=1e-4)


def test_an_embedding_with_an_adapter_is_the_one_that_was_trained(model_directory, tmp_path):
    base, mesh = model_directory("Qwen3", tied=False), build_mesh(ParallelConfig())
    lora = LoraConfig(rank=4, alpha=6.0, targets=("embed_tokens", "lm_head"))
    model = load_causal_lm(base, mesh, ModelConfig(lora=lora))
    move_adapters(model, std=0.1)
    export_lora(model, tmp_path / "adapter", mesh, base=base)
    merge_directories(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.arange(9)[None]
    assert_same_logits(model, merged, tokens, atol=1e-5)


@pytest.mark.parametrize(
    "targets", [("c_attn", "lm_head"), ("attn.c_proj", "lm_head"), ("all-linear",), ("lm_head",)]
)
def test_layers_stored_transposed_are_merged_beside_a_head_that_is_not(tmp_path, targets):
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    ends = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    base, mesh = tmp_path / "base", build_mesh(ParallelConfig())
    GPT2LMHeadModel(GPT2Config(**sizes, **ends)).save_pretrained(base)
    lora = LoraConfig(rank=4, alpha=6.0, targets=targets)
    model = load_causal_lm(base, mesh, ModelConfig(lora=lora)).eval()
    move_adapters(model, std=0.3)
    export_lora(model, tmp_path / "adapter", mesh, base=base)
    merge_directories(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(9)[None]
    assert_same_logits(model, merged, tokens, atol=1e-5)


def test_one_layer_by_hand():
    base = {"a.weight": torch.zeros(2, 3), "b.weight": torch.ones(2, 2)}
    adapter = {
        "base_model.model.a.lora_A.weight": torch.tensor([[1.0, 2.0, 3.0]]),
        "base_model.model.a.lora_B.weight": torch.tensor([[1.0], [-1.0]]),
    }
    found = merged_weights(base, adapter, {"lora_alpha": 2.0})
    assert found.keys() == {"a.weight"}
    assert found["a.weight"].tolist() == [[2.0, 4.0, 6.0], [-2.0, -4.0, -6.0]]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("c", {"lora_alpha": 1}, "c.weight is to be .*2, 2.; the base has no such weight"),
        ("a", {"lora_alpha": 1}, "the base has one of .2, 3."),
        ("a", {"lora_alpha": 1, "use_dora": True}, "use_dora is set"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(name, config, message):
    adapter = {
        f"base_model.model.{name}.lora_A.weight": torch.ones(1, 2),
        f"base_model.model.{name}.lora_B.weight": torch.ones(2, 1),
    }
    with pytest.raises(AdapterError, match=message):
        merged_weights({"a.weight": torch.zeros(2, 3)}, adapter, config)


def test_weights_that_a_base_has_in_the_format_of_mistral_are_not_left_as_they_were(
    model_directory, tmp_path
):
    base, mesh = model_directory("Qwen3", tied=False), build_mesh(ParallelConfig())
    model = load_causal_lm(base, mesh, ModelConfig(lora=LoraConfig(rank=4, alpha=6.0)))
    export_lora(model, tmp_path / "adapter", mesh, base=base)
    both = tmp_path / "both"
    shutil.copytree(base, both)
    (both / "LICENSE").touch()
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, both / "consolidated.safetensors")
    index = both / "consolidated.safetensors.index.json"
    index.write_text('{"weight_map": {"layers.0.attention.wq.weight": "consolidated.safetensors"}}')
    merge_directories(both, tmp_path / "adapter", tmp_path / "merged")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {path.name for path in base.iterdir()} | {"LICENSE"}


def test_a_directory_without_the_layer_leaves_nothing_behind(model_directory, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"lora_alpha": 1}))
    tensors = {f"base_model.model.x.lora_{k}.weight": torch.ones(2, 2) for k in "AB"}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"has no weight x\.weight"):
        merge_directories(model_directory("Qwen3"), adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
