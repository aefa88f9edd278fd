"""Recipes that name environments, rewards and endpoints: what they become, and come back as."""

from pathlib import Path

import pytest

from cosmos_app.errors import DataError
from cosmos_app.prepare import check_inputs
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import Recipe
from cosmos_core.config import ConfigError, config_from_json, config_to_json, load_config
from cosmos_rollout import (
    CodeReward,
    EpisodeLimits,
    GroupReward,
    GymnasiumEnvironmentConfig,
    PythonEnvironmentConfig,
    ToolEnvironmentConfig,
    VerifiersEnvironmentConfig,
)

RECIPE = Path(__file__).parents[3] / "configs" / "quickstart.toml"


@pytest.mark.parametrize(
    ("overrides", "environment"),
    [
        ([], None),
        (
            ['kind="tools"', 'functions=["a.py:f"]'],
            ToolEnvironmentConfig(functions=("a.py:f",)),
        ),
        (
            ['kind="gymnasium"', 'id="FrozenLake-v1"', "settings.is_slippery=false"],
            GymnasiumEnvironmentConfig(id="FrozenLake-v1", settings={"is_slippery": False}),
        ),
        (['kind="verifiers"', 'id="wordle"'], VerifiersEnvironmentConfig(id="wordle")),
        (['kind="python"', 'function="a:f"'], PythonEnvironmentConfig(function="a:f")),
    ],
)
def test_a_recipe_names_its_environment(overrides, environment):
    recipe = load_config(Recipe, RECIPE, [f"rollout.environment.{text}" for text in overrides])
    assert recipe.rollout.environment == environment
    assert config_from_json(Recipe, config_to_json(recipe)) == recipe


def test_a_recipe_names_rewards_limits_and_groups_that_wait():
    overrides = [
        'reward.rewards=[{kind="code", isolation="required", readable=["~/x"]}]',
        'reward.group_rewards=[{function="a:f", weight=0.5}]',
        "rollout.episode.max_turns=3",
        "rollout.scoring=4",
    ]
    recipe = load_config(Recipe, RECIPE, overrides)
    assert recipe.reward.rewards == (CodeReward(isolation="required", readable=("~/x",)),)
    assert recipe.reward.group_rewards == (GroupReward(function="a:f", weight=0.5),)
    assert recipe.rollout.episode == EpisodeLimits(max_turns=3)
    assert recipe.rollout.scoring == 4


def test_an_environment_of_no_kind_is_refused():
    with pytest.raises(ConfigError, match="gymnasium"):
        load_config(Recipe, RECIPE, ['rollout.environment.kind="gymnasum"'])


def test_a_recipe_names_the_format_of_calls_and_is_told_which_there_are():
    recipe = load_config(Recipe, RECIPE, ['rollout.episode.tool_format="mistral"'])
    assert recipe.rollout.episode.tool_format == "mistral"
    with pytest.raises(ConfigError, match=r"tool_format.*hermes.*llama3_json.*kimi_k2"):
        load_config(Recipe, RECIPE, ['rollout.episode.tool_format="llama"'])


def test_a_reward_model_that_is_not_there_is_named_before_anything_starts(tmp_path: Path):
    rewards = f"reward.rewards=[{{kind='model', path='{tmp_path}', name='judge'}}]"
    recipe = load_config(Recipe, RECIPE, [rewards])
    with pytest.raises(DataError, match=r"reward\.rewards: judge: .*has no config\.json"):
        check_inputs(recipe)
    (tmp_path / "config.json").write_text("{}")
    check_inputs(recipe)


def test_an_environment_and_a_tokenizer_without_a_chat_template_are_refused(tmp_path: Path):
    """The engine's process would find out, and be started again to no end."""
    played = "rollout.environment={kind='gymnasium', id='FrozenLake-v1'}"
    with pytest.raises(DataError, match=r"rollout\.environment needs a chat template, which the"):
        check_inputs(load_config(Recipe, RECIPE, [played]))
    sizes = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2)
    build_tiny_model(tmp_path / "model", ["1+1=2"], sizes, seed=0)
    recipe = load_config(Recipe, RECIPE, [played, f"model.path={tmp_path / 'model'}"])
    with pytest.raises(DataError, match=r"takes a question; that of .* does not: .*chat_template"):
        check_inputs(recipe)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    check_inputs(recipe)
