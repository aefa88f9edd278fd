"""What a policy replica tells the controller; of its ranks, the first does."""

from cosmos_app.roles.publication import Publication
from cosmos_app.roles.step_trainer import StepTrainer
from cosmos_core.bus import ReplicaChannel
from cosmos_core.messages import CheckpointSaved, StepFinished


class Telling:
    """Words of one replica, each of the lineage of the weights that its trainer holds.

    Args:
        replica: its name.
        channel: to the controller; none on ranks that leave it to the first.
    """

    def __init__(self, replica: str, channel: ReplicaChannel | None) -> None:
        """Nothing is said yet."""
        self._replica = replica
        self._channel = channel

    async def step(self, trainer: StepTrainer) -> None:
        """Say that it has taken the step to the weights that it holds."""
        if self._channel is not None:
            step, lineage = trainer.version - 1, trainer.lineage
            await self._channel.send(
                StepFinished(replica=self._replica, step=step, lineage=lineage)
            )

    async def publication(self, trainer: StepTrainer, publication: Publication) -> None:
        """Say what became of a version."""
        if self._channel is not None:
            await self._channel.send(publication.message(self._replica, trainer.lineage))

    async def saved(self, trainer: StepTrainer, path: str) -> None:
        """Say where a checkpoint of the weights it holds is; an empty path: it has saved none."""
        if self._channel is not None:
            step, lineage = trainer.version - 1, trainer.lineage
            await self._channel.send(
                CheckpointSaved(replica=self._replica, step=step, path=path, lineage=lineage)
            )
