"""Corrections and rejections of two samples by hand, and what a token's lag is worth."""

import math
from dataclasses import replace

import pytest
import torch

from cosmos_algos import (
    AlgorithmConfigError,
    ClipConfig,
    Distances,
    GspoClip,
    IcePopConfig,
    ImportanceConfig,
    MisConfig,
    NoCorrection,
    ObjectiveConfig,
    OffPolicyMask,
    RatioMask,
    Samples,
    StalenessMask,
    TisConfig,
    TokenScores,
    WorstTokenMask,
    correction_weights,
    empty_batch,
    kept_tokens,
    policy_objective,
    proximal_logprobs,
)

LOG2 = math.log(2.0)
# ρ = 2, 2, 1/2 | 4 and one token that is not trained.
LOG_RATIOS = torch.tensor([[LOG2, LOG2, -LOG2], [2 * LOG2, 9.0, 0.0]], dtype=torch.float64)
TRAINABLE = torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ImportanceConfig(), [[2, 2, 0.5], [4]]),
        # Products 2 and 4; roots 2^(1/3) and 4.
        (ImportanceConfig(level="sequence"), [[2, 2, 2], [4]]),
        (ImportanceConfig(level="geometric"), [[2 ** (1 / 3)] * 3, [4]]),
        (TisConfig(cap=3.0, level="sequence"), [[2, 2, 2], [3]]),
        (TisConfig(cap=1.1, level="geometric"), [[1.1, 1.1, 1.1], [1.1]]),
        (IcePopConfig(low=0.6, high=3.0), [[2, 2, 0], [0]]),
        (MisConfig(high=3.0), [[2, 2, 2], [0]]),
        (MisConfig(low=0.5, high=1.2, level="geometric"), [[0, 0, 0], [0]]),
        (MisConfig(low=0.5, high=1.3, level="geometric"), [[2 ** (1 / 3)] * 3, [0]]),
    ],
)
def test_weights_of_two_samples(config, expected):
    weights = correction_weights(LOG_RATIOS, config, Samples(TRAINABLE))

    found = [weights[0].tolist(), weights[1, :1].tolist()]
    assert found[0] == pytest.approx(expected[0])
    assert found[1] == pytest.approx(expected[1])


def test_tokens_that_are_not_trained_and_other_samples_of_the_row_do_not_count():
    packed = Samples(
        torch.tensor([[True, True, True, True, False, False]]),
        torch.tensor([[0, 0, 0, 1, 1, 1]]),
    )

    weights = correction_weights(
        LOG_RATIOS.reshape(1, 6), ImportanceConfig(level="sequence"), packed
    )

    assert weights[0, [0, 3]].tolist() == pytest.approx([2.0, 4.0])


@pytest.mark.parametrize(
    ("rejections", "expected"),
    [
        ((), [[1, 1, 1], [1, 0, 0]]),
        ((RatioMask(level="token", low=0.6, high=3.0),), [[1, 1, 0], [0, 0, 0]]),
        ((RatioMask(low=0.5, high=1.3),), [[1, 1, 1], [0, 0, 0]]),
        ((RatioMask(level="sequence", high=3.0),), [[1, 1, 1], [0, 0, 0]]),
        # The worst token of the first sample is 1/2, of the second 4.
        ((WorstTokenMask(low=0.6, high=5.0),), [[0, 0, 0], [1, 0, 0]]),
        ((WorstTokenMask(low=0.4, high=3.0),), [[1, 1, 1], [0, 0, 0]]),
        # Means of log μ - log π: 1/2 in the first, -1 in the second; the advantage must be < 0.
        ((OffPolicyMask(bound=0.4),), [[0, 0, 0], [1, 0, 0]]),
        ((OffPolicyMask(bound=0.6),), [[1, 1, 1], [1, 0, 0]]),
        ((StalenessMask(max_lag=1),), [[1, 1, 0], [1, 0, 0]]),
        ((StalenessMask(max_lag=1), WorstTokenMask(high=3.0)), [[1, 1, 0], [0, 0, 0]]),
    ],
)
def test_what_a_rejection_leaves_out(rejections, expected):
    distances = Distances(
        proximal=LOG_RATIOS,
        current=torch.tensor([[-0.5, -0.5, -0.5], [1.0, 0.0, 0.0]]).double(),
        advantages=-torch.ones(2, 3).double(),
        lags=torch.tensor([[0, 1, 2], [0, 0, 0]]),
    )

    kept = kept_tokens(distances, Samples(TRAINABLE), rejections)

    assert kept.int().tolist() == expected


def test_an_off_policy_sample_with_a_positive_advantage_stays():
    distances = Distances(
        proximal=LOG_RATIOS,
        current=torch.full((2, 3), -5.0, dtype=torch.float64),
        advantages=torch.ones(2, 3).double(),
        lags=torch.zeros(2, 3, dtype=torch.int64),
    )

    kept = kept_tokens(distances, Samples(TRAINABLE), (OffPolicyMask(bound=0.1),))

    assert torch.equal(kept, TRAINABLE)


