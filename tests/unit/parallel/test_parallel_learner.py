"""The learner on one process, against steps worked out by hand or by a plain loop."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    LossContractError,
    MeshError,
    NoBatchError,
    NonFiniteStepError,
    OptimizerError,
    ParallelConfig,
    ProcessContext,
    ScheduleConfig,
    SgdConfig,
    TrainingMesh,
    tell_passes,
)


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Scale(nn.Module):
    """y = w x, so that the gradient of a sum of y is the sum of x."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


def sum_loss(model: nn.Module, batch: torch.Tensor) -> Sums:
    total = model(batch).sum()
    return Sums(total, torch.tensor(float(batch.numel())), {"inputs": batch.sum()})


NEVER_CLIP = math.inf
TOTAL = torch.zeros((), requires_grad=True)


def sgd(lr: float = 1.0, max_grad_norm: float = NEVER_CLIP, **kwargs: int) -> LearnerConfig:
    return LearnerConfig(optimizer=SgdConfig(lr=lr), max_grad_norm=max_grad_norm, **kwargs)


def test_gradient_is_the_sum_over_micro_batches_divided_once_by_the_whole_weight():
    model = Scale()
    learner = Learner(model, sgd())
    # three tokens in one batch and one in the other: (1 + 2 + 3 + 10) / 4, not the mean of means
    report = learner.step([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])], sum_loss)
    assert model.w.item() == pytest.approx(-4.0)
    assert report.grad_norm == pytest.approx(4.0)
    assert report.weight == 4.0
    assert report.num_passes == 2
    assert report.metrics == {"inputs": 16.0}
    assert report.mean("inputs") == 4.0
    assert report.mean("inputs", over="inputs") == 1.0
    assert report.per_second("inputs") == pytest.approx(16.0 / report.seconds)


def test_a_model_or_its_stages_tell_of_each_pass_in_training_and_in_evaluation():
    told: list[None] = []
    model, cut = Scale(), nn.Module()
    cut.stages = nn.ModuleList([Scale(), Scale()])
    tell_passes(lambda: told.append(None), model, None, cut)
    learner, batches = Learner(model, sgd()), [torch.tensor([1.0]), torch.tensor([2.0])]
    learner.step(batches, sum_loss)
    learner.evaluate(batches, sum_loss)
    assert len(told) == 4
    for stage in cut.stages:
        stage(torch.tensor([1.0]))
    assert len(told) == 6


def test_reported_loss_is_taken_before_the_update():
    learner = Learner(Scale(2.0), sgd())
    assert learner.step([torch.tensor([1.0, 3.0])], sum_loss).loss == pytest.approx(4.0)


def test_clipping_scales_the_normalised_gradient_to_the_norm():
    model = Scale()
    report = Learner(model, sgd(max_grad_norm=0.5)).step([torch.tensor([4.0])], sum_loss)
    assert report.grad_norm == pytest.approx(4.0)
    assert model.w.item() == pytest.approx(-0.5, abs=1e-6)


def test_a_step_without_weight_changes_nothing_and_says_so():
    model = Scale(1.0)
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=0.1, weight_decay=0.5)))
    empty = torch.zeros(0)
    report = learner.step([empty], sum_loss)
    assert (report.outcome, report.loss, report.weight) == ("no_weight", 0.0, 0.0)
    assert model.w.item() == 1.0
    assert learner.num_updates == 0


def test_no_batches_at_all_is_a_step_without_weight():
    report = Learner(Scale(), sgd()).step([], sum_loss)
    assert (report.outcome, report.num_passes) == ("no_weight", 0)


def test_filler_counts_for_nothing():
    model = Scale()
    learner = Learner(model, sgd())
    report = learner.step([], sum_loss, filler=torch.tensor([5.0]))
    assert (report.outcome, report.num_passes, report.metrics) == ("no_weight", 1, {"inputs": 0.0})
    assert model.w.item() == 0.0


def test_a_non_finite_step_is_skipped_and_too_many_in_a_row_are_an_error():
    model = Scale(1.0)
    learner = Learner(model, sgd(max_non_finite_steps=1))
    bad = [torch.tensor([math.nan])]
    assert learner.step(bad, sum_loss).outcome == "non_finite"
    assert learner.step([torch.tensor([1.0])], sum_loss).outcome == "updated"
    assert learner.step(bad, sum_loss).outcome == "non_finite"
    assert model.w.item() == 0.0
    with pytest.raises(NonFiniteStepError, match="2 steps in a row"):
        learner.step(bad, sum_loss)


