"""Ranks that train mixtures on rows that go through none of some parts; others' rows do.

python idle_ranks.py DIRECTORY < cases, as of parallel_pool.py.
"""

from pathlib import Path

import torch
from parallel_pool import loss, run_pool

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    ProcessContext,
    build_mesh,
    load_causal_lm,
)

NUM_STEPS = 3
NUM_TOKENS = 64


def rows(tokens: torch.Tensor) -> dict:
    """Return a micro-batch of which every token is kept."""
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
    return {
        "tokens": tokens,
        "kept": torch.ones_like(tokens, dtype=torch.bool),
        "positions": positions,
    }


def idle_token(model: torch.nn.Module) -> int:
    """Return a token of which a row leaves a part without a gradient; alike ones go alike ways."""
    for token in range(3, NUM_TOKENS):
        batch = rows(torch.full((1, 3), token))
        model.zero_grad()
        loss(model, batch).total.backward()
        parts = [
            value.grad
            for name, value in model.named_parameters()
            if "gate_up_proj" in name or "compressor.kv_proj" in name
        ]
        assert all(grad is not None for grad in parts)
        if not all(grad.any() for grad in parts):
            return token
    raise AssertionError


def work(case: dict, directory: Path, process: ProcessContext) -> dict:
    """Train on a row of each kind; every rank of the case calls."""
    config = ModelConfig(
        implementation="transformers",
        activation_checkpointing=case.get("checkpointing", "none"),
        lora=LoraConfig(rank=4) if case.get("lora") else None,
    )
    mesh = build_mesh(ParallelConfig(**case["degrees"]), process)
    model = load_causal_lm(directory / case["model"], mesh, config)
    kept = directory / f"{case['model']}.token"  # found by the first case, of one process
    if not kept.exists():
        kept.write_text(str(idle_token(model)))
    idle = rows(torch.full((1, 3), int(kept.read_text())))
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=1e-3)), mesh=mesh)
    generator = torch.Generator().manual_seed(0)
    busy = rows(torch.randint(3, NUM_TOKENS, (2, 24), generator=generator))
    batches = [idle, busy]
    reports = []
    for _ in range(NUM_STEPS):
        report = learner.step(batches[mesh.data_rank :: mesh.data_size], loss, filler=idle)
        reports.append([report.loss, report.grad_norm])
    return {"reports": reports}


if __name__ == "__main__":
    run_pool(work)
