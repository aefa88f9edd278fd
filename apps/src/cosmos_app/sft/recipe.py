"""The recipe of a supervised run: ``kind = "sft"`` at the top of its file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cosmos_app.quickstart.tiny_model import TinyModelConfig
from cosmos_app.recipe import BusConfig, LaunchConfig, PolicyConfig
from cosmos_core.metrics import ConsoleSinkConfig, JsonlSinkConfig, SinkConfig
from cosmos_parallel import (
    ElasticConfig,
    LearnerConfig,
    RetentionConfig,
    SftBatchConfig,
    SftFormat,
)
from cosmos_parallel import ModelConfig as HeldModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SftModelConfig:
    """The model that is trained.

    Attributes:
        path: a local Hugging Face model directory; a tiny model is built when there is none.
        tiny: sizes of the model that is built, with a token for each character of the data.
        training: how weights are held and computed with.
    """

    path: Path | None = None
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    training: HeldModelConfig = field(default_factory=HeldModelConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class SftDataConfig:
    """Examples.

    Attributes:
        path: JSON lines, Parquet, a directory of them, or what ``datasets.save_to_disk`` wrote.
        rows: which fields hold what, and which split of a directory is trained on.
        validation_path: examples that are only validated on, in the same form.
        validation_split: a split of ``path`` that is only validated on.
        held_out: how many of the last examples are kept back to validate on, when neither is
            given; 0 for none.
    """

    path: Path
    rows: SftFormat = field(default_factory=SftFormat)
    validation_path: Path | None = None
    validation_split: str = ""
    held_out: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SftTrainerConfig:
    """The loop of optimizer steps.

    Attributes:
        steps: optimizer steps in all.
        batch: which examples make a step, and how they are laid out.
        validate_every: steps between validations; 0 for only at checkpoints and at the end.
        checkpoint_every: steps between checkpoints; the last step always has one.
        checkpoints: where they lie: a directory or a URL such as ``s3://bucket/run``; in the run
            directory when empty.
        export_dtype: floating-point weights of the exported model are cast to this.
        retention: which of them stay; the score is the validation loss.
    """

    steps: int = 200
    batch: SftBatchConfig = field(default_factory=SftBatchConfig)
    validate_every: int = 0
    checkpoint_every: int = 100
    checkpoints: str = ""
    export_dtype: Literal["float32", "bfloat16"] | None = None
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: naming the one that is out of range.
        """
        for name, least in (("steps", 1), ("validate_every", 0), ("checkpoint_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class SftRecipe:
    """One supervised run.

    Attributes:
        kind: says that this is one.
        seed: of the tiny model's weights; the order of examples has ``trainer.batch.seed``.
        output: the run directory.
        model: what is trained.
        data: on what.
        learner: optimizer, schedule and clipping.
        trainer: the loop.
        policy: replicas and ranks that train.
        elastic: how long replicas wait for each other, when there are several.
        bus: where metrics travel.
        launch: how processes are kept alive.
        sinks: where metrics go.
    """

    kind: Literal["sft"] = "sft"
    seed: int = 0
    output: Path = Path("runs/sft")
    model: SftModelConfig = field(default_factory=SftModelConfig)
    data: SftDataConfig
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: SftTrainerConfig = field(default_factory=SftTrainerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sinks: tuple[SinkConfig, ...] = (
        ConsoleSinkConfig(
            show=("controller/loss", "controller/validation_loss", "controller/tokens_per_second")
        ),
        JsonlSinkConfig(),
    )

    def __post_init__(self) -> None:
        """Check the rules between sections.

        Raises:
            ValueError: naming the settings that do not go together.
        """
        self.policy.parallel.resolve(self.policy.ranks)
        data = self.data
        if data.validation_split and data.validation_split == data.rows.split:
            raise ValueError(
                f"data.validation_split and data.rows.split are both {data.rows.split!r}; "
                "validate on what is not trained on"
            )
        if data.held_out and (data.validation_path or data.validation_split):
            raise ValueError(
                "data.held_out keeps examples back for validation, but the recipe names others: "
                "drop one of the two"
            )
