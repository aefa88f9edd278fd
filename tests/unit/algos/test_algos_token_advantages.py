"""Returns, GAE, whitening and the critic against loops over the trained tokens alone."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from cosmos_algos import (
    AlgorithmConfigError,
    CriticConfig,
    GaeConfig,
    MissingScoresError,
    ModelHeadError,
    Samples,
    advantage_moments,
    critic_objective,
    critic_values,
    empty_batch,
    generalised_advantages,
    returns_to_go,
    terminal_rewards,
    token_moments,
    value_losses,
    whitened,
    with_gae,
    with_whitened_advantages,
)


def inputs(seed=0, rows=3, width=8):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    trainable = torch.rand(rows, width, generator=generator) < 0.6
    return rewards, values, trainable


def loop_gae(rewards, values, discount, decay, last=0.0):
    """One sample of trained tokens only, in the textbook double sum over δ."""
    following = [*values[1:], last]
    errors = [r + discount * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((discount * decay) ** (s - t) * errors[s] for s in range(t, len(errors)))
        for t in range(len(errors))
    ]


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0)])
@pytest.mark.parametrize("bootstrap", [None, torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)])
def test_gae_is_that_of_the_trained_tokens_with_the_others_taken_out(discount, decay, bootstrap):
    rewards, values, trainable = inputs()

    advantages = generalised_advantages(
        rewards,
        values,
        Samples(trainable),
        GaeConfig(discount=discount, decay=decay),
        bootstrap,
    )

    for i in range(3):
        kept = trainable[i]
        expected = loop_gae(
            rewards[i, kept].tolist(),
            values[i, kept].tolist(),
            discount,
            decay,
            0.0 if bootstrap is None else bootstrap[i].item(),
        )
        assert advantages[i, kept].tolist() == pytest.approx(expected, rel=1e-12)
        assert advantages[i, ~kept].eq(0.0).all()


def test_observations_between_turns_leave_values_and_advantages_alone():
    # Two turns with a tool answer in between whose values and rewards are nonsense.
    rewards = torch.tensor([[0.0, 99.0, 99.0, 1.0]])
    values = torch.tensor([[0.2, -77.0, 55.0, 0.5]])
    samples = Samples(torch.tensor([[True, False, False, True]]))

    advantages = generalised_advantages(rewards, values, samples, GaeConfig(decay=1.0))

    # δ_4 = 1 - 0.5, A_1 = (0.5 - 0.2) + 0.5.
    assert advantages.tolist() == [[pytest.approx(0.8), 0.0, 0.0, pytest.approx(0.5)]]


def test_samples_of_one_row_do_not_see_each_other():
    rewards, values, trainable = inputs(rows=2, width=4)
    config = GaeConfig(discount=0.9, decay=0.8)
    apart = generalised_advantages(rewards, values, Samples(trainable), config)

    packed = Samples(trainable.reshape(1, 8), torch.tensor([[0] * 4 + [1] * 4]))
    row = generalised_advantages(rewards.reshape(1, 8), values.reshape(1, 8), packed, config)

    torch.testing.assert_close(row.reshape(2, 4), apart)


def test_the_value_after_a_row_is_not_given_to_a_sample_before_its_last():
    # The first sample has ended; the row was cut short in the prompt of the second.
    trainable = torch.tensor([[False, True, True, False, False]])
    samples = Samples(trainable, torch.tensor([[0, 0, 0, 1, 1]]))
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]]), torch.zeros(1, 5)

    found = generalised_advantages(
        rewards, values, samples, GaeConfig(decay=1.0), bootstrap=torch.tensor([100.0])
    )

    assert found.tolist() == [[0.0, 1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_returns_to_go(discount):
    samples = Samples(torch.tensor([[True, False, True, True, False]]))

    returns = returns_to_go(torch.tensor([[1.0, 9.0, 2.0, 4.0, 9.0]]), samples, discount)

    expected = [7.0, 0.0, 6.0, 4.0, 0.0] if discount == 1.0 else [3.0, 0.0, 4.0, 4.0, 0.0]
    assert returns.tolist() == [expected]


def test_a_reward_stands_at_the_last_trained_token_of_its_sample():
    trainable = torch.tensor([[True, True, False, True, False, False]])
    row = Samples(trainable)
    packed = Samples(trainable, torch.tensor([[0, 0, 0, 1, 1, 1]]))
    rewards = torch.tensor([[5.0, 5.0, 5.0, 7.0, 7.0, 7.0]])

    assert terminal_rewards(row, rewards).tolist() == [[0, 0, 0, 7, 0, 0]]
    assert terminal_rewards(packed, rewards).tolist() == [[0, 5, 0, 7, 0, 0]]


def test_whitening_by_the_moments_of_all_parts_is_that_of_the_whole():
    values, _, trainable = inputs(seed=5)
    tokens = values[trainable].tolist()
    mean, deviation = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)

    moments = token_moments(values[:1], trainable[:1]) + token_moments(values[1:], trainable[1:])
    found = whitened(values, trainable, moments)

    assert found[trainable].tolist() == pytest.approx([(x - mean) / deviation for x in tokens])
    assert found[~trainable].eq(0.0).all()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 2.0, 0.5, -1.0),
        # Moved 0.5 towards the target, held at 1.2: the larger error counts, without gradient.
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0),
        # Moved away from it: not held.
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5),
    ],
)
def test_the_value_loss_is_clipped_on_the_improving_side_and_has_its_half(
    value, old, target, loss, slope
):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)

    losses = value_losses(values, old * one, target * one, 0.2)
    losses.sum().backward()

    assert (losses.item(), values.grad.item()) == pytest.approx((loss, slope))


def test_gradients_of_the_value_loss_equal_finite_differences():
    rewards, values, _ = inputs(seed=6)

    assert torch.autograd.gradcheck(
        lambda v: value_losses(v, values, rewards, 0.3), (values + 0.7 * rewards).requires_grad_()
    )


def ppo_batch():
    """One sample of two trained tokens with reward 1, values 0.25 and 0.5."""
    hit = torch.tensor([[1.0, 1.0, 0.0]])
    return replace(
        empty_batch(num_tokens=3),
        trainable=hit.bool(),
        advantages=hit,
        token_weights=hit,
        denominators=torch.tensor([2.0], dtype=torch.float64),
        values=torch.tensor([[0.25, 0.5, 9.0]]),
    )


def test_a_batch_gets_its_advantages_and_its_critic_a_loss():
    batch = with_gae(ppo_batch(), GaeConfig(decay=1.0))
    assert batch.advantages.tolist() == [[0.75, 0.5, 0.0]]

    values = torch.tensor([[0.25, 0.75, 9.0]], requires_grad=True)
    returns = batch.advantages + batch.values
    part = critic_objective(values, batch, returns, CriticConfig())
    part.total.backward()

    # 0.5 · 0.75² + 0.5 · (0.7 - 1)²: the second moved by 0.25, over the clip of 0.2.
    assert part.total.item() == pytest.approx(0.5 * 0.75**2 + 0.5 * 0.3**2)
    assert part.weight.item() == 2.0
    assert values.grad.tolist() == [[pytest.approx(-0.75), 0.0, 0.0]]
    assert part.metrics["clipped"].item() == 1.0


@pytest.mark.parametrize("padding", [math.nan, -math.inf, math.inf])
def test_what_stands_at_padding_is_of_no_account_to_a_critic(padding):
    spoilt = replace(ppo_batch(), values=torch.tensor([[0.25, 0.5, padding]]))
    batch = with_gae(spoilt, GaeConfig(decay=1.0))
    assert (batch.advantages.tolist(), batch.returns.tolist()) == (
        [[0.75, 0.5, 0.0]],
        [[1.0, 1.0, 0.0]],
    )

    values = torch.tensor([[0.25, 0.75, padding]], requires_grad=True)
    returns = torch.tensor([[1.0, 1.0, padding]])
    part = critic_objective(values, batch, returns, CriticConfig())
    part.total.backward()

    assert part.total.item() == pytest.approx(0.5 * 0.75**2 + 0.5 * 0.3**2)
    assert values.grad.tolist() == [[pytest.approx(-0.75), 0.0, 0.0]]
    assert {name: value.item() for name, value in part.metrics.items()} == pytest.approx(
        {
            "tokens": 2.0,
            "value": 1.0,
            "return": 2.0,
            "return_squared": 2.0,
            "squared_error": 0.75**2 + 0.25**2,
            "clipped": 1.0,
        }
    )
    given = torch.tensor([[1.0, 1.0, padding]])
    assert terminal_rewards(batch.samples, given).tolist() == [[0.0, 1.0, 0.0]]


def test_whitened_advantages_of_a_batch_have_mean_0_and_deviation_1():
    batch = with_gae(ppo_batch(), GaeConfig(decay=1.0))

    white = with_whitened_advantages(batch, advantage_moments(batch))

    # 0.75 and 0.5: ±0.125 over a ddof-1 deviation of 0.17678.
    assert white.advantages.tolist() == [
        [pytest.approx(0.7071, abs=0.0001), pytest.approx(-0.7071, abs=0.0001), 0.0]
    ]


def test_without_values_there_is_no_gae():
    with pytest.raises(MissingScoresError, match="needs the batch's values; it has none"):
        with_gae(replace(ppo_batch(), values=None), GaeConfig())


class Critic(torch.nn.Module):
    def __init__(self, num_outputs):
        super().__init__()
        self.embed = torch.nn.Embedding(5, num_outputs)

    def forward(self, input_ids):
        class Output:
            logits = self.embed(input_ids)

        return Output


def test_a_critic_has_one_output_per_token():
    critic = Critic(1)

    values = critic_values(critic, empty_batch(num_tokens=3))
    assert torch.equal(values, critic.embed.weight[:1, 0].expand(1, 3))

    with pytest.raises(ModelHeadError, match=r"Critic returned \(1, 3, 2\) for \(1, 3\) tokens"):
        critic_values(Critic(2), empty_batch(num_tokens=3))


@pytest.mark.parametrize("factors", [{"discount": 1.5}, {"decay": -0.1}])
def test_a_factor_outside_0_to_1_is_refused(factors):
    with pytest.raises(AlgorithmConfigError, match=r"gae: discount .* must be in \[0, 1\]"):
        GaeConfig(**factors)


def test_a_negative_clip_is_refused():
    with pytest.raises(AlgorithmConfigError, match="clip -1"):
        CriticConfig(clip=-1.0)
