"""Flow matching: which noise levels are trained on, and the loss at them.

L = E w(σ) ‖v_θ(x_σ, c, σ) - (ε - x_0)‖², the mean over dimensions, x_σ = (1 - σ) x_0 + σ ε
(Esser et al., arXiv 2403.03206, sections 2 and 3.1).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_algos import LossSum
from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.ranges import check_at_least, check_finite, check_positive, check_unused

_OF_DENSITY = {
    "logit_normal": {"logit_mean": 0.0, "logit_std": 1.0},
    "mode": {"mode_scale": 1.29},
}
"""Settings that belong to one density, with what they are by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowMatchingConfig:
    """Density of the noise levels and weight of the loss at each.

    Levels are continuous: u is drawn, then shifted to σ = s u / (1 + (s - 1) u).

    Attributes:
        density: of u. ``logit_normal``: sigmoid(mean + std n), so that a mean above 0 leans to
            *noise*; ``uniform``; ``mode``: the paper's heavy-tailed density.
        logit_mean: location of ``logit_normal``; refused with another density.
        logit_std: scale of ``logit_normal``; refused with another density.
        mode_scale: s of ``mode``; 0 is uniform, above 0 leans to the middle. Refused with another
            density.
        shift: s of the shift; 0 takes the model's own.
        weighting: w(σ). ``none``: 1; ``sigma_sqrt``: σ^-2; ``cosmap``: 2/(π(1 - 2σ + 2σ²)).
    """

    density: Literal["logit_normal", "uniform", "mode"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    shift: float = 0.0
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"

    def __post_init__(self) -> None:
        """Refuse what is no density or no shift.

        Raises:
            WfmConfigError: if a number is out of range, or of another density.
        """
        check_positive("flow", self, "logit_std")
        check_finite("flow", self, "logit_mean", "logit_std")
        check_at_least("flow", self, shift=0)  # which is the model's own
        for density, settings in _OF_DENSITY.items():
            if density != self.density:
                check_unused("flow", self, settings, f"density = {density}")
        if not -1.0 <= self.mode_scale <= 2.0 / (math.pi - 2.0):
            raise WfmConfigError(
                f"flow: mode_scale {self.mode_scale} must be in [-1, {2.0 / (math.pi - 2.0):.3f}], "
                "where the density's map is monotonic"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlowBatch:
    """B samples with all the randomness of the loss drawn already, so that the loss is a function.

    Attributes:
        latents: x_0, normalised.
        noise: ε.
        sigmas: noise level of each sample.
        text: embedded prompts.
        weights: of each sample in the step's mean: 1, or 0 for a pass that only keeps step.
        given: 1 in the latent frames that are a condition: they stay clean and have no error.
        names: of the samples, for messages.
    """

    latents: Float[Tensor, "B C *s"]
    noise: Float[Tensor, "B C *s"]
    sigmas: Float[Tensor, " B"]
    text: TextCondition
    weights: Float[Tensor, " B"]
    given: Float[Tensor, "B 1 f 1 1"] | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check shapes.

        Raises:
            WfmConfigError: names what has another one.
        """
        rows = {"sigmas": self.sigmas, "weights": self.weights}
        check_rows(self.latents, {"noise": self.noise}, rows, self.text)


def check_rows(
    latents: Float[Tensor, "B C *s"],
    alike: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    text: TextCondition,
) -> None:
    """Refuse what torch would stretch to the shape of samples, and so compute something else.

    Args:
        latents: of the samples.
        alike: what has their shape.
        rows: what has one number for each sample.
        text: embedded prompts.

    Raises:
        WfmConfigError: names what has another shape.
    """
    num = len(latents)
    shapes = {name: (each.shape, latents.shape) for name, each in alike.items()}
    shapes |= {name: (each.shape, torch.Size([num])) for name, each in rows.items()}
    for name, (found, wanted) in shapes.items():
        if found != wanted:
            raise WfmConfigError(
                f"batch: {name} is {tuple(found)}, and latents {tuple(latents.shape)}; it has to "
                f"be {tuple(wanted)}"
            )
    for name, each in text.items():
        if each.shape[:1] != (num,):
            raise WfmConfigError(
                f"batch: text[{name!r}] is {tuple(each.shape)}; its first axis has to be the {num} "
                "samples of the batch"
            )


class LevelCheck:
    """Looks at the first noise levels that a loss is given, since a mistake is one of them all."""

    def __init__(self) -> None:
        """Nothing is looked at yet."""
        self._has_looked = False

    def __call__(
        self, sigmas: Float[Tensor, " B"], next_sigmas: Float[Tensor, " B"] | None = None
    ) -> None:
        """Look, the first time.

        Raises:
            WfmConfigError: if levels are not in [0, 1], or those stepped to not below.
        """
        if self._has_looked or not sigmas.numel():
            return
        self._has_looked = True
        lowest, highest = sigmas.min().item(), sigmas.max().item()
        if not 0.0 <= lowest <= highest <= 1.0:
            raise WfmConfigError(
                f"batch: sigmas are from {lowest:g} to {highest:g}; noise levels are in [0, 1], 1 "
                "being noise: what schedulers call sigmas, or timesteps / num_train_timesteps"
            )
        if next_sigmas is not None and not bool((next_sigmas < sigmas).all()):
            raise WfmConfigError(
                f"batch: next_sigmas are up to {next_sigmas.max().item():g} where sigmas are up to "
                f"{highest:g}; a step goes down, from noise to data"
            )


def per_sample(values: Float[Tensor, " B"], like: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    """Return one value for each sample in a shape that multiplies the whole sample."""
    return values.view(-1, *(1 for _ in range(like.dim() - 1)))


def add_noise(
    latents: Float[Tensor, "B C *s"], noise: Float[Tensor, "B C *s"], sigmas: Float[Tensor, " B"]
) -> Float[Tensor, "B C *s"]:
    """Return x_σ = (1 - σ) x_0 + σ ε."""
    level = per_sample(sigmas, latents)
    return (1.0 - level) * latents + level * noise


def shift_sigmas(levels: Float[Tensor, " B"], shift: float) -> Float[Tensor, " B"]:
    """Return s u / (1 + (s - 1) u), which leans to noise for s above 1."""
    return shift * levels / (1.0 + (shift - 1.0) * levels)


def draw_sigmas(
    config: FlowMatchingConfig, shift: float, num: int, generator: torch.Generator
) -> Float[Tensor, " B"]:
    """Draw noise levels from the configured density, shifted; float32 on the generator's device.

    Args:
        config: which density.
        shift: the model's own shift, used unless the config has one.
        num: how many.
        generator: the only source of randomness.
    """
    device = generator.device
    if config.density == "logit_normal":
        normal = torch.randn(num, generator=generator, device=device)
        levels = torch.sigmoid(config.logit_mean + config.logit_std * normal)
    else:
        levels = torch.rand(num, generator=generator, device=device)
        if config.density == "mode":
            bend = torch.cos(math.pi / 2 * levels) ** 2 - 1 + levels
            levels = 1 - levels - config.mode_scale * bend
    return shift_sigmas(levels, config.shift or shift)


def sigma_weights(
    sigmas: Float[Tensor, " B"], weighting: Literal["none", "sigma_sqrt", "cosmap"]
) -> Float[Tensor, " B"]:
    """Return w(σ) of each level (arXiv 2403.03206, section 3.1)."""
    match weighting:
        case "none":
            return torch.ones_like(sigmas)
        case "sigma_sqrt":
            return sigmas**-2
        case "cosmap":
            return 2.0 / (math.pi * (1.0 - 2.0 * sigmas + 2.0 * sigmas**2))


def flow_matching_loss(
    adapter: DiffusionModelAdapter, config: FlowMatchingConfig
) -> Callable[[nn.Module, FlowBatch], LossSum]:
    """Return ``loss(transformer, batch)``, a sum over samples for the learner to divide.

    Metrics are sums over samples: ``samples``, and ``velocity_error`` without w(σ).
    """
    check = LevelCheck()

    def loss(transformer: nn.Module, batch: FlowBatch) -> LossSum:
        check(batch.sigmas)
        noisy = add_noise(batch.latents, batch.noise, batch.sigmas)
        target = batch.noise - batch.latents
        if batch.given is not None:
            noisy = batch.given * batch.latents + (1.0 - batch.given) * noisy
        velocity = adapter.velocity(transformer, noisy, batch.sigmas, batch.text, batch.given)
        difference = (velocity - target).float()
        if batch.given is not None:
            difference = (1.0 - batch.given) * difference
        errors = difference.square().flatten(1).mean(1)
        weighed = batch.weights * sigma_weights(batch.sigmas, config.weighting)
        return LossSum(
            total=(weighed * errors).sum(),
            weight=batch.weights.sum(),
            metrics={
                "samples": batch.weights.sum(),
                "velocity_error": (batch.weights * errors.detach()).sum(),
            },
        )

    return loss
