"""Corrections, rejections, anchors and bonuses on random samples, against loops over Python floats.

A loop has two columns of log-probabilities: those that a gradient goes through, and the same held
fixed where the formula has a stop-gradient. So its finite differences are the formula's gradient.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from cosmos_algos import (
    AggregationConfig,
    ClipConfig,
    IcePopConfig,
    ImportanceConfig,
    MisConfig,
    NoCorrection,
    ObjectiveConfig,
    OffPolicyMask,
    RatioMask,
    StalenessMask,
    TisConfig,
    TokenBatch,
    TokenScores,
    WorstTokenMask,
    batch_of_targets,
    empty_batch,
    imitation_weights,
    policy_objective,
    sample_weights,
    scores_from_logits,
)

WIDTH = 14
# samples of each row by their columns: packed rows, and trained tokens with gaps between them
ROWS = (
    ((0, 1, 2, 4), (6, 7), (9, 10, 12, 13)),
    ((1, 2, 3, 5, 6, 7, 8, 9), (12,)),
    ((3, 4, 6), (8, 9, 10, 11, 12, 13)),
)
SAMPLES = [[(row, column) for column in one] for row, line in enumerate(ROWS) for one in line]
PLACES = [place for sample in SAMPLES for place in sample]


@dataclass
class Token:
    """What a loop knows of one trained token; ``held`` is log π without gradient."""

    held: float
    behaviour: float
    old: float
    advantage: float
    lag: int
    weight: float


def tokens_of(seed: int) -> dict[tuple[int, int], Token]:
    draw, found = random.Random(seed), {}
    for sample in SAMPLES:
        advantage, shift = draw.gauss(0.0, 1.0), draw.gauss(0.0, 0.15)
        for place in sample:
            behaviour = -0.5 - 2.0 * draw.random()
            old = behaviour + shift + draw.gauss(0.0, 0.4)
            held, lag, weight = old + draw.gauss(0.0, 0.25), draw.randrange(5), draw.random()
            found[place] = Token(held, behaviour, old, advantage, lag, weight)
    return found


def batch_of(tokens: dict[tuple[int, int], Token], *, with_old: bool) -> TokenBatch:
    """Return the rows in float64, with numbers that mean nothing in between."""

    def column(value: Callable[[Token], float], elsewhere: float) -> torch.Tensor:
        values = torch.full((len(ROWS), WIDTH), elsewhere, dtype=torch.float64)
        for place, token in tokens.items():
            values[place] = value(token)
        return values

    segments = torch.zeros(len(ROWS), WIDTH, dtype=torch.long)
    for row, line in enumerate(ROWS):
        for number, one in enumerate(line):
            segments[row, one[0] :] = number
    return replace(
        empty_batch(num_tokens=WIDTH, num_rows=len(ROWS)),
        trainable=column(lambda _: 1.0, 0.0).bool(),
        behaviour_logprobs=column(lambda token: token.behaviour, 7.0),
        old_logprobs=column(lambda token: token.old, -9.0) if with_old else None,
        advantages=column(lambda token: token.advantage, 3.0),
        lags=column(lambda token: token.lag, 9.0).long(),
        token_weights=column(lambda token: token.weight, 5.0),
        denominators=torch.ones(len(ROWS), dtype=torch.float64),
        segments=segments,
    )


def ratios(level: str, logs: Sequence[float]) -> list[float]:
    if level == "token":
        return [math.exp(x) for x in logs]
    whole = math.exp(sum(logs))
    return [whole if level == "sequence" else whole ** (1.0 / len(logs))] * len(logs)


def weights(config, logs: Sequence[float]) -> list[float]:
    """Return what multiplies each token of a sample, from its log ρ."""
    match config:
        case NoCorrection():
            return [1.0] * len(logs)
        case ImportanceConfig():
            return ratios(config.level, logs)
        case TisConfig():
            return [min(max(x, config.floor), config.cap) for x in ratios(config.level, logs)]
        case IcePopConfig():
            found = ratios("token", logs)
        case MisConfig():
            found = ratios(config.level, logs)
    return [x if config.low <= x <= config.high else 0.0 for x in found]


def keeps(rejection, sample: Sequence[Token], logs: Sequence[float]) -> list[bool]:
    """Return which tokens of a sample stay, from its log ρ."""
    match rejection:
        case RatioMask():
            return [rejection.low <= x <= rejection.high for x in ratios(rejection.level, logs)]
        case WorstTokenMask():
            whole = all(rejection.low <= math.exp(x) <= rejection.high for x in logs)
        case OffPolicyMask():
            away = sum(token.behaviour - token.held for token in sample) / len(sample)
            whole = not (sample[0].advantage < 0.0 and away > rejection.bound)
        case StalenessMask():
            return [token.lag <= rejection.max_lag for token in sample]
    return [whole] * len(sample)


def proximal(token: Token, anchor: str, *, with_old: bool) -> float:
    """Return log π_old: A-3PO's α = (v_old - v_μ)/(v_π - v_μ), of the version before the last."""
    if anchor == "behaviour":
        return token.behaviour
    if anchor == "interpolated" and token.lag:
        share = (token.lag - 1) / token.lag
        return (1.0 - share) * token.behaviour + share * token.held
    return token.old if with_old and anchor == "old" else token.held


