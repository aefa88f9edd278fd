"""GRPO: group-relative advantages, a symmetric clip, the mean over sequences of token means.

Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoConfig:
    """GRPO as published, corrected for stale and mismatched samples.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["grpo"] = "grpo"
    advantage: AdvantageName = "grpo"
    objective: ObjectiveConfig = ObjectiveConfig()
    aggregation: AggregationConfig = AggregationConfig(mode="sequence_mean")
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
