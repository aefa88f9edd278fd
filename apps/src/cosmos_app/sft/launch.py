"""``cosmos-app run`` of a supervised recipe, from the empty directory to the report.

files ─► redis (metrics) ─► meeting place + replicas ─► (watch) ─► report
                              ▲  restarted when they die; the others go on without them
"""

import asyncio
import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from cosmos_app.children import QUIET, app_command, has_gpu, torchrun_command
from cosmos_app.control_files import write_address
from cosmos_app.errors import InterruptedRunError
from cosmos_app.launcher import open_redis, open_run
from cosmos_app.output import print_json
from cosmos_app.sft.files import ask_to_stop, forget_meeting_place, prepare_model
from cosmos_app.sft.recipe import SftRecipe
from cosmos_app.supervisor import ChildSpec, Incident, Supervisor
from cosmos_core.bus import Bus
from cosmos_core.config import config_to_json
from cosmos_core.metrics import MetricRecord, SinkContext, open_sinks, read_metrics
from cosmos_core.rundir import RunDirectory, write_atomic

_MEETING = "meeting"
_LAST_METRICS_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SftReport:
    """What a supervised run did.

    Attributes:
        run_dir: where it all lies.
        finished: whether the last step was taken.
        seconds: wall time.
        steps: optimizer steps taken, those of earlier launches counted.
        losses: training loss by step.
        validation_losses: loss over the examples kept back, by step.
        tokens_per_second: median over steps.
        incidents: processes that died unasked, and what was done.
        export: the Hugging Face model, if one was written.
    """

    run_dir: str
    finished: bool
    seconds: float
    steps: int
    losses: dict[int, float]
    validation_losses: dict[int, float]
    tokens_per_second: float
    incidents: tuple[Incident, ...]
    export: str


async def run_sft_recipe(recipe: SftRecipe, *, resume: bool, as_json: bool) -> int:
    """Run a supervised recipe to its end; return the exit code.

    Raises:
        RunExistsError: if the output directory holds a run and ``resume`` was not asked for.
        NothingToResumeError: if it holds none and it was.
        DataError: if the model cannot be used.
        ParallelError: if the data cannot be used.
        ChildFailedError: if a process could not be kept alive.
        InterruptedRunError: after a clean stop before the last step.
    """
    console = Console(stderr=as_json)
    run = open_run(recipe, console, resume=resume)
    with run:
        parameters = prepare_model(recipe, run)
        if parameters:
            console.print(f"model: built with {parameters:,} parameters in {run.path / 'model'}")
        async with open_redis(recipe, run) as url:
            report = await SftLaunch(recipe, run, url, console).run()
        write_atomic(run.report, json.dumps(asdict(report), indent=2, default=str))
        if as_json:
            print_json(asdict(report))
        else:
            print_report(report, console)
    if not report.finished:
        raise InterruptedRunError(f"stopped at step {report.steps}; go on with --resume")
    return 0


class SftLaunch:
    """One supervised run from its first process to its last."""

    def __init__(self, recipe: SftRecipe, run: RunDirectory, url: str, console: Console) -> None:
        """Nothing is started yet."""
        self._recipe = recipe
        self._run = run
        self._url = url
        self._console = console
        self._namespace = f"cosmos.{run.name}.{uuid.uuid4().hex[:8]}"
        self._supervisor = Supervisor(self._on_incident)
        self._is_stopping = False

    async def run(self) -> SftReport:
        """Start everything, watch it to its end, report."""
        started = time.monotonic()
        forget_meeting_place(self._run)
        write_address(self._run, self._url, self._namespace)
        async with await Bus.connect(self._url, self._namespace) as bus:
            metrics = asyncio.create_task(self._pass_metrics_on(bus))
            try:
                with self._interruptible():
                    await self._train()
                # what the replicas said last may still be on its way
                await asyncio.wait([metrics], timeout=_LAST_METRICS_S)
            finally:
                await self._supervisor.stop(self._recipe.launch.stop_grace_s)
                metrics.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await metrics
        return self._report(time.monotonic() - started)

    async def _train(self) -> None:
        specs = child_specs(self._recipe, self._run)
        for spec in specs:
            self._supervisor.start(spec)
        await self._supervisor.wait([spec.name for spec in specs if spec.name != _MEETING])

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
        finally:
            sinks.close()

    async def _on_incident(self, incident: Incident) -> None:
        self._console.print(
            f"[yellow]{incident.name} (pid {incident.pid}) died: {incident.how}; "
            f"{incident.outcome}[/]"
        )

    @contextlib.contextmanager
    def _interruptible(self) -> Generator[None]:
        """Have the first Ctrl-C stop the run cleanly and the second one kill it."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            if self._is_stopping:
                task.cancel()
                return
            self._is_stopping = True
            self._console.print("[bold]stopping after the step in hand; Ctrl-C again kills[/]")
            ask_to_stop(self._run)

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, interrupt)
        try:
            yield
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(signum)

    def _report(self, seconds: float) -> SftReport:
        records = read_metrics(self._run.metrics) if self._run.metrics.exists() else []
        export = self._run.export / "model"
        steps = max((record.step + 1 for record in records), default=0)
        return SftReport(
            run_dir=str(self._run.path),
            finished=steps == self._recipe.trainer.steps and export.exists(),
            seconds=seconds,
            steps=steps,
            losses=_series(records, "loss"),
            validation_losses=_series(records, "validation_loss"),
            tokens_per_second=_median(list(_series(records, "tokens_per_second").values())),
            incidents=tuple(self._supervisor.incidents),
            export=str(export) if export.exists() else "",
        )


def child_specs(recipe: SftRecipe, run: RunDirectory) -> list[ChildSpec]:
    """Return the replicas of a run, and where they meet if there are several."""
    ranks, where = recipe.policy.ranks, str(run.path)
    commands: dict[str, Sequence[str]] = {}
    if recipe.policy.replicas > 1:
        commands[_MEETING] = app_command("meeting", where)
    for index in range(recipe.policy.replicas):
        arguments = ("sft", where, "--replica", f"policy-{index}")
        command = app_command(*arguments) if ranks == 1 else torchrun_command(ranks, *arguments)
        commands[f"policy-{index}"] = command
    computing = recipe.policy.replicas * ranks
    threads = str(max(1, (os.cpu_count() or 1) // computing))
    shared = {} if has_gpu() else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    return [
        ChildSpec(
            name=name,
            argv=command,
            environment={**QUIET, "RUST_LOG": "error", **shared},
            log=run.logs / f"{name}.log",
            restarts=recipe.launch.restarts,
        )
        for name, command in commands.items()
    ]


def print_report(report: SftReport, console: Console) -> None:
    """Show a report to a person."""
    table = Table(show_header=False, title=report.run_dir)
    losses = list(report.losses.values())
    rows = [
        ("steps", str(report.steps)),
        ("loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "none"),
        *(("validation loss", text) for text in _validation_text(report)),
        ("tokens/s", f"{report.tokens_per_second:,.0f}"),
        ("seconds", f"{report.seconds:.1f}"),
        *(("died", f"{i.name}: {i.how}; {i.outcome}") for i in report.incidents),
        ("model", report.export or "not written: the run did not come to its end"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _validation_text(report: SftReport) -> list[str]:
    found = report.validation_losses
    if not found:
        return []
    best = min(found, key=lambda step: found[step])
    last = found[max(found)]
    return [f"{last:.4f} at the end, best {found[best]:.4f} after step {best}"]


def _series(records: Sequence[MetricRecord], name: str) -> dict[int, float]:
    return {record.step: record.values[name] for record in records if name in record.values}


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
