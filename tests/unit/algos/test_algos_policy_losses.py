"""Every policy loss against a loop written from its formula, by hand and by finite differences."""

import math

import pytest
import torch

from cosmos_algos import (
    AggregationConfig,
    AipoClip,
    AlgorithmConfigError,
    CispoClip,
    ClipConfig,
    GrpoConfig,
    GspoClip,
    NoCorrection,
    ObjectiveConfig,
    Samples,
    SapoGate,
    policy_surrogate,
)

CONFIGS = {
    "ppo": ClipConfig(low=0.2, high=0.2),
    "clip_higher": ClipConfig(low=0.2, high=0.28),
    "dual": ClipConfig(low=0.2, high=0.2, dual=1.5),
    "gspo": GspoClip(low=0.1, high=0.1),
    "gspo_token": GspoClip(low=0.1, high=0.1, level="token"),
    "cispo": CispoClip(cap=1.2, floor=0.9),
    "aipo": AipoClip(rho=1.1),
    "aipo_below_rho": AipoClip(rho=1.1, gradient="below_rho"),
    "sapo": SapoGate(),
}
# Where the loss is -w A log π, w is a constant of the gradient.
DETACHED = {"cispo", "aipo"}


def inputs(seed=0, rows=4, width=6):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, width, generator=generator, dtype=torch.float64)  # noqa: E731
    anchor = -1.0 + 0.3 * draw()
    logprobs = anchor + 0.25 * draw()
    trainable = torch.rand(rows, width, generator=generator) < 0.7
    trainable[:, 1] = True
    advantages = draw()[:, :1].expand(rows, width).contiguous()
    return logprobs.requires_grad_(), anchor, advantages, Samples(trainable)


def token_loss(name, config, logp, anchor, advantage, mean_log_ratio):
    """One token in Python floats; ``mean_log_ratio`` is that of its sample."""
    r = math.exp(logp - anchor)
    if name.startswith("gspo"):
        s = math.exp(mean_log_ratio)
        return -min(s * advantage, min(max(s, 0.9), 1.1) * advantage)
    if name == "cispo":
        return -min(max(r, 0.9), 1.2) * advantage * logp
    if name == "aipo":
        return -min(r, 1.1) * advantage * logp
    if name == "aipo_below_rho":
        return -min(r, 1.1) * advantage
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -4 / tau / (1 + math.exp(-tau * (r - 1))) * advantage
    loss = -min(r * advantage, min(max(r, 1 - config.low), 1 + config.high) * advantage)
    return min(loss, -config.dual * advantage) if config.dual and advantage < 0 else loss


@pytest.mark.parametrize("name", CONFIGS)
def test_values_equal_a_loop_over_tokens(name):
    logprobs, anchor, advantages, samples = inputs()
    losses, _ = policy_surrogate(logprobs, anchor, advantages, samples, CONFIGS[name])

    for i in range(4):
        kept = [t for t in range(6) if samples.trainable[i, t]]
        mean = sum((logprobs[i, t] - anchor[i, t]).item() for t in kept) / len(kept)
        for t in kept:
            expected = token_loss(
                name,
                CONFIGS[name],
                logprobs[i, t].item(),
                anchor[i, t].item(),
                advantages[i, t].item(),
                mean,
            )
            assert losses[i, t].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if name not in DETACHED | {"gspo_token"}]
)
def test_gradients_equal_finite_differences(name):
    logprobs, anchor, advantages, samples = inputs(seed=1)

    def total(logp):
        losses, _ = policy_surrogate(logp, anchor, advantages, samples, CONFIGS[name])
        return (losses * samples.trainable).sum()

    assert torch.autograd.gradcheck(total, logprobs, eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(("name", "low", "high"), [("cispo", 0.9, 1.2), ("aipo", 0.0, 1.1)])
def test_a_capped_weight_scales_the_gradient_of_every_token_and_stops_none(name, low, high):
    logprobs, anchor, advantages, samples = inputs(seed=2)
    losses, clipped = policy_surrogate(logprobs, anchor, advantages, samples, CONFIGS[name])

    (slope,) = torch.autograd.grad(losses.sum(), logprobs)

    ratios = (logprobs - anchor).exp().detach()
    torch.testing.assert_close(slope, -ratios.clamp(low, high) * advantages)
    assert clipped.any()
    assert slope[clipped].abs().min() > 0.0


def test_the_form_of_aipo_differentiated_through_the_weight_has_no_gradient_above_rho():
    logprobs, anchor, advantages, samples = inputs(seed=2)
    name = "aipo_below_rho"
    losses, clipped = policy_surrogate(logprobs, anchor, advantages, samples, CONFIGS[name])

    (slope,) = torch.autograd.grad(losses.sum(), logprobs)

    assert clipped.any()
    assert slope[clipped].eq(0.0).all()
    ratios = (logprobs - anchor).exp().detach()
    torch.testing.assert_close(slope[~clipped], (-ratios * advantages)[~clipped])


def test_the_token_variant_of_gspo_has_the_gradient_of_gspo():
    logprobs, anchor, advantages, samples = inputs(seed=3)
    lengths = samples.trainable.sum(-1, keepdim=True)
    slopes = []
    for level in ("sequence", "token"):
        config = GspoClip(low=0.1, high=0.1, level=level)
        losses, _ = policy_surrogate(logprobs, anchor, advantages, samples, config)
        mean = (losses * samples.trainable / lengths).sum()
        slopes.append(torch.autograd.grad(mean, logprobs)[0])

    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-12, atol=1e-15)


