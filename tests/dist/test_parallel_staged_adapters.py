"""Adapters that are divided among stages are sent and exported whole."""

import json
from pathlib import Path

import pytest
import torch
from process_trees import run_tree
from safetensors.torch import load_file

from cosmos_parallel import load_weights, merged_weights

pytest.importorskip("peft")
RANKS = Path(__file__).with_name("staged_adapter_ranks.py")


@pytest.mark.slow
def test_adapters_of_two_stages_arrive_alone_and_added_to_the_weights(tmp_path):
    run_tree(RANKS, tmp_path, deadline_s=200)
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    # two factors of 7 linear layers in each of 2 blocks, all of them moved
    assert len(exported) == 2 * 7 * 2
    assert all(bool(value.any()) for value in exported.values())
    sent = load_file(tmp_path / "sent.safetensors")
    assert sent.keys() == exported.keys()
    assert all(torch.equal(sent[name], value) for name, value in exported.items())
    base = load_weights(tmp_path / "qwen3")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    expected = base | merged_weights(base, exported, settings)
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-7)
