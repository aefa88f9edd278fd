"""A simulated policy replica: waits for a step, takes it, publishes."""

from cosmos_core.messages import (
    CheckpointSaved,
    Command,
    FallBack,
    ReplicaJoined,
    StepFinished,
    Stop,
    Train,
    VersionPublished,
)
from cosmos_core.simulation.engine import World
from cosmos_core.simulation.log import Activity, Span, StepTaken, step_taken
from cosmos_core.simulation.workload import SystemConfig


class SimulatedLearner:
    """One policy replica.

    Args:
        name: of the replica.
        system: how long it takes.
        world: clock, messages and log.
        saved: version and lineage of the checkpoint that it goes on from.

    Attributes:
        saved: those of its newest checkpoint.
    """

    def __init__(
        self, name: str, system: SystemConfig, world: World, saved: tuple[int, int] = (0, 0)
    ) -> None:
        self.name = name
        self._system = system
        self._world = world
        self._free_s = world.now
        self._version, self._lineage = self.saved = saved

    def begin(self) -> None:
        """Say that it is there, and with which weights."""
        self._world.send(
            ReplicaJoined(
                replica=self.name,
                role="policy",
                version=self._version,
                lineage=self._lineage,
                endpoints=("here",),
            )
        )
        self._publish()

    def obey(self, command: Command) -> None:
        """Take a command in."""
        match command:
            case Train() if len(command.line) >= self._lineage and command.step >= self._version:
                self._lineage = len(command.line)
                self._train(command)
            case FallBack():
                self._lineage = len(command.line)
            case Stop():
                self._world.send(CheckpointSaved(replica=self.name, step=-1, path=""))
            case _:
                pass

    def _train(self, train: Train) -> None:
        begin = max(self._world.now + self._system.fetch_s, self._free_s)
        trained = begin + self._system.train_s
        done = trained + self._system.snapshot_s
        blocked = self._system.push_s if self._system.push == "blocking" else 0.0
        validated = min(self._free_s + train.validated_s, begin)
        self._note("eval", self._free_s, validated, train.step)
        self._note("wait_data", validated, begin, train.step)
        self._note("fwd_bwd", begin, trained, train.step)
        self._note("push_exposed", trained, done + blocked, train.step + 1)
        self._free_s = done + blocked
        taken = step_taken(train, begin, done)
        self._world.after(done - self._world.now, lambda: self._done(train, taken))

    def _done(self, train: Train, taken: StepTaken) -> None:
        self._world.record(taken)
        self._version, name = taken.step + 1, self.name
        self._world.send(StepFinished(replica=name, step=taken.step, lineage=self._lineage))
        self._publish()
        if train.cut:  # checkpoints take no time
            self.saved = (self._version, self._lineage)
            self._world.send(
                CheckpointSaved(replica=name, step=taken.step, path="there", lineage=self._lineage)
            )

    def _publish(self) -> None:
        self._world.send(
            VersionPublished(replica=self.name, version=self._version, lineage=self._lineage)
        )

    def _note(self, activity: Activity, start_s: float, end_s: float, version: int) -> None:
        if end_s > start_s:
            self._world.record(
                Span(
                    role="policy",
                    replica=self.name,
                    activity=activity,
                    start_s=start_s,
                    end_s=end_s,
                    version=version,
                )
            )
