"""OPO: the length-weighted mean reward of a group as baseline, the one of least variance.

A_i = R_i - Σ_j T_j R_j / Σ_j T_j.
Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class OpoConfig:
    """OPO; published for exactly on-policy samples, here corrected like the rest.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["opo"] = "opo"
    advantage: AdvantageName = "opo"
    objective: ObjectiveConfig = ObjectiveConfig()
    aggregation: AggregationConfig = AggregationConfig(mode="sequence_sum")
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
