"""RLOO: REINFORCE with the mean reward of the other samples as baseline, losses of whole samples.

A_i = R_i - Σ_{j≠i} R_j / (G - 1), and the loss of a step is (1/B) Σ_i Σ_t l_it.
Ahmadian et al., Back to Basics, arXiv 2402.14740, section 2.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RlooConfig:
    """RLOO, corrected for stale and mismatched samples.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["rloo"] = "rloo"
    advantage: AdvantageName = "rloo"
    objective: ObjectiveConfig = ObjectiveConfig()
    aggregation: AggregationConfig = AggregationConfig(mode="sequence_sum")
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
