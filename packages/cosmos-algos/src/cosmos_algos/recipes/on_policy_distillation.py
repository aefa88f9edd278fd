"""On-policy distillation: reverse KL to a teacher on the student's own samples, token by token.

Agarwal et al., arXiv 2306.13649, with the gradient of Gu et al., MiniLLM, arXiv 2306.08543,
without return-to-go: A_t = log π_teacher - log π. With ``top_k`` the teacher's distribution is
compared, not what was drawn: GKD's generalised Jensen-Shannon divergence of each token, eq. 1.
"""

from dataclasses import dataclass, replace
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.likeliest import LikeliestConfig
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class OnPolicyDistillationConfig:
    """Distillation alone; with another advantage, rewards count besides.

    A teacher of the same tokenizer may have another number of padding rows than the policy. Each
    model's softmax is over all of its own rows, as engines that score have it: what a trained
    model gives its padding is too little to count. With ``top_k``, a token that the policy has not
    is one of "all others".

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties; ``teacher_coefficient`` weighs the
            teacher either way.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
        top_k: compare the teacher's likeliest tokens and all others as one; 0 for the teacher's
            log-probability of the sampled token alone.
        beta: with ``top_k``: 0 is KL(teacher || student), 1 KL(student || teacher), between them
            the mixture's.
    """

    kind: Literal["on_policy_distillation"] = "on_policy_distillation"
    advantage: AdvantageName = "none"
    objective: ObjectiveConfig = ObjectiveConfig(teacher_coefficient=1.0)
    aggregation: AggregationConfig = AggregationConfig()
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK
    top_k: int = 0
    beta: float = 0.5

    def build(self) -> Algorithm:
        """Make the algorithm."""
        if self.top_k == 0:
            return policy_algorithm(self)
        likeliest = LikeliestConfig(
            top_k=self.top_k, beta=self.beta, coefficient=self.objective.teacher_coefficient
        )
        alone = replace(self, objective=replace(self.objective, teacher_coefficient=0.0))
        return policy_algorithm(alone, likeliest=likeliest)
