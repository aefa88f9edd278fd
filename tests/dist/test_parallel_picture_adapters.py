"""Adapters of a model that sees, whose files call its layers otherwise than it does."""

import json

import pytest
import torch
from seeing import write_seeing_model
from transformers import AutoModelForImageTextToText

from cosmos_parallel import (
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    build_mesh,
    export_lora,
    load_causal_lm,
    load_weights,
    merge_directories,
    merged_weights,
    names_in_files,
)

peft = pytest.importorskip("peft")
# peft says so where it cannot look a base model up
pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")


def test_a_model_that_sees_is_called_otherwise_in_its_files(tmp_path):
    """Its layers moved into a language part since; what peft writes of it loads in peft."""
    base, mesh = tmp_path / "base", build_mesh(ParallelConfig())
    write_seeing_model(base)
    names = names_in_files(base)
    assert any(name != called for name, called in names.items())
    config = ModelConfig(lora=LoraConfig(rank=4, alpha=6.0), dtype="float32")
    model = load_causal_lm(base, mesh, config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    export_lora(model, tmp_path / "adapter", mesh, base=base)
    merge_directories(base, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    theirs = AutoModelForImageTextToText.from_pretrained(base).eval()
    in_peft = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    adapter = load_weights(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    weights = merged_weights(load_weights(base), adapter, settings, names)
    written = load_weights(tmp_path / "merged")
    assert all(torch.equal(written[name], value) for name, value in weights.items())
    tokens = torch.randint(8, 100, (2, 9))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
        for other in (merged, in_peft):
            found = other(input_ids=tokens).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