def factors(tokens, objective: ObjectiveConfig, *, with_old: bool) -> dict[tuple[int, int], float]:
    """Return the weight of each token by correction and rejections."""
    found = {}
    for places in SAMPLES:
        sample = [tokens[place] for place in places]
        olds = [proximal(token, objective.anchor, with_old=with_old) for token in sample]
        logs = [old - token.behaviour for old, token in zip(olds, sample, strict=True)]
        mine = weights(objective.correction, logs)
        for rejection in objective.rejections:
            kept = keeps(rejection, sample, logs)
            mine = [w if keep else 0.0 for w, keep in zip(mine, kept, strict=True)]
        found |= dict(zip(places, mine, strict=True))
    return found


def looped(tokens, logprobs, objective: ObjectiveConfig, *, with_old: bool) -> float:
    """Return Σ w_t weight_t · -min(r A, clip(r) A), r = exp(log π - sg log π_old)."""
    clip, total = objective.surrogate, 0.0
    for place, factor in factors(tokens, objective, with_old=with_old).items():
        token = tokens[place]
        r = math.exp(logprobs[place] - proximal(token, objective.anchor, with_old=with_old))
        cut = min(max(r, 1.0 - clip.low), 1.0 + clip.high)
        total -= token.weight * factor * min(r * token.advantage, cut * token.advantage)
    return total


def slopes(function: Callable[[dict], float], at: dict, step: float = 1e-6) -> dict:
    """Return central differences in each entry."""
    found = {}
    for name, value in at.items():
        above, below = function({**at, name: value + step}), function({**at, name: value - step})
        found[name] = (above - below) / (2.0 * step)
    return found


CORRECTIONS = {
    "none": NoCorrection(),
    **{f"importance-{x}": ImportanceConfig(level=x) for x in ("token", "sequence", "geometric")},
    "tis-token": TisConfig(cap=1.3, floor=0.8),
    "tis-sequence": TisConfig(cap=1.5, floor=0.6, level="sequence"),
    "tis-geometric": TisConfig(cap=1.05, floor=0.9, level="geometric"),
    "icepop": IcePopConfig(low=0.7, high=1.4),
    "mis-sequence": MisConfig(low=0.6, high=1.5),
    "mis-geometric": MisConfig(low=0.9, high=1.1, level="geometric"),
}
REJECTIONS = {
    "ratio-token": (RatioMask(level="token", low=0.7, high=1.4),),
    "ratio-sequence": (RatioMask(level="sequence", low=0.5, high=1.6),),
    "ratio-geometric": (RatioMask(low=0.9, high=1.1),),
    "worst_token": (WorstTokenMask(low=0.5, high=1.8),),
    "off_policy": (OffPolicyMask(bound=0.02),),
    "staleness": (StalenessMask(max_lag=2),),
    "two": (StalenessMask(max_lag=3), RatioMask(level="token", low=0.6, high=1.8)),
}
# what a ratio is over: π_old as scored, the current policy as it is, a guess of π_old
ANCHORS = {"old": ("old", True), "current": ("old", False), "guessed": ("interpolated", False)}


