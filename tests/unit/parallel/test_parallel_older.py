"""A checkpoint that an earlier version wrote is gone on with.

``older/checkpoint-format-1.tar.xz`` was written by 1291958, of 2026-11-24: two steps of AdamW from
a ``nn.Linear(3, 1)`` of seed 0. That version took the two steps behind it to the numbers below.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    CheckpointError,
    CheckpointStore,
    Learner,
    LearnerConfig,
    ParallelConfig,
    SftLoss,
    build_mesh,
)

LOSSES = [0.8211707472801208, 1.4759376049041748]
WEIGHT = [-0.028916412964463234, 0.27246716618537903, -0.44209688901901245]
BIAS = -0.4130997061729431


@pytest.fixture
def store(tmp_path):
    with tarfile.open(Path(__file__).parent / "older" / "checkpoint-format-1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    store = CheckpointStore(tmp_path, build_mesh(ParallelConfig()))
    yield store
    store.close()


def loss(model: nn.Module, batch: torch.Tensor) -> SftLoss:
    return SftLoss(total=model(batch).square().sum(), weight=torch.tensor(1.0), metrics={})


def make_learner() -> Learner:
    return Learner(nn.Linear(3, 1), LearnerConfig(optimizer=AdamWConfig(lr=0.01)))


def test_a_checkpoint_of_format_1_is_gone_on_with(store):
    learner = make_learner()
    found = store.load(learner)
    assert (found.step, len(found.extra)) == (2, 109)
    losses = []
    for step in (2, 3):
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        losses.append(learner.step([batch], loss).loss)
    assert losses == pytest.approx(LOSSES, rel=1e-5)
    parameters = dict(learner.model.named_parameters())
    assert parameters["weight"].tolist()[0] == pytest.approx(WEIGHT, rel=1e-5)
    assert parameters["bias"].item() == pytest.approx(BIAS, rel=1e-5)


def test_a_checkpoint_of_a_later_format_says_so(store, tmp_path):
    manifest = tmp_path / "step-00000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="has format 2; this version reads 1"):
        store.load(make_learner())
