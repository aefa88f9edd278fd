"""A trainer whose loss needs other models: it scores a frozen reference and a teacher itself."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from cosmos_algos import GrpoConfig, KlConfig, NoCorrection, ObjectiveConfig
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import ModelConfig, Recipe
from cosmos_app.roles.run_checkpoints import RunCheckpoints
from cosmos_app.roles.step_trainer import Seat
from cosmos_app.roles.trainer import Trainer
from cosmos_app.trainer_config import TrainerConfig
from cosmos_core.messages import SampleRef, Train
from cosmos_core.trajectory import Trajectory, VersionSpan
from cosmos_parallel import LearnerConfig, ParallelConfig, SgdConfig, build_mesh
from cosmos_parallel import ModelConfig as HeldModelConfig

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=32)


def sample(sibling: int) -> Trajectory:
    return Trajectory(
        prompt_id="p",
        group="g",
        sibling=sibling,
        attempt=0,
        token_ids=np.array([3, 4, 5 + sibling], np.int32),
        logprobs=np.array([0.0, 0.0, -2.0], np.float32),
        trainable=np.array([False, False, True]),
        versions=(VersionSpan(-1, 2), VersionSpan(0, 1)),
        rewards={},
        reward=1.0,  # equal rewards: all the gradient is the penalty's
        finish_reason="stop",
    )


def train(step: int) -> Train:
    refs = tuple(
        SampleRef(sibling=i, status="completed", key=str(i), num_tokens=1, reward=1.0)
        for i in range(2)
    )
    return Train(step=step, groups=(refs,), publish=False)


@pytest.mark.parametrize("implementation", ["transformers", "native"])
def test_the_penalty_is_zero_at_the_reference_and_pulls_a_moved_policy_back(
    tmp_path: Path, implementation: Literal["transformers", "native"]
) -> None:
    torch.set_num_threads(1)
    build_tiny_model(tmp_path / "model", ["1+1=2"], TINY, seed=0)
    kl = KlConfig(coefficient=1.0)
    recipe = replace(
        Recipe(),
        algorithm=GrpoConfig(objective=ObjectiveConfig(correction=NoCorrection(), kl=kl)),
        learner=LearnerConfig(optimizer=SgdConfig(lr=0.005)),
        model=ModelConfig(tiny=TINY, training=HeldModelConfig(implementation=implementation)),
        trainer=TrainerConfig(tokens_per_batch=64),
    )
    mesh = build_mesh(ParallelConfig())
    trainer = Trainer(
        recipe,
        tmp_path / "model",
        Seat(replica_index=0, num_replicas=1, mesh=mesh),
        RunCheckpoints(tmp_path / "checkpoints", mesh),
        None,
    )
    try:
        command = train(0)
        share = trainer.share(command)
        samples = [sample(0), sample(1)]

        at_start = trainer.train(command, share, samples)
        assert at_start["kl"] == pytest.approx(0.0, abs=1e-9)
        assert at_start["grad_norm"] == pytest.approx(0.0, abs=1e-6)
        assert trainer.num_passes == 2  # of the reference and of the policy

        with torch.no_grad():
            for parameter in trainer._model.parameters():
                parameter.mul_(1.5)
        moved = [trainer.train(train(step), share, samples)["kl"] for step in range(1, 6)]
        assert moved[0] > 0.0
        assert moved[-1] < moved[0]
    finally:
        trainer.close()
