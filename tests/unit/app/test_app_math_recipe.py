"""The recipe for mathematics has the numbers of its paper, and passes its check."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cosmos_algos import ClipConfig, DapoConfig
from cosmos_app.cli import main
from cosmos_app.recipe import load_recipe
from cosmos_rollout import LengthReward

MATH = Path(__file__).parents[3] / "configs" / "math.toml"


def test_it_is_dapo_as_published() -> None:
    """Yu et al., arXiv 2503.14476: equations 8, 11 and 13, and the numbers of section 4.1."""
    recipe = load_recipe(MATH)
    assert isinstance(recipe.algorithm, DapoConfig)
    assert recipe.algorithm.objective.surrogate == ClipConfig(low=0.2, high=0.28)
    assert recipe.algorithm.objective.kl.coefficient == 0.0
    assert recipe.algorithm.aggregation.mode == "token_mean"
    assert recipe.trainer.drop_zero_signal
    assert recipe.trainer.mask_truncated
    assert recipe.trainer.groups_per_step * recipe.trainer.samples_per_group == 512
    length = recipe.reward.rewards[1]
    assert isinstance(length, LengthReward)
    assert length.limit - length.target == 4096
    assert length.limit == recipe.rollout.sampling.max_new_tokens == 20480


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"What is {n}/2?", "answer": f"\\frac{{{n}}}{{2}}"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_check_passes_it_on_rows_of_ones_own(problems: Path, tmp_path: Path) -> None:
    overrides = [f"data.path={problems}", "model.tiny.max_position=32768", f"output={tmp_path}/run"]
    result = CliRunner().invoke(main, ["check", str(MATH), *overrides, "--json"])
    assert result.exit_code == 0, result.output
    placements = {one["role"]: one["processes"] for one in json.loads(result.output)["placements"]}
    assert placements == {"controller": 1, "policy": 4, "rollout": 4}
