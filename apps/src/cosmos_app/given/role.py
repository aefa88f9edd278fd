"""A replica of a run on given data: meet the others, take a step, tell; until the last step.

A replica that is alone has nobody to meet. Of several, the first writes checkpoints and validates;
who is first may change from step to step.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from cosmos_app.checkpoint_places import checkpoints_of
from cosmos_app.control_files import read_address
from cosmos_app.given.files import recipe_of
from cosmos_app.given.recipe import GivenRecipe
from cosmos_app.given.stop_file import is_asked_to_stop
from cosmos_app.given.trainer import GivenTrainer
from cosmos_app.parent import die_with_parent
from cosmos_app.roles.elastic import open_replicas
from cosmos_app.roles.lease import Standing, watch_saving, watch_start, watched_work
from cosmos_app.roles.process import TorchrunPlace, torchrun_place, unwatched_groups
from cosmos_app.roles.ranks import join_ranks
from cosmos_app.roles.spans import PolicyTime, open_diary
from cosmos_app.run_bus import connect_to_run
from cosmos_app.settings import kernels
from cosmos_app.unsaved import Saves
from cosmos_core.bus import Bus
from cosmos_core.messages import Train
from cosmos_core.metrics import MetricRecord, MetricsFormatError, read_metrics
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    CheckpointWriteError,
    Learner,
    ReplicaLostError,
    Seat,
    TrainingMesh,
    build_mesh,
    shutdown_distributed,
)

Value = TypeVar("Value")


class Replicas(Protocol):
    """What the loop needs of the other replicas; see ``ElasticReplicas``."""

    def meet(self, learner: Learner, step: int, *, wants_stop: bool = False) -> Seat:
        """Settle who takes the next step, and which."""
        ...

    def lose(self) -> None:
        """Note that a step was lost."""
        ...

    def close(self) -> None:
        """Leave the others."""
        ...


class Alone:
    """A replica without others."""

    def __init__(self, name: str, mesh: TrainingMesh) -> None:
        """Be alone."""
        self._name = name
        self._mesh = mesh

    def meet(self, learner: Learner, step: int, *, wants_stop: bool = False) -> Seat:
        """Take the next step alone; all ranks stop together."""
        asked = torch.tensor(int(wants_stop), device=learner.mesh.process.device)
        stop = bool(self._mesh.max_(asked).item())
        return Seat(step=step, index=0, names=(self._name,), wants_stop=stop)

    def lose(self) -> None:
        """Never happens."""

    def close(self) -> None:
        """Do nothing."""


class GivenProcess:
    """One rank's loop."""

    def __init__(self, recipe: GivenRecipe, run: RunDirectory, bus: Bus, replica: str) -> None:
        """Nothing is loaded yet; ``run`` does."""
        self._recipe = recipe
        self._run = run
        self._bus = bus
        self._replica = replica
        self._place: TorchrunPlace = torchrun_place()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._saves = Saves()
        is_told = self._place.rank == 0
        self._time = PolicyTime(open_diary(run.path, "policy", replica) if is_told else None)
        self._is_working = False

    async def run(self) -> None:
        """Train until the last step, or until asked to stop."""
        with watch_start(self._replica, self._recipe.launch):
            mesh = await self._blocking(self._build_mesh)
            trainer = await self._blocking(lambda: self._make_trainer(mesh))
            replicas = await self._blocking(lambda: self._open_replicas(mesh))
        try:
            async with self._watched(trainer):
                await self._train(trainer, replicas)
        finally:
            await self._blocking(replicas.close)
            await self._blocking(trainer.close)
            self._time.close()
            self._thread.shutdown()

    async def _train(self, trainer: GivenTrainer, replicas: Replicas) -> None:
        is_first = True
        taken: tuple[int, dict[str, float]] | None = None
        while trainer.step < self._recipe.trainer.steps:
            seat = await self._blocking(lambda: self._meet(trainer, replicas))
            takes_over = seat.index == 0 and not is_first
            trainer.step, is_first = seat.step, seat.index == 0
            if takes_over and taken is not None and taken[0] == seat.step - 1:
                await self._make_up(trainer, taken[1])
            if seat.wants_stop or seat.step >= self._recipe.trainer.steps:
                break
            try:
                with self._time.spent("training", seat.step):
                    figures = await self._working(lambda s=seat: trainer.train(s))
            except ReplicaLostError:
                await self._blocking(replicas.lose)
                continue
            self._time.step(Train(step=seat.step, groups=(), publish=False), {})
            taken = (seat.step, figures)
            if is_first:
                await self._look_after(trainer, figures)
        if is_first:
            await self._finish(trainer)

    def _meet(self, trainer: GivenTrainer, replicas: Replicas) -> Seat:
        wants_stop = is_asked_to_stop(self._run)
        with unwatched_groups():
            return replicas.meet(trainer.learner, trainer.step, wants_stop=wants_stop)

    async def _make_up(self, trainer: GivenTrainer, figures: dict[str, float]) -> None:
        """Look after the last step, if who was first then died before it had."""
        device = trainer.learner.mesh.process.device

        def lacks() -> bool:  # as the ranks agree
            asked = torch.tensor(int(not self._is_told(trainer.step - 1)), device=device)
            return bool(trainer.learner.mesh.max_(asked).item())

        if await self._working(lacks):
            await self._look_after(trainer, figures)

    def _is_told(self, step: int) -> bool:
        """Whether the run's file of metrics has the record of a step."""
        try:
            records = read_metrics(self._run.metrics)
        except (OSError, MetricsFormatError):
            return False
        return any(record.role == "controller" and record.step == step for record in records)

    async def _look_after(self, trainer: GivenTrainer, figures: dict[str, float]) -> None:
        """Validate, save and tell after a step, as the first replica."""
        config = self._recipe.trainer
        saves = trainer.is_due(config.checkpoint_every)
        found = None
        if saves or trainer.is_due(config.validate_every):
            with self._time.spent("evaluating", trainer.step):
                found = await self._working(trainer.validate)
        if saves:
            await self._save(trainer, found.loss if found else None, figures)
        if found is not None:
            figures["validation_loss"] = found.loss
        if self._place.rank != 0:
            return
        now_s, step = time.time(), trainer.step - 1
        # what is said of the whole run is said in the controller's name
        note = trainer.problem
        records = [MetricRecord(now_s, "controller", self._replica, step, figures, note)]
        if found is not None and found.data_sets:
            sets = {f"data_set/{name}": loss for name, loss in found.data_sets.items()}
            values = {"loss": found.loss} | sets
            records.insert(0, MetricRecord(now_s, "validation", self._replica, step, values))
        await self._bus.send_metrics(records)

    async def _save(
        self, trainer: GivenTrainer, loss: float | None, figures: dict[str, float]
    ) -> None:
        """Begin a checkpoint; that the one before could not be written is told with the step."""
        failure = None
        with self._time.spent("saving", trainer.step):
            try:
                await self._writing(lambda: trainer.save(loss))
            except CheckpointWriteError as error:
                failure = error
                await self._writing(lambda: trainer.save(loss))
        figures |= self._saves.measured(failure)

    async def _finish(self, trainer: GivenTrainer) -> None:
        async def report(values: Mapping[str, float]) -> None:
            if self._place.rank == 0:
                record = MetricRecord(
                    time.time(), "policy", self._replica, trainer.step - 1, values
                )
                await self._bus.send_metrics([record])

        await self._saves.at_last(lambda: self._writing(trainer.save_now), report)
        if trainer.step == self._recipe.trainer.steps:
            with self._while_writing(self._run.export):
                await self._blocking(trainer.export)

    def _build_mesh(self) -> TrainingMesh:
        process = join_ranks(self._place, casts=self._recipe.model.training.casts)
        return build_mesh(self._recipe.policy.parallel, process)

    def _make_trainer(self, mesh: TrainingMesh) -> GivenTrainer:
        return GivenTrainer(self._recipe, self._run, mesh, self._while_writing)

    def _open_replicas(self, mesh: TrainingMesh) -> Replicas:
        if self._recipe.policy.replicas == 1:
            return Alone(self._replica, mesh)
        return open_replicas(self._run, self._replica, mesh, self._recipe.elastic)

    def _while_writing(self, where: Path | None = None) -> AbstractContextManager[None]:
        """Return what ends this process if it takes too long to write, checkpoints by default."""
        place = checkpoints_of(self._recipe.trainer, self._run) if where is None else where
        return watch_saving(self._replica, self._recipe.launch, place)

    def _watched(self, trainer: GivenTrainer) -> AbstractAsyncContextManager[None]:
        """Return what ends this process if it gets no further with its work."""

        def standing() -> Standing:
            is_busy = self._is_working and not trainer.is_waiting
            return Standing(trainer.num_passes, is_busy=is_busy)

        part = "a pass over its data, or reading them (launch.stall_s),"
        return watched_work(self._replica, standing, self._recipe.launch.stall_s, part=part)

    async def _working(self, call: Callable[[], Value]) -> Value:
        """Run a blocking call that makes passes over data."""
        self._is_working = True
        try:
            return await self._blocking(call)
        finally:
            self._is_working = False

    async def _writing(self, call: Callable[[], Value]) -> Value:
        """Run a blocking call that writes a checkpoint, or waits for one that is being written."""
        with self._while_writing():
            return await self._blocking(call)

    async def _blocking(self, call: Callable[[], Value]) -> Value:
        """Run a blocking call on the one thread that owns communicators."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


async def run_learner(run_dir: Path, redis_url: str | None, replica: str) -> int:
    """Run one rank of a replica of a run on given data to its end; return 0.

    Raises:
        ConfigError: if the run is of another kind.
        RunError: if it was never started.
    """
    die_with_parent()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run = RunDirectory.open(run_dir)
    recipe = recipe_of(run)
    written_url, namespace = read_address(run)
    try:
        async with await connect_to_run(redis_url or written_url, namespace) as bus:
            with kernels(recipe.seed, are_deterministic=recipe.trainer.deterministic):
                await GivenProcess(recipe, run, bus, replica).run()
    finally:
        shutdown_distributed()
    return 0
