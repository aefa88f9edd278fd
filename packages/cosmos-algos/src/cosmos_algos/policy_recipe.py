"""What an algorithm is built from, whichever it is."""

from typing import Protocol, runtime_checkable

from cosmos_algos.advantages import AdvantageName
from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.objective import ObjectiveConfig


@runtime_checkable
class PolicyRecipe(Protocol):
    """What the recipes of policy-gradient algorithms have in common; see ``GrpoConfig``."""

    @property
    def advantage(self) -> AdvantageName:
        """Formula of the advantages."""
        ...

    @property
    def objective(self) -> ObjectiveConfig:
        """What a token's loss is made of."""
        ...

    @property
    def aggregation(self) -> AggregationConfig:
        """Which mean over tokens."""
        ...

    @property
    def temperature(self) -> float:
        """That of the sampler."""
        ...

    @property
    def logprob_chunk(self) -> int:
        """Targets projected onto the vocabulary at a time."""
        ...
