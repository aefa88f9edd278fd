"""Pipelines whose steps tests compare with those of one process, and the model that they divide."""

from collections.abc import Collection, Iterable

import pytest

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
STAGED = {
    "pp2": (2, {"pp": 2}),
    "pp2-interleaved": (2, {"pp": 2, "pp_schedule": "Interleaved1F1B"}),
    "pp2-zero-bubble": (2, {"pp": 2, "pp_schedule": "ZBVZeroBubble"}),
    "fsdp2-pp2": (4, {"pp": 2}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
}
# one schedule of one stage a rank, one of two, and ranks whose numbers of batches differ
STAGED_IN_CI = ("pp2", "pp2-zero-bubble", "fsdp2-pp2")


def selected(config: pytest.Config, layouts: Iterable[str], in_ci: Collection[str]) -> list[str]:
    """Return what a run of the tests has of some layouts, as ``--parallel-axes`` says."""
    return list(layouts if config.getoption("--parallel-axes") == "all" else in_ci)
