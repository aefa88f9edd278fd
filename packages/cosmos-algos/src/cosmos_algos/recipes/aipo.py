"""AIPO: REINFORCE weighed by min(π/μ, ρ), for samples of older weights.

Wu et al., LlamaRL, arXiv 2505.24034.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.corrections import NoCorrection
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig
from cosmos_algos.surrogate import AipoClip


@dataclass(frozen=True, kw_only=True, slots=True)
class AipoConfig:
    """AIPO; no forward pass for π_old is needed.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["aipo"] = "aipo"
    advantage: AdvantageName = "grpo"
    objective: ObjectiveConfig = ObjectiveConfig(
        surrogate=AipoClip(), anchor="behaviour", correction=NoCorrection()
    )
    aggregation: AggregationConfig = AggregationConfig()
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
