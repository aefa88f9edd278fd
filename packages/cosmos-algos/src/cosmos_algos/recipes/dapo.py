"""DAPO: clip-higher and the token mean over the whole step.

Yu et al., arXiv 2503.14476, eq. 8. Its dynamic sampling (groups without signal are replaced) is
the controller's business, its overlong filtering that of who weighs a step
(``without_truncated``), its overlong penalty a reward (``overlong_penalties``).
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig
from cosmos_algos.surrogate import ClipConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DapoConfig:
    """DAPO's loss, corrected for stale and mismatched samples.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["dapo"] = "dapo"
    advantage: AdvantageName = "grpo"
    objective: ObjectiveConfig = ObjectiveConfig(surrogate=ClipConfig(low=0.2, high=0.28))
    aggregation: AggregationConfig = AggregationConfig()
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
