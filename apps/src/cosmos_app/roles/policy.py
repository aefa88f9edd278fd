"""A policy replica's process: commands in, steps out.

Rank 0 speaks with the controller and passes each command on to the other ranks; every rank then
fetches its own trajectories and calls the same methods of its ``Trainer``::

    command ─► rank 0 ─broadcast─► all ranks: fetch share ─► train ─► publish or skip ─► (save)
    events  ◄─ rank 0
"""

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from cosmos_app.checkpoint_places import checkpoints_of
from cosmos_app.children import policy_names
from cosmos_app.control_files import read_weights_token
from cosmos_app.errors import RunError
from cosmos_app.parent import die_with_parent
from cosmos_app.patience import silence_s
from cosmos_app.roles.batch_plan import shown_pictures
from cosmos_app.roles.elastic import Gathering, open_replicas
from cosmos_app.roles.lease import Standing, keep_lease, watch_saving, watch_start, watched_work
from cosmos_app.roles.meeting import meet_replicas
from cosmos_app.roles.orders import orders
from cosmos_app.roles.process import (
    RunContext,
    TorchrunPlace,
    open_context,
    own_address,
    torchrun_place,
)
from cosmos_app.roles.put_away import PutAway
from cosmos_app.roles.ranks import gather_texts, join_ranks, leave_ranks
from cosmos_app.roles.run_checkpoints import RunCheckpoints
from cosmos_app.roles.spans import PolicyTime, open_diary
from cosmos_app.roles.step_trainer import Seat, StepTrainer
from cosmos_app.roles.telling import Telling
from cosmos_app.roles.trainer import Trainer
from cosmos_app.roles.turns import policy_turn
from cosmos_app.run_bus import connect_to_run
from cosmos_app.settings import bad_steps_kept, kernels
from cosmos_app.step_share import read_samples
from cosmos_app.unsaved import HowToSave, Saves
from cosmos_core.bus import Bus, ReplicaChannel
from cosmos_core.control import ALL_DONE, line_of_cut, step_of_cut
from cosmos_core.messages import (
    SCALED_DOWN,
    Command,
    FallBack,
    ReplicaJoined,
    Stop,
    Train,
    decode_command,
    encode_message,
)
from cosmos_core.metrics import MetricRecord
from cosmos_parallel import (
    ReplicaGroup,
    ReplicaLostError,
    RetentionConfig,
    TrainingMesh,
    broadcast_bytes,
    build_mesh,
)

Value = TypeVar("Value")


