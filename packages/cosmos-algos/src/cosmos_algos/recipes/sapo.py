"""SAPO: a smooth gate (4/τ) σ(τ (r - 1)) in place of the clip, steeper for negative advantages.

Gao et al., Soft Adaptive Policy Optimization, arXiv 2511.20347, eq. 5 and 6.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig
from cosmos_algos.surrogate import SapoGate


@dataclass(frozen=True, kw_only=True, slots=True)
class SapoConfig:
    """SAPO, corrected for stale and mismatched samples.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["sapo"] = "sapo"
    advantage: AdvantageName = "grpo"
    objective: ObjectiveConfig = ObjectiveConfig(surrogate=SapoGate())
    aggregation: AggregationConfig = AggregationConfig(mode="sequence_mean")
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
