"""The clipped objective, corrections and penalties against values worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from cosmos_algos import (
    AlgorithmConfigError,
    ClipConfig,
    CriticConfig,
    IcePopConfig,
    KlConfig,
    MissingScoresError,
    NoCorrection,
    ObjectiveConfig,
    TisConfig,
    TokenBatch,
    TokenScores,
    clipped_surrogate,
    correction_weights,
    empty_batch,
    policy_objective,
    summarise_metrics,
)

CLIP = ClipConfig(low=0.2, high=0.28, dual=3.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # The gradient with respect to the ratio is -A, or 0 where clipped.
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.0),
        (1.5, 2.0, -2.56, 0.0),  # improving side, above 1.28
        (0.5, 2.0, -1.0, -2.0),  # got worse: not clipped
        (0.5, -2.0, 1.6, 0.0),  # improving side, below 0.8
        (1.5, -2.0, 3.0, 2.0),  # got worse: not clipped
        (5.0, -2.0, 6.0, 0.0),  # dual clip at 3 |A|
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipping_stops_the_gradient_only_on_the_improving_side(ratio, advantage, loss, gradient):
    ratios = torch.tensor([[ratio]], requires_grad=True)

    losses, clipped = clipped_surrogate(ratios, torch.tensor([[advantage]]), CLIP)
    losses.sum().backward()

    assert losses.item() == pytest.approx(loss)
    assert ratios.grad.item() == pytest.approx(gradient)
    assert clipped.item() is (gradient == 0.0 and advantage != 0.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (NoCorrection(), [1.0, 1.0, 1.0, 1.0]),
        (TisConfig(cap=2.0), [0.25, 1.0, 2.0, 2.0]),
        (TisConfig(cap=5.0, floor=0.5), [0.5, 1.0, 3.0, 5.0]),
        (IcePopConfig(low=0.5, high=5.0), [0.0, 1.0, 3.0, 0.0]),
    ],
)
def test_correction_weights(config, expected):
    ratios = torch.tensor([[0.25, 1.0, 3.0, 8.0]], requires_grad=True)

    weights = correction_weights(ratios.log(), config)

    torch.testing.assert_close(weights, torch.tensor([expected]))
    assert not weights.requires_grad


def one_token(behaviour=-1.0, advantage=1.0, **extra):
    """A batch of two rows, one trainable token in the first."""
    empty = empty_batch(num_tokens=3)
    hit = torch.tensor([[1.0, 0.0, 0.0]])
    return replace(
        empty,
        trainable=hit.bool(),
        behaviour_logprobs=behaviour * hit,
        advantages=advantage * hit,
        token_weights=hit,
        denominators=torch.ones(1, dtype=torch.float64),
        **{name: value * hit for name, value in extra.items()},
    )


def scored(logprob, entropy=0.0):
    logprobs = torch.tensor([[logprob, 0.0, 0.0]], requires_grad=True)
    return TokenScores(logprobs, torch.tensor([[entropy, 0.0, 0.0]]))


def loss_and_slope(batch: TokenBatch, logprob: float, objective: ObjectiveConfig):
    scores = scored(logprob)
    part = policy_objective(scores, batch, objective)
    part.total.backward()
    return part.total.item(), scores.logprobs.grad[0, 0].item()


def test_anchored_on_the_current_policy_the_gradient_is_the_truncated_importance_weight():
    # π/μ = e^0.5 = 1.6487, below the cap; e^1 = 2.718, above it.
    for logprob, weight in ((-0.5, math.exp(0.5)), (0.0, 2.0)):
        loss, slope = loss_and_slope(one_token(), logprob, ObjectiveConfig())
        assert (loss, slope) == pytest.approx((-weight, -weight))


def test_anchored_on_old_log_probs_the_correction_is_old_over_behaviour():
    # r = e^0.1, clipped at none; ρ = e^0.3.
    batch = one_token(behaviour=-1.0, old_logprobs=torch.tensor(-0.7))

    loss, slope = loss_and_slope(batch, -0.6, ObjectiveConfig())

    assert (loss, slope) == pytest.approx((-math.exp(0.4), -math.exp(0.4)))


def test_anchored_on_the_behaviour_policy_the_importance_weight_counts_once():
    objective = ObjectiveConfig(anchor="behaviour", correction=NoCorrection())

    loss, slope = loss_and_slope(one_token(), -0.9, objective)
    assert (loss, slope) == pytest.approx((-math.exp(0.1), -math.exp(0.1)))

    loss, slope = loss_and_slope(one_token(), -0.5, objective)  # e^0.5 > 1.2: clipped
    assert (loss, slope) == pytest.approx((-1.2, 0.0))


def test_counting_an_importance_weight_twice_cannot_be_written_down():
    with pytest.raises(AlgorithmConfigError, match="correction 'tis' would count it twice"):
        ObjectiveConfig(anchor="behaviour")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClipConfig(low=1.5), "low 1.5 must be in"),
        (lambda: ClipConfig(dual=0.5), "dual 0.5 must be over 1"),
        (lambda: TisConfig(cap=0.5), r"\[0.0, 0.5\] must contain 1"),
        (lambda: IcePopConfig(low=2.0), r"\[2.0, 5.0\] must contain 1"),
        (lambda: KlConfig(coefficient=-1.0), "coefficient -1.0 must be 0 or more"),
        (lambda: KlConfig(coefficient=math.inf), "kl: coefficient inf must be .* finite"),
        (lambda: ObjectiveConfig(entropy_coefficient=-math.inf), "entropy_coefficient inf must"),
        (lambda: ObjectiveConfig(teacher_coefficient=math.inf), "teacher_coefficient inf must"),
        (lambda: CriticConfig(coefficient=math.inf), "critic: coefficient inf must"),
    ],
)
def test_settings_that_no_algorithm_has_are_refused(make, message):
    with pytest.raises(AlgorithmConfigError, match=message):
        make()


def test_a_masked_token_keeps_its_place_in_the_denominator():
    objective = ObjectiveConfig(correction=IcePopConfig(high=1.5))

    part = policy_objective(scored(0.0), one_token(), objective)  # e^1 > 1.5: masked

    assert part.total.item() == 0.0
    assert part.weight.item() == 1.0


def test_the_kl_penalty_needs_a_reference_and_adds_its_share():
    objective = ObjectiveConfig(kl=KlConfig(coefficient=0.1))
    with pytest.raises(MissingScoresError, match=r"kl\.coefficient over 0 needs the batch's ref"):
        policy_objective(scored(-1.0), one_token(), objective)

    batch = one_token(reference_logprobs=torch.tensor(-1.5))
    loss, slope = loss_and_slope(batch, -1.0, objective)
    # k2: -1 + 0.1 * 0.5 * 0.5², slope -1 + 0.1 * 0.5.
    assert (loss, slope) == pytest.approx((-1 + 0.0125, -1 + 0.05))


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.6), ("k3", math.exp(-0.6) - 0.4)])
def test_the_divergence_is_told_wherever_it_is_a_penalty(place, estimator, expected):
    # log π - log π_ref = 0.6, weighed by π/μ = e^0.1
    batch = one_token(behaviour=-1.1, reference_logprobs=torch.tensor([[-1.6]]))
    kl = KlConfig(coefficient=0.1, estimator=estimator, place=place)
    part = policy_objective(scored(-1.0), batch, ObjectiveConfig(kl=kl))
    assert part.metrics["kl"].item() == pytest.approx(math.exp(0.1) * expected, rel=1e-6)


def test_the_entropy_bonus_lowers_the_loss():
    objective = ObjectiveConfig(entropy_coefficient=0.1)

    part = policy_objective(scored(-1.0, entropy=2.0), one_token(), objective)

    assert part.total.item() == pytest.approx(-1.2)


def test_a_broken_log_prob_gives_a_finite_loss_and_gradient():
    loss, slope = loss_and_slope(
        one_token(behaviour=-500.0, advantage=-1.0), 0.0, ObjectiveConfig()
    )

    assert (loss, slope) == (2.0, 2.0)


def test_an_empty_batch_has_the_keys_of_a_full_one_and_adds_zeros():
    full = policy_objective(scored(-1.0), one_token(), ObjectiveConfig())
    empty = policy_objective(
        TokenScores(torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2)),
        empty_batch(),
        ObjectiveConfig(),
    )
    empty.total.backward()

    assert list(full.metrics) == list(empty.metrics)
    assert (empty.total.item(), empty.weight.item()) == (0.0, 0.0)
    assert all(value == 0.0 for value in empty.metrics.values())


def test_metrics_become_means_shares_and_an_effective_sample_size():
    two = one_token()
    hit = torch.tensor([[1.0, 1.0, 0.0]])
    batch = replace(
        two,
        trainable=hit.bool(),
        behaviour_logprobs=torch.tensor([[-1.0, -2.0, 0.0]]),
        advantages=hit,
        lags=torch.tensor([[0, 7, 0]]),
    )
    scores = TokenScores(torch.tensor([[-1.0, -1.5, 0.0]]), 0.25 * hit)
    sums = policy_objective(scores, batch, ObjectiveConfig()).metrics

    report = summarise_metrics({name: value.item() for name, value in sums.items()})

    heavy = math.exp(0.5)
    assert report["tokens"] == 2
    assert report["entropy"] == pytest.approx(0.25)
    assert report["correction"] == pytest.approx((1 + heavy) / 2)
    assert report["mismatch/abs"] == pytest.approx(0.25)
    assert report["mismatch/k3"] == pytest.approx((heavy - 1 - 0.5) / 2)
    assert report["mismatch/over_0.1"] == 0.5
    assert report["mismatch/over_1"] == 0.0
    assert report["mismatch/effective_share"] == pytest.approx(
        (1 + heavy) ** 2 / (2 * (1 + heavy**2))
    )
    assert report["lag0/abs"] == 0.0
    assert report["lag4/abs"] == pytest.approx(0.5)
    assert report["lag4/tokens"] == 0.5
    assert "lag1/abs" not in report
