"""How a producer samples."""

from dataclasses import dataclass, field

from cosmos_rollout.engine import Sampling
from cosmos_rollout.environments import EpisodeLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerConfig:
    """How a producer samples.

    Attributes:
        slots: groups that are generated at once; more wait in order.
        scoring: further groups that may be waiting for their rewards, or to be stored, while
            others are generated in their place.
        sampling: of samples that are trained on; its seed is the run's.
        validation: of answers to held-out prompts, with the same seed; greedy if None.
        episode: what ends an episode in an environment.
    """

    slots: int = 8
    scoring: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    validation: Sampling | None = None
    episode: EpisodeLimits = field(default_factory=EpisodeLimits)

    def __post_init__(self) -> None:
        if self.slots < 1 or self.scoring < 0:
            raise ValueError(
                f"slots has to be 1 or more and scoring 0 or more, found {self.slots} and "
                f"{self.scoring}"
            )

    def sampling_of(self, source: str) -> Sampling:
        """Return how groups of a source are sampled."""
        if source == "train":
            return self.sampling
        return self.validation or self.sampling.greedy()