class PolicyProcess:
    """One rank's loop.

    Args:
        context: the run.
        bus: its control plane.
        replica: name of the replica.
        place: which of its ranks this is.
        make_trainer: makes what takes the steps; the recipe's `Trainer` by default.
    """

    def __init__(
        self,
        context: RunContext,
        bus: Bus,
        replica: str,
        place: TorchrunPlace,
        *,
        make_trainer: Callable[[], StepTrainer] | None = None,
    ) -> None:
        """Nothing is loaded yet; ``run`` does."""
        self._make = make_trainer if make_trainer is not None else self._make_trainer
        self._context = context
        self._bus = bus
        self._replica = replica
        self._place = place
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        keeps_diary = make_trainer is None and place.rank == 0
        diary = open_diary(context.run.path, "policy", replica) if keeps_diary else None
        self._time = PolicyTime(diary)
        self._trainer: StepTrainer | None = None
        self._turn, self._saves = policy_turn(context), Saves()
        self._belongings: PutAway | None = None

    async def run(self) -> None:
        """Load, join, obey until told to stop."""
        self._loop = asyncio.get_running_loop()
        with watch_start(self._replica, self._context.recipe.launch):
            await self._take_turn()
            trainer = self._trainer = await self._blocking(self._make)
            endpoints = await self._blocking(lambda: gather_texts(trainer.endpoint))
            await self._give_turn()
        try:
            if self._place.rank == 0:
                await self._lead(trainer, tuple(endpoints))
            else:
                await self._follow(trainer)
        finally:
            trainer.close()
            self._time.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _lead(self, trainer: StepTrainer, endpoints: tuple[str, ...]) -> None:
        joined = ReplicaJoined(
            replica=self._replica,
            role="policy",
            version=trainer.version,
            lineage=trainer.lineage,
            endpoints=endpoints,
            host=own_address(),
        )
        async with self._bus.join(joined) as channel:
            tell = Telling(self._replica, channel)
            await tell.publication(trainer, trainer.publication)
            given = orders(channel.commands(), lambda: not trainer.publication.is_published)
            pulse = asyncio.create_task(self._pulse(channel, trainer))
            try:
                async for command in given:
                    data = b"" if command is None else encode_message(command)
                    await self._take_turn()
                    await self._blocking(functools.partial(broadcast_bytes, data))
                    await self._obey(trainer, command, tell)
                    await self._give_turn()
                    if _is_over(trainer, command):
                        return
            finally:
                await given.aclose()
                pulse.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await pulse

    async def _follow(self, trainer: StepTrainer) -> None:
        # without a lease: rank 0, which has it, may be done with a step that this rank hangs in
        name, tell = f"{self._replica}, rank {self._place.rank}", Telling(self._replica, None)
        standing = functools.partial(self._standing, trainer)
        async with watched_work(name, standing, silence_s(self._context.recipe)):
            while True:
                data = await self._blocking(lambda: broadcast_bytes(None))
                command = decode_command(data) if data else None
                await self._take_turn()
                await self._obey(trainer, command, tell)
                await self._give_turn()
                if _is_over(trainer, command):
                    return

    async def _take_turn(self) -> None:
        """Have the devices alone, where rollouts share them; rank 0 waits for all ranks."""
        if self._turn is None:
            return
        if self._place.rank == 0:
            await self._turn.take()
        if self._belongings is not None:
            await self._blocking(self._belongings.back)

    async def _give_turn(self) -> None:
        """Let rollouts have the devices, once every rank has put its things away."""
        if self._turn is None:
            return
        if self._belongings is not None:
            await self._blocking(self._belongings.away)
            await self._blocking(lambda: gather_texts("away"))
        self._turn.give()

    async def _obey(self, trainer: StepTrainer, command: Command | None, tell: Telling) -> None:
        """Do what all ranks do; without a command, publish what has had no room."""
        match command:
            case None:
                await self._publish(trainer, tell)
            case Train():
                await self._train(trainer, command, tell)
            case FallBack(line=line, saved=saved):
                trainer.follow(line, saved)
            case Stop():
                await self._stop(trainer, command, tell)
            case _:
                pass

    async def _train(self, trainer: StepTrainer, train: Train, tell: Telling) -> None:
        if not trainer.follow(train.line) or train.step < trainer.version:
            return  # from before a fall-back, or delivered twice
        metrics: dict[str, float] | None = None
        while metrics is None:
            found = await self._meet(trainer, train.step, tell)
            if found > train.step or trainer.lineage > len(train.line):
                return  # the others took it without this one, or fell back
            metrics = await self._take(trainer, train)
        await tell.step(trainer)
        if train.publish:
            await tell.publication(trainer, trainer.publication)
        spent = self._time.step(train, metrics)
        figures = {**metrics, **spent, "idle_share": self._time.idle_share}
        await self._report(train.step, figures, trainer.problem)
        if train.cut and trainer.is_first_replica:
            await self._save(trainer, train.cut, tell, self._saves.in_passing)

    async def _publish(self, trainer: StepTrainer, tell: Telling) -> None:
        """Publish, between steps, what was skipped with its step, if there is room by now."""
        with self._time.spent("publishing", trainer.version):
            publication = await self._blocking(trainer.publish)
        if publication.is_published:
            await tell.publication(trainer, publication)
            await self._report(trainer.version - 1, publication.figures)

    async def _meet(self, trainer: StepTrainer, step: int, tell: Telling) -> int:
        """Meet the other replicas before a step; tell the controller of weights had from them."""
        held = trainer.version
        found = await self._blocking(lambda: trainer.meet(step))
        if trainer.version > held:
            await tell.step(trainer)
        return found

    async def _take(self, trainer: StepTrainer, train: Train) -> dict[str, float] | None:
        """Take a step; return its metrics, or ``None`` if a member died: then it is void."""
        share = trainer.share(train)
        payloads = await self._bus.get_payloads([ref.key for ref in share.refs])
        trajectories = read_samples(share.refs, payloads)
        with self._time.spent("training", train.step):
            try:
                return await self._blocking(lambda: trainer.train(train, share, trajectories))
            except ReplicaLostError as error:
                await self._blocking(functools.partial(trainer.lose, error))
                return None

    async def _stop(self, trainer: StepTrainer, stop: Stop, tell: Telling) -> None:
        if stop.reason == SCALED_DOWN:
            return  # the others go on
        if not stop.cut:  # the run was over before this one came: it is as it was loaded
            if trainer.version == self._context.recipe.trainer.steps:
                await self._export(trainer)  # one that had saved it may have died
            return
        if trainer.version != step_of_cut(stop.cut) or trainer.is_lost_on(line_of_cut(stop.cut)):
            return  # others save the last weights, or nobody has them, or see `_is_over`
        if trainer.version:
            await self._blocking(trainer.settle_end)
            await self._save(trainer, stop.cut, tell, self._saves.at_last)
        else:
            await tell.saved(trainer, "")
        if stop.reason == ALL_DONE:
            await self._export(trainer)

    async def _export(self, trainer: StepTrainer) -> None:
        place = self._context.run.export / "model"
        await self._writing(place, lambda: trainer.export(place))

    async def _save(
        self,
        trainer: StepTrainer,
        cut: bytes,
        tell: Telling,
        how: HowToSave,
    ) -> None:
        place = checkpoints_of(self._context.recipe.trainer, self._context.run)
        saving = functools.partial(self._writing, place, lambda: trainer.save(cut))
        with self._time.spent("saving", trainer.version):
            path = await how(saving, functools.partial(self._report, trainer.version - 1))
        if path is not None:
            await tell.saved(trainer, path)

    async def _report(self, step: int, values: Mapping[str, float], note: str = "") -> None:
        if self._place.rank == 0:
            record = MetricRecord(time.time(), "policy", self._replica, step, values, note)
            await self._bus.send_metrics([record])

    async def _pulse(self, channel: ReplicaChannel, trainer: StepTrainer) -> None:
        """Keep the lease while waiting for commands or while passes are being made."""
        standing = functools.partial(self._standing, trainer)
        await keep_lease(channel, self._replica, standing, silence_s(self._context.recipe))

    def _standing(self, trainer: StepTrainer) -> Standing:
        is_busy = self._time.is_busy and not trainer.is_waiting
        return Standing(trainer.num_passes, is_busy=is_busy)

    async def _blocking(self, call: Callable[[], Value]) -> Value:
        """Run a blocking call on the one thread that owns communicators."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _writing(self, where: Path | str, call: Callable[[], Value]) -> Value:
        """Run a blocking call that writes, for no longer than it may."""
        with watch_saving(self._replica, self._context.recipe.launch, where):
            return await self._blocking(call)

    # ---------------------------------------------------------------- loading

    def _make_trainer(self) -> Trainer:
        recipe = self._context.recipe
        process = join_ranks(self._place, casts=recipe.model.training.casts)
        mesh = build_mesh(recipe.policy.parallel, process)
        names = policy_names(recipe.policy)
        elastic = recipe.elastic
        index = 0 if elastic is not None else names.index(self._replica)
        store = RunCheckpoints(
            checkpoints_of(recipe.trainer, self._context.run),
            mesh,
            self._read_line,
            retention=RetentionConfig(keep=recipe.trainer.keep_checkpoints),
        )
        learner = bad_steps_kept(
            recipe.learner, self._context.run.path, keep=recipe.trainer.keep_bad_steps
        )
        trainer = Trainer(
            replace(recipe, learner=learner),
            self._context.files.model,
            Seat(
                replica_index=index,
                num_replicas=len(names),
                mesh=mesh,
                host=own_address(),
                token=read_weights_token(self._context.run),
            ),
            store,
            self._others(index, mesh),
            pictures=shown_pictures(recipe, self._context.files),
        )
        if self._turn is not None:
            self._belongings = trainer.belongings()
        return trainer

    def _read_line(self) -> tuple[int, ...]:
        """Ask for the run's line from the thread of communicators, while the loop waits for it."""
        asked = asyncio.run_coroutine_threadsafe(self._bus.read_status(), self._loop)
        return tuple(asked.result().get("line", ()))

    def _others(self, index: int, mesh: TrainingMesh) -> ReplicaGroup | Gathering | None:
        """Return the other policy replicas: who come and go, who are always there, or nobody."""
        elastic, run = self._context.recipe.elastic, self._context.run
        if elastic is not None:
            return Gathering(lambda: open_replicas(run, self._replica, mesh, elastic))
        several = self._context.recipe.policy.replicas > 1
        return meet_replicas(self._context, index, mesh.process) if several else None