def assert_is_the_loop(objective: ObjectiveConfig, *, with_old: bool) -> set[float]:
    """Compare values and gradients of three batches, and return the loop's weights."""
    found: set[float] = set()
    for seed in range(3):
        tokens = tokens_of(seed)
        batch = batch_of(tokens, with_old=with_old)
        logprobs = torch.full((len(ROWS), WIDTH), math.nan, dtype=torch.float64)
        for place, token in tokens.items():
            logprobs[place] = token.held
        logprobs.requires_grad_()
        part = policy_objective(TokenScores(logprobs, torch.zeros_like(logprobs)), batch, objective)
        part.total.backward()

        held = {place: token.held for place, token in tokens.items()}
        loop = partial(looped, tokens, objective=objective, with_old=with_old)
        assert part.total.item() == pytest.approx(loop(held), rel=1e-11)
        expected = torch.zeros_like(logprobs)
        for place, slope in slopes(loop, held).items():
            expected[place] = slope
        torch.testing.assert_close(logprobs.grad, expected, rtol=1e-7, atol=1e-8)
        found |= set(factors(tokens, objective, with_old=with_old).values())
    return found


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_corrected_loss_is_that_of_a_loop_with_its_gradient(name, anchor):
    over, with_old = ANCHORS[anchor]
    config = CORRECTIONS[name]
    objective = ObjectiveConfig(anchor=over, correction=config)

    found = assert_is_the_loop(objective, with_old=with_old)

    if isinstance(config, TisConfig):
        assert {config.floor, config.cap} < found
    if isinstance(config, IcePopConfig | MisConfig):
        assert 0.0 in found
        assert any(found)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("name", REJECTIONS)
def test_a_loss_without_what_is_rejected_is_that_of_a_loop(name, anchor):
    over, with_old = ANCHORS[anchor]
    objective = ObjectiveConfig(anchor=over, rejections=REJECTIONS[name])

    found = assert_is_the_loop(objective, with_old=with_old)

    assert 0.0 in found
    assert any(found)


def test_a_ratio_over_the_sampler_is_that_of_a_loop():
    objective = ObjectiveConfig(
        surrogate=ClipConfig(low=0.2, high=0.3), anchor="behaviour", correction=NoCorrection()
    )

    assert_is_the_loop(objective, with_old=True)


VOCABULARY, GROUPS, REWARDS = 5, ["a", "a", "b", "b"], [1.0, -0.5, 0.0, 2.0]
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]]).bool()
COEFFICIENT = 0.3


def of_logits() -> tuple[dict, list[list[int]], dict]:
    """Return random logits by row, column and token; the targets, and log μ of these."""
    draw, every = random.Random(4), range(4)
    names = [(row, column, v) for row in every for column in every for v in range(VOCABULARY)]
    logits = {name: draw.gauss(0.0, 1.0) for name in names}
    targets = [[draw.randrange(VOCABULARY) for _ in every] for _ in every]
    return (
        logits,
        targets,
        {(row, column): -1.0 - draw.random() for row in every for column in every},
    )


