"""A rollout replica's process: commands in, scored groups out, new weights while it generates.

commands ─► Generate ──► producer ──► trajectories to the store ──► GroupFinished
            LoadVersion ► engine: fetch while generating, swap ────► VersionLoaded
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from cosmos_algos import prefixes_trained_once
from cosmos_app.length_reward import scorer_of
from cosmos_app.parent import die_with_parent
from cosmos_app.patience import silence_s
from cosmos_app.prepared_data import open_prompts
from cosmos_app.roles.colocated import Bed, Sleeper
from cosmos_app.roles.engine_setup import EngineWeights, engine_setup, engine_weights
from cosmos_app.roles.engine_start import engine_that_shows, naming_its_keys
from cosmos_app.roles.failed_loads import FailedLoads
from cosmos_app.roles.finding_teachers import find_teacher
from cosmos_app.roles.gpu_turns import STARTING, engine_that_shares, start_turn
from cosmos_app.roles.lease import Standing, keep_lease, watch_start
from cosmos_app.roles.process import RunContext, num_sharers, open_context, own_address
from cosmos_app.roles.quantised import engine_model
from cosmos_app.roles.sockets import own_sockets
from cosmos_app.roles.spans import open_diary
from cosmos_app.roles.turns import Turn, rollout_turn
from cosmos_app.run_bus import connect_to_run
from cosmos_app.samples import append_samples, append_trajectories, text_of
from cosmos_app.shown_samples import SampleShow
from cosmos_core.bus import Bus, ReplicaChannel
from cosmos_core.control import payload_key
from cosmos_core.messages import (
    CancelGroup,
    Command,
    Generate,
    GroupFinished,
    LoadVersion,
    ReplicaJoined,
    Stop,
    VersionLoaded,
)
from cosmos_core.metrics import MetricRecord
from cosmos_core.simulation import Diary
from cosmos_core.trajectory import Trajectory, encode_trajectory
from cosmos_rollout import (
    EMPTY_STATES,
    Environment,
    OccupancyReading,
    Producer,
    ProducerConfig,
    ProducerParts,
    RewardPool,
    RolloutEngine,
    SleepingEngine,
    TeacherReplicas,
    stop_tokens,
)

_METRICS_S = 2.0
_MIB = 1 << 20


async def run_rollout(run_dir: Path, redis_url: str | None, replica: str) -> int:
    """Run a rollout replica until it is told to stop; return 0.

    Raises:
        EngineStartError: if the engine does not start.
        RewardError: if a reward cannot be imported.
        UserCodeError: if the environment cannot be made.
        TeacherError: if the run has teachers, and none answers.
        BusUnreachableError: if Redis cannot be reached.
    """
    die_with_parent()
    context = open_context(run_dir, redis_url)
    pool = context.recipe.reward.build()
    async with contextlib.AsyncExitStack() as ended:
        start = ended.enter_context(watch_start(replica, context.recipe.launch))
        ended.push_async_callback(pool.aclose)
        await pool.start()
        chosen = context.recipe.rollout.environment
        environment = chosen.build() if chosen is not None else None
        if environment is not None:
            ended.push_async_callback(environment.aclose)
        model = await asyncio.to_thread(
            engine_model,
            context.files.model,
            context.recipe.weight_sync,
            context.run.path,
            replica,
        )
        turn = rollout_turn(context)
        weights = engine_weights(context, shares_device=turn is not None)
        setup = engine_setup(context, model, weights, ended)
        if turn is not None:
            await turn.take()
            setup = replace(setup, can_sleep=True)
        ended.enter_context(own_sockets())
        with naming_its_keys("rollout.engine"):
            chosen = engine_that_shows(context.recipe.rollout.engine, context.files)
            async with start_turn(context.run.path / STARTING, num_sharers()):
                engine = await engine_that_shares(chosen, num_sharers()).build(setup)
        ended.push_async_callback(engine.aclose)
        teacher = await find_teacher(context, ended)
        parts = ReplicaParts(
            engine=engine,
            pool=pool,
            environment=environment,
            weights=weights,
            teacher=teacher,
            turn=turn,
        )
        start.rest()
        async with await connect_to_run(context.redis_url, context.namespace) as bus:
            await RolloutProcess(context, bus, replica, parts).run()
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaParts:
    """What a rollout replica runs with; its owner ends them.

    Attributes:
        engine: generates.
        pool: scores.
        environment: what episodes are played in, if there is one.
        teacher: scores what is trained on, if somebody other than the policy does.
        turn: on devices that the policy shares, if it does.
        weights: where others fetch the engine's weights, if they do.
        diary: of an engine that keeps one itself.
    """

    engine: RolloutEngine
    pool: RewardPool
    environment: Environment | None
    teacher: TeacherReplicas | None = None
    turn: Turn | None = None
    weights: EngineWeights | None = None
    diary: Diary | None = None


class RolloutProcess:
    """The loops of one rollout replica."""

    def __init__(
        self,
        context: RunContext,
        bus: Bus,
        replica: str,
        parts: ReplicaParts,
    ) -> None:
        """Join the parts; nothing runs yet."""
        from transformers import AutoTokenizer

        recipe, files = context.recipe, context.files
        self._context = context
        self._bus = bus
        self._replica = replica
        self._engine = parts.engine
        self._weights = parts.weights
        self._diary = parts.diary or open_diary(context.run.path, "rollout", replica)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(files.model)
        ends = stop_tokens(self._tokenizer, files.model)
        sampling = recipe.rollout.sampling.build(recipe.seed, ends)
        self._producer = Producer(
            ProducerParts(
                engine=parts.engine,
                prompts=open_prompts(recipe, files),
                tokenizer=self._tokenizer,
                scorer=scorer_of(parts.pool, recipe.length_reward),
                publish=self._publish,
                environment=parts.environment,
                teacher=parts.teacher,
                narrow=prefixes_trained_once if recipe.rollout.shared_prefixes == "once" else None,
                diary=None if parts.diary is not None else self._diary,
            ),
            ProducerConfig(
                slots=recipe.rollout.slots,
                scoring=recipe.rollout.scoring,
                sampling=sampling,
                validation=recipe.validation.sampling(sampling),
                episode=recipe.rollout.episode,
            ),
            replica=replica,
        )
        self._loads: asyncio.Queue[LoadVersion] = asyncio.Queue()
        self._failed_loads = FailedLoads()
        self._joined = 0.0
        self._sleeper = self._make_sleeper(parts)
        self._show = SampleShow(context.run.path / "samples", replica, self._decode)

    async def run(self) -> None:
        """Join and obey until told to stop."""
        chosen = self._context.recipe.rollout
        joined = ReplicaJoined(
            replica=self._replica,
            role="rollout",
            slots=chosen.slots + chosen.scoring,
            version=self._engine.weight_version,
            endpoints=() if self._weights is None else await self._weights.serve(),
            host=own_address(),
        )
        async with self._bus.join(joined) as channel:
            self._joined = time.monotonic()
            loops = [
                asyncio.create_task(loop(channel), name=loop.__name__)
                for loop in (self._obey, self._report, self._load, self._pulse, self._measure)
            ]
            if self._sleeper is not None:
                alternating = self._sleeper.alternate(partial(self._load_version, channel))
                loops.append(asyncio.create_task(alternating, name="alternate"))
            try:
                done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in loops:
                    task.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
                await self._producer.aclose()
                self._producer.occupancy()
                self._diary.close()

    def _make_sleeper(self, parts: ReplicaParts) -> Sleeper | None:
        """Return who puts the engine to sleep, on devices that the policy shares."""
        how = self._context.recipe.rollout.colocate
        if parts.turn is None or not how:
            return None
        bed = Bed(
            engine=cast(SleepingEngine, parts.engine),  # the recipe has none other here
            producer=self._producer,
            turn=parts.turn,
            weights=how,
        )
        return Sleeper(bed, take=self._take, report=self._report_sleep)

    async def _report_sleep(self, values: dict[str, float]) -> None:
        await self._send_metrics(self._engine.weight_version, values)

    # ---------------------------------------------------------------- loops

    async def _obey(self, channel: ReplicaChannel) -> None:
        """Take commands; the only loop that ends by itself, with the command to stop."""
        async for command in channel.commands():
            if isinstance(command, Stop):
                return
            (self._take if self._sleeper is None else self._sleeper.hand)(command)

    def _take(self, command: Command) -> None:
        match command:
            case Generate():
                self._diary.given(command.withheld_s, time.monotonic())
                self._producer.submit(command)
            case CancelGroup():
                self._producer.cancel(command)
            case LoadVersion():
                self._loads.put_nowait(command)
            case _:
                pass

    async def _report(self, channel: ReplicaChannel) -> None:
        is_new = True
        async for event in self._producer.events():
            await channel.send(event)
            if is_new and isinstance(event, GroupFinished):
                is_new = False
                waited_s = time.monotonic() - self._joined
                await self._send_metrics(self._engine.weight_version, {"first_group_s": waited_s})

    async def _load(self, channel: ReplicaChannel) -> None:
        while True:
            await self._load_version(channel, await self._loads.get())

    async def _load_version(self, channel: ReplicaChannel, command: LoadVersion) -> None:
        if self._weights is not None:
            self._weights.describe_by(command.described_by)
        event = await self._producer.load(command)
        if isinstance(event, VersionLoaded) and self._weights is not None:
            event = structs.replace(event, endpoints=self._weights.endpoints)
        await channel.send(event)
        self._failed_loads.note(event)
        if isinstance(event, VersionLoaded):
            values = {"stall_s": event.stall_s, "transfer_s": event.transfer_s}
            if self._weights is not None:
                values["wire_mib"] = self._weights.fetching.wire_bytes / _MIB
            await self._send_metrics(event.version, values)

    async def _pulse(self, channel: ReplicaChannel) -> None:
        """Keep the lease while tokens come, or while there is nothing to do."""
        silence = silence_s(self._context.recipe)
        await keep_lease(channel, self._replica, self._standing, silence)

    def _standing(self) -> Standing:
        return Standing(self._producer.progress, is_busy=self._producer.num_groups > 0)

    async def _measure(self, channel: ReplicaChannel) -> None:
        del channel
        before = self._producer.occupancy()
        for _ in itertools.count():
            await asyncio.sleep(_METRICS_S)
            now = self._producer.occupancy()
            values = occupancy_values(before, now)
            for name, count in self._producer.failures.items():
                values[f"failed/{name.replace(': ', '/')}"] = float(count)
            await self._send_metrics(self._engine.weight_version, values)
            before = now

    async def _send_metrics(self, version: int, values: dict[str, float]) -> None:
        record = MetricRecord(time.time(), "rollout", self._replica, version, values)
        await self._bus.send_metrics([record])

    # ---------------------------------------------------------------- trajectories

    async def _publish(self, trajectories: Sequence[Trajectory]) -> Sequence[str]:
        """Store the trajectories of a group under keys that no other attempt uses."""
        payloads = {
            payload_key(t.group, t.attempt, t.sibling): encode_trajectory(t) for t in trajectories
        }
        await self._bus.put_payloads(payloads)
        self._show.offer(trajectories)
        if self._context.recipe.rollout.record:
            folder = self._context.run.path / "trajectories"
            append_trajectories(folder / f"{self._replica}.bin", list(payloads.values()))
        if trajectories[0].group.startswith("validation."):
            path = self._context.run.path / "samples" / f"samples-{self._replica}.jsonl"
            append_samples(path, [text_of(t, self._decode) for t in trajectories])
        return list(payloads)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def occupancy_values(before: OccupancyReading, now: OccupancyReading) -> dict[str, float]:
    """Return where the time between two readings went, and the totals until now."""
    elapsed_s = max(now.elapsed_s - before.elapsed_s, 1e-9)
    shares = {
        f"{state}_share": (now.seconds[state] - before.seconds[state]) / elapsed_s
        for state in now.seconds
    }
    return {
        **shares,
        "idle_share": sum(shares[f"{state}_share"] for state in EMPTY_STATES),
        "idle_total_share": sum(now.seconds[s] for s in EMPTY_STATES) / max(now.elapsed_s, 1e-9),
        "withheld_before_s": now.withheld_before_s - before.withheld_before_s,
        "tokens_per_s": (now.num_tokens - before.num_tokens) / elapsed_s,
        "slot_share": now.slot_share,
        "token_share": now.token_share,
    }
