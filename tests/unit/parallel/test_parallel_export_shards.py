"""An export in bfloat16, cut into several files."""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cosmos_parallel import ParallelConfig, build_mesh, export_hf, load_causal_lm


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
