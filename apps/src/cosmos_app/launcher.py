"""``cosmos-app run``: everything of a run on this machine, from the empty directory to the report.

files ─► redis ─► warm-up ─► controller + policies + rollouts ─► (watch) ─► report
                                  ▲   restarted when they die   │
                                  └─────────────────────────────┘
"""

import asyncio
import contextlib
import functools
import itertools
import json
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from cosmos_app.children import child_specs, policy_names, rollout_names, warmup_spec
from cosmos_app.control_files import write_address, write_control
from cosmos_app.dashboard.address import announce_dashboard
from cosmos_app.errors import InterruptedRunError, NothingToResumeError
from cosmos_app.output import print_json
from cosmos_app.prepare import (
    RunFiles,
    check_inputs,
    count_rows,
    prepare_data,
    prepare_model,
    run_files,
)
from cosmos_app.recipe import BusConfig, Recipe, controller_config
from cosmos_app.report import Outcome, RunReport, build_report, draw_report, print_report
from cosmos_app.samples import last_samples
from cosmos_app.supervisor import Incident, Supervisor
from cosmos_core.bus import Bus, RedisServer
from cosmos_core.config import config_to_json
from cosmos_core.control import ALL_DONE
from cosmos_core.messages import ReplicaLeft, StopRequested
from cosmos_core.metrics import MetricRecord, SinkContext, open_sinks, read_metrics
from cosmos_core.rundir import RunDirectory, write_atomic
from cosmos_parallel import CheckpointStore, ParallelConfig, build_mesh

_WARMUP_LINES = 8


class LaunchedRecipe(Protocol):
    """What opening a run needs of its recipe, of whatever kind."""

    @property
    def output(self) -> Path:
        """The run directory."""
        ...

    @property
    def bus(self) -> BusConfig:
        """The control plane."""
        ...


RUN_MARKER = "run.json"


async def run_recipe(recipe: Recipe, *, resume: bool, as_json: bool) -> int:
    """Run a recipe to its end; return the exit code.

    Raises:
        RunExistsError: if the output directory holds a run and ``resume`` was not asked for.
        NothingToResumeError: if it holds none and it was.
        DataError: if data or model cannot be used.
        ChildFailedError: if a process could not be kept alive.
        InterruptedRunError: after a clean stop before the last step.
    """
    console = Console(stderr=as_json)
    check_inputs(recipe)
    run = open_run(recipe, console, resume=resume)
    with run:
        files = run_files(recipe, run.path)
        if not (resume and files.train.exists()):
            num_train, num_held_out = prepare_data(recipe, files)
            console.print(f"data: {num_train} prompts to train on, {num_held_out} held out")
        parameters = prepare_model(recipe, files)
        if parameters:
            console.print(f"model: built with {parameters:,} parameters in {files.built_model}")
        async with open_redis(recipe, run) as url:
            launch = Launch(recipe, run, files, url, console)
            report = await launch.run()
        write_atomic(run.report, json.dumps(report.to_json(), indent=2, default=str))
        draw_report(report, run.path / "report.png")
        if as_json:
            print_json(report.to_json())
        else:
            print_report(report, console)
        if report.finished != ALL_DONE:
            raise InterruptedRunError(
                f"stopped at step {report.steps}: {report.finished}; go on with --resume"
            )
    return 0


def open_run(recipe: LaunchedRecipe, console: Console, *, resume: bool) -> RunDirectory:
    """Lock the run directory: the recipe's, or the next free one beside an earlier run."""
    if resume:
        if not recipe.output.exists():
            raise NothingToResumeError(f"{recipe.output}: there is no run to resume; drop --resume")
        run = RunDirectory.resume(recipe.output)
        write_atomic(run.config, config_to_json(recipe))
        return run
    output = _free_output(recipe.output)
    if output != recipe.output:
        console.print(f"{recipe.output} holds an earlier run; this one goes to {output}")
    tables: dict[str, Any] = json.loads(config_to_json(recipe))
    text = json.dumps({**tables, "output": str(output)}, indent=2) + "\n"
    return RunDirectory.create(output, config_json=text, now_s=time.time())


def _free_output(output: Path) -> Path:
    numbered = (output.with_name(f"{output.name}-{number}") for number in itertools.count(2))
    candidates = itertools.chain([output], numbered)
    return next(path for path in candidates if not (path / RUN_MARKER).exists())


@contextlib.asynccontextmanager
async def open_redis(recipe: LaunchedRecipe, run: RunDirectory) -> AsyncGenerator[str]:
    """Give the URL of the recipe's server, or of a bundled one that lives as long as the run."""
    if recipe.bus.url is not None:
        yield recipe.bus.url
        return
    server = await asyncio.to_thread(RedisServer.start, run.redis, port=recipe.bus.port)
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.stop)


