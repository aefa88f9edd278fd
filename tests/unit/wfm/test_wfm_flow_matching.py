"""Noise levels and the flow-matching loss against values worked out by hand."""

import math

import pytest
import torch
from torch import nn

from cosmos_wfm import (
    FlowBatch,
    FlowMatchingConfig,
    WfmConfigError,
    draw_sigmas,
    flow_matching_loss,
    shift_sigmas,
    sigma_weights,
)
from cosmos_wfm.flow_batches import given_mask


@pytest.mark.parametrize(
    ("level", "shift", "sigma"),
    [(0.5, 1.0, 0.5), (0.5, 3.0, 0.75), (0.25, 3.0, 0.5), (0.0, 8.0, 0.0), (1.0, 8.0, 1.0)],
)
def test_shift_in_closed_form(level, shift, sigma):
    assert shift_sigmas(torch.tensor([level]), shift).item() == pytest.approx(sigma)


def levels(**settings):
    generator = torch.Generator().manual_seed(0)
    return draw_sigmas(FlowMatchingConfig(**settings), 1.0, 40_000, generator).double()


def test_logit_normal_levels_have_a_normal_logit_and_lean_to_noise_for_a_mean_above_zero():
    logits = torch.logit(levels(logit_mean=0.5, logit_std=2.0))

    # 40,000 draws: the error of the mean is 0.01.
    assert logits.mean().item() == pytest.approx(0.5, abs=0.05)
    assert logits.std().item() == pytest.approx(2.0, abs=0.05)


def test_uniform_levels_are_uniform():
    drawn = levels(density="uniform")

    assert drawn.mean().item() == pytest.approx(0.5, abs=0.01)
    assert drawn.var().item() == pytest.approx(1 / 12, abs=0.003)


def test_mode_levels_follow_the_papers_map():
    # u = 1 - u' - s (cos²(πu'/2) - 1 + u'): s = 0 is uniform, s = 1.29 gathers in the middle.
    uniform, middle = levels(density="mode", mode_scale=0.0), levels(density="mode")
    drawn = torch.rand(40_000, generator=torch.Generator().manual_seed(0)).double()

    torch.testing.assert_close(uniform, 1 - drawn, atol=1e-6, rtol=0)
    assert middle.var() < uniform.var()
    assert middle.min() >= 0
    assert middle.max() <= 1


def test_the_models_shift_applies_unless_the_recipe_has_its_own():
    def drawn(models, **settings):
        generator = torch.Generator().manual_seed(0)
        return draw_sigmas(FlowMatchingConfig(**settings), models, 5, generator)

    torch.testing.assert_close(drawn(3.0), shift_sigmas(drawn(1.0), 3.0))
    assert torch.equal(drawn(3.0, shift=1.0), drawn(1.0))


@pytest.mark.parametrize(
    ("weighting", "weight"),
    [("none", 1.0), ("sigma_sqrt", 16.0), ("cosmap", 2 / (math.pi * 0.625))],
)
def test_weight_of_a_level(weighting, weight):
    assert sigma_weights(torch.tensor([0.25]), weighting).item() == pytest.approx(weight)


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(0.0))


class ConstantAdapter:
    """Predicts the same velocity everywhere, and remembers what it was shown."""

    def velocity(self, transformer, latents, sigmas, text, given=None):
        self.seen = latents
        return transformer.value.expand_as(latents)


def batch(weights=(1.0, 1.0)):
    return FlowBatch(
        latents=torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1).expand(2, 1, 1, 2),
        noise=torch.tensor([3.0, -1.0]).reshape(2, 1, 1, 1).expand(2, 1, 1, 2),
        sigmas=torch.tensor([0.25, 0.5]),
        text={},
        weights=torch.tensor(weights),
    )


def test_the_loss_is_the_squared_distance_to_noise_minus_data():
    model, adapter = Constant(), ConstantAdapter()

    part = flow_matching_loss(adapter, FlowMatchingConfig())(model, batch())
    part.total.backward()

    # Targets 2 and -3: 4 + 9; d/dv Σ (v - target)² at v = 0 is -2 (2 - 3).
    assert part.total.item() == pytest.approx(13.0)
    assert part.weight.item() == 2.0
    assert model.value.grad.item() == pytest.approx(2.0)
    # 0.75 · 1 + 0.25 · 3 and 0.5 · 2 - 0.5 · 1.
    assert adapter.seen[:, 0, 0, 0].tolist() == pytest.approx([1.5, 0.5])


def test_weights_of_levels_and_of_samples_multiply_but_only_samples_are_counted():
    config = FlowMatchingConfig(weighting="sigma_sqrt")

    part = flow_matching_loss(ConstantAdapter(), config)(Constant(), batch(weights=(1.0, 0.0)))

    assert part.total.item() == pytest.approx(16.0 * 4.0)
    assert part.weight.item() == 1.0
    assert part.metrics["velocity_error"].item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_std": 0.0},
        {"logit_mean": math.nan},
        {"shift": -1.0},
        {"mode_scale": 2.0},
        {"mode_scale": 0.5},  # of a density that is another
        {"logit_mean": 0.5, "density": "uniform"},
        {"logit_std": 2.0, "density": "mode"},
    ],
)
def test_settings_that_are_no_density_are_refused(settings):
    with pytest.raises(WfmConfigError, match=next(iter(settings))):
        FlowMatchingConfig(**settings)


def test_given_frames_stay_clean_and_have_no_error():
    adapter = ConstantAdapter()
    latents = torch.ones(1, 1, 3, 1, 1)
    mask = given_mask([2], latents)
    given = FlowBatch(
        latents=latents,
        noise=torch.full_like(latents, 3.0),
        sigmas=torch.tensor([0.5]),
        text={},
        weights=torch.ones(1),
        given=mask,
    )

    part = flow_matching_loss(adapter, FlowMatchingConfig())(Constant(), given)

    assert adapter.seen.flatten().tolist() == [1.0, 1.0, 2.0]
    # Target 2 in the one frame that is made, mean over all three.
    assert part.total.item() == pytest.approx(4.0 / 3.0)
    assert given_mask([3, 0], torch.ones(2, 1, 3, 1, 1)).flatten().tolist() == [1, 1, 0, 0, 0, 0]