def _is_over(trainer: StepTrainer, command: Command | None) -> bool:
    """Whether a command was the last.

    The cut of a stop may be of before a step that was taken, as the controller does not know yet
    that it was: beside these weights its groups would be trained on again. It gives another one.
    """
    if not isinstance(command, Stop):
        return False
    is_ahead = bool(command.cut) and trainer.version > step_of_cut(command.cut)
    return not is_ahead or trainer.is_lost_on(line_of_cut(command.cut))


async def run_policy(run_dir: Path, redis_url: str | None, replica: str) -> int:
    """Run one rank of a policy replica until it is told to stop; return 0.

    Raises:
        RunError: if the run has no policy replica of that name.
    """
    die_with_parent()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    context = open_context(run_dir, redis_url)
    is_fixed = context.recipe.elastic is None
    if is_fixed and replica not in policy_names(context.recipe.policy):
        raise RunError(
            f"{replica}: this run's policy replicas are "
            f"{', '.join(policy_names(context.recipe.policy))}; raise policy.replicas"
        )
    try:
        async with await connect_to_run(context.redis_url, context.namespace) as bus:
            recipe = context.recipe
            with kernels(recipe.seed, are_deterministic=recipe.trainer.deterministic):
                await PolicyProcess(context, bus, replica, torchrun_place()).run()
    finally:
        leave_ranks(replica)
    return 0
