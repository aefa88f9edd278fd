"""Advantages that differ from token to token: returns, GAE and whitening.

Columns are predictions: at column t stand the value of the state before the target is drawn and
the reward for having drawn it. Columns that are not trained on (prompts, tool answers, padding)
are *skipped*: the value and the advantage of the next trained token are carried across them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cosmos_algos.samples import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class GaeConfig:
    """Generalised advantage estimation.

    Attributes:
        discount: γ of rewards.
        decay: λ; 1 is returns minus values, 0 the one-step error.
    """

    discount: float = 1.0
    decay: float = 0.95


def terminal_rewards(samples: Samples, rewards: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Keep a reward that stands at every token of a sample at its last trained token only."""
    remaining = returns_to_go(torch.ones_like(rewards).where(samples.trainable, 0.0), samples)
    return rewards * (samples.trainable & (remaining == 1.0))


def returns_to_go(
    rewards: Float[Tensor, "B T"], samples: Samples, discount: float = 1.0
) -> Float[Tensor, "B T"]:
    """Return G_t = r_t + γ G_t' with t' the next trained token of the sample; 0 elsewhere."""
    if discount == 1.0 and samples.segments is None:
        kept = rewards.where(samples.trainable, 0.0)
        return kept.flip(-1).cumsum(-1).flip(-1).where(samples.trainable, 0.0)
    zeros = torch.zeros_like(rewards)
    config = GaeConfig(discount=discount, decay=1.0)
    return generalised_advantages(rewards, zeros, samples, config)


def generalised_advantages(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    samples: Samples,
    config: GaeConfig,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return A_t = δ_t + γλ A_t' with δ_t = r_t + γ V_t' - V_t.

    t' is the next trained token of the sample. Schulman et al.,
    arXiv 1506.02438, eq. 16 as a recursion. Returns are A + V.

    Args:
        rewards: of each token.
        values: V of the state that each token was drawn in.
        samples: the trained tokens and which belong together.
        config: γ and λ.
        bootstrap: V of the state after the last token of a row that was cut short; 0 by default.

    Returns:
        Advantages, 0 where not trained.
    """
    next_value = rewards.new_zeros(rewards.shape[0]) if bootstrap is None else bootstrap
    carried = torch.zeros_like(next_value)
    columns: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        if samples.segments is not None and t + 1 < rewards.shape[1]:
            same = samples.segments[:, t] == samples.segments[:, t + 1]
            next_value, carried = next_value * same, carried * same
        here = samples.trainable[:, t]
        error = rewards[:, t] + config.discount * next_value - values[:, t]
        advantage = error + config.discount * config.decay * carried
        carried = torch.where(here, advantage, carried)
        next_value = torch.where(here, values[:, t], next_value)
        columns.append(torch.where(here, advantage, 0.0))
    return torch.stack(columns[::-1], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Count, sum and sum of squares of a step's tokens; those of micro-batches and ranks add.

    Attributes:
        count: how many.
        total: their sum.
        squares: sum of their squares.
    """

    count: Float[Tensor, ""]
    total: Float[Tensor, ""]
    squares: Float[Tensor, ""]

    def __add__(self, other: "Moments") -> "Moments":
        """Return the moments of both."""
        return Moments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )


def token_moments(values: Float[Tensor, "B T"], trainable: Bool[Tensor, "B T"]) -> Moments:
    """Return the moments of trained tokens, in float64."""
    kept = values.double().where(trainable, 0.0)
    return Moments(trainable.sum().double(), kept.sum(), (kept**2).sum())


def whitened(
    values: Float[Tensor, "B T"],
    trainable: Bool[Tensor, "B T"],
    moments: Moments,
    eps: float = 1e-8,
) -> Float[Tensor, "B T"]:
    """Return (x - mean) / sqrt(var + eps), ddof 1, by the moments of the *whole* step; 0 elsewhere.

    PPO and REINFORCE++ whiten over the global batch: moments of a micro-batch would make the
    result depend on the split.
    """
    mean = moments.total / moments.count.clamp(min=1)
    spread = (moments.squares - moments.count * mean**2).clamp(min=0.0)
    deviation = (spread / (moments.count - 1).clamp(min=1) + eps).sqrt()
    scaled = (values.double() - mean) / deviation
    return scaled.to(values.dtype).where(trainable, 0.0)
