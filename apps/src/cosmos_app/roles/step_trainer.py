"""What the loop of a policy replica asks of a trainer, and which share of a step a rank has."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cosmos_app.roles.publication import Publication
from cosmos_app.step_share import StepShare
from cosmos_core.messages import Train
from cosmos_core.trajectory import Trajectory
from cosmos_parallel import ReplicaLostError, TrainingMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Which share of every step a rank trains on.

    Attributes:
        replica_index: position of the replica among the policy replicas.
        num_replicas: policy replicas.
        mesh: the ranks of the replica.
        host: where this rank serves its weights.
        token: what it wants to be shown there; empty on loopback.
    """

    replica_index: int
    num_replicas: int
    mesh: TrainingMesh
    host: str = "127.0.0.1"
    token: str = ""

    @property
    def index(self) -> int:
        """Position along the data of all replicas; the same for ranks of one copy of the model."""
        return self.replica_index * self.mesh.data_size + self.mesh.data_rank

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.num_replicas * self.mesh.process.world_size

    @property
    def num_shares(self) -> int:
        """Among how many the samples are divided, over all replicas."""
        return self.num_replicas * self.mesh.data_size


class StepTrainer(Protocol):
    """What the loop trains with; `Trainer` is one. Its methods block, in the loop's one thread."""

    @property
    def version(self) -> int:
        """Weight version it holds."""
        ...

    @property
    def lineage(self) -> int:
        """Lineage of these weights."""
        ...

    @property
    def num_passes(self) -> int:
        """Grows while a step is being worked on."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether a step that it works on waits for other replicas."""
        ...

    @property
    def problem(self) -> str:
        """What was not finite in the last step, so that it changed nothing; empty if all was."""
        ...

    @property
    def is_first_replica(self) -> bool:
        """Whether this replica writes checkpoints and exports."""
        ...

    @property
    def publication(self) -> Publication:
        """What became of the version that was last to be published."""
        ...

    @property
    def endpoint(self) -> str:
        """Where this rank serves its weights."""
        ...

    def is_lost_on(self, line: Sequence[int]) -> bool:
        """Whether a run that has this line has fallen back from the weights it holds."""
        ...

    def follow(self, line: tuple[int, ...], saved: int = 0) -> bool:
        """Go on as an order says, or raise; return False for an order from before a fall-back."""
        ...

    def meet(self, step: int) -> int:
        """Agree with the other replicas on the step to come; return the one that they take."""
        ...

    def lose(self, error: ReplicaLostError) -> None:
        """Note that the step in hand is void, or raise the error where that cannot be made good."""
        ...

    def share(self, train: Train) -> StepShare:
        """Return the share of a step that this rank trains on."""
        ...

    def train(
        self, train: Train, share: StepShare, trajectories: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Take a step, publish it if asked and if there is room, return its metrics."""
        ...

    def publish(self) -> Publication:
        """Publish the weights it holds if there is room now."""
        ...

    def settle_end(self) -> None:
        """Settle which replica writes the last checkpoint and the export."""
        ...

    def save(self, cut: bytes) -> str:
        """Write a checkpoint with the controller's cut, once durable; empty if another does."""
        ...

    def export(self, directory: Path) -> None:
        """Have one replica write the weights in the form that others read; all call."""
        ...

    def close(self) -> None:
        """Stop serving weights."""
        ...
