"""Which sinks there are and how each is set up; a sink's own libraries load when it is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cosmos_core.errors import CosmosError
from cosmos_core.metrics.jsonl import JsonlSink
from cosmos_core.metrics.record import FanOut, MetricSink
from cosmos_core.rundir import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console


class MissingExtraError(CosmosError, ImportError):
    """Raised by ``build`` when the library of a sink is not installed; says how to install it."""

    def __init__(self, sink: str, extra: str) -> None:
        super().__init__(f'the {sink} sink needs an extra: pip install "cosmos-core[{extra}]"')


class SinkError(CosmosError):
    """Raised where a sink cannot begin: it has no account, or no server answers it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkContext:
    """What a sink may ask of the run it serves.

    Attributes:
        run: where files go.
        num_steps: training steps of the whole run.
        console: where a person looks; it belongs to the caller.
        config: the resolved configuration, as plain tables.
    """

    run: RunDirectory
    num_steps: int
    console: "Console"
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsoleSinkConfig:
    """A progress bar with the figures that matter; plain lines where there is no terminal.

    Attributes:
        kind: live progress for a person.
        show: figures to show, each ``role/name``, averaged over the replicas of the role.
        every: without a terminal, print one line every so many steps.
    """

    kind: Literal["console"] = "console"
    show: tuple[str, ...] = (
        "controller/reward",
        "controller/staleness",
        "policy/loss",
        "policy/idle_share",
        "rollout/idle_share",
    )
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every has to be at least 1, found {self.every}")

    def build(self, context: SinkContext) -> MetricSink:
        """Make the sink; it draws with the first record."""
        from cosmos_core.metrics.console import ConsoleSink

        return ConsoleSink(
            context.console, num_steps=context.num_steps, show=self.show, every=self.every
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlSinkConfig:
    """Every record as a line of ``metrics.jsonl`` in the run directory.

    Attributes:
        kind: lines of JSON.
    """

    kind: Literal["jsonl"] = "jsonl"

    def build(self, context: SinkContext) -> MetricSink:
        """Open the file to append."""
        return JsonlSink(context.run.metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoardSinkConfig:
    """Event files for TensorBoard, one folder for each replica, under the run directory.

    Attributes:
        kind: TensorBoard event files.
        folder: name of the folder in the run directory.
        flush_s: how long a point may wait to be written.
    """

    kind: Literal["tensorboard"] = "tensorboard"
    folder: str = "tensorboard"
    flush_s: int = 10

    def build(self, context: SinkContext) -> MetricSink:
        """Make the sink.

        Raises:
            MissingExtraError: if tensorboard is not installed.
        """
        try:
            from cosmos_core.metrics.tensorboard import TensorBoardSink
        except ModuleNotFoundError as error:
            raise MissingExtraError("tensorboard", "tensorboard") from error
        return TensorBoardSink(context.run.path / self.folder, flush_s=self.flush_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbSinkConfig:
    """A Weights & Biases run; offline by default, to be sent later by ``wandb sync``.

    Attributes:
        kind: Weights & Biases.
        project: the project it belongs to.
        mode: offline writes to the run directory only, online needs an account.
        entity: the team; none for one's own.
    """

    kind: Literal["wandb"] = "wandb"
    project: str = "cosmos"
    mode: Literal["offline", "online"] = "offline"
    entity: str | None = None

    def build(self, context: SinkContext) -> MetricSink:
        """Start the run.

        Raises:
            MissingExtraError: if wandb is not installed.
        """
        try:
            from cosmos_core.metrics.wandb import WandbSink
        except ModuleNotFoundError as error:
            raise MissingExtraError("wandb", "wandb") from error
        return WandbSink(
            context.run,
            project=self.project,
            mode=self.mode,
            entity=self.entity,
            config=context.config,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MlflowSinkConfig:
    """An MLflow run; in a database file of the run directory unless a server is given.

    Attributes:
        kind: MLflow.
        uri: a tracking server; none for ``mlflow.db`` of the run directory, which
            ``mlflow ui --backend-store-uri sqlite:///mlflow.db`` shows.
        experiment: the experiment it belongs to.
        batch: points that are sent at once, at most 500.
    """

    kind: Literal["mlflow"] = "mlflow"
    uri: str | None = None
    experiment: str = "cosmos"
    batch: int = 100

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch has to be at least 1, found {self.batch}")

    def build(self, context: SinkContext) -> MetricSink:
        """Start the run.

        Raises:
            MissingExtraError: if MLflow is not installed.
        """
        try:
            from cosmos_core.metrics.mlflow import MlflowSink
        except ModuleNotFoundError as error:
            raise MissingExtraError("mlflow", "mlflow") from error
        return MlflowSink(
            self.uri or f"sqlite:///{(context.run.path / 'mlflow.db').absolute()}",
            experiment=self.experiment,
            name=context.run.name,
            config=context.config,
            batch=self.batch,
        )


SinkConfig = (
    ConsoleSinkConfig | JsonlSinkConfig | TensorBoardSinkConfig | WandbSinkConfig | MlflowSinkConfig
)


def open_sinks(configs: Sequence[SinkConfig], context: SinkContext) -> FanOut:
    """Build every sink and put one in front of them; those already open are closed on failure.

    Raises:
        MissingExtraError: if the library of one is not installed.
        SinkError: if what one writes to does not let it begin.
        OSError: if a file cannot be written.
    """
    sinks = list[MetricSink]()
    try:
        for config in configs:
            sinks.append(_begun(config, context))
    except BaseException:
        FanOut(sinks).close()
        raise
    return FanOut(sinks)


def _begun(config: SinkConfig, context: SinkContext) -> MetricSink:
    try:
        return config.build(context)
    except (CosmosError, OSError):
        raise
    except Exception as error:  # of a library that only its sink knows
        raise SinkError(
            f"the {config.kind} sink cannot begin: {type(error).__name__}: {error}"
        ) from error
