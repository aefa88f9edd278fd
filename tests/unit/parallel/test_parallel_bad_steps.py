"""Steps that must not be taken: named, counted, written down, and an end to them."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    CheckpointError,
    CheckpointStore,
    Learner,
    LearnerConfig,
    NonFiniteStepError,
    ParallelConfig,
    SgdConfig,
    TokenIdError,
    build_mesh,
    load_causal_lm,
)


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    values: torch.Tensor
    names: tuple[str, ...]


class Root(nn.Module):
    """y = sqrt(w) x: at w = 0 the value is finite and the gradient is not."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value))
        self.bias = nn.Parameter(torch.tensor(0.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.w.sqrt() * values + self.bias


def summed(model: nn.Module, batch: Rows) -> Sums:
    return Sums(model(batch.values).sum(), torch.tensor(float(len(batch.values))))


GOOD = Rows(torch.tensor([1.0, 2.0]), ("prompt 1 sample 0", "prompt 1 sample 1"))
BAD = Rows(torch.tensor([math.nan]), ("prompt 7 sample 3",))


def learner_of(model: nn.Module, **settings) -> Learner:
    return Learner(model, LearnerConfig(optimizer=SgdConfig(lr=0.1), **settings))


def test_a_loss_that_is_not_finite_names_its_samples_and_its_batch_is_written_down(tmp_path):
    model = Root(1.0)
    learner = learner_of(model, dump_directory=tmp_path / "skipped")
    report = learner.step([GOOD, BAD], summed)
    assert report.outcome == "non_finite"
    assert report.num_skipped == 1
    assert report.problem.startswith("micro-batch 1 (prompt 7 sample 3) has loss nan; written to")
    assert (model.w.item(), learner.num_updates) == (1.0, 0)
    found = torch.load(tmp_path / "skipped" / "skipped-0001-rank-0.pt", weights_only=False)
    assert [batch.names for batch in found["batches"]] == [BAD.names]
    good = learner.step([GOOD], summed)
    assert (good.outcome, good.num_skipped, good.problem) == ("updated", 1, "")


def test_a_gradient_that_is_not_finite_is_named():
    learner = learner_of(Root(0.0))
    report = learner.step([GOOD], summed)
    assert report.outcome == "non_finite"
    assert report.problem == "gradients are not finite: w"


def test_infinity_counts_as_well_and_too_many_in_a_row_end_the_run_with_the_reason():
    learner = learner_of(Root(1.0), max_non_finite_steps=1)
    endless = Rows(torch.tensor([math.inf]), ("prompt 9 sample 0",))
    assert learner.step([endless], summed).outcome == "non_finite"
    with pytest.raises(NonFiniteStepError, match=r"2 steps in a row .*prompt 9 sample 0"):
        learner.step([endless], summed)


def test_an_optimizer_never_sees_a_step_that_was_skipped():
    model = Root(1.0)
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=0.1)))
    learner.step([BAD], summed)
    assert not learner.optimizer.state
    learner.step([GOOD], summed)
    assert all(value.isfinite().all() for value in learner.optimizer.state[model.w].values())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[3, 4], [5, 64]], r"token id 64 at row 1, column 1 .*ids 0 to 63"),
        ([[3, -1]], r"token id -1 at row 0, column 1"),
    ],
)
def test_a_token_beyond_the_vocabulary_is_named_with_its_place(model_directory, ids, message):
    model = load_causal_lm(model_directory("Qwen3"), build_mesh(ParallelConfig()))
    with pytest.raises(TokenIdError, match=message):
        model(input_ids=torch.tensor(ids), use_cache=False)


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_tensor(
    model_directory, tmp_path
):
    mesh = build_mesh(ParallelConfig())
    store = CheckpointStore(tmp_path, mesh)
    store.save(0, learner_of(load_causal_lm(model_directory("Qwen3"), mesh)), b"")
    other = learner_of(load_causal_lm(model_directory("Qwen3Moe"), mesh))
    with pytest.raises(CheckpointError, match=r"of another model: model\.layers\.0\.mlp"):
        store.load(other)
    store.close()
