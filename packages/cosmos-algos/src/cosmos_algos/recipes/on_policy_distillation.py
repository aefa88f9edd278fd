"""On-policy distillation: reverse KL to a teacher on the student's own samples, token by token.

Agarwal et al., arXiv 2306.13649, with the gradient of Gu et al., MiniLLM, arXiv 2306.08543,
without return-to-go: A_t = log π_teacher - log π.
"""

from dataclasses import dataclass, field
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicyDistillationConfig:
    """Distillation alone; with another advantage, rewards count besides.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["on_policy_distillation"] = "on_policy_distillation"
    advantage: AdvantageName = "none"
    objective: ObjectiveConfig = field(
        default_factory=lambda: ObjectiveConfig(teacher_coefficient=1.0)
    )
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
