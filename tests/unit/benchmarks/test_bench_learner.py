"""The bubble benchmark's learner: real steps of a tiny transformer that end when they should."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from async_bubbles import Place, make_place
from async_learner import TinyLearner
from async_paced import PacedTrainer, open_diary

from cosmos_algos import GrpoConfig
from cosmos_app.step_share import share_of_step
from cosmos_core.messages import SampleRef, Train
from cosmos_core.simulation import Span, StepTaken, SystemConfig, read_log
from cosmos_core.trajectory import UNSAMPLED, Trajectory, VersionSpan

PROMPT, ANSWER, STEP_S = 8, 40, 0.6
TOKEN, END = 5, 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("bench"), "redis://nobody")


def sampled(sibling: int) -> Trajectory:
    """Return an answer as a paced engine gives it: one token again and again, and the end."""
    size = PROMPT + ANSWER
    return Trajectory(
        prompt_id="0",
        group="train.0.0",
        sibling=sibling,
        attempt=0,
        token_ids=np.array([TOKEN] * (size - 1) + [END], dtype=np.int32),
        logprobs=np.where(np.arange(size) >= PROMPT, -1.0, 0.0).astype(np.float32),
        trainable=np.arange(size) >= PROMPT,
        versions=(VersionSpan(UNSAMPLED, PROMPT), VersionSpan(0, ANSWER)),
        rewards={"exact": 0.0},
        reward=0.0,
        finish_reason="stop",
    )


def a_step(num_samples: int) -> tuple[Train, list[Trajectory]]:
    refs = tuple(
        SampleRef(
            sibling=sibling,
            status="completed",
            key=str(sibling),
            num_tokens=ANSWER,
            length=PROMPT + ANSWER,
        )
        for sibling in range(num_samples)
    )
    return Train(step=0, groups=(refs,), publish=True), [sampled(s) for s in range(num_samples)]


def test_a_step_changes_what_is_published_and_ends_at_its_time(place: Place) -> None:
    """All rewards are alike, so that a policy gradient would be nothing."""
    learner = TinyLearner(place.files)
    train, trajectories = a_step(4)
    share = share_of_step(train, GrpoConfig().build(), index=0, num_shares=1)
    before = [shard.tensor.detach().clone() for shard in learner.shards]
    passed: list[float] = []
    until_s = time.monotonic() + STEP_S
    learner.step(share, trajectories, version=0, until_s=until_s, passed=passed.append)
    late_s = time.monotonic() - until_s
    after = [shard.tensor.detach() for shard in learner.shards]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert late_s >= 0
    assert passed[0] >= until_s - 0.05  # it was the sleep that came last, and then the update


def test_a_step_longer_than_its_time_is_not_padded(place: Place) -> None:
    learner, (train, trajectories) = TinyLearner(place.files), a_step(1)
    share = share_of_step(train, GrpoConfig().build(), index=0, num_shares=1)
    begun_s = time.monotonic()
    learner.step(share, trajectories, version=0, until_s=begun_s, passed=lambda _: None)
    assert time.monotonic() > begun_s


def test_a_paced_trainer_writes_the_parts_of_a_step_and_publishes_it(
    place: Place, tmp_path: Path
) -> None:
    train, trajectories = a_step(2)
    system = SystemConfig(train_s=STEP_S)
    diary = open_diary("policy", "policy-0", tmp_path / "spans")
    trainer = PacedTrainer(system, TinyLearner(place.files), diary, tmp_path)
    trainer.train(train, trainer.share(train), trajectories)
    trainer.save(b"")
    trainer.close()
    diary.close()
    log = read_log(list((tmp_path / "spans").iterdir()))
    spans = [record for record in log if isinstance(record, Span)]
    assert [span.activity for span in spans] == [
        *("wait_data", "fwd_bwd", "optim", "push_exposed", "wait_data", "checkpoint"),
    ]
    taken_s = spans[2].end_s - spans[1].start_s
    assert taken_s >= STEP_S
    (step,) = [record for record in log if isinstance(record, StepTaken)]
    assert step.end_s - step.start_s >= taken_s
    assert trainer.version == 1
