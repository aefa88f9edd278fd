"""The asynchronous system in virtual time: the real controller, and replicas that only take time.

Nothing sleeps and nothing is random but the seeded lengths, so the same arguments give the same
log. A thousand replicas are simulated faster than ten would run.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from cosmos_core.control import Controller, ControllerConfig
from cosmos_core.control.state import ReplicaState
from cosmos_core.errors import CosmosError
from cosmos_core.messages import Command, Event, ReplicaLeft
from cosmos_core.simulation.engine import SimulatedRollout, World
from cosmos_core.simulation.learner import SimulatedLearner
from cosmos_core.simulation.log import LogRecord, QueueDepths, Span
from cosmos_core.simulation.workload import CONTROLLER, POLICY, Outage, SystemConfig

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


class _Seat:
    """The world of one replica, in which nothing happens any more once it has left."""

    def __init__(self, world: World) -> None:
        self.is_left = False
        self._world = world
        self.send, self.record = world.send, world.record

    @property
    def now(self) -> float:
        return self._world.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._world.after(seconds, lambda: None if self.is_left else call())


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
        self._controlled_from_s = 0.0
        self._saved = (0, 0)
        self._present: dict[str, tuple[SimulatedRollout | SimulatedLearner, _Seat]] = {}

    def run(self, steps: int, seconds: float) -> list[LogRecord]:
        for name in (POLICY, *self._system.rollout_names):
            self._begin(name)
        for outage in self._system.outages:
            self.after(outage.at_s, partial(self._kill, outage))
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
        for replica in self._controller.state.rollouts():
            self._end(replica)
        self.record(self._depths())
        return self._log

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._pending, (self.now + seconds, self._count, call))

    def send(self, event: Event) -> None:
        self.after(self._system.message_s, lambda: self._tell(event))

    def record(self, record: LogRecord) -> None:
        self._log.append(record)

    def _kill(self, outage: Outage) -> None:
        name = outage.name
        if name == CONTROLLER:
            self._controlled_from_s = self.now + outage.away_s
            return
        replica, seat = self._present.pop(name)
        if isinstance(replica, SimulatedLearner):
            self._saved = replica.saved
        else:
            replica.end()
        seat.is_left = True
        self._log = list(_until_death(self._log, name, self.now))
        self.send(ReplicaLeft(replica=name, reason="killed"))
        self.after(outage.away_s, partial(self._begin, name))

    def _begin(self, name: str) -> None:
        """Have a replica begin; one that was there before is another now."""
        seat = _Seat(self)
        if name == POLICY:
            replica = SimulatedLearner(name, self._system, seat, self._saved)
        else:
            replica = SimulatedRollout(name, self._system, seat)
        self._present[name] = replica, seat
        replica.begin()

    def _end(self, known: ReplicaState) -> None:
        """Have a rollout replica account for the time until now, whatever is withheld from it."""
        replica, _ = self._present.get(known.name, (None, None))
        if isinstance(replica, SimulatedRollout):
            empty_s = self.now - known.empty_since_s if known.empty_since_s >= 0 else 0.0
            replica.end(withheld_s=empty_s)

    def _deliver(self, name: str, command: Command) -> None:
        if name in self._present:
            self._present[name][0].obey(command)

    def _tell(self, event: Event) -> None:
        if self.now < self._controlled_from_s:  # it waits for whoever controls next
            self.after(self._controlled_from_s - self.now, partial(self._tell, event))
            return
        controller = self._controller
        commands = controller.handle(event, self.now)
        controller.take_garbage()
        controller.take_stats()
        for name, command in commands:
            self.after(self._system.message_s, partial(self._deliver, name, command))

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


def _until_death(log: Iterable[LogRecord], replica: str, end_s: float) -> Iterator[LogRecord]:
    """Yield a log without what a replica would have done after it died."""
    for record in log:
        if not isinstance(record, Span) or record.replica != replica or record.end_s <= end_s:
            yield record
        elif record.start_s < end_s:
            yield msgspec.structs.replace(record, end_s=end_s)
