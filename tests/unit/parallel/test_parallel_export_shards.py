"""Exports in bfloat16, cut into several files, and to a full disk."""

import errno
import json

import pytest
import torch
from full_disks import no_file_longer_than
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cosmos_parallel import (
    ExportError,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    build_mesh,
    export_hf,
    export_lora,
    load_causal_lm,
)
from cosmos_parallel.tensor_files import save_tensors


def test_a_large_model_is_cut_into_files_that_load_as_one(tmp_path, model_directory):
    mesh = build_mesh(ParallelConfig())
    model = load_causal_lm(model_directory("Llama", tied=False), mesh)
    directory = tmp_path / "exported"
    export_hf(model, directory, mesh, dtype="bfloat16", max_shard_gb=20e-6)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    # 20 kB each; no tensor of this model is larger
    assert all((directory / name).stat().st_size < 20_000 + 4_000 for name in files)
    kinds = {t.dtype for name in files for t in load_file(directory / name).values()}
    assert kinds == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value.to(torch.bfloat16))


def test_a_full_disk_is_what_the_system_says_of_it(tmp_path, model_directory):
    mesh, path = build_mesh(ParallelConfig()), tmp_path / "one.safetensors"
    with no_file_longer_than(600), pytest.raises(OSError, match=r"one\.safetensors") as found:
        save_tensors({"a": torch.zeros(1000)}, path, {})
    assert found.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        save_tensors({"a": torch.zeros(1)}, tmp_path / "none" / "one.safetensors", {})

    model = load_causal_lm(model_directory("Llama", tied=False), mesh)
    with no_file_longer_than(600), pytest.raises(ExportError, match=r"out: .*File too large"):
        export_hf(model, tmp_path / "out", mesh)
    assert not [each for each in tmp_path.iterdir() if "out" in each.name]


def test_an_adapter_for_which_there_is_no_room_is_an_error_of_the_export(tmp_path, model_directory):
    pytest.importorskip("peft")
    mesh, base = build_mesh(ParallelConfig()), model_directory("Llama", tied=False)
    model = load_causal_lm(base, mesh, ModelConfig(lora=LoraConfig()))
    with no_file_longer_than(4000), pytest.raises(ExportError, match=r"out: .*File too large"):
        export_lora(model, tmp_path / "out", mesh, base=base)
