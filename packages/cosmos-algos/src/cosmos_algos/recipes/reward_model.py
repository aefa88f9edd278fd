"""A reward model from preferences, by the Bradley-Terry likelihood.

Ouyang et al., InstructGPT, arXiv 2203.02155, eq. 1.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from cosmos_algos.arguments import check_coefficients
from cosmos_algos.batch import TokenBatch
from cosmos_algos.labelled import paired
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.preferences import bradley_terry_losses
from cosmos_algos.values import critic_values
from cosmos_algos.whole_samples import pair_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelConfig:
    """Bradley-Terry on pairs (``collate_pairs``); the reward is the output at the last token.

    Attributes:
        centering: weight of (r_c + r_r)², which keeps rewards around 0.
    """

    kind: Literal["reward_model"] = "reward_model"
    centering: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a weight that would drive rewards apart."""
        check_coefficients("reward_model", {"centering": self.centering})

    def rewards(self, model: nn.Module, batch: TokenBatch) -> Float[Tensor, " B"]:
        """Return the model's reward of each sample.

        Args:
            model: a Hugging Face model with one output per token.
            batch: the samples.

        Raises:
            ModelHeadError: if there is not exactly one output per token.
        """
        last = (batch.valid.sum(-1) - 1).clamp(min=0)
        return critic_values(model, batch).gather(-1, last[:, None])[:, 0]

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossSum:
        """Run the model once over a batch and return the batch's part of the step's loss.

        Raises:
            PairingError: if the batch's rows are no pairs.
        """
        pairs = paired(self.rewards(model, batch))
        return pair_sum(bradley_terry_losses(*pairs, centering=self.centering), pairs, batch)
