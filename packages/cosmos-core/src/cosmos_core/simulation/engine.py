"""A simulated rollout replica: requests, tokens and weight versions, in virtual time.

All requests in the batch get their tokens at the same rate, which only changes when the batch
does. Hence one counter, the tokens a request would have had if it had been there all along, says
when each is done: at its start plus its length.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from cosmos_core.messages import (
    CancelGroup,
    Command,
    Event,
    Generate,
    GroupFinished,
    GroupId,
    LoadVersion,
    ReplicaJoined,
    SampleRef,
    VersionLoaded,
)
from cosmos_core.simulation.diary import Diary
from cosmos_core.simulation.log import Activity, LogRecord
from cosmos_core.simulation.workload import SystemConfig

_Attempt = tuple[GroupId, int]


class World(Protocol):
    """What a simulated replica needs around it."""

    @property
    def now(self) -> float:
        """Virtual seconds."""
        ...

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have something happen later."""
        ...

    def send(self, event: Event) -> None:
        """Tell the controller."""
        ...

    def record(self, record: LogRecord) -> None:
        """Write a record down."""
        ...


class _Sample(NamedTuple):
    attempt: _Attempt
    sibling: int
    turns: tuple[int, ...]  # tokens of each that is still to come
    num_tokens: int = 0  # of those before
    oldest: int = -1  # version of the first token, once there is one


class _Request(NamedTuple):
    end: float
    order: int
    sample: _Sample