class Launch:
    """One run from its first process to its last.

    The launcher decides nothing about training: it starts and restarts processes, passes metrics
    on to the sinks, and tells the controller who died and that somebody pressed Ctrl-C.
    """

    def __init__(
        self, recipe: Recipe, run: RunDirectory, files: RunFiles, url: str, console: Console
    ) -> None:
        """Nothing is started yet."""
        self._recipe = recipe
        self._run = run
        self._files = files
        self._url = url
        self._console = console
        self._namespace = f"cosmos.{run.name}.{uuid.uuid4().hex[:8]}"
        self._supervisor = Supervisor(self._on_incident)
        self._bus: Bus | None = None
        self._stop_reason = ""

    async def run(self) -> RunReport:
        """Start everything, watch it to its end, report."""
        started = time.monotonic()
        write_address(self._run, self._url, self._namespace)
        async with await Bus.connect(self._url, self._namespace) as bus:
            self._bus = bus
            metrics = asyncio.create_task(self._pass_metrics_on(bus))
            try:
                with self._interruptible():
                    await self._warm_up()
                    await self._train()
                status = await bus.read_status()
            finally:
                await self._supervisor.stop(self._recipe.launch.stop_grace_s)
                metrics.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await metrics
        return self._report(status, time.monotonic() - started)

    # ---------------------------------------------------------------- the phases

    async def _warm_up(self) -> None:
        if self._files.model.exists() or self._stop_reason:
            return
        spec = warmup_spec(self._recipe, self._run)
        self._supervisor.start(spec)
        await self._supervisor.wait([spec.name])

    async def _train(self) -> None:
        if self._stop_reason:
            return
        write_control(
            self._run,
            controller_config(self._recipe, count_rows(self._files.held_out)),
            self._cut(),
        )
        specs = child_specs(self._recipe, self._run)
        for spec in specs:
            self._supervisor.start(spec)
        say = functools.partial(self._console.print, soft_wrap=True)
        announcing = asyncio.create_task(announce_dashboard(self._run, say))
        try:
            await self._supervisor.wait(["controller", *policy_names(self._recipe)])
        finally:
            announcing.cancel()
        await self._supervisor.wait_briefly(
            rollout_names(self._recipe), self._recipe.launch.stop_grace_s
        )

    def _cut(self) -> bytes:
        """Return the sample stream of the newest checkpoint; empty for a run without one."""
        store = CheckpointStore(self._run.checkpoints, build_mesh(ParallelConfig()))
        step = store.latest()
        return b"" if step is None else store.extra(step)

    async def _pass_metrics_on(self, bus: Bus) -> None:
        context = SinkContext(
            run=self._run,
            num_steps=self._recipe.trainer.steps,
            console=self._console,
            config=json.loads(config_to_json(self._recipe)),
        )
        sinks = open_sinks(self._recipe.sinks, context)
        try:
            async for record in bus.metrics():
                sinks.write(record)
                if record.role == "warmup":
                    self._show_warmup(record)
        finally:
            sinks.close()

    def _show_warmup(self, record: MetricRecord) -> None:
        steps = self._recipe.warmup.steps
        if (record.step + 1) % max(1, steps // _WARMUP_LINES) == 0:
            loss = record.values["loss"]
            self._console.print(f"warm-up step {record.step + 1}/{steps}  loss {loss:.3f}")

    # ---------------------------------------------------------------- what may happen

    async def _on_incident(self, incident: Incident) -> None:
        self._console.print(
            f"[yellow]{incident.name} (pid {incident.pid}) died: {incident.how}; "
            f"{incident.outcome}[/]"
        )
        if self._bus is None or incident.name == "controller":
            return
        await self._bus.send_event(ReplicaLeft(replica=incident.name, reason=incident.how))
        if incident.name in policy_names(self._recipe):
            await self._recycle_policies(self._bus, incident.name)

    async def _recycle_policies(self, bus: Bus, dead: str) -> None:
        """Policy replicas sum gradients with one another: all go back to the last checkpoint."""
        for name in policy_names(self._recipe):
            if name != dead and self._supervisor.recycle(name):
                self._console.print(f"{name} starts again from the last checkpoint with {dead}")
                await bus.send_event(ReplicaLeft(replica=name, reason=f"{dead} died"))

    @contextlib.contextmanager
    def _interruptible(self) -> Generator[None]:
        """Have the first Ctrl-C stop the run cleanly and the second one kill it."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            if self._stop_reason:
                task.cancel()
                return
            self._stop_reason = "Ctrl-C"
            self._console.print("[bold]stopping after the step in hand; Ctrl-C again kills[/]")
            stopping.append(asyncio.create_task(self._ask_to_stop()))

        stopping: list[asyncio.Task[None]] = []
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, interrupt)
        try:
            yield
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(signum)

    async def _ask_to_stop(self) -> None:
        self._supervisor.terminate("warmup")
        if self._bus is not None:
            await self._bus.send_event(StopRequested(reason=self._stop_reason))

    # ---------------------------------------------------------------- the end

    def _report(self, status: Mapping[str, Any], seconds: float) -> RunReport:
        records = read_metrics(self._run.metrics) if self._run.metrics.exists() else []
        export = self._run.export / "model"
        outcome = Outcome(
            run_dir=self._run.path,
            finished=status.get("finished") or self._stop_reason or "nothing was started",
            seconds=seconds,
            accuracies={
                int(version): result["mean_reward"]
                for version, result in status.get("validations", {}).items()
            },
            books=status.get("books", {}),
            incidents=self._supervisor.incidents,
            samples=last_samples(self._run.path / "samples"),
            export=str(export) if export.exists() else "",
        )
        return build_report(records, outcome)