def test_gspo_ratios_do_not_leak_between_samples_of_one_row():
    logprobs, anchor, advantages, _ = inputs(seed=4, rows=2)
    trainable = torch.ones(2, 6, dtype=torch.bool)
    apart = Samples(trainable)
    packed = Samples(trainable.reshape(1, 12), torch.tensor([[0] * 6 + [1] * 6]))

    rows, _ = policy_surrogate(logprobs, anchor, advantages, apart, GspoClip())
    row, _ = policy_surrogate(
        logprobs.reshape(1, 12),
        anchor.reshape(1, 12),
        advantages.reshape(1, 12),
        packed,
        GspoClip(),
    )

    torch.testing.assert_close(row.reshape(2, 6), rows, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # τ = 1 above, 1.05 below; at r = 1 the gate has slope 1 whatever τ is.
        (1.0, 1.0, -2.0, -1.0),
        (1.0, -1.0, 2 / 1.05, 1.0),
        (2.0, 1.0, -4 / (1 + math.exp(-1.0)), -4 * math.exp(-1.0) / (1 + math.exp(-1.0)) ** 2),
    ],
)
def test_sapo_by_hand(ratio, advantage, loss, slope):
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    samples = Samples(torch.tensor([[True]]))

    losses, _ = policy_surrogate(logprobs, zero, zero + advantage, samples, SapoGate())
    losses.sum().backward()

    assert losses.item() == pytest.approx(loss)
    # d loss / d log r = r d loss / d r.
    assert logprobs.grad.item() / ratio == pytest.approx(slope)


def test_an_epsilon_in_place_of_a_cap_is_refused():
    # A cap of 0.28 shrinks every on-policy gradient to 28%.
    with pytest.raises(AlgorithmConfigError, match="cap is the largest weight, 1 \\+ ε_high"):
        CispoClip(cap=0.28)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GspoClip(low=2.0), "gspo: low 2.0 must be in"),
        (lambda: AipoClip(rho=0.5), "rho 0.5 must be at least 1"),
        (lambda: SapoGate(negative=0.0), "temperatures 1.0 and 0.0 must be above 0"),
        (lambda: ObjectiveConfig(surrogate=AipoClip()), "its anchor is 'behaviour', not 'old'"),
    ],
)
def test_settings_that_no_paper_has_are_refused(make, message):
    with pytest.raises(AlgorithmConfigError, match=message):
        make()


def test_gspo_weighed_by_length_is_refused():
    objective = ObjectiveConfig(surrogate=GspoClip(), correction=NoCorrection())

    GrpoConfig(objective=objective).build()
    with pytest.raises(AlgorithmConfigError, match="'token_mean' weighs samples by their length"):
        GrpoConfig(objective=objective, aggregation=AggregationConfig()).build()