def test_adamw_equals_a_plain_loop_over_five_steps():
    torch.manual_seed(0)
    data = [torch.randn(8, 3) for _ in range(5)]
    ours, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(ours.state_dict())
    config = AdamWConfig(lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    learner = Learner(ours, LearnerConfig(optimizer=config, max_grad_norm=0.3))
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, foreach=False
    )

    def loss(model: nn.Module, batch: torch.Tensor) -> Sums:
        return Sums(model(batch).square().sum(), torch.tensor(float(len(batch))))

    for batch in data:
        report = learner.step([batch[:3], batch[3:]], loss)
        value = plain(batch).square().sum() / 8
        optimizer.zero_grad()
        value.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3, foreach=False)
        optimizer.step()
        assert report.loss == pytest.approx(value.item(), rel=1e-6)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_frozen_parameters_stay():
    model = nn.Sequential(Scale(2.0), Scale(3.0))
    model[0].w.requires_grad_(False)
    Learner(model, sgd()).step([torch.tensor([1.0])], sum_loss)
    assert model[0].w.item() == 2.0
    assert model[1].w.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Sums(torch.zeros(2), torch.ones(())), "total that is no scalar"),
        (Sums(torch.zeros((), requires_grad=True), 1.0), "weight that is no scalar"),
        (Sums(torch.zeros(()), torch.ones(())), "without gradient"),
        (Sums(TOTAL, torch.ones(()), {"hits": 1.0}), r"metric 'hits' that is no scalar.*float"),
        (Sums(TOTAL, torch.ones(()), {"hits": torch.ones(2)}), r"metric 'hits'.*shape \(2,\)"),
        (Sums(TOTAL, torch.ones(()), None), "metrics that are a NoneType"),
        (TOTAL, "a Tensor without total, weight, metrics; it must have total"),
        ((TOTAL, torch.ones(())), "a tuple without total"),
    ],
)
def test_a_loss_that_is_not_a_sum_with_weight_is_refused(result, message):
    with pytest.raises(LossContractError, match=message):
        Learner(Scale(), sgd()).step([torch.ones(1)], lambda model, batch: result)


def test_what_is_no_list_of_batches_and_a_model_with_nothing_to_train_are_refused():
    learner = Learner(Scale(), sgd())
    for take in (learner.step, learner.evaluate):
        with pytest.raises(NoBatchError, match=r"a dictionary stands for the list.*\[batch\]"):
            take({"x": torch.ones(1)}, sum_loss)
        with pytest.raises(NoBatchError, match=r"a tensor \(2, 3\) stands for the list.*\[batch\]"):
            take(torch.ones(2, 3), sum_loss)  # whose rows are no micro-batches
    assert learner.step((batch for batch in [torch.ones(2)]), sum_loss).weight == 2.0
    with pytest.raises(OptimizerError, match="Scale has nothing to train"):
        Learner(Scale().requires_grad_(False), sgd())


def test_a_model_that_was_not_sharded_is_refused_where_ranks_have_different_data():
    mesh = TrainingMesh(ParallelConfig().resolve(2), ProcessContext(), None)
    with pytest.raises(MeshError, match=r"w is not sharded \(1 of 1 .*each of the 2 ranks would"):
        Learner(Scale(), sgd(), mesh=mesh)


@pytest.mark.parametrize(
    ("shape", "factors"),
    [
        # two warm-up updates, then four of decay from 1 to 0.2
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.317157, 0.2]),
    ],
)
def test_schedule(shape, factors):
    schedule = ScheduleConfig(shape=shape, num_warmup_steps=2, num_steps=6, final_factor=0.2)
    assert [schedule.factor(i) for i in range(7)] == pytest.approx(factors, abs=1e-5)


def test_learning_rate_follows_updates_and_not_steps():
    schedule = ScheduleConfig(num_warmup_steps=4)
    learner = Learner(Scale(), LearnerConfig(optimizer=SgdConfig(lr=1.0, schedule=schedule)))
    rates = [learner.step(b, sum_loss).lr for b in ([torch.ones(1)], [], [torch.ones(1)])]
    assert rates == [0.25, 0.5, 0.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LearnerConfig(max_grad_norm=0.0), "above 0"),
        (lambda: LearnerConfig(max_non_finite_steps=-1), "0 or more"),
        (lambda: ScheduleConfig(shape="cosine", num_warmup_steps=5, num_steps=5), "num_steps"),
        (lambda: ScheduleConfig(num_warmup_steps=-1), "0 or more"),
    ],
)
def test_impossible_configs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
