"""The asynchronous system in virtual time: the real controller, and replicas that only take time.

Nothing sleeps and nothing is random but the seeded lengths, so the same arguments give the same
log. A thousand replicas are simulated faster than ten would run.
"""

import heapq
from collections.abc import Callable
from functools import partial

from cosmos_core.control import Controller, ControllerConfig
from cosmos_core.errors import CosmosError
from cosmos_core.messages import Event, ReplicaJoined, VersionPublished
from cosmos_core.simulation.engine import SimulatedRollout
from cosmos_core.simulation.learner import SimulatedLearner
from cosmos_core.simulation.log import LogRecord, QueueDepths
from cosmos_core.simulation.workload import SystemConfig

_POLICY = "policy-0"
_DEPTHS_EVERY_S = 0.25


class SimulationError(CosmosError):
    """Raised when the simulated system stands still before it has taken its steps."""


def simulate(
    config: ControllerConfig,
    system: SystemConfig,
    *,
    steps: int,
    seconds: float = float("inf"),
) -> list[LogRecord]:
    """Run the system until it has taken so many steps or so many virtual seconds have passed.

    Let ``config.num_steps`` be larger than ``steps``, or the last steps show how a run drains.

    Raises:
        SimulationError: if nothing is left to happen; it says what the controller waits for.
    """
    return _Simulation(config, system).run(steps, seconds)


class _Simulation:
    """Clock, messages and log of one simulation; see `World`."""

    def __init__(self, config: ControllerConfig, system: SystemConfig) -> None:
        self.now = 0.0
        self._controller = Controller(config)
        self._system = system
        self._pending: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._log: list[LogRecord] = []
        self._next_depths_s = 0.0
        names = [f"rollout-{index}" for index in range(system.rollouts)]
        self._replicas: dict[str, SimulatedRollout | SimulatedLearner] = {
            name: SimulatedRollout(name, system, self) for name in names
        }
        self._replicas[_POLICY] = SimulatedLearner(_POLICY, system, self)

    def run(self, steps: int, seconds: float) -> list[LogRecord]:
        self.send(ReplicaJoined(replica=_POLICY, role="policy", endpoints=("here",)))
        self.send(VersionPublished(replica=_POLICY, version=0))
        for name, replica in self._replicas.items():
            if isinstance(replica, SimulatedRollout):
                slots = self._system.slots
                self.send(ReplicaJoined(replica=name, role="rollout", slots=slots, version=-1))
        while self._controller.state.step < steps and self.now < seconds:
            if not self._pending:
                raise SimulationError(
                    f"after {self._controller.state.step} of {steps} steps nothing happens any "
                    f"more; the controller waits for {self._controller.waiting_for(self.now)}"
                )
            moment_s, _, call = heapq.heappop(self._pending)
            self._note_depths(moment_s)
            self.now = moment_s
            call()
        self.record(self._depths())
        return self._log

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._pending, (self.now + seconds, self._count, call))

    def send(self, event: Event) -> None:
        self.after(self._system.message_s, lambda: self._tell(event))

    def record(self, record: LogRecord) -> None:
        self._log.append(record)

    def _tell(self, event: Event) -> None:
        controller = self._controller
        commands = controller.handle(event, self.now)
        controller.take_garbage()
        controller.take_stats()
        for name, command in commands:
            self.after(self._system.message_s, partial(self._replicas[name].obey, command))

    def _note_depths(self, until_s: float) -> None:
        """Note the queues at regular times, in which nothing happened since ``now``."""
        while self._next_depths_s < until_s:
            self.now = max(self.now, self._next_depths_s)
            self.record(self._depths())
            self._next_depths_s += _DEPTHS_EVERY_S

    def _depths(self) -> QueueDepths:
        books, state = self._controller.books(), self._controller.state
        return QueueDepths(
            time_s=self.now,
            waiting=books.in_flight["waiting"],
            generating=books.in_flight["generating"],
            ready=books.in_flight["ready"],
            training=books.in_flight["training"],
            denied=sum(replica.free for replica in state.rollouts()),
            dropped=sum(books.dropped.values()),
            consumed=books.consumed,
            generated_samples=state.counters.generated_samples,
            generated_tokens=state.counters.generated_tokens,
        )
