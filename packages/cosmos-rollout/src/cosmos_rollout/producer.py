"""Keeps an engine full: groups of prompts in, finished and scored groups out, nobody waited for.

A group's life here. Its siblings are requests of their own among everybody else's, each is scored
while the others still generate, and the group is reported once its payload is stored::

    submit ─► queued ─► generating + scoring ─► publish ─► GroupFinished
                │             │ prompt, engine or store failed ─► GroupFailed
                └──── cancel ─┘ (no event)
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from cosmos_core.messages import (
    CancelGroup,
    Generate,
    GroupFailed,
    GroupFinished,
    GroupId,
    LoadFailed,
    LoadVersion,
    SampleRef,
    VersionLoaded,
)
from cosmos_core.simulation import Diary
from cosmos_core.trajectory import TeacherScores, Trajectory
from cosmos_rollout.engine import RolloutEngine
from cosmos_rollout.environments import ChatTokenizer, Environment
from cosmos_rollout.episode import Episode
from cosmos_rollout.errors import (
    EngineClosedError,
    EngineDeadError,
    PromptDataError,
    PromptError,
    WeightLoadError,
)
from cosmos_rollout.metered import MeteredEngine
from cosmos_rollout.occupancy import Occupancy, OccupancyReading
from cosmos_rollout.occupancy_spans import OccupancySpans
from cosmos_rollout.playing import EnvironmentPlayer, GroupPlan, Player, SingleTurnPlayer
from cosmos_rollout.producer_config import ProducerConfig
from cosmos_rollout.prompts import PromptSource, Tokenizer
from cosmos_rollout.rewards import Failure, Outcome, RewardInput
from cosmos_rollout.siblings import (
    Sibling,
    group_seed,
    reward_input,
    sample_ref,
    sample_seed,
    trajectory_of,
)
from cosmos_rollout.teaching import Teacher, teach

GroupEvent = GroupFinished | GroupFailed
Publish = Callable[[Sequence[Trajectory]], Awaitable[Sequence[str]]]
"""Stores trajectories durably and returns the key of each."""

_UNREADABLE = "prompt that cannot be read"
_Key = tuple[GroupId, int]
_Fatal = EngineDeadError | EngineClosedError


class _Judged(NamedTuple):
    sibling: Sibling
    seen: RewardInput
    outcome: Outcome
    teacher: TeacherScores | None = None


class Scorer(Protocol):
    """What scores a sample; `RewardPool` does."""

    async def score(self, sample: RewardInput) -> Outcome:
        """Return the rewards of one sample, or why it has none."""
        ...

    async def score_group(
        self, samples: Sequence[RewardInput], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Add what depends on all siblings of a group to what `score` said of each."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerParts:
    """What a producer joins.

    Attributes:
        engine: generates.
        prompts: prompt set of each ``GroupId.source``.
        tokenizer: text to tokens and back.
        scorer: gives the rewards.
        publish: stores the trajectories of a group.
        environment: what episodes are played in, with a chat template; None: one prompt, one reply.
        teacher: scores what is trained on; a sample that it cannot score has failed.
        narrow: returns the trajectories of a group with fewer trained tokens; None: all are. It is
            not asked of validation.
        diary: where it is written what the replica did when, on the clock of ``time.monotonic``.
    """

    engine: RolloutEngine
    prompts: Mapping[str, PromptSource]
    tokenizer: Tokenizer
    scorer: Scorer
    publish: Publish
    environment: Environment | None = None
    teacher: Teacher | None = None
    narrow: Callable[[Sequence[Trajectory]], Sequence[Trajectory]] | None = None
    diary: Diary | None = None


class Producer:
    """Turns `Generate` commands into `GroupFinished` and `GroupFailed` events.

    Used from one asyncio loop. Commands may be delivered twice: a group that is in work is not
    started again, and one that was finished lately is reported again.

    Args:
        parts: what it joins.
        config: slots and sampling.
        replica: its name in events.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        parts: ProducerParts,
        config: ProducerConfig,
        *,
        replica: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = parts
        self._config = config
        self._replica = replica
        self._clock = clock
        self._queued: deque[Generate] = deque()
        self._tasks: dict[_Key, asyncio.Task[GroupEvent]] = {}
        self._generated: set[_Key] = set()  # those of the tasks that only wait for rewards
        self._reported: dict[_Key, GroupEvent] = {}
        self._events: asyncio.Queue[GroupEvent | _Fatal] = asyncio.Queue()
        self._metered = MeteredEngine(parts.engine, self._account)
        self._player = _player(self._metered, parts, config)
        self._failures: Counter[str] = Counter()
        self._num_scored = 0
        self._is_dead = False
        self._occupancy = Occupancy(config.slots, clock())
        self._spans = OccupancySpans(parts.diary, parts.engine, clock())

    @property
    def num_groups(self) -> int:
        """Groups in work or waiting for a slot."""
        return len(self._tasks) + len(self._queued)

    @property
    def progress(self) -> int:
        """Grows with every token generated and every sample scored: the loop is alive."""
        asked = self._parts.teacher.num_tries if self._parts.teacher else 0
        return self._parts.engine.num_tokens_generated + self._num_scored + asked

    @property
    def failures(self) -> dict[str, int]:
        """Samples without a reward, by who is to blame, as in ``{"exact: TimeoutError": 2}``."""
        return dict(self._failures)

    def submit(self, command: Generate) -> None:
        """Take a group on; of no effect once the engine is dead."""
        key = (command.group, command.attempt)
        if self._is_dead:
            return  # whoever reads the events is about to hear of it
        if key in self._reported:
            self._events.put_nowait(self._reported[key])
        elif key not in self._tasks and command not in self._queued:
            self._occupancy.given(command.withheld_s, self._clock())
            self._queued.append(command)
            self._fill_slots()

    def cancel(self, command: CancelGroup) -> None:
        """Drop an attempt at a group, whatever stage it is in; there will be no event."""
        self._queued = deque(
            queued
            for queued in self._queued
            if (queued.group, queued.attempt) != (command.group, command.attempt)
        )
        task = self._tasks.get((command.group, command.attempt))
        if task is not None:
            task.cancel()

    async def events(self) -> AsyncIterator[GroupEvent]:
        """Yield what became of each group, for ever.

        Raises:
            EngineDeadError: after the events of the groups that fell with the engine.
            EngineClosedError: likewise, if the engine was closed under it.
        """
        while True:
            event = await self._events.get()
            if isinstance(event, _Fatal):
                raise event
            yield event

    async def load(self, command: LoadVersion) -> VersionLoaded | LoadFailed:
        """Have the engine load weights while it generates.

        Raises:
            EngineDeadError: if the engine died of it.
        """
        try:
            report = await self._parts.engine.load_version(command.version, command.endpoints)
        except WeightLoadError as error:
            return LoadFailed(
                replica=self._replica,
                version=command.version,
                reason=str(error),
                lineage=command.lineage,
            )
        self._occupancy.stalled(report.stall_s, self._clock())
        self._spans.stalled(report.stall_s, self._clock())
        return VersionLoaded(
            replica=self._replica,
            version=report.version,
            transfer_s=report.transfer_s,
            stall_s=report.stall_s,
            lineage=command.lineage,
        )

    def occupancy(self) -> OccupancyReading:
        """Return where the time went until now."""
        self._spans.tell(self._clock())
        return self._occupancy.read(self._parts.engine.num_tokens_generated, self._clock())

    async def aclose(self) -> None:
        """Drop everything in work; the engine and the scorer stay their owner's. Idempotent."""
        self._queued.clear()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fill_slots(self) -> None:
        while self._queued and self._has_room():
            command = self._queued.popleft()
            key = (command.group, command.attempt)
            task = asyncio.create_task(self._attempt(command), name=f"group {command.group}")
            self._tasks[key] = task
            task.add_done_callback(lambda task, command=command: self._ended(command, task))
        self._account()

    def _has_room(self) -> bool:
        generating = len(self._tasks) - len(self._generated)
        most = self._config.slots + self._config.scoring
        return generating < self._config.slots and len(self._tasks) < most

    def _ended(self, command: Generate, task: asyncio.Task[GroupEvent]) -> None:
        key = (command.group, command.attempt)
        del self._tasks[key]
        self._generated.discard(key)
        if not task.cancelled() or not task.cancelling():  # one that nobody cancelled has failed
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            event = task.result() if error is None else self._failed(command, error)
            self._report(key, event)
            if isinstance(error, _Fatal):
                self._is_dead = True
                self._queued.clear()
            self._fill_slots()
            if isinstance(error, _Fatal) and not self.num_groups:
                self._events.put_nowait(error)  # the last to fall with the engine says so
        else:
            self._fill_slots()

    def _report(self, key: _Key, event: GroupEvent) -> None:
        self._reported[key] = event
        if len(self._reported) > 4 * self._config.slots:
            del self._reported[next(iter(self._reported))]
        self._events.put_nowait(event)

    def _failed(self, command: Generate, error: BaseException) -> GroupFailed:
        reason, drop_as = f"{type(error).__name__}: {error}", ""
        if isinstance(error, PromptError):
            reason, drop_as = f"{reason}; {self._named(command)}", error.drop_as
        elif isinstance(error, PromptDataError) and command.group.source in self._parts.prompts:
            drop_as = _UNREADABLE  # its place is named already
        return GroupFailed(
            replica=self._replica,
            group=command.group,
            attempt=command.attempt,
            reason=reason,
            drop_as=drop_as,
        )

    def _named(self, command: Generate) -> str:
        """Return what a prompt is called by who wrote it."""
        row = self._parts.prompts[command.group.source].row(command.group.ordinal)
        of_set = f" of {row.data_set!r}" if row.data_set else ""
        return f"prompt {row.prompt_id!r}{of_set} ({command.group.source})"

    async def _attempt(self, command: Generate) -> GroupEvent:
        plan = self._plan(command)
        siblings = await self._generate(command, plan)
        trajectories: Sequence[Trajectory] = [s for s in siblings if isinstance(s, Trajectory)]
        if self._parts.narrow is not None and command.group.source == "train":
            trajectories = self._parts.narrow(trajectories)
        keys = await self._parts.publish(trajectories) if trajectories else ()
        name = plan.row.data_set
        refs = (sample_ref(t, key, name) for t, key in zip(trajectories, keys, strict=True))
        samples = (next(refs) if isinstance(s, Trajectory) else s for s in siblings)
        return GroupFinished(
            replica=self._replica,
            group=command.group,
            attempt=command.attempt,
            samples=tuple(samples),
        )

    async def _generate(self, command: Generate, plan: GroupPlan) -> list[Trajectory | SampleRef]:
        """Generate the siblings, scoring each as it comes; in order of sibling."""
        scoring: dict[int, asyncio.Task[_Judged]] = {}
        try:
            async with aclosing(self._player.play(plan)) as played:
                async for index, episode in played:
                    made = None if isinstance(episode, Failure) else episode
                    sibling = Sibling(command, index, plan.row, made)
                    scoring[index] = asyncio.create_task(self._score(sibling, episode))
            self._generated.add((command.group, command.attempt))
            self._fill_slots()
            judged = [await scoring[index] for index in range(command.num_samples)]
            return await self._judge_group(judged)
        finally:
            for task in scoring.values():
                task.cancel()

    async def _score(self, sibling: Sibling, episode: Episode | Failure) -> _Judged:
        if isinstance(episode, Failure):
            return _Judged(sibling, RewardInput(prompt="", response=""), episode)
        seen = reward_input(sibling.row, episode)
        outcome, taught = await asyncio.gather(
            self._parts.scorer.score(seen), self._teach(sibling.command, episode)
        )
        self._num_scored += 1
        if isinstance(taught, Failure):
            return _Judged(sibling, seen, taught)
        return _Judged(sibling, seen, outcome, taught)

    async def _teach(self, command: Generate, episode: Episode) -> TeacherScores | Failure | None:
        """Ask the teacher of what may be trained on."""
        teacher = self._parts.teacher
        if teacher is None or command.group.source != "train":
            return None
        return await teach(teacher, episode)

    async def _judge_group(self, judged: Sequence[_Judged]) -> list[Trajectory | SampleRef]:
        """Add what the siblings earn as a group."""
        outcomes = await self._parts.scorer.score_group(
            [each.seen for each in judged], [each.outcome for each in judged]
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        self._failures.update(f"{failure.reward}: {failure.error}" for failure in failures)
        return [
            trajectory_of(each.sibling, outcome, each.teacher)
            for each, outcome in zip(judged, outcomes, strict=True)
        ]

    def _plan(self, command: Generate) -> GroupPlan:
        group, seed = command.group, self._config.sampling.seed
        sampling = self._config.sampling_of(group.source)
        prompts = self._parts.prompts.get(group.source)
        if prompts is None:
            raise PromptDataError(f"there are no prompts for {group.source!r}")
        return GroupPlan(
            row=prompts.row(group.ordinal),
            name=f"{group}.{command.attempt}",
            seed=group_seed(seed, group),
            samplings=tuple(
                sampling.with_seed(sample_seed(seed, group, index))
                for index in range(command.num_samples)
            ),
        )

    def _account(self) -> None:
        now, requests = self._clock(), self._metered.num_requests
        self._occupancy.account(
            groups=min(len(self._tasks), self._config.slots),
            requests=requests,
            episodes=self._metered.num_episodes,
            now=now,
        )
        self._spans.account(self._occupancy.state, requests, now)


def _player(engine: MeteredEngine, parts: ProducerParts, config: ProducerConfig) -> Player:
    if parts.environment is None:
        return SingleTurnPlayer(engine, parts.tokenizer)
    tokenizer = cast(ChatTokenizer, parts.tokenizer)  # its template is only then told of tools
    return EnvironmentPlayer(engine, tokenizer, parts.environment, config.episode)
