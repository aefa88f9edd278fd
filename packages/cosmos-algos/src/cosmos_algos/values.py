"""A critic: its clipped loss, and advantages from what it expected."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_algos.arguments import check_coefficients, check_same_shape
from cosmos_algos.batch import TokenBatch
from cosmos_algos.errors import ModelHeadError
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.rows import check_rows, position_ids
from cosmos_algos.scoring import head_values
from cosmos_algos.token_advantages import (
    GaeConfig,
    Moments,
    generalised_advantages,
    terminal_rewards,
    token_moments,
    whitened,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """How a critic is used and trained.

    Attributes:
        gae: how its values become advantages.
        clip: values move at most this far from those at the start of the step before the gradient
            stops; 0 for no clip.
        coefficient: weight of the value loss beside the policy's.
        whiten: give the advantages of the whole step mean 0 and variance 1.
    """

    gae: GaeConfig = field(default_factory=GaeConfig)
    clip: float = 0.2
    coefficient: float = 0.5
    whiten: bool = True

    def __post_init__(self) -> None:
        """Refuse a negative or infinite clip or coefficient."""
        check_coefficients("critic", {"clip": self.clip, "coefficient": self.coefficient})


def value_losses(
    values: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    clip: float,
) -> Float[Tensor, "B T"]:
    """Return 0.5 max((V - G)², (clip(V, V_old ± ε) - G)²) of each token.

    The value loss of PPO's reference implementation (arXiv 2005.12729, section 3).

    Args:
        values: V, with gradient.
        old_values: V_old.
        returns: G = A + V_old.
        clip: ε; 0 for no clip.

    Raises:
        ShapeError: if the three have different shapes.
    """
    tensors = {"values": values, "old_values": old_values, "returns": returns}
    check_same_shape("value loss", tensors)
    free = (values - returns) ** 2
    if not clip:
        return 0.5 * free
    held = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(free, (held - returns) ** 2)


def critic_values(critic: nn.Module, batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Return what a critic expects before each target is drawn.

    Args:
        critic: a language model with a child ``value_head``, or a Hugging Face model with one
            output per token, as ``AutoModelForTokenClassification`` with ``num_labels=1``.
        batch: what to value.

    Raises:
        ModelHeadError: if there is not exactly one output per token.
        ShapeError: if rows are padded on the left, or targets are not the tokens that come next.
    """
    check_rows(batch)
    if isinstance(getattr(critic, "value_head", None), nn.Module):
        return head_values(critic, batch)
    rows = {} if batch.segments is None else {"position_ids": position_ids(batch.segments)}
    outputs = critic(input_ids=batch.token_ids, **{**rows, **batch.image_arguments()}).logits
    if outputs.shape != (*batch.token_ids.shape, 1):
        raise ModelHeadError(
            f"{type(critic).__name__} returned {tuple(outputs.shape)} for "
            f"{tuple(batch.token_ids.shape)} tokens; a critic has one output per token"
        )
    return outputs[..., 0].float() if outputs.dtype != torch.float64 else outputs[..., 0]


def with_gae(
    batch: TokenBatch, config: GaeConfig, penalties: Float[Tensor, "B T"] | None = None
) -> TokenBatch:
    """Return the batch with the advantages of its values, in place of a reward per sample.

    The batch's advantages are taken as each sample's reward (advantage ``reward``), given at its
    last trained token. ``returns`` become A + V.

    Args:
        batch: with values.
        config: γ and λ.
        penalties: what each token costs beside, such as β KL; none by default.

    Raises:
        MissingScoresError: if the batch has no values.
        ShapeError: if there is not one penalty for each token.
    """
    values = batch.scores_of("values", "generalised advantage estimation")
    rewards = terminal_rewards(batch.samples, batch.advantages)
    if penalties is not None:
        check_same_shape("gae", {"rewards": rewards, "penalties": penalties})
        rewards = rewards - penalties
    advantages = generalised_advantages(rewards, values, batch.samples, config)
    returns = (advantages + values).where(batch.trainable, 0.0)
    return replace(batch, advantages=advantages, returns=returns)


def advantage_moments(batch: TokenBatch) -> Moments:
    """Return the moments of a batch's advantages; add those of all batches of the step."""
    return token_moments(batch.advantages, batch.trainable)


def with_whitened_advantages(batch: TokenBatch, moments: Moments) -> TokenBatch:
    """Return the batch with its advantages whitened by the moments of the whole step."""
    return replace(batch, advantages=whitened(batch.advantages, batch.trainable, moments))


def critic_objective(
    values: Float[Tensor, "B T"],
    batch: TokenBatch,
    returns: Float[Tensor, "B T"],
    config: CriticConfig,
) -> LossSum:
    """Return the critic's loss of a batch, with the same weights as the policy's.

    What stands where nothing is trained does not matter: it may be NaN.

    Args:
        values: the critic's, with gradient.
        batch: with the values of the critic at the start of the step.
        returns: A + V of ``with_gae``, before any whitening.
        config: the clip.

    Raises:
        MissingScoresError: if the batch has no values.
    """
    kept = batch.trainable
    old = batch.scores_of("values", "the value loss").where(kept, 0.0)
    values, returns = values.where(kept, 0.0), returns.where(kept, 0.0)
    losses = value_losses(values, old, returns, config.clip)
    held = (values.detach() - old).abs() > config.clip if config.clip else ~kept
    sums = {
        "tokens": kept,
        "value": values.detach(),
        "return": returns,
        "return_squared": returns**2,
        "squared_error": (values.detach() - returns) ** 2,
        "clipped": held,
    }
    return LossSum(
        total=(losses * batch.token_weights).sum(),
        weight=batch.denominators.sum(),
        metrics={name: (x * kept).sum().to(values.dtype) for name, x in sums.items()},
    )
