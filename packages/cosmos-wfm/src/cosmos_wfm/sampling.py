"""Samplers over any velocity, and the noise levels they step through.

The flow x_σ = (1 - σ) x_0 + σ ε is run from σ = 1 to 0, as an ODE (dx = v dσ), or as a stochastic
process with the same marginals (Liu et al., Flow-GRPO, arXiv 2505.05470, equation 9), whose steps
have a density:

    x' = x + [v + s²/(2σ) (x + (1 - σ) v)] Δ + s √-Δ n,      Δ = σ' - σ < 0

with s = η √(σ / (1 - σ)) (Flow-GRPO) or s = η (DanceGRPO, arXiv 2505.07818). s has a pole at σ = 1:
levels above the schedule's second one count as that one there, not just a level of exactly 1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.flow_matching import per_sample, shift_sigmas
from cosmos_wfm.ranges import check_at_least

Velocity = Callable[[Tensor, Tensor], Tensor]
"""From x [B, C, *s] and a level for each sample, [B], to v [B, C, *s]."""

_SMALL_SIGMA = 1e-3


def flow_schedule(num_steps: int, shift: float) -> Float[Tensor, " S"]:
    """Return num_steps + 1 levels from 1 to 0: evenly spaced, then shifted in closed form.

    Unlike some released schedules it has no tiny last level: over the jump before one, second-order
    solvers overshoot, and samples of a Gaussian come out 40 % too wide.

    Raises:
        WfmConfigError: if there is no step.
    """
    if num_steps < 1:
        raise WfmConfigError(f"sampler: num_steps is {num_steps}; it must be 1 or more")
    return shift_sigmas(torch.linspace(1.0, 0.0, num_steps + 1), shift)


@torch.no_grad()
def sample_ode(
    velocity: Velocity,
    noise: Float[Tensor, "B C *s"],
    sigmas: Float[Tensor, " S"],
    *,
    order: Literal[1, 2] = 2,
) -> Float[Tensor, "B C *s"]:
    """Follow the flow from noise to data; float32 throughout.

    Args:
        velocity: v(x, σ).
        noise: x at the first level, which must be near 1.
        sigmas: levels, falling, the last 0.
        order: 1 is Euler. 2 extrapolates the velocity over two levels (Adams and Bashforth's rule
            for uneven steps, what DPM-Solver++(2M) does in this parameterisation to leading order).

    Raises:
        WfmConfigError: if the levels do not fall, or are none.
    """
    _check_levels(sigmas)
    latents, before, last = noise.float(), None, 0.0
    for now, then in pairwise(sigmas.tolist()):
        slope = velocity(latents, torch.full((len(noise),), now, device=noise.device)).float()
        step = then - now
        moved = slope
        if order == 2 and before is not None:
            moved = slope + 0.5 * step / last * (slope - before)
        latents, before, last = latents + step * moved, slope, step
    return latents


@dataclass(frozen=True, kw_only=True, slots=True)
class SdeConfig:
    """The stochastic process that rollouts of policy-gradient methods follow.

    Attributes:
        kind: ``flow``: Flow-GRPO's noise, strong at high levels; ``dance``: DanceGRPO's constant.
        eta: strength; 0 is the ODE, which has no density and cannot be trained on.
        first: step at which noise begins, from 0.
        num_noisy: steps with noise, from ``first``; the others follow the ODE and are not trained
            on (the window of Flow-GRPO-Fast and MixGRPO). 0 for all but the last, which never has
            noise, as nothing would take it away again.
    """

    kind: Literal["flow", "dance"] = "flow"
    eta: float = 0.7
    first: int = 0
    num_noisy: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_at_least("sde", self, eta=0, first=0, num_noisy=0)

    def noise_levels(self, sigmas: Float[Tensor, " S"]) -> list[float]:
        """Return s of each step; 0 where the ODE is followed.

        Raises:
            WfmConfigError: if the window has no step of this schedule.
        """
        num_steps = len(sigmas) - 1
        end = num_steps - 1 if not self.num_noisy else min(self.first + self.num_noisy, num_steps)
        if sigmas[-1] == 0:
            end = min(end, num_steps - 1)
        if self.first >= end:
            raise WfmConfigError(
                f"sde: no step of {num_steps} has noise: the window begins at step {self.first}, "
                "and the last step to level 0 never has any"
            )
        highest = float(sigmas[1])
        levels = [0.0] * num_steps
        for step in range(self.first, end):
            level = min(float(sigmas[step]), highest)
            flow = math.sqrt(level / (1.0 - level)) if self.kind == "flow" else 1.0
            levels[step] = self.eta * flow
        return levels


class Transition(NamedTuple):
    """A Gaussian step: its mean, and its standard deviation in every dimension."""

    mean: Float[Tensor, "B C *s"]
    std: Float[Tensor, " B"]


def transition(
    latents: Float[Tensor, "B C *s"],
    velocity: Float[Tensor, "B C *s"],
    sigmas: Float[Tensor, " B"],
    next_sigmas: Float[Tensor, " B"],
    noise_levels: Float[Tensor, " B"],
) -> Transition:
    """Return the step's distribution; with a noise level of 0 it is Euler's, of width 0.

    Args:
        latents: x, float32.
        velocity: v(x, σ), with gradient where the caller wants one.
        sigmas: σ of each sample.
        next_sigmas: σ' of each sample, below σ.
        noise_levels: s of each sample, of ``SdeConfig.noise_levels``.
    """
    x, v = latents.float(), velocity.float()
    step = per_sample(next_sigmas - sigmas, x)
    sigma = per_sample(sigmas.clamp_min(_SMALL_SIGMA), x)
    correction = per_sample(noise_levels, x) ** 2 / (2.0 * sigma) * (x + (1.0 - sigma) * v)
    return Transition(x + (v + correction) * step, noise_levels * (sigmas - next_sigmas).sqrt())


def log_prob(following: Float[Tensor, "B C *s"], step: Transition) -> Float[Tensor, " B"]:
    """Return the *mean over dimensions* of the log-density of x', not its sum.

    A sum over 10⁵ dimensions would make every ratio 0 or infinite; the mean is why clip ranges of
    these methods are as small as 1e-4.

    Raises:
        WfmConfigError: if the step is deterministic and has no density.
    """
    if bool((step.std <= 0).any()):
        raise WfmConfigError("a step without noise has no log-probability")
    std = per_sample(step.std, following)
    density = -((following.float() - step.mean) ** 2) / (2.0 * std**2)
    density = density - std.log() - 0.5 * math.log(2.0 * math.pi)
    return density.flatten(1).mean(1)


@dataclass(frozen=True, slots=True, eq=False)
class NoisyStep:
    """One step with noise of a batch of trajectories, all that training on it needs.

    Attributes:
        latents: x, float32.
        following: x' that was drawn.
        sigma: level of x.
        next_sigma: level of x'.
        noise_level: s.
        log_probs: of x' when it was drawn.
    """

    latents: Float[Tensor, "B C *s"]
    following: Float[Tensor, "B C *s"]
    sigma: float
    next_sigma: float
    noise_level: float
    log_probs: Float[Tensor, " B"]

    def to(self, device: torch.device) -> "NoisyStep":
        """Return the same step on a device."""
        return replace(
            self,
            latents=self.latents.to(device),
            following=self.following.to(device),
            log_probs=self.log_probs.to(device),
        )


@torch.no_grad()
def sample_sde(
    velocity: Velocity,
    noise: Float[Tensor, "B C *s"],
    sigmas: Float[Tensor, " S"],
    config: SdeConfig,
    generators: Sequence[torch.Generator],
) -> tuple[Float[Tensor, "B C *s"], list[NoisyStep]]:
    """Run the stochastic process and keep its noisy steps.

    Args:
        velocity: v(x, σ).
        noise: x at the first level.
        sigmas: levels, falling.
        config: which noise, and where.
        generators: one for each sample, so that a sample does not depend on its batch; on any
            device, all on the same.

    Returns:
        The final latents and the steps that have a density.

    Raises:
        WfmConfigError: if the levels do not fall, or are none, or samples have no generator each.
    """
    _check_levels(sigmas)
    if len(generators) != len(noise):
        raise WfmConfigError(
            f"sampler: {len(generators)} generators for {len(noise)} samples; want one for each, "
            "or samples would share their noise"
        )
    latents, steps = noise.float(), list[NoisyStep]()
    num, device = len(noise), noise.device
    for (now, then), level in zip(
        pairwise(sigmas.tolist()), config.noise_levels(sigmas), strict=True
    ):
        rows = [torch.full((num,), value, device=device) for value in (now, then, level)]
        step = transition(latents, velocity(latents, rows[0]), *rows)
        if level == 0.0:
            latents = step.mean
            continue
        drawn = torch.stack([_normal(latents.shape[1:], each) for each in generators])
        following = step.mean + per_sample(step.std, latents) * drawn.to(device)
        steps.append(NoisyStep(latents, following, now, then, level, log_prob(following, step)))
        latents = following
    return latents, steps


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _check_levels(sigmas: Float[Tensor, " S"]) -> None:
    """Refuse what is no falling row of noise levels.

    Raises:
        WfmConfigError: says what was found.
    """
    levels: list[float] = sigmas.tolist()
    falls = all(then < now for now, then in pairwise(levels))
    if len(levels) < 2 or not falls or levels[0] > 1.0 or levels[-1] < 0.0:
        shown = ", ".join(f"{level:g}" for level in (*levels[:3], *levels[-1:]))
        raise WfmConfigError(
            f"sampler: sigmas are {shown}; want levels that fall from at most 1 (noise) to 0, such "
            "as sigmas of a flow-matching scheduler after set_timesteps, not its timesteps"
        )
