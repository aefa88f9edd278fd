"""Every config of the package is read from TOML tables by the loader of cosmos_core."""

import dataclasses
import math

import pytest

from cosmos_core import ConfigError, config_from_json, config_to_json, load_config
from cosmos_parallel import (
    AdamWConfig,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    RetentionConfig,
    ScheduleConfig,
    SftBatchConfig,
    SgdConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All of them.

    Attributes:
        model: how weights are held.
        parallel: degrees.
        learner: updates.
        sft: batches.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    sft: SftBatchConfig = dataclasses.field(default_factory=SftBatchConfig)


def test_a_recipe_is_read_and_written_back():
    table = {
        "model": {"compute_dtype": "bfloat16", "activation_checkpointing": "full"},
        "parallel": {"dp_replicate": 2},
        "learner": {
            "optimizer": {
                "kind": "adamw",
                "lr": 1e-4,
                "betas": [0.9, 0.95],
                "schedule": {"shape": "cosine", "num_warmup_steps": 5, "num_steps": 50},
            },
            "max_grad_norm": math.inf,
        },
        "sft": {"layout": "packed"},
    }
    recipe = load_config(Recipe, table)
    schedule = ScheduleConfig(shape="cosine", num_warmup_steps=5, num_steps=50)
    assert recipe == Recipe(
        model=ModelConfig(compute_dtype="bfloat16", activation_checkpointing="full"),
        parallel=ParallelConfig(dp_replicate=2),
        learner=LearnerConfig(
            optimizer=AdamWConfig(lr=1e-4, betas=(0.9, 0.95), schedule=schedule),
            max_grad_norm=math.inf,
        ),
        sft=SftBatchConfig(layout="packed"),
    )
    assert config_from_json(Recipe, config_to_json(recipe)) == recipe


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetentionConfig(better="max"), "better is 'max'; .* 'lower', 'higher'"),
        (lambda: ScheduleConfig(shape="cosin", num_steps=9), "shape .* 'cosin'; .* 'cosine'"),
        (lambda: SftBatchConfig(layout="pack"), "layout is 'pack'; .* 'padded', 'packed'"),
    ],
)
def test_a_name_that_a_setting_does_not_have_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_optimizer_is_told_by_its_kind():
    recipe = load_config(Recipe, {}, ["learner.optimizer.kind=sgd", "learner.optimizer.lr=0.5"])
    assert recipe.learner.optimizer == SgdConfig(lr=0.5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tp=0", "parallel.*tp is 0; it must be 1 or more"),
        ("learner.max_grad_norm=0", "learner.*max_grad_norm is 0.0; it must be above 0"),
        ("sft.bucket=0", "sft.*bucket is 0"),
        ("learner.optimizer.schedule.shape=cosine", "schedule.*needs num_steps above"),
        ("learner.optimizer.lrr=1", "lrr"),
    ],
)
def test_a_value_out_of_range_is_a_config_error_with_its_path(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(Recipe, {}, [override])