def step_gradient(logits, targets, behaviour, shaped, objective) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a step of two micro-batches."""
    flat = torch.tensor(list(logits.values()), dtype=torch.float64, requires_grad=True)
    table, ids = flat.view(4, 4, VOCABULARY), torch.tensor(targets)
    sampled = torch.tensor(list(behaviour.values()), dtype=torch.float64).view(4, 4)
    advantages, total = torch.tensor([0.5, -0.5, -1.0, 1.0]), torch.zeros((), dtype=torch.float64)
    for rows in ([0, 2], [1, 3]):
        batch = batch_of_targets(
            ids[rows], MASK[rows], sampled[rows], advantages[rows], shaped.select(rows)
        )
        exact = {n: getattr(batch, n).double() for n in ("token_weights", "advantages")}
        part = replace(batch, **exact, behaviour_logprobs=sampled[rows].where(MASK[rows], 0.0))
        total = (
            total
            + policy_objective(scores_from_logits(table[rows], ids[rows]), part, objective).total
            / shaped.denominator.sum()
        )
    total.backward()
    return total.item(), flat.grad


def logarithms(logits: dict, row: int, column: int) -> list[float]:
    scores = [logits[row, column, v] for v in range(VOCABULARY)]
    norm = math.log(sum(math.exp(score) for score in scores))
    return [score - norm for score in scores]


def surrogate(logits, fixed, targets, behaviour, row: int, column: int) -> float:
    """Return -sg(min(π/μ, 2)) A π/sg(π) of one token."""
    chosen, held = (logarithms(x, row, column)[targets[row][column]] for x in (logits, fixed))
    weight = min(math.exp(held - behaviour[row, column]), 2.0)
    return -weight * [0.5, -0.5, -1.0, 1.0][row] * math.exp(chosen - held)


def test_an_entropy_bonus_is_that_of_a_loop_over_distributions():
    logits, targets, behaviour = of_logits()
    shaped = sample_weights(MASK.sum(1), GROUPS, AggregationConfig(mode="sequence_mean"))
    objective = ObjectiveConfig(entropy_coefficient=COEFFICIENT)

    def loop(at):
        total = 0.0
        for row, kept in enumerate(MASK.tolist()):
            losses = []
            for column in (place for place, is_kept in enumerate(kept) if is_kept):
                entropy = -sum(math.exp(x) * x for x in logarithms(at, row, column))
                token = surrogate(at, logits, targets, behaviour, row, column)
                losses.append(token - COEFFICIENT * entropy)
            total += sum(losses) / len(losses) / len(GROUPS)
        return total

    loss, gradient = step_gradient(logits, targets, behaviour, shaped, objective)

    assert loss == pytest.approx(loop(logits), abs=1e-7)  # token weights are float32
    expected = torch.tensor(list(slopes(loop, logits).values()), dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_the_likelihood_of_positive_samples_is_that_of_a_loop():
    # L + μ (Σ over samples with R > 0 of Σ_t -log π) / (Σ over them of T): rows 0 and 3.
    logits, targets, behaviour = of_logits()
    counts = MASK.sum(1).tolist()
    shaped = sample_weights(counts, GROUPS, AggregationConfig(mode="sequence_mean"))
    shaped = imitation_weights(counts, REWARDS, shaped, COEFFICIENT)

    def loop(at):
        policy, likelihood, num_positive = 0.0, 0.0, 0
        for row, kept in enumerate(MASK.tolist()):
            places = [place for place, is_kept in enumerate(kept) if is_kept]
            losses = [surrogate(at, logits, targets, behaviour, row, c) for c in places]
            policy += sum(losses) / len(losses) / len(GROUPS)
            if REWARDS[row] > 0.0:
                num_positive += len(places)
                likelihood -= sum(logarithms(at, row, c)[targets[row][c]] for c in places)
        return policy + COEFFICIENT * likelihood / num_positive

    loss, gradient = step_gradient(logits, targets, behaviour, shaped, ObjectiveConfig())

    assert loss == pytest.approx(loop(logits), abs=1e-7)
    expected = torch.tensor(list(slopes(loop, logits).values()), dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