def test_bounds_are_on_the_ratio_and_not_on_its_inverse():
    # [0.5, 5] keeps ρ = 4 and leaves out ρ = 1/4.
    log_ratios = torch.tensor([[math.log(4.0), math.log(0.25)]])

    weights = correction_weights(log_ratios, IcePopConfig(low=0.5, high=5.0))

    assert weights.tolist() == [[pytest.approx(4.0), 0.0]]


@pytest.mark.parametrize(
    ("lag", "share"),
    [
        (0, 1.0),  # sampled by the policy itself: it is the current one
        (1, 0.0),  # the version before is the one that sampled
        (2, 0.5),
        (4, 0.75),
    ],
)
def test_the_interpolated_policy_lies_one_version_before_the_current_one(lag, share):
    batch = replace(
        empty_batch(), behaviour_logprobs=torch.full((1, 2), -3.0), lags=torch.full((1, 2), lag)
    )

    guess = proximal_logprobs(torch.full((1, 2), -1.0), batch, "interpolated")

    assert guess.tolist() == [[pytest.approx(-3.0 + 2.0 * share)] * 2]


def one_row(behaviour, old, advantage):
    width = len(behaviour)
    return replace(
        empty_batch(num_tokens=width),
        trainable=torch.ones(1, width, dtype=torch.bool),
        behaviour_logprobs=torch.tensor([behaviour]),
        old_logprobs=torch.tensor([old]),
        advantages=torch.full((1, width), advantage),
        token_weights=torch.ones(1, width),
        denominators=torch.tensor([float(width)], dtype=torch.float64),
    )


def test_the_decoupled_objective_clips_around_the_proximal_policy_and_weighs_by_it_over_mu():
    # r = π/π_prox = e^0.1 and e^0.5 (clipped at 1.2); w = π_prox/μ = e^-0.2 and e^0.3.
    batch = one_row(behaviour=[-1.0, -1.0], old=[-1.2, -0.7], advantage=1.0)
    logprobs = torch.tensor([[-1.1, -0.2]], requires_grad=True)
    objective = ObjectiveConfig(correction=ImportanceConfig())

    part = policy_objective(TokenScores(logprobs, torch.zeros(1, 2)), batch, objective)
    part.total.backward()

    first, second = math.exp(-0.2) * math.exp(0.1), math.exp(0.3) * 1.2
    assert part.total.item() == pytest.approx(-first - second)
    assert logprobs.grad.tolist() == [[pytest.approx(-first), 0.0]]


@pytest.mark.parametrize("surrogate", [ClipConfig(), GspoClip()])
def test_a_correction_does_not_move_the_anchor_of_the_ratio(surrogate):
    # With a correction on, the ratio is still over π_old: r = s = 1, and only w = π_old/μ differs.
    # Over μ in its place, s = e would be clipped and the token have no gradient.
    batch = one_row(behaviour=[-2.0], old=[-1.0], advantage=1.0)
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    objective = ObjectiveConfig(surrogate=surrogate, correction=TisConfig())

    part = policy_objective(TokenScores(logprobs, torch.zeros(1, 1)), batch, objective)
    part.total.backward()

    assert part.total.item() == pytest.approx(-2.0)  # min(e, 2) · 1
    assert logprobs.grad.item() == pytest.approx(-2.0)


def test_what_is_rejected_is_counted_and_leaves_the_denominator():
    batch = one_row(behaviour=[-1.0, -9.0], old=[-1.0, -1.0], advantage=1.0)
    objective = ObjectiveConfig(
        correction=NoCorrection(), rejections=(RatioMask(level="token", low=0.5, high=2.0),)
    )

    part = policy_objective(
        TokenScores(torch.tensor([[-1.0, -1.0]]), torch.zeros(1, 2)), batch, objective
    )

    assert part.total.item() == pytest.approx(-1.0)
    assert part.weight.item() == 2.0
    assert part.metrics["rejected"].item() == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RatioMask(low=1.5, high=2.0), r"rejection ratio: \[1.5, 2.0\] must contain 1"),
        (lambda: WorstTokenMask(high=0.5), r"worst_token: .* must contain 1"),
        (lambda: OffPolicyMask(bound=0.0), "bound 0.0 must be above 0"),
        (lambda: StalenessMask(max_lag=-1), "max_lag -1 is negative"),
        (lambda: MisConfig(high=0.5), r"correction mis: \[0.0, 0.5\] must contain 1"),
    ],
)
def test_bounds_that_leave_out_the_policy_itself_are_refused(make, message):
    with pytest.raises(AlgorithmConfigError, match=message):
        make()
