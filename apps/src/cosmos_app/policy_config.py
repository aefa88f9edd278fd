"""The recipe's table ``[policy]``, and what ``[elastic]`` may ask of it."""

from dataclasses import dataclass, field

from cosmos_app.ranges import require_at_least
from cosmos_parallel import ElasticConfig, ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """The replicas that train.

    Attributes:
        replicas: data-parallel replicas, each a process group of its own.
        ranks: processes in a replica; started by torchrun when more than one.
        parallel: how a replica's ranks share the model.
    """

    replicas: int = 1
    ranks: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        require_at_least(self, {"replicas": 1, "ranks": 1})


def check_elastic(elastic: ElasticConfig, policy: PolicyConfig) -> None:
    """Refuse to wait for replicas that there are not.

    Raises:
        ValueError: naming both settings.
    """
    if elastic.min_replicas > policy.replicas:
        raise ValueError(
            f"elastic.min_replicas is {elastic.min_replicas} and policy.replicas "
            f"{policy.replicas}; no step would ever be taken"
        )
