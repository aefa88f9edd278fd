"""Native models on a GPU, with the kernels for it, against the same models on processors."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import write_random

from cosmos_parallel import (
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    ProcessContext,
    SftBatch,
    build_mesh,
    load_causal_lm,
    sft_loss,
)

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False,
}
STATES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
CONFIGS = {
    "qwen-3": transformers.Qwen3Config(**SIZES),
    "qwen-3-moe": transformers.Qwen3MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "gpt-oss": transformers.GptOssConfig(
        **SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=8
    ),
    "qwen-3.5": transformers.Qwen3_5TextConfig(**SIZES | STATES),
}
LENGTHS = (5, 130, 64, 41)


def samples() -> SftBatch:
    """One row of four samples; without the first token of each, whose context is another's."""
    chance = torch.Generator().manual_seed(3)
    length = sum(LENGTHS)
    trainable = torch.rand(1, length, generator=chance) < 0.6
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    trainable[:, starts] = False
    return SftBatch(
        token_ids=torch.randint(0, 64, (1, length), generator=chance),
        trainable=trainable,
        position_ids=torch.cat([torch.arange(each) for each in LENGTHS])[None],
        num_tokens=length,
    )


def step(path: Path, device: str, config: ModelConfig) -> tuple[float, float]:
    mesh = build_mesh(ParallelConfig(), ProcessContext(device=torch.device(device)))
    learner = Learner(load_causal_lm(path, mesh, config), LearnerConfig(), mesh=mesh)
    first = learner.step([samples()], sft_loss)
    return first.loss, first.grad_norm


@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        ("qwen-3", "none"),
        ("qwen-3", "inductor"),
        ("qwen-3-moe", "none"),
        ("gpt-oss", "none"),
        ("qwen-3.5", "none"),
    ],
)
def test_a_step_is_that_of_processors(tmp_path: Path, family: str, compiled) -> None:
    if family == "qwen-3.5":  # its states are computed by fla, and by torch on processors
        pytest.importorskip("fla")
    write_random(CONFIGS[family], tmp_path)
    config = ModelConfig(implementation="native", compile=compiled)
    found = step(tmp_path, "cuda", config)
    expected = step(tmp_path, "cpu", ModelConfig(implementation="native"))
    assert found == pytest.approx(expected, rel=2e-3)
