"""A rank that trains by itself, where the weights that it computes with are cast."""

from pathlib import Path

import pytest
from process_trees import run_ranks

from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2)
WORKER = """
import sys
import torch
from cosmos_app.roles.process import torchrun_place
from cosmos_app.roles.ranks import join_ranks
from cosmos_parallel import ModelConfig, ParallelConfig, build_mesh, load_causal_lm

training = ModelConfig(compute_dtype="bfloat16")
mesh = build_mesh(ParallelConfig(), join_ranks(torchrun_place(), casts=training.casts))
model = load_causal_lm(sys.argv[1], mesh, training)
assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
assert model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits.dtype == torch.bfloat16
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_by_itself_computes_in_another_type_than_its_weights(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", ["0123456789+="], TINY, seed=0)
    run_ranks(WORKER, tmp_path, [[tmp_path / "model"]], deadline_s=240)
