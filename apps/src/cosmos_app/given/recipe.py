"""Recipes of runs on given data, told apart by ``kind`` at the top of their files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cosmos_algos import DistillationConfig, DpoConfig, KtoConfig, RewardModelConfig
from cosmos_app.given.data_config import PreferenceDataConfig, SftDataConfig, sources_of
from cosmos_app.learnable import check_head
from cosmos_app.policy_config import PolicyConfig, check_elastic
from cosmos_app.quickstart.tiny_model import TinyModelConfig
from cosmos_app.ranges import check_seed
from cosmos_app.recipe import BusConfig, LaunchConfig
from cosmos_core.metrics import ConsoleSinkConfig, JsonlSinkConfig, SinkConfig
from cosmos_parallel import (
    ElasticConfig,
    LearnerConfig,
    RetentionConfig,
    SftBatchConfig,
)
from cosmos_parallel import ModelConfig as HeldModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenModelConfig:
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
class GivenTrainerConfig:
    """The loop of optimizer steps.

    Attributes:
        steps: optimizer steps in all.
        batch: which examples make a step, and how they are laid out.
        validate_every: steps between validations; 0 for only at checkpoints and at the end.
        checkpoint_every: steps between checkpoints; the last step always has one.
        checkpoints: where they lie: a directory or a URL such as ``s3://bucket/run``; in the run
            directory when empty. A new run goes on from what is there.
        export_dtype: floating-point weights of the exported model are cast to this.
        retention: which of them stay; the score is the validation loss.
        keep_bad_steps: write the batches of steps whose loss or gradient was not finite to
            ``bad_steps/`` of the run directory.
        deterministic: use deterministic kernels, and refuse what has none.
    """

    steps: int = 200
    batch: SftBatchConfig = field(default_factory=SftBatchConfig)
    validate_every: int = 0
    checkpoint_every: int = 100
    checkpoints: str = ""
    export_dtype: Literal["float32", "bfloat16"] | None = None
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    keep_bad_steps: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: naming the one that is out of range.
        """
        for name, least in (("steps", 1), ("validate_every", 0), ("checkpoint_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {least} or more")


DEFAULT_SINKS: tuple[SinkConfig, ...] = (
    ConsoleSinkConfig(
        show=("controller/loss", "controller/validation_loss", "controller/tokens_per_second")
    ),
    JsonlSinkConfig(),
)


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
    model: GivenModelConfig = field(default_factory=GivenModelConfig)
    data: SftDataConfig
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: GivenTrainerConfig = field(default_factory=GivenTrainerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sinks: tuple[SinkConfig, ...] = DEFAULT_SINKS

    def __post_init__(self) -> None:
        """Check the rules between sections.

        Raises:
            ValueError: naming the settings that do not go together.
        """
        _check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRecipe:
    """One run of a policy from preferences, with the first policy as reference.

    Attributes:
        kind: says that this is one.
        seed: of the tiny model's weights; the order of examples has ``trainer.batch.seed``.
        output: the run directory.
        model: what is trained.
        data: on what.
        algorithm: what is made of them.
        learner: optimizer, schedule and clipping.
        trainer: the loop.
        policy: replicas and ranks that train.
        elastic: how long replicas wait for each other, when there are several.
        bus: where metrics travel.
        launch: how processes are kept alive.
        sinks: where metrics go.
    """

    kind: Literal["preference"] = "preference"
    seed: int = 0
    output: Path = Path("runs/preference")
    model: GivenModelConfig = field(default_factory=GivenModelConfig)
    data: PreferenceDataConfig
    algorithm: DpoConfig | KtoConfig = field(default_factory=DpoConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: GivenTrainerConfig = field(default_factory=GivenTrainerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sinks: tuple[SinkConfig, ...] = DEFAULT_SINKS

    def __post_init__(self) -> None:
        """Check the rules between sections.

        Raises:
            ValueError: naming the settings that do not go together.
        """
        _check(self)
        _check_rows(self.trainer)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelRecipe:
    """One run of a reward model from preferences; exported, it is a sequence classifier.

    Attributes:
        kind: says that this is one.
        seed: of the tiny model's weights; the order of examples has ``trainer.batch.seed``.
        output: the run directory.
        model: what is trained.
        data: on what.
        algorithm: what is made of them.
        learner: optimizer, schedule and clipping.
        trainer: the loop.
        policy: replicas and ranks that train.
        elastic: how long replicas wait for each other, when there are several.
        bus: where metrics travel.
        launch: how processes are kept alive.
        sinks: where metrics go.
    """

    kind: Literal["reward_model"] = "reward_model"
    seed: int = 0
    output: Path = Path("runs/reward_model")
    model: GivenModelConfig = field(default_factory=GivenModelConfig)
    data: PreferenceDataConfig
    algorithm: RewardModelConfig = field(default_factory=RewardModelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: GivenTrainerConfig = field(default_factory=GivenTrainerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sinks: tuple[SinkConfig, ...] = DEFAULT_SINKS

    def __post_init__(self) -> None:
        """Check the rules between sections.

        Raises:
            ValueError: naming the settings that do not go together.
        """
        _check(self)
        _check_rows(self.trainer)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationRecipe:
    """One run that learns a teacher's distributions on given answers.

    Attributes:
        kind: says that this is one.
        seed: of the tiny model's weights; the order of examples has ``trainer.batch.seed``.
        output: the run directory.
        model: what is trained.
        data: on what.
        teacher: a local Hugging Face model directory, with the tokens of the model.
        algorithm: which divergence.
        learner: optimizer, schedule and clipping.
        trainer: the loop.
        policy: replicas and ranks that train.
        elastic: how long replicas wait for each other, when there are several.
        bus: where metrics travel.
        launch: how processes are kept alive.
        sinks: where metrics go.
    """

    kind: Literal["distillation"] = "distillation"
    seed: int = 0
    output: Path = Path("runs/distillation")
    model: GivenModelConfig = field(default_factory=GivenModelConfig)
    data: SftDataConfig
    teacher: Path
    algorithm: DistillationConfig = field(default_factory=DistillationConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    trainer: GivenTrainerConfig = field(default_factory=GivenTrainerConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sinks: tuple[SinkConfig, ...] = DEFAULT_SINKS

    def __post_init__(self) -> None:
        """Check the rules between sections.

        Raises:
            ValueError: naming the settings that do not go together.
        """
        _check(self)


GivenRecipe = SftRecipe | PreferenceRecipe | RewardModelRecipe | DistillationRecipe
GIVEN_KINDS: dict[str, type[GivenRecipe]] = {
    "sft": SftRecipe,
    "preference": PreferenceRecipe,
    "reward_model": RewardModelRecipe,
    "distillation": DistillationRecipe,
}


def _check(recipe: GivenRecipe) -> None:
    data, trainer = recipe.data, recipe.trainer
    recipe.policy.parallel.resolve(recipe.policy.ranks)
    check_elastic(recipe.elastic, recipe.policy)
    recipe.learner.optimizer.schedule.check_updates(trainer.steps)
    check_seed(recipe.seed)
    check_head(recipe.model.training)
    if recipe.launch.external or recipe.launch.standbys:
        raise ValueError(
            "launch.external and launch.standbys: a run on given data has no controller that "
            "others could join or stand by; leave them out"
        )
    if data.held_out < 0:
        raise ValueError(f"data.held_out is {data.held_out}; it must be 0 or more")
    if data.validation_split and data.validation_split == data.rows.split:
        raise ValueError(
            f"data.validation_split and data.rows.split are both {data.rows.split!r}; "
            "validate on what is not trained on"
        )
    if data.held_out and (data.validation_path or data.validation_split):
        raise ValueError(
            "data.held_out keeps examples back for validation, but the recipe names others: "
            "set data.held_out=0, or drop the others"
        )
    if not any(source.is_validated for source in sources_of(data)):
        needing = {
            "trainer.validate_every": trainer.validate_every,
            "trainer.retention.keep_best": trainer.retention.keep_best,
        }
        if said := " and ".join(f"{name} is {value}" for name, value in needing.items() if value):
            raise ValueError(
                f"{said}, and there is nothing to validate on: set data.held_out, "
                "data.validation_path or data.validation_split (a set of data.sets has "
                "held_out_path), or leave it at 0"
            )


def _check_rows(trainer: GivenTrainerConfig) -> None:
    if trainer.batch.layout != "padded":
        raise ValueError(
            f"trainer.batch.layout is {trainer.batch.layout!r}; preferences are judged by "
            "whole samples, each in a row of its own: use 'padded'"
        )
