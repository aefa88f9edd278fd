"""Decoupled PPO: the clip is around a proximal policy, μ enters as a weight π_prox/μ.

Fu et al., AReaL, arXiv 2505.24298, eq. 5; the proximal policy guessed from each token's lag as in
A-3PO, arXiv 2512.06547, or scored (``Algorithm.with_old``) with ``objective.anchor = "old"``.
"""

from dataclasses import dataclass
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.corrections import IcePopConfig
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoupledPpoConfig:
    """AReaL's objective; weights over the cap are left out, as its authors do.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    advantage: AdvantageName = "grpo"
    objective: ObjectiveConfig = ObjectiveConfig(
        anchor="interpolated", correction=IcePopConfig(low=0.0, high=5.0)
    )
    aggregation: AggregationConfig = AggregationConfig()
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        return policy_algorithm(self)
