"""Advantages that differ from token to token: returns, GAE and whitening.

Columns are predictions: at column t stand the value of the state before the target is drawn and
the reward for having drawn it. Columns that are not trained on (prompts, tool answers, padding)
are *skipped*: the value and the advantage of the next trained token are carried across them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cosmos_algos.arguments import check_same_shape
from cosmos_algos.errors import AlgorithmConfigError
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

    def __post_init__(self) -> None:
        """Refuse factors by which what is far away would count for more."""
        if not (0.0 <= self.discount <= 1.0 and 0.0 <= self.decay <= 1.0):
            raise AlgorithmConfigError(
                f"gae: discount {self.discount} and decay {self.decay} must be in [0, 1]"
            )


def terminal_rewards(samples: Samples, rewards: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Keep a reward that stands at every token of a sample at its last trained token only.

    Raises:
        ShapeError: if there is not one reward for each token.
    """
    samples.check("terminal rewards", {"rewards": rewards})
    remaining = returns_to_go(torch.ones_like(rewards).where(samples.trainable, 0.0), samples)
    return rewards.where(samples.trainable & (remaining == 1.0), 0.0)


def returns_to_go(
    rewards: Float[Tensor, "B T"], samples: Samples, discount: float = 1.0
) -> Float[Tensor, "B T"]:
    """Return G_t = r_t + γ G_t' with t' the next trained token of the sample; 0 elsewhere.

    Raises:
        ShapeError: if there is not one reward for each token.
    """
    samples.check("returns", {"rewards": rewards})
    rewards = _floating(rewards)
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
        bootstrap: V of the state after the last sample of a row that was cut short, which is that
            of the largest number among its segments; 0 by default.

    Returns:
        Advantages, 0 where not trained.

    Raises:
        ShapeError: if there is not one reward and value for each token.
    """
    samples.check("gae", {"rewards": rewards, "values": values})
    if bootstrap is not None:
        check_same_shape("gae", {"sums of rows": rewards.sum(-1), "bootstrap": bootstrap})
    rewards, values = _floating(rewards), _floating(values)
    table = _Table.of(samples)
    reward, value = table.put(rewards), table.put(values)
    next_value = rewards.new_zeros(table.num_samples)
    if bootstrap is not None:
        next_value = torch.where(table.is_last_of_row, bootstrap[table.row], next_value)
    carried = torch.zeros_like(next_value)
    advantages = torch.zeros_like(reward)
    for t in reversed(range(reward.shape[1])):
        here = t < table.lengths
        error = reward[:, t] + config.discount * next_value - value[:, t]
        carried = torch.where(here, error + config.discount * config.decay * carried, carried)
        next_value = torch.where(here, value[:, t], next_value)
        advantages[:, t] = carried
    return table.take(advantages)


def _floating(values: Tensor) -> Tensor:
    """Return whole numbers, such as a reward of 0 or 1, as ones that have fractions."""
    return values if values.is_floating_point() else values.float()


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The trained tokens of a batch, a line for each sample that has any: a short loop over them.

    Attributes:
        place: where the trained tokens stand in the batch.
        sample: the line of each.
        column: its place in the line.
        lengths: trained tokens of each line.
        row: row of the batch that the line's sample is in.
        is_last_of_row: whether it is the last sample there; that may have no line.
    """

    place: Bool[Tensor, "B T"]
    sample: Int[Tensor, " N"]
    column: Int[Tensor, " N"]
    lengths: Int[Tensor, " S"]
    row: Int[Tensor, " S"]
    is_last_of_row: Bool[Tensor, " S"]

    @staticmethod
    def of(samples: Samples) -> "_Table":
        place = samples.trainable
        rows = place.nonzero()[:, 0]
        segments = torch.zeros_like(rows) if samples.segments is None else samples.segments[place]
        size = int(segments.max()) + 1 if segments.numel() else 1
        numbers, sample, lengths = torch.unique_consecutive(
            rows * size + segments, return_inverse=True, return_counts=True
        )
        starts = lengths.cumsum(0) - lengths
        row = torch.div(numbers, size, rounding_mode="floor")
        is_last = torch.ones_like(row, dtype=torch.bool)
        if samples.segments is not None and numbers.numel():
            is_last = numbers % size == samples.segments.amax(-1)[row]
        column = torch.arange(len(sample), device=sample.device) - starts[sample]
        return _Table(place, sample, column, lengths, row, is_last)

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def put(self, values: Float[Tensor, "B T"]) -> Float[Tensor, "S L"]:
        width = int(self.lengths.max()) if self.num_samples else 0
        table = values.new_zeros(self.num_samples, width)
        table[self.sample, self.column] = values[self.place]
        return table

    def take(self, table: Float[Tensor, "S L"]) -> Float[Tensor, "B T"]:
        values = table.new_zeros(self.place.shape)
        values[self.place] = table[self.sample, self.column]
        return values


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
    """Return the moments of trained tokens, in float64.

    Raises:
        ShapeError: if the mask is not of these tokens, or one of numbers.
    """
    Samples(trainable).check("moments", {"values": values})
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

    Raises:
        ShapeError: if the mask is not of these tokens, or one of numbers.
    """
    Samples(trainable).check("whitening", {"values": values})
    values = _floating(values)
    mean = moments.total / moments.count.clamp(min=1)
    spread = (moments.squares - moments.count * mean**2).clamp(min=0.0)
    deviation = (spread / (moments.count - 1).clamp(min=1) + eps).sqrt()
    scaled = (values.double() - mean) / deviation
    return scaled.to(values.dtype).where(trainable, 0.0)
