"""How held-out prompts are answered, from a recipe to the report."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cosmos_app.recipe import controller_config, load_recipe
from cosmos_app.report import RunReport, print_report
from cosmos_app.validation_config import ValidationConfig
from cosmos_core import ConfigError
from cosmos_rollout import Sampling

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
TRAINED = Sampling(temperature=0.8, top_p=0.9, max_new_tokens=5, seed=3, stop_token_ids=(1,))


def test_answers_are_greedy_unless_a_recipe_says_otherwise() -> None:
    found = ValidationConfig().sampling(TRAINED)
    assert found == replace(TRAINED, temperature=0.0, top_p=1.0)


def test_answers_have_a_sampling_of_their_own() -> None:
    overrides = ["validation={samples=8, temperature=0.6, top_p=0.95, max_new_tokens=64}"]
    recipe = load_recipe(QUICKSTART, overrides)
    found = recipe.validation.sampling(TRAINED)
    assert found == replace(TRAINED, temperature=0.6, top_p=0.95, max_new_tokens=64)
    assert controller_config(recipe, 100).validation.num_samples == 8


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("validation.samples=4", "all answers to a prompt would be the same"),
        ("validation.samples=0", "samples"),
        ("validation.temperature=-1", "temperature"),
        ("validation.top_p=0", "top_p"),
        ("validation.max_new_tokens=-1", "max_new_tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_recipe(QUICKSTART, [override])


def test_the_report_has_the_best_of_several_answers(report: RunReport) -> None:
    shown = io.StringIO()
    several = replace(report, accuracies={0: 0.25, 9: 0.5}, best_of_several={0: 0.75, 9: 1.0})
    print_report(several, Console(file=shown, width=120))
    assert "best of a prompt's answers  0.750 at version 0, 1.000 at version 9" in shown.getvalue()


@pytest.fixture
def report() -> RunReport:
    return RunReport(
        run_dir="run",
        finished="all steps done",
        seconds=1.0,
        steps=9,
        rewards=(0.5,) * 9,
        accuracies={},
        best_of_several={},
        data_sets={},
        policy_idle=0.0,
        rollout_idle=0.0,
        validated_s=(0.0, 0.0),
        stall_ms=(0.0, 0.0),
        transfer_ms=(0.0, 0.0),
        wire_mib=(0.0, 0.0),
        publish_ms=(0.0, 0.0),
        publications_skipped=0,
        served_s=(0.0, 0.0),
        publish_ms_of={},
        served_s_of={},
        first_group_s=(0.0, 0.0),
        num_loads=9,
        staleness=(0.0, 0),
        mismatch=(0.0, 0.0),
        switched=0.0,
        length_ratio=1.0,
        books={},
        failures={},
        incidents=(),
        samples=(),
        export="",
    )