class SimulatedRollout:
    """One engine and its queue.

    Args:
        name: of the replica.
        system: speeds and lengths.
        world: clock, messages and log.
    """

    def __init__(self, name: str, system: SystemConfig, world: World) -> None:
        self.name = name
        self._system = system
        self._world = world
        self._version = -1
        self._queue: deque[_Sample] = deque()
        self._away: set[_Sample] = set()  # with the environment
        self._running: list[_Request] = []
        self._held: dict[_Attempt, list[SampleRef]] = {}
        self._missing: dict[_Attempt, int] = {}
        self._counter = 0.0
        self._diary = Diary("rollout", name, self._write, start_s=world.now)
        self._pause: Activity | None = None
        self._turn = 0
        self._order = 0

    def begin(self) -> None:
        """Say that it is there, without weights or work."""
        slots = self._system.slots
        self._world.send(
            ReplicaJoined(replica=self.name, role="rollout", slots=slots, version=self._version)
        )

    def end(self, withheld_s: float = 0.0) -> None:
        """Account for the time until now; nothing that it had begun will happen.

        Args:
            withheld_s: for how long admission has withheld a group from it until now.
        """
        self._catch_up()
        self._diary.given(withheld_s, self._world.now)
        self._diary.close()

    def obey(self, command: Command) -> None:
        """Take a command in."""
        match command:
            case Generate():
                self._start(command)
            case CancelGroup():
                self._cancel((command.group, command.attempt))
            case LoadVersion() if self._system.push == "staged":
                self._world.after(self._system.push_s, lambda: self._swap(command))
            case LoadVersion():
                self._stand("paused_for_weights")
                self._world.after(self._system.push_s, lambda: self._swap(command))
            case _:
                pass

    # ---------------------------------------------------------------- groups

    def _start(self, command: Generate) -> None:
        self._catch_up()
        self._diary.given(command.withheld_s, self._world.now)
        attempt = (command.group, command.attempt)
        self._held[attempt] = []
        self._missing[attempt] = command.num_samples
        self._queue.extend(
            _Sample(attempt, sibling, self._system.turns(command.group.ordinal, sibling))
            for sibling in range(command.num_samples)
        )
        self._go_on()

    def _cancel(self, attempt: _Attempt) -> None:
        self._catch_up()
        self._held.pop(attempt, None)
        self._missing.pop(attempt, None)
        self._queue = deque(sample for sample in self._queue if sample.attempt != attempt)
        self._away = {sample for sample in self._away if sample.attempt != attempt}
        self._running = [each for each in self._running if each.sample.attempt != attempt]
        heapq.heapify(self._running)
        self._go_on()

    def _finish(self, turn: int) -> None:
        if turn != self._turn:
            return  # the batch has changed since
        self._catch_up()
        while self._running and self._running[0].end <= self._counter + 1e-6:
            sample = heapq.heappop(self._running).sample
            if sample.turns:
                self._leave(sample)
            else:
                self._complete(sample)
        self._go_on()

    def _leave(self, sample: _Sample) -> None:
        """Hand a sample to its environment until the next turn; its place in the batch is free."""
        self._away.add(sample)
        wait_s = self._system.answer_s(sample.attempt[0].ordinal, sample.num_tokens)
        self._world.after(wait_s, lambda: self._come_back(sample))

    def _come_back(self, sample: _Sample) -> None:
        if sample in self._away:  # and not given up meanwhile
            self._catch_up()
            self._away.remove(sample)
            self._queue.append(sample)
            self._go_on()

    def _complete(self, sample: _Sample) -> None:
        attempt = sample.attempt
        self._held[attempt].append(
            SampleRef(
                sibling=sample.sibling,
                status="completed",
                key=f"{attempt[0]}.{attempt[1]}.{sample.sibling}",
                num_tokens=sample.num_tokens,
                oldest_version=sample.oldest,
                newest_version=self._version,
            )
        )
        self._missing[attempt] -= 1
        if not self._missing[attempt]:
            del self._missing[attempt]
            self._world.after(self._system.score_s, lambda: self._report(attempt))

    def _report(self, attempt: _Attempt) -> None:
        self._catch_up()
        samples = self._held.pop(attempt, None)
        if samples is not None:
            self._world.send(
                GroupFinished(
                    replica=self.name, group=attempt[0], attempt=attempt[1], samples=tuple(samples)
                )
            )

    # ---------------------------------------------------------------- weights

    def _swap(self, load: LoadVersion) -> None:
        self._stand("swap")
        self._world.after(self._system.swap_s, lambda: self._swapped(load))

    def _swapped(self, load: LoadVersion) -> None:
        self._catch_up()
        self._pause, self._version = None, load.version
        loaded = VersionLoaded(
            replica=self.name,
            version=load.version,
            transfer_s=self._system.push_s,
            stall_s=self._system.swap_s,
            lineage=load.lineage,
        )
        self._world.send(loaded)
        self._go_on()

    def _stand(self, activity: Activity) -> None:
        self._catch_up()
        self._pause = activity
        self._turn += 1

    # ---------------------------------------------------------------- time

    def _activity(self) -> Activity:
        if self._pause is not None:
            return self._pause
        if self._running:
            return "decode"
        if self._away:
            return "env_wait"
        return "reward_wait" if self._held else "idle_no_work"

    def _catch_up(self) -> None:
        """Account for the time since the last change, in which the batch was what it is now."""
        now, since = self._world.now, self._diary.until_s
        if now <= since:
            return
        activity, width, steps = self._activity(), 0, 0.0
        if activity == "decode":
            width = len(self._running)
            steps = (now - since) / self._system.speed.step_s(width)
            self._counter += steps
        self._diary.note(activity, now, version=self._version, width=width, tokens=width * steps)

    def _write(self, records: Sequence[LogRecord]) -> None:
        for record in records:
            self._world.record(record)

    def _go_on(self) -> None:
        """Fill the batch and wait for the first request that will be done."""
        while self._queue and len(self._running) < self._system.speed.max_running:
            sample = self._queue.popleft()
            length, self._order = sample.turns[0], self._order + 1
            begun = sample._replace(
                turns=sample.turns[1:],
                num_tokens=sample.num_tokens + length,
                oldest=sample.oldest if sample.num_tokens else self._version,
            )
            request = _Request(self._counter + length, self._order, begun)
            heapq.heappush(self._running, request)
        self._turn += 1
        if self._running and self._pause is None:
            steps = max(0.0, self._running[0].end - self._counter)
            turn = self._turn
            wait_s = steps * self._system.speed.step_s(len(self._running))
            self._world.after(wait_s, lambda: self._finish(turn))
