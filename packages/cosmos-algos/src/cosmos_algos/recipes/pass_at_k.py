"""Pass@k training: a sample is worth what it adds to the best of k.

A right one has (1 - p)/σ, p = 1 - C(N⁻,k)/C(N,k); see ``pass_at_k_advantages``.
Chen et al., arXiv 2508.10751.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PassAtKConfig:
    """Pass@k; rewards are 0 or 1.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
        k: how many samples the best is of; at most the group size.
    """

    kind: Literal["pass_at_k"] = "pass_at_k"
    advantage: AdvantageName = "pass_at_k"
    objective: ObjectiveConfig = ObjectiveConfig()
    aggregation: AggregationConfig = AggregationConfig(mode="sequence_mean")
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK
    k: int = 4

    def __post_init__(self) -> None:
        """Refuse a best of none."""
        if self.k < 1:
            raise AlgorithmConfigError(f"pass_at_k: k {self.k} must be at least 1")

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self, k=self.k)
