"""Samplers on one-dimensional Gaussian data, whose exact velocity is known."""

from itertools import pairwise

import pytest
import torch

from cosmos_wfm import (
    SdeConfig,
    Transition,
    WfmConfigError,
    flow_schedule,
    log_prob,
    sample_ode,
    sample_sde,
    transition,
)

MEAN, STD = 1.0, 0.5
SHIFTS = {"sd3 and sana": 3.0, "cosmos": 5.0, "sana-video": 8.0}


def exact(x, sigmas):
    """E[ε - x_0 | x_σ] for x_0 ~ N(MEAN, STD²)."""
    s = sigmas[:, None]
    variance = (1 - s) ** 2 * STD**2 + s**2
    residual = (x - (1 - s) * MEAN) / variance
    return s * residual - (MEAN + (1 - s) * STD**2 * residual)


@pytest.fixture(scope="module")
def noise():
    return torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)
@pytest.mark.parametrize(
    # Steps of finite length lose some width and never add any (2 % is the sample's own error).
    ("num_steps", "narrowest"),
    [(10, 0.72), (25, 0.93), (40, 0.96)],
)
def test_the_second_order_solver_gives_the_datas_width(noise, shift, num_steps, narrowest):
    samples = sample_ode(exact, noise, flow_schedule(num_steps, shift))

    assert samples.mean().item() == pytest.approx(MEAN, abs=0.03)
    assert narrowest < samples.std().item() / STD < 1.02


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)
@pytest.mark.parametrize("kind", ["flow", "dance"])
def test_stochastic_steps_keep_the_datas_width(noise, shift, kind):
    sigmas, generator = flow_schedule(40, shift), torch.Generator().manual_seed(1)
    levels, x = SdeConfig(kind=kind).noise_levels(sigmas), noise
    for (now, then), level in zip(pairwise(sigmas.tolist()), levels, strict=True):
        rows = [torch.full((len(x),), value) for value in (now, then, level)]
        step = transition(x, exact(x, rows[0]), *rows)
        x = step.mean + step.std[:, None] * torch.randn(x.shape, generator=generator)

    assert x.mean().item() == pytest.approx(MEAN, abs=0.04)
    assert 0.85 < x.std().item() / STD < 1.05


def test_a_first_level_just_below_one_is_no_pole():
    for first in (1.0, 0.9999, 1 - 1e-6):
        levels = SdeConfig(eta=0.7).noise_levels(torch.tensor([first, 0.8, 0.4, 0.0]))
        # 0.7 √(0.8 / 0.2) twice, then 0.7 √(0.4 / 0.6) is not used: the last step has no noise.
        assert levels == pytest.approx([1.4, 1.4, 0.0])


def test_a_window_of_early_steps_has_noise_and_the_rest_follow_the_flow():
    sigmas = flow_schedule(6, 1.0)

    assert [level > 0 for level in SdeConfig(first=1, num_noisy=2).noise_levels(sigmas)] == [
        False, True, True, False, False, False
    ]  # fmt: skip
    with pytest.raises(WfmConfigError, match="no step of 6 has noise"):
        SdeConfig(first=5).noise_levels(sigmas)


def test_one_stochastic_step_by_hand():
    x, v = torch.tensor([[2.0]]), torch.tensor([[1.0]])
    rows = [torch.tensor([value]) for value in (0.5, 0.25, 0.6)]

    step = transition(x, v, *rows)

    # 2 + (1 + 0.36 / 1 · (2 + 0.5 · 1)) · (-0.25), and 0.6 √0.25.
    assert step.mean.item() == pytest.approx(2 - 0.25 * (1 + 0.36 * 2.5))
    assert step.std.item() == pytest.approx(0.3)


def test_log_probabilities_are_means_over_dimensions():
    step = Transition(torch.zeros(1, 2, 3), torch.tensor([2.0]))
    drawn = torch.tensor([[[0.0, 1.0, 2.0], [3.0, -1.0, 0.5]]])

    normal = torch.distributions.Normal(0.0, 2.0)
    assert log_prob(drawn, step).item() == pytest.approx(normal.log_prob(drawn).mean().item())
    with pytest.raises(WfmConfigError, match="has no log-probability"):
        log_prob(drawn, Transition(step.mean, torch.tensor([0.0])))


def test_a_sample_does_not_depend_on_its_batch():
    def run(rows):
        noise = torch.stack([torch.full((1,), float(row)) for row in rows])
        generators = [torch.Generator().manual_seed(row) for row in rows]
        return sample_sde(exact, noise, flow_schedule(4, 3.0), SdeConfig(), generators)

    together, steps = run([0, 1, 2])
    alone, _ = run([1])

    assert torch.equal(together[1], alone[0])
    assert len(steps) == 3  # the fourth has no noise
    assert torch.equal(steps[0].following, steps[1].latents)


def test_the_schedule_is_even_levels_shifted_once_in_closed_form():
    # 3 u / (1 + 2 u) at 1, 3/4, 1/2, 1/4, 0.
    assert flow_schedule(4, 3.0).tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5, 0.0])
    with pytest.raises(WfmConfigError, match="num_steps is 0"):
        flow_schedule(0, 3.0)
