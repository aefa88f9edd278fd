"""PPO with a critic: GAE, clipped ratio, clipped value loss.

Schulman et al., arXiv 1707.06347, eq. 7 and 9. The loss of positive samples is VAPO's
(arXiv 2504.05118).
"""

from dataclasses import dataclass, replace
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig
from cosmos_algos.values import CriticConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoConfig:
    """PPO; batches pass through ``Algorithm.with_critic`` before the loss.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
        critic: how values become advantages, and how they are trained.
        imitation_coefficient: weight of the likelihood of samples with a positive reward.
        epochs: optimizer steps over the samples of each step; ratios and values of later ones are
            clipped at those of the first.
    """

    kind: Literal["ppo"] = "ppo"
    advantage: AdvantageName = "reward"
    objective: ObjectiveConfig = ObjectiveConfig()
    aggregation: AggregationConfig = AggregationConfig()
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK
    critic: CriticConfig = CriticConfig()
    imitation_coefficient: float = 0.0
    epochs: int = 1

    def build(self) -> Algorithm:
        """Make the algorithm."""
        made = policy_algorithm(self, imitation_coefficient=self.imitation_coefficient)
        return replace(made, critic=self.critic, epochs=self.epochs)
