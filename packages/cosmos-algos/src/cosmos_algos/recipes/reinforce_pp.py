"""REINFORCE++: A_t = R - β Σ_{s≥t} k1_s, whitened over all tokens of the step.

Hu et al., arXiv 2501.03262. Advantage ``reinforce_pp_baseline`` takes the group's mean off first.
"""

from dataclasses import dataclass, replace
from typing import Literal

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.divergence import KlConfig
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.objective import ObjectiveConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforcePlusPlusConfig:
    """REINFORCE++; set ``objective.kl.coefficient`` for its penalty, which needs a reference.

    The penalty is whitened with the rewards, so the step's samples are scored before its update.

    Attributes:
        advantage: formula of the advantages.
        objective: policy loss, anchor, correction and penalties.
        aggregation: which mean over tokens.
        temperature: that of the sampler; logits are divided by it.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    advantage: AdvantageName = "reinforce_pp"
    objective: ObjectiveConfig = ObjectiveConfig(kl=KlConfig(estimator="k1", place="reward"))
    aggregation: AggregationConfig = AggregationConfig()
    temperature: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def build(self) -> Algorithm:
        """Make the algorithm."""
        kl = self.objective.kl
        whitened = self.advantage in ("reinforce_pp", "reinforce_pp_baseline")
        penalised = kl.coefficient > 0.0 and kl.place == "reward"
        return replace(policy_algorithm(self), whiten_returns=whitened and penalised)
