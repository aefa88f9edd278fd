"""Steps of several updates: a lost replica undoes them all, anything else none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    EmaConfig,
    Learner,
    LearnerConfig,
    MuonConfig,
    OptimizerConfig,
    ReplicaLostError,
    SgdConfig,
    whole_step,
)
from cosmos_parallel.learner_state import parts_of

OPTIMIZERS = {
    "adamw": AdamWConfig(lr=0.1),
    "momentum": SgdConfig(lr=0.1, momentum=0.9),
    "muon": MuonConfig(lr=0.1),
}


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


def squares(model: nn.Module, batch: torch.Tensor) -> Sums:
    return Sums(model(batch).square().sum(), torch.tensor(float(len(batch))))


def learner_with(optimizer: OptimizerConfig) -> Learner:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    return Learner(model, LearnerConfig(optimizer=optimizer, ema=EmaConfig(decay=0.9)))


def update(learner: Learner, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    learner.step([torch.randn(3, 6, generator=generator)], squares)


def broken_off(learner: Learner, numbers: Sequence[int], error: Exception) -> None:
    with whole_step(learner):
        for number in numbers:
            update(learner, number)
        raise error


def state(learner: Learner) -> dict[str, torch.Tensor]:
    parts = parts_of(learner, learner.mesh.process)
    return {name: part.clone() for name, part in parts.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_lost_replica_undoes_all_updates_of_the_step(optimizer: OptimizerConfig) -> None:
    learner, undisturbed = learner_with(optimizer), learner_with(optimizer)
    for step in range(3):
        before = state(learner)
        with pytest.raises(ReplicaLostError, match="gone"):
            broken_off(learner, (2 * step, 7), ReplicaLostError("gone"))
        after = state(learner)
        assert after.keys() == before.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        for one in (learner, undisturbed):
            with whole_step(one):
                update(one, 2 * step)
                update(one, 2 * step + 1)
    expected, found = state(undisturbed), state(learner)
    assert int(found["num_updates"]) == 6
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_what_was_skipped_in_the_step_is_not_counted_any_more() -> None:
    learner = learner_with(AdamWConfig(lr=0.1))
    counts: list[tuple[int, int]] = []

    def skip() -> None:
        learner.step([torch.full((1, 6), torch.inf)], squares)
        counts.append((learner.num_skipped, learner.num_skipped_in_a_row))

    def broken_off_after_another() -> None:
        with whole_step(learner):
            skip()
            raise ReplicaLostError("gone")

    skip()
    with pytest.raises(ReplicaLostError, match="gone"):
        broken_off_after_another()
    assert counts == [(1, 1), (2, 2)]
    assert (learner.num_skipped, learner.num_skipped_in_a_row) == (1, 1)


def test_another_error_undoes_nothing() -> None:
    learner = learner_with(AdamWConfig(lr=0.1))
    with pytest.raises(ZeroDivisionError):
        broken_off(learner, (0,), ZeroDivisionError())
    assert learner.num_updates == 1
