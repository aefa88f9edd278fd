"""Which algorithms a run can take, and that stale samples are corrected unless told otherwise."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from cosmos_algos import AlgorithmConfig, OnPolicyDistillationConfig
from cosmos_app.recipe import ModelConfig, Recipe, load_recipe


def test_the_default_run_is_stale_and_corrected() -> None:
    recipe = Recipe()
    assert recipe.staleness.bound > 0
    assert recipe.algorithm.build().objective.corrects


@pytest.mark.parametrize("config", get_args(AlgorithmConfig))
def test_every_algorithm_runs_and_corrects_by_default(config: type) -> None:
    recipe = replace(Recipe(), algorithm=config(), model=ModelConfig(teacher=Path("teacher")))
    assert recipe.algorithm.build().objective.corrects


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.kind=on_policy_distillation"], "needs a teacher: set model.teacher"),
        (
            [
                "algorithm.kind=on_policy_distillation",
                "algorithm.top_k=8",
                "model.teacher=teacher",
                "teacher.replicas=1",
            ],
            "algorithm.top_k is 8 and teacher.top_k 0",
        ),
        (
            ["algorithm.kind=pass_at_k", "trainer.samples_per_group=4"],
            "algorithm.k is 4 and trainer.samples_per_group 4: the best of all samples",
        ),
        (
            ["algorithm.kind=pass_at_k", "reward.rewards=[{kind='exact', weight=0.5}]"],
            "'pass_at_k' and reward.rewards 0.5 exact; its samples are right or wrong",
        ),
        (
            [
                "algorithm.kind=pass_at_k",
                "reward.rewards=[{kind='code', field='t', score='share'}]",
            ],
            "'pass_at_k' and reward.rewards 1 code; its samples are right or wrong",
        ),
        (
            [
                "algorithm.advantage=max_rl",
                "reward.rewards=[{kind='exact'}, {kind='length', target=4, limit=8}]",
            ],
            "'max_rl' and reward.rewards 1 exact [+] 1 length, which can be negative",
        ),
        (["model.training.value_head=true"], "a run has a value head by its algorithm"),
        (
            ["algorithm.kind=pass_at_k", "length_reward.kind=cap"],
            "'pass_at_k' and length_reward.kind 'cap', which makes of rewards what it has no",
        ),
        (["algorithm.kind=max_rl", "length_reward.kind=relative"], "and length_reward.kind"),
        (
            ["seed=9223372036854775808"],
            "seed is 9223372036854775808; it must be 0 or more, and below",
        ),
    ],
)
def test_what_no_rank_has_is_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "recipe.toml").write_text("seed = 1\n")
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "recipe.toml", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.kind=pass_at_k", "reward.rewards=[{kind='python', function='a:b'}]"],
        ["algorithm.kind=pass_at_k", "reward.rewards=[{kind='exact'}, {kind='math', weight=0.0}]"],
        [
            "algorithm.kind=max_rl",
            "reward.rewards=[{kind='length', target=4, limit=8, weight=-1.0}]",
        ],
    ],
)
def test_rewards_that_may_have_a_meaning_are_left_to_the_run(
    tmp_path: Path, overrides: list[str]
) -> None:
    (tmp_path / "recipe.toml").write_text("seed = 1\n")
    load_recipe(tmp_path / "recipe.toml", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.objective.kl.coefficient=0.1", "algorithm.objective.kl.reset_every=2"],
        ["algorithm.kind=on_policy_distillation", "model.teacher=teacher"],
        ["algorithm.kind=on_policy_distillation", "model.teacher=teacher", "teacher.replicas=1"],
        ["algorithm.kind=ppo", "algorithm.epochs=2"],
    ],
)
def test_a_pipeline_learns_beside_other_models(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "recipe.toml").write_text("seed = 1\n")
    staged = ["policy.ranks=2", "policy.parallel.pp=2"]
    recipe = load_recipe(tmp_path / "recipe.toml", [*overrides, *staged])
    assert recipe.policy.parallel.pp == 2


def test_a_teacher_makes_distillation_a_run() -> None:
    recipe = replace(
        Recipe(),
        algorithm=OnPolicyDistillationConfig(),
        model=ModelConfig(teacher=Path("teacher")),
    )
    assert recipe.algorithm.build().needs == {"teacher_logprobs"}
