"""Several data sets in one run: what a recipe may say of them, and what becomes of their rows."""

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from real_runs import SUMS
from rich.console import Console

from cosmos_app.errors import DataError
from cosmos_app.prepare import check_inputs, run_files
from cosmos_app.prepared_data import open_prompts, prepare_data
from cosmos_app.recipe import Recipe, load_recipe
from cosmos_app.report import Outcome, build_report, print_report
from cosmos_app.step_share import step_statistics
from cosmos_core.config import ConfigError
from cosmos_core.messages import SampleRef, Train
from cosmos_core.metrics import MetricRecord
from cosmos_core.metrics.console import ConsoleSink


def write(path: Path, name: str, count: int, **fields: object) -> Path:
    lines = [{"prompt": f"{name}{i}=", "answer": str(i), **fields} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    sums = write(tmp_path / "sums.jsonl", "s", 40, data_set="whatever the file says")
    code = write(tmp_path / "code.jsonl", "c", 20)
    exam = write(tmp_path / "exam.jsonl", "e", 6)
    sets = (
        f"[{{name='sums', path='{sums}', share=3}}, {{name='code', path='{code}', share=1}},"
        f" {{name='exam', held_out_path='{exam}'}}]"
    )
    return load_recipe(SUMS, [f"data.sets={sets}", "data.held_out=4"])


def test_rows_say_whose_they_are_and_prompts_have_the_shares(
    recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "run" / "data").mkdir(parents=True)
    files = run_files(recipe, tmp_path / "run")
    check_inputs(recipe)
    # a tenth of each at most: 4 of the sums, 2 of the code, and all of the exam
    assert prepare_data(recipe, files) == (36 + 18, 4 + 2 + 6)
    prompts = open_prompts(recipe, files)
    drawn = Counter(prompts["train"].row(i).data_set for i in range(400))
    assert drawn == {"sums": 300, "code": 100}
    held_out = [prompts["validation"].row(i) for i in range(12)]
    assert Counter(row.data_set for row in held_out) == {"sums": 4, "code": 2, "exam": 6}
    assert {row.data_set for row in held_out[:4]} == {"sums", "code", "exam"}
    assert {row.prompt for row in held_out if row.data_set == "sums"} == {
        f"s{i}=" for i in range(36, 40)
    }


def test_without_shares_all_rows_are_drawn_alike(recipe: Recipe, tmp_path: Path) -> None:
    sets = tuple(replace(each, share=None) for each in recipe.data.sets)
    recipe = replace(recipe, data=replace(recipe.data, sets=sets))
    (tmp_path / "run" / "data").mkdir(parents=True)
    files = run_files(recipe, tmp_path / "run")
    prepare_data(recipe, files)
    train = open_prompts(recipe, files)["train"]
    assert Counter(train.row(i).data_set for i in range(54)) == {"sums": 36, "code": 18}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.sets=[{name='a', path='x'}]", "data.path=y"], "sets and path"),
        (["data.sets=[{name='a', held_out_path='x'}]"], "nothing to train on"),
        (["data.held_out_path=x"], "held_out_path is given and path is not"),
        (["data.sets=[{name='a', path='x'}, {name='a', path='y'}]"], "two sets are called 'a'"),
        (["data.sets=[{name='a', path='x'}, {name='b', path='y', share=1}]"], "'a' has no share"),
        (["data.sets=[{name='a/b', path='x'}]"], "metrics are called by it"),
        (["data.sets=[{name='a'}]"], "neither path nor held_out_path"),
        (["data.sets=[{name='a', path='x', share=0}]"], "positive number"),
        (["data.sets=[{name='a', path='x', share=-1}]"], "positive number"),
        (["data.sets=[{name='a', held_out_path='x', share=1}]"], "and no path"),
        (
            ["data.sets=[{name='a', path='x', share=1}, {name='b', path='y', share=1e-5}]"],
            "less than one in 1000",
        ),
        (
            ["data.sets=[{name='a', path='x'}]", "reward.sets={exact=['b']}"],
            "reward.sets.exact names the data set 'b'; data.sets are called: a",
        ),
        (
            ["data.sets=[{name='a', path='x'}, {name='b', path='y'}]", "reward.sets={exact=['b']}"],
            "no reward judges the data set 'a'",
        ),
        (
            ["data.sets=[{name='a', path='x'}]", "data.held_out=0", "validation.every=5"],
            "nothing to validate",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_recipe(SUMS, overrides)


def test_a_row_of_a_set_that_no_reward_judges_is_named(tmp_path: Path) -> None:
    data = write(tmp_path / "mine.jsonl", "x", 3, data_set="b")
    recipe = load_recipe(SUMS, [f"data.path={data}", "reward.sets={exact=['a']}"])
    with pytest.raises(DataError, match=r"row 1: it is of the data set 'b', which no reward"):
        check_inputs(recipe)


def test_an_answer_is_wanted_by_the_rewards_that_judge_a_row(tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "x", "data_set": "free"}\n')
    length = "reward.rewards=[{kind='exact'}, {kind='length', target=1, limit=4}]"
    free = [f"data.path={data}", length, "reward.sets={exact=['sums']}"]
    check_inputs(load_recipe(SUMS, free))
    with pytest.raises(DataError, match=r"row 1 has no 'answer', which the reward 'exact'"):
        check_inputs(load_recipe(SUMS, [*free[:2]]))


def ref(reward: float, data_set: str, **rewards: float) -> SampleRef:
    return SampleRef(
        sibling=0,
        status="completed",
        key="k",
        reward=reward,
        data_set=data_set,
        rewards=tuple(rewards.items()),
    )


def test_a_step_tells_the_mean_of_every_data_set_and_of_every_part_of_the_reward() -> None:
    groups = (
        (ref(1.0, "sums", exact=1.0), ref(0.0, "sums", exact=0.0)),
        (ref(1.5, "code", exact=1.0, short=0.5), ref(0.5, "code", exact=0.0, short=0.5)),
    )
    told = step_statistics(Train(step=0, groups=groups, publish=True))
    assert {name: told[name] for name in told if "/" in name} == {
        "data_set/sums": 0.5,
        "data_set/code": 1.0,
        "reward/exact": 0.5,
        "reward/short": 0.5,
    }


def validation(version: int, reward: float, **sets: float) -> MetricRecord:
    values = {"reward": reward} | {f"data_set/{name}": value for name, value in sets.items()}
    return MetricRecord(float(version), "validation", "validation", version, values)


def test_the_report_and_the_console_show_every_data_set(tmp_path: Path) -> None:
    records = [validation(0, 0.25, sums=0.5, ode=0.0), validation(8, 0.5, sums=0.25, ode=0.75)]
    outcome = Outcome(
        run_dir=tmp_path,
        finished="all steps done",
        seconds=1.0,
        accuracies={0: 0.25, 8: 0.5},
        best_of_several={},
        books={},
        failures={},
        incidents=(),
        samples=(),
        export="",
    )
    report = build_report(records, outcome)
    assert report.data_sets == {"ode": {0: 0.0, 8: 0.75}, "sums": {0: 0.5, 8: 0.25}}
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=120))
    assert "ode   0.000 ▁█ 0.750  (+0.750)" in shown.getvalue()
    lines = io.StringIO()
    sink = ConsoleSink(Console(file=lines, width=120), num_steps=9, show=(), every=1)
    for record in records:
        sink.write(record)
    assert "held-out reward at version 8: 0.500 (sums 0.250, ode 0.750)" in lines.getvalue()
