"""A recipe whose environment brings its own data, in the real library."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from capabilities import skip_without

pytest.importorskip("verifiers")
pytest.importorskip("datasets")
if version("verifiers") != "0.1.10":
    skip_without("packages", "of verifiers, 0.1.10")

from cosmos_app.errors import DataError
from cosmos_app.prepare import RunFiles, run_files
from cosmos_app.prepared_data import open_prompts, prepare_data
from cosmos_app.recipe import Recipe
from cosmos_app.required_rewards import require_rewards
from cosmos_core.config import load_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SUMS = Path(__file__).parents[3] / "configs" / "sums.toml"
ENVIRONMENTS = """
import verifiers as vf
from datasets import Dataset

def sums(count=20):
    rows = [{"question": f"{n}+1?", "answer": str(n + 1), "info": {"n": n}} for n in range(count)]
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), system_prompt="Add.", rubric=vf.Rubric([])
    )

def measured_only():
    rows = Dataset.from_list([{"question": "?", "answer": "1"}])
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([]))
"""


@pytest.fixture
def prepared(tmp_path: Path):
    (tmp_path / "mine.py").write_text(ENVIRONMENTS)

    def prepare(function: str, *overrides: str) -> tuple[Recipe, RunFiles]:
        environment = (
            f"rollout.environment={{kind='verifiers', id='{tmp_path}/mine.py:{function}'}}"
        )
        recipe = load_config(Recipe, SUMS, [environment, *overrides])
        return recipe, run_files(recipe, tmp_path / "run")

    return prepare


def test_its_rows_are_trained_on_and_some_of_them_held_out(prepared):
    recipe, files = prepared("sums")
    assert prepare_data(recipe, files) == (18, 2)
    first = json.loads(files.train.read_text().splitlines()[0])
    assert first["answer"] == "1"
    assert first["messages"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "0+1?"},
    ]
    assert first["info"] == {"n": 0}
    row = open_prompts(recipe, files)["validation"].row(0)
    assert (row.answer, row.prompt_id) == ("19", "18")


def test_a_file_of_rows_takes_their_place(prepared, tmp_path):
    (tmp_path / "my.jsonl").write_text('{"prompt": "go"}\n' * 3)
    recipe, files = prepared("sums", f"data.path={tmp_path / 'my.jsonl'}", "data.held_out=1")
    assert prepare_data(recipe, files) == (2, 1)
    assert json.loads(files.train.read_text().splitlines()[0]) == {"prompt": "go"}


def test_its_rows_may_have_budgets(prepared):
    recipe, _ = prepared("sums", "length_reward={kind='budget', field='info'}")
    require_rewards(recipe)


def test_an_environment_without_data_asks_for_a_file(prepared):
    recipe, files = prepared("measured_only")
    with pytest.raises(
        DataError, match=r"rollout\.environment: SingleTurnEnv has no data set.*path"
    ):
        prepare_data(recipe, files)


def test_an_environment_that_cannot_be_loaded_is_named(prepared):
    recipe, files = prepared("nothing")
    with pytest.raises(
        DataError, match=r"rollout\.environment: .*mine\.py has no function nothing"
    ):
        prepare_data(recipe, files)


def test_a_validation_without_rows_held_out_is_refused(prepared):
    recipe, files = prepared("sums", "data.held_out=0", "validation.every=1")
    with pytest.raises(DataError, match=r"data\.held_out keeps none of the environment's rows"):
        prepare_data(recipe, files)
