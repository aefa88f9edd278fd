"""A GRPO and a DAPO step equal what TRL's ``GRPOTrainer`` documents, by loops in float64.

TRL: A = (r - mean) / (std + 1e-4) with ddof 1 over a group; a token's loss is
-min(c A, clip(c, 1 - ε_low, 1 + ε_high) A), c = exp(log π - log π_old); ``loss_type="grpo"`` takes
the mean over samples of their means over tokens, ``"dapo"`` the mean over all tokens of the step.
The library itself is not run here.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cosmos_algos import (
    ClipConfig,
    DapoConfig,
    GrpoConfig,
    NoCorrection,
    ObjectiveConfig,
    Share,
    policy_objective,
    scores_from_logits,
)
from cosmos_core.trajectory import Trajectory, VersionSpan

VOCABULARY = 7
REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0]
LENGTHS = [3, 5, 1, 4, 2, 6]  # of responses; groups of three
PROMPT = 2
CLIPS = (0.2, 0.28)


def samples() -> list[Trajectory]:
    generator = np.random.default_rng(0)
    found = []
    for index, (reward, length) in enumerate(zip(REWARDS, LENGTHS, strict=True)):
        trained = np.arange(PROMPT + length) >= PROMPT
        found.append(
            Trajectory(
                prompt_id=f"p{index // 3}",
                group=f"g{index // 3}",
                sibling=index % 3,
                attempt=0,
                token_ids=generator.integers(0, VOCABULARY, PROMPT + length).astype(np.int32),
                logprobs=np.where(trained, -1.5, 0.0).astype(np.float32),
                trainable=trained,
                versions=(VersionSpan(-1, PROMPT), VersionSpan(0, length)),
                rewards={},
                reward=reward,
                finish_reason="stop",
            )
        )
    return found


def loop(tables, olds, kind: str, eps: float) -> float:
    """Return TRL's loss; ``tables[i][t]`` are logits before token t of sample i."""
    total, num_tokens = 0.0, sum(LENGTHS)
    for index, sample in enumerate(samples()):
        group = REWARDS[index // 3 * 3 : index // 3 * 3 + 3]
        mean = sum(group) / 3
        std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / 2)
        advantage = (REWARDS[index] - mean) / (std + eps)
        losses = []
        for place in range(PROMPT, PROMPT + LENGTHS[index]):
            logits = tables[index][place - 1]
            norm = math.log(sum(math.exp(x) for x in logits))
            ratio = math.exp(logits[sample.token_ids[place]] - norm - olds[index][place - 1])
            held = min(max(ratio, 1 - CLIPS[0]), 1 + CLIPS[1])
            losses.append(-min(ratio * advantage, held * advantage))
        total += sum(losses) / (len(losses) * 6 if kind == "grpo" else num_tokens)
    return total


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_loss_and_gradient_are_those_of_trl(kind: str) -> None:
    objective = ObjectiveConfig(
        surrogate=ClipConfig(low=CLIPS[0], high=CLIPS[1]), correction=NoCorrection()
    )
    config = GrpoConfig if kind == "grpo" else DapoConfig
    algorithm = config(objective=objective).build()
    trajectories = samples()
    batches = algorithm.batches(trajectories, Share(max_tokens=16), policy_version=0)
    assert len(batches) > 1  # micro-batches, divided once
    generator = torch.Generator().manual_seed(1)
    width = max(map(len, (t.token_ids for t in trajectories)))
    table = torch.randn(6, width, VOCABULARY, generator=generator, dtype=torch.float64)
    table.requires_grad_()
    olds = torch.randn(6, width, generator=generator, dtype=torch.float64) * 0.3 - 1.9
    numbers = {f"group g{i // 3} sibling {i % 3}": i for i in range(6)}
    total, weight, num_clipped = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for batch in batches:
        rows = torch.tensor([numbers[name] for name in batch.names])
        columns = batch.token_ids.shape[1]
        scored = replace(batch, old_logprobs=olds[rows, :columns])
        scores = scores_from_logits(table[rows, :columns], batch.targets)
        part = policy_objective(scores, scored, objective)
        total, weight = total + part.total, weight + float(part.weight)
        num_clipped += float(part.metrics["clipped"])
    assert 0 < num_clipped < sum(LENGTHS)
    found = total / weight
    found.backward()

    values, old_values = table.detach().tolist(), olds.tolist()
    # TRL's 1e-4 beside our 1e-6 under the standard deviation, which is 0.5 and more here
    assert found.item() == pytest.approx(loop(values, old_values, kind, eps=1e-4), rel=3e-4)
    assert found.item() == pytest.approx(loop(values, old_values, kind, eps=1e-6), rel=1e-5)
    step = 1e-6
    for place in [(0, 1, 3), (1, 4, 0), (3, 2, 5), (4, 2, 1), (5, 6, 2), (5, 7, 2), (2, 0, 0)]:
        row, column, token = place
        above, below = (
            [[list(logits) for logits in sample] for sample in values] for _ in range(2)
        )
        above[row][column][token] += step
        below[row][column][token] -= step
        slope = loop(above, old_values, kind, 1e-6) - loop(below, old_values, kind, 1e-6)
        assert table.grad[place].item() == pytest.approx(slope / (2 * step), rel=1e-4, abs=1e-8)
