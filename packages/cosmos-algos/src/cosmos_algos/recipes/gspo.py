"""GSPO: the clip acts on the geometric mean ratio of a whole sample.

Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, eq. 5.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig
from cosmos_algos.surrogate import GspoClip


@dataclass(frozen=True, kw_only=True, slots=True)
class GspoConfig:
    """GSPO; ``objective.surrogate.level = "token"`` is its token variant.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["gspo"] = "gspo"
    advantage: AdvantageName = "grpo"
    objective: ObjectiveConfig = ObjectiveConfig(surrogate=GspoClip())
    aggregation: AggregationConfig = AggregationConfig(mode="sequence_mean")
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
