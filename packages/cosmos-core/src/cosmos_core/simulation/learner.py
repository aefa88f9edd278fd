"""A simulated policy replica: waits for a step, takes it, publishes."""

from cosmos_core.messages import (
    CheckpointSaved,
    Command,
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
    """

    def __init__(self, name: str, system: SystemConfig, world: World) -> None:
        self.name = name
        self._system = system
        self._world = world
        self._free_s = world.now

    def obey(self, command: Command) -> None:
        """Take a command in."""
        match command:
            case Train():
                self._train(command)
            case Stop():
                self._world.send(CheckpointSaved(replica=self.name, step=-1, path=""))
            case _:
                pass

    def _train(self, train: Train) -> None:
        begin = max(self._world.now, self._free_s)
        trained = begin + self._system.train_s
        done = trained + self._system.snapshot_s
        blocked = self._system.push_s if self._system.push == "blocking" else 0.0
        self._note("wait_data", self._free_s, begin, train.step)
        self._note("fwd_bwd", begin, trained, train.step)
        self._note("push_exposed", trained, done + blocked, train.step + 1)
        self._free_s = done + blocked
        taken = step_taken(train, begin, done)
        self._world.after(done - self._world.now, lambda: self._done(taken))

    def _done(self, taken: StepTaken) -> None:
        self._world.record(taken)
        self._world.send(StepFinished(replica=self.name, step=taken.step))
        self._world.send(VersionPublished(replica=self.name, version=taken.step + 1))

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
