"""Losses of RL: identities in float64, hand values, and what each leaves alone."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from cosmos_wfm import (
    AwmConfig,
    DdrlBatch,
    DdrlConfig,
    FlowBatch,
    FlowGrpoConfig,
    ForwardBatch,
    Guidance,
    NftConfig,
    OldPolicyDecay,
    SamplerConfig,
    SdeConfig,
    StepBatch,
    WfmConfigError,
    awm_loss,
    ddrl_loss,
    exponential_advantages,
    flow_grpo_loss,
    nft_errors,
    nft_loss,
)


class Offset(nn.Module):
    """A velocity that is one number."""

    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))


class OffsetAdapter:
    def velocity(self, transformer, latents, sigmas, text, given=None):
        return transformer.value + 0.1 * latents.double()

    def guide(self, positive, negative, scale):
        return negative + scale * (positive - negative)


class Fixed:
    """Policies of given offsets."""

    def __init__(self, old=0.0, reference=0.0):
        self.values = {"old": old, "reference": reference}

    @contextmanager
    def _give(self, name):
        with torch.no_grad():
            yield Offset(self.values[name])

    def old(self):
        return self._give("old")

    def reference(self):
        return self._give("reference")


def forward_batch(advantages, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    num = len(advantages)
    return ForwardBatch(
        latents=torch.randn(num, 3, 2, generator=generator, dtype=dtype),
        noise=torch.randn(num, 3, 2, generator=generator, dtype=dtype),
        sigmas=torch.linspace(0.2, 0.9, num, dtype=dtype),
        text={},
        advantages=torch.tensor(advantages, dtype=dtype),
        weights=torch.ones(num, dtype=dtype),
    )


def velocities(batch):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch.latents.shape, generator=generator, dtype=torch.float64)


def test_nft_has_no_gradient_where_the_policy_is_old_and_r_is_a_half():
    batch = forward_batch([0.0, 0.0])
    old = velocities(batch)
    new = old.clone().requires_grad_()

    nft_errors(new, old, batch, torch.tensor([0.5, 0.5]).double(), 0.3).sum().backward()

    assert new.grad.abs().max() < 1e-15


@pytest.mark.parametrize("beta", [0.1, 1.0, 2.5])
def test_nft_at_the_old_policy_is_advantage_weighted_matching_whatever_beta_is(beta):
    batch = forward_batch([0.0, 0.0, 0.0])
    r = torch.tensor([0.9, 0.3, 0.5], dtype=torch.float64)
    old = velocities(batch)
    new = old.clone().requires_grad_()
    nft_errors(new, old, batch, r, beta).sum().backward()

    other = old.clone().requires_grad_()
    level = batch.sigmas[:, None, None]
    noisy = (1 - level) * batch.latents + level * batch.noise
    difference = (noisy - level * other - batch.latents).flatten(1)
    width = difference.detach().abs().mean(1)
    ((2 * r - 1) * difference.square().mean(1) / width).sum().backward()

    torch.testing.assert_close(new.grad, other.grad, atol=1e-9, rtol=0)


def test_the_optimum_of_the_plain_loss_is_the_papers():
    """With E[v] = v_old behind one x_t: v* = v_old + (2/β)(E[r v] - E[r] v_old)."""
    v, r = torch.tensor([2.0, -1.0, 0.5]).double(), torch.tensor([0.8, 0.1, 0.4]).double()
    v_old, beta = v.mean(), 0.7
    new = (v_old + 2 / beta * ((r * v).mean() - r.mean() * v_old)).requires_grad_()

    positive, negative = (v_old + sign * beta * (new - v_old) for sign in (1, -1))
    (r * (positive - v) ** 2 + (1 - r) * (negative - v) ** 2).mean().backward()

    assert abs(new.grad.item()) < 1e-12


def test_nft_adds_the_clip_and_the_distance_to_the_reference():
    adapter, batch = OffsetAdapter(), forward_batch([2.0, -9.0])
    model, policies = Offset(0.5), Fixed(old=0.2, reference=0.1)

    bare = nft_loss(adapter, NftConfig(kl=0.0), policies)(model, batch)
    pulled = nft_loss(adapter, NftConfig(kl=0.25), policies)(model, batch)

    # (0.5 - 0.1)² for each of two samples.
    assert (pulled.total - bare.total).item() == pytest.approx(0.25 * 2 * 0.16)
    assert pulled.weight.item() == 2.0
    assert pulled.metrics["old_deviation"].item() == pytest.approx(2 * 0.09)
    assert NftConfig().optimality(batch.advantages).tolist() == pytest.approx([0.7, 0.0])


def test_the_old_policys_decay_schedules():
    assert [OldPolicyDecay(rate=0.0).at(step) for step in (1, 99)] == [0.0, 0.0]
    assert [OldPolicyDecay().at(step) for step in (1, 100, 900)] == pytest.approx([0.001, 0.1, 0.5])
    slow = OldPolicyDecay(rate=0.0075, wait=75, most=0.999)
    assert [slow.at(step) for step in (75, 76, 500)] == pytest.approx([0.0, 0.0075, 0.999])


def test_advantage_weighted_matching_is_the_flow_matching_error_times_the_advantage():
    adapter, batch = OffsetAdapter(), forward_batch([1.5, -0.5])
    part = awm_loss(adapter, AwmConfig(kl=0.0), Fixed())(Offset(0.4), batch)

    level = batch.sigmas[:, None, None]
    noisy = (1 - level) * batch.latents + level * batch.noise
    errors = (0.4 + 0.1 * noisy - batch.noise + batch.latents).square().flatten(1).mean(1)
    assert part.total.item() == pytest.approx((batch.advantages * errors).sum().item(), rel=1e-5)


def step_batch(model, advantages, *, negative=None, guidance=1.0):
    """Draw steps from the model itself, so that its ratio is 1."""
    generator = torch.Generator().manual_seed(2)
    num = len(advantages)
    batch = StepBatch(
        latents=torch.randn(num, 2, 2, generator=generator),
        following=torch.randn(num, 2, 2, generator=generator),
        sigmas=torch.full((num,), 0.8),
        next_sigmas=torch.full((num,), 0.6),
        noise_levels=torch.full((num,), 0.9),
        log_probs=torch.zeros(num),
        text={},
        negative=negative,
        guidance=Guidance(guidance),
        advantages=torch.tensor(advantages),
        weights=torch.ones(num),
    )
    part = flow_grpo_loss(OffsetAdapter(), FlowGrpoConfig(clip=1e9), Fixed())
    logs = [part(model, only(batch, row)).metrics["ratio"].log().float() for row in range(num)]
    return StepBatch(**{**fields(batch), "log_probs": torch.stack(logs)})


def fields(batch):
    return {name: getattr(batch, name) for name in type(batch).__dataclass_fields__}


def only(batch, row):
    kept = {"text", "negative", "guidance"}
    return StepBatch(**{n: v if n in kept else v[row : row + 1] for n, v in fields(batch).items()})


def test_flow_grpo_at_its_own_policy_has_ratio_one_and_the_policy_gradient():
    model, batch = Offset(0.3), step_batch(Offset(0.3), [2.0, -1.0])

    part = flow_grpo_loss(OffsetAdapter(), FlowGrpoConfig(), Fixed())(model, batch)
    part.total.backward()

    assert part.metrics["ratio"].item() == pytest.approx(2.0, abs=1e-6)
    assert part.metrics["clipped"].item() == 0.0
    assert part.total.item() == pytest.approx(-1.0, abs=1e-6)
    # -Σ A ∂ log p/∂θ by finite differences of the log-probabilities.
    log_of = flow_grpo_loss(OffsetAdapter(), FlowGrpoConfig(clip=1e9), Fixed())
    slopes = []
    for row in range(2):
        ends = [
            log_of(Offset(0.3 + h), only(batch, row)).metrics["ratio"].log().item()
            for h in (-1e-2, 1e-2)
        ]
        slopes.append((ends[1] - ends[0]) / 2e-2)
    assert model.value.grad.item() == pytest.approx(-2.0 * slopes[0] + slopes[1], rel=2e-3)


def test_clipping_stops_the_gradient_only_on_the_improving_side():
    config = FlowGrpoConfig(clip=1e-4)
    batch = step_batch(Offset(0.0), [1.0])
    moved = StepBatch(**{**fields(batch), "log_probs": batch.log_probs - 0.1})  # ratio e^0.1
    gradients = {}
    for sign in (1.0, -1.0):
        model = Offset(0.0)
        signed = StepBatch(**{**fields(moved), "advantages": torch.tensor([sign])})
        flow_grpo_loss(OffsetAdapter(), config, Fixed())(model, signed).total.backward()
        gradients[sign] = model.value.grad.item()

    assert gradients[1.0] == 0.0
    assert gradients[-1.0] != 0.0


def test_the_kl_of_two_steps_is_that_of_two_gaussians():
    model, batch = Offset(0.5), step_batch(Offset(0.5), [0.0])
    part = flow_grpo_loss(OffsetAdapter(), FlowGrpoConfig(kl=2.0), Fixed(reference=0.2))(
        model, batch
    )

    # dμ/dv = (1 + s²(1 - σ)/(2σ)) Δ with s = 0.9, σ = 0.8, Δ = -0.2; variance s²|Δ|.
    shift = 0.3 * (1 + 0.81 * 0.2 / 1.6) * 0.2
    assert part.metrics["kl"].item() == pytest.approx(shift**2 / (2 * 0.81 * 0.2), rel=1e-5)
    assert part.total.item() == pytest.approx(2 * part.metrics["kl"].item(), rel=1e-5)


def test_guidance_is_in_the_loss_and_only_the_positive_side_has_a_gradient():
    model = Offset(0.4)
    batch = step_batch(Offset(0.4), [1.0], negative={}, guidance=3.0)
    guided = flow_grpo_loss(OffsetAdapter(), FlowGrpoConfig(), Fixed())(model, batch)
    guided.total.backward()
    plain_model = Offset(0.4)
    plain = StepBatch(**{**fields(batch), "negative": None})
    flow_grpo_loss(OffsetAdapter(), FlowGrpoConfig(), Fixed())(plain_model, plain).total.backward()

    # Both conditions give the same velocity here, so values agree and the slope is three times.
    assert model.value.grad.item() == pytest.approx(3 * plain_model.value.grad.item(), rel=1e-5)


def test_the_exponential_reward_is_centred_and_at_the_optimum_balances_the_data():
    rewards, beta = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), 0.8
    data = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    optimum = data * (rewards / beta).exp()
    z = beta * optimum.sum().log()
    optimum = optimum / optimum.sum()

    # λ + p_data / p = 0 everywhere, and the same Z from samples of p: -β log E_p exp(-r/β).
    torch.testing.assert_close(
        -(-(rewards - z) / beta).exp() + data / optimum, torch.zeros(3).double()
    )
    assert (-beta * (optimum * (-rewards / beta).exp()).sum().log()).item() == pytest.approx(
        z.item()
    )
    # e^0 and e^-1, mean (1 + 1/e)/2.
    found = exponential_advantages(torch.tensor([0.0, 1.0], dtype=torch.float64), 1.0)
    half = (1 + math.exp(-1)) / 2
    assert found.tolist() == pytest.approx([1 - 1 / half, 1 - math.exp(-1) / half])
    assert found.mean().item() == pytest.approx(0.0, abs=1e-12)


def test_what_is_cut_of_the_exponential_reward_is_cut_before_its_mean_is_taken_off():
    # λ of one bad sample in eight is near -8, which counts as -5, and 0 of the others: mean -5/8.
    rewards = torch.tensor([0.0] + [50.0] * 7)

    found = DdrlConfig().advantages(rewards, torch.zeros(8, dtype=torch.int64))

    assert found.tolist() == pytest.approx([-5 + 5 / 8] + [5 / 8] * 7)


def test_ddrl_is_the_policy_loss_and_a_share_of_the_data_loss():
    adapter, model = OffsetAdapter(), Offset(0.3)
    steps = step_batch(Offset(0.3), [1.0, -0.5])
    data = FlowBatch(
        latents=torch.ones(2, 2, 2),
        noise=torch.zeros(2, 2, 2),
        sigmas=torch.tensor([0.5, 0.5]),
        text={},
        weights=torch.ones(2),
    )
    config = DdrlConfig(data_weight=0.5, policy=FlowGrpoConfig(sde=SdeConfig(kind="dance")))

    part = ddrl_loss(adapter, config, Fixed())(model, DdrlBatch(steps=steps, data=data))

    # Velocity 0.3 + 0.05 at x = 0.5, target -1: 1.35² for both.
    assert part.metrics["data_loss"].item() == pytest.approx(2 * 1.35**2, rel=1e-5)
    assert part.total.item() == pytest.approx(-0.5 + 0.5 * 2 * 1.35**2, rel=1e-5)
    assert part.weight.item() == 2.0


def test_ddrls_two_forms_are_chosen_by_name():
    rewards, groups = torch.tensor([0.0, 1.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])

    paper = DdrlConfig(form="paper").advantages(rewards, groups)
    shortcut = DdrlConfig(form="shortcut").advantages(rewards, groups)

    assert paper[:2].tolist() == pytest.approx(exponential_advantages(rewards[:2], 1.0).tolist())
    assert paper[2:].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert shortcut.tolist() == pytest.approx([-0.7071, 0.7071, 0.0, 0.0], abs=1e-3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NftConfig(beta=0.0), "beta is 0.0"),
        (lambda: NftConfig(kl=math.nan), "kl is nan"),
        (lambda: NftConfig(advantage_clip=math.inf), "advantage_clip is inf"),
        (lambda: NftConfig(timestep_fraction=0.0), "timestep_fraction is 0.0"),
        (lambda: OldPolicyDecay(rate=-0.1), "rate is -0.1"),
        (lambda: OldPolicyDecay(wait=-1), "wait is -1"),
        (lambda: OldPolicyDecay(most=1.0), "most is 1.0"),
        (lambda: FlowGrpoConfig(sde=SdeConfig(eta=0.0)), "no density"),
        (lambda: FlowGrpoConfig(clip=0.0), "clip is 0.0"),
        (lambda: DdrlConfig(beta=0.0), "beta is 0.0"),
        (lambda: DdrlConfig(form="shortcut", beta=2.0), "beta is 2.0, but .* form = paper only"),
        (lambda: DdrlConfig(policy=FlowGrpoConfig(standardise="all")), "standardise is all"),
        (lambda: AwmConfig(kl=-1.0), "kl is -1.0"),
        (lambda: SdeConfig(eta=-1.0), "eta is -1.0"),
        (lambda: SamplerConfig(guidance=1.0), "guidance is 1.0; it must be above 1"),
        (lambda: SamplerConfig(guidance=math.nan), "guidance is nan"),
        (lambda: SamplerConfig(guidance=4.0, guidance_2=-1.0), "guidance_2 is -1.0"),
        (lambda: SamplerConfig(shift=math.inf), "shift is inf"),
    ],
)
def test_settings_that_have_no_meaning_are_refused(build, message):
    with pytest.raises(WfmConfigError, match=message):
        build()
