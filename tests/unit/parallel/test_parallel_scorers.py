"""Frozen models beside the trained one: when they run, and what a loss is told of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from cosmos_parallel import (
    Learner,
    LearnerConfig,
    MeshError,
    Pass,
    Scorer,
    SgdConfig,
    run_passes,
    scored,
)


@dataclass(frozen=True)
class Sums:
    total: torch.Tensor
    weight: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Numbers:
    """A batch of numbers, with what frozen models make of them."""

    x: torch.Tensor
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Scale(nn.Module):
    """y = w x, which notes when it runs."""

    def __init__(self, value: float, events: list[str], name: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))
        self.events = events
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append(f"{self.name} {x.sum().item():g}")
        return self.w * x


class Together(Scale):
    """The same, all passes at once, as a pipeline takes them."""

    least_passes = 2

    def run_passes(self, passes, loss, on_result) -> None:
        self.events.append(f"{self.name} takes {len(passes)}")
        for each in passes:
            result = loss(self, each.batch)
            on_result(each, result)
            if torch.is_grad_enabled():
                (result.total * float(each.counts)).backward()

    def score_passes(self, passes, score):
        assert not torch.is_grad_enabled()
        self.events.append(f"{self.name} scores {len(passes)}")
        return [score(self, each.batch) for each in passes]


def scorer(model: nn.Module, name: str, most_kept: int | None = None) -> Scorer[Numbers]:
    def join(batch: Numbers, scores: Mapping[str, torch.Tensor]) -> Numbers:
        return replace(batch, scores={**batch.scores, **scores})

    def score(frozen: nn.Module, batch: Numbers) -> Mapping[str, torch.Tensor]:
        return {name: frozen(batch.x)}

    return Scorer(model=model, score=score, join=join, most_kept=most_kept)


def distance(model: nn.Module, batch: Numbers) -> Sums:
    """Half the square of the distance to the sum of all scores."""
    goal = torch.stack(list(batch.scores.values())).sum(0)
    total = 0.5 * (model(batch.x) - goal).square().sum()
    return Sums(total, torch.tensor(float(batch.x.numel())), {"goal": goal.sum()})


BATCHES = [Numbers(torch.tensor([1.0, 2.0])), Numbers(torch.tensor([4.0]))]


def test_a_plain_model_scores_each_batch_inside_its_pass():
    events: list[str] = []
    trained = Scale(1.0, events, "policy")
    scorers = [
        scorer(Scale(2.0, events, "reference"), "r"),
        scorer(Scale(3.0, events, "teacher"), "t"),
    ]
    learner = Learner(trained, LearnerConfig(optimizer=SgdConfig(lr=1.0), max_grad_norm=1e9))
    report = learner.step(BATCHES, distance, scorers=scorers)
    assert events == [f"{name} {x}" for x in (3, 4) for name in ("reference", "teacher", "policy")]
    # w - 5 times the squares 1, 4 and 16, over three numbers
    assert report.grad_norm == pytest.approx(4.0 * 21.0 / 3.0)
    assert report.metrics == {"goal": 35.0}
    assert all(each.model.w.grad is None for each in scorers)


def test_an_evaluation_has_the_scores_too():
    learner = Learner(Scale(1.0, [], "policy"), LearnerConfig())
    found = learner.evaluate(BATCHES, distance, scorers=[scorer(Scale(2.0, [], "reference"), "r")])
    assert found.loss == pytest.approx(0.5 * 21.0 / 3.0)


def test_a_model_that_takes_all_passes_finds_them_scored():
    events: list[str] = []
    scorers = [
        scorer(Together(2.0, events, "reference"), "r"),
        scorer(Scale(3.0, events, "teacher"), "t"),  # one that can be called by itself
    ]
    learner = Learner(
        Together(1.0, events, "policy"), LearnerConfig(optimizer=SgdConfig(), max_grad_norm=1e9)
    )
    report = learner.step(BATCHES, distance, scorers=scorers)
    assert report.grad_norm == pytest.approx(4.0 * 21.0 / 3.0)
    assert [event for event in events if event.split()[1] in ("takes", "scores")] == [
        "reference scores 2",
        "policy takes 2",
    ]
    assert events.index("teacher 4") < events.index("policy takes 2")


@pytest.mark.parametrize(("most_kept", "parts"), [(1, [2, 2, 1]), (3, [3, 2]), (None, [5])])
def test_large_scores_are_kept_of_few_passes_and_at_least_of_as_many_as_fill_it(most_kept, parts):
    events: list[str] = []
    passes = [Pass(Numbers(torch.tensor([float(n)]))) for n in range(5)]
    run_passes(
        Together(1.0, events, "policy"),
        passes,
        distance,
        lambda each, result: events.append(f"given {each.batch.x.item():g}"),
        scorers=[scorer(Together(2.0, events, "teacher"), "t", most_kept)],
    )
    taken = [event for event in events if "takes" in event or "scores" in event]
    assert taken == [f"{who} {n}" for n in parts for who in ("teacher scores", "policy takes")]
    assert [event for event in events if "given" in event] == [f"given {n}" for n in range(5)]


def test_stages_cannot_score_for_a_model_without_stages():
    with pytest.raises(MeshError, match="a Together scores for a Scale, which is not cut into"):
        run_passes(
            Scale(1.0, [], "policy"),
            [Pass(BATCHES[0])],
            distance,
            lambda each, result: None,
            scorers=[scorer(Together(2.0, [], "teacher"), "t")],
        )


def test_scores_of_no_pass_cannot_be_kept():
    with pytest.raises(ValueError, match="most_kept is 0"):
        scorer(Scale(1.0, [], "teacher"), "t", most_kept=0)


def test_scores_have_no_gradient():
    batch = scored(BATCHES[0], [scorer(Scale(2.0, [], "teacher"), "t")])
    assert batch.scores["t"].tolist() == [2.0, 4.0]
    assert not batch.scores["t"].requires_grad
