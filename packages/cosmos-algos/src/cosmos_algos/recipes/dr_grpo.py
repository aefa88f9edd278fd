"""Dr.GRPO: no division by the group's deviation, and a constant in place of each length.

A = R - mean_g, and the loss of a step is (1/(B C)) Σ_i Σ_t l_it.
Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DrGrpoConfig:
    """Dr.GRPO; the constant of its aggregation is usually the longest response allowed.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["dr_grpo"] = "dr_grpo"
    advantage: AdvantageName = "dr_grpo"
    objective: ObjectiveConfig = ObjectiveConfig()
    aggregation: AggregationConfig = AggregationConfig(mode="constant", constant=1024)
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
