"""Several data sets in a run on given data: shares, positions in checkpoints, losses by set."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cosmos_app.errors import DataError, WrongStreamError
from cosmos_app.given.check import SetForecast, check_given, forecast_given
from cosmos_app.given.data_config import sources_of
from cosmos_app.given.files import check_inputs, prepare_model
from cosmos_app.given.tasks import open_task, supervised
from cosmos_app.given.trainer import GivenTrainer
from cosmos_app.recipes import load_any_recipe
from cosmos_core.config import ConfigError, config_to_json
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    CheckpointStore,
    ParallelConfig,
    Seat,
    SftDataError,
    build_mesh,
)

STEPS = 6


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    """Twelve sums, forty letters, and three words that are only measured."""
    torch.set_num_threads(1)
    sums = [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(12)]
    letters = [{"prompt": f"{n}", "response": "abc"[n % 3]} for n in range(40)]
    exam = [{"prompt": "say", "response": "a word"}] * 3
    for name, rows in (("sums", sums), ("letters", letters), ("exam", exam)):
        written(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


@pytest.fixture
def file(folder):
    path = folder / "sft.toml"
    path.write_text(
        f'kind = "sft"\n[data]\nheld_out = 2\nsets = [{{name="sums", path="{folder}/sums.jsonl", '
        f'share=1}}, {{name="letters", path="{folder}/letters.jsonl", share=3}}, '
        f'{{name="exam", held_out_path="{folder}/exam.jsonl"}}]\n'
        f"[trainer]\nsteps = {STEPS}\nbatch = {{ batch_size = 8 }}\n[model.tiny]\n"
        "hidden_size = 32\nnum_layers = 1\nnum_heads = 2\n"
    )
    return path


@pytest.fixture
def run(folder, file):
    recipe = load_any_recipe(file)
    with RunDirectory.create(
        folder / "run", config_json=config_to_json(recipe), now_s=0.0
    ) as created:
        prepare_model(recipe, created)
        yield created


def trained(recipe, run, steps: range) -> list[dict[str, float]]:
    """Take steps from the newest checkpoint, if there is one, and leave one; return figures."""
    trainer = GivenTrainer(recipe, run, build_mesh(ParallelConfig()))
    try:
        assert trainer.step == steps.start
        figures = [
            trainer.train(Seat(step=step, index=0, names=("a",), wants_stop=False))
            for step in steps
        ]
        trainer.save_now()
    finally:
        trainer.close()
    return figures


def position(run) -> dict[str, object]:
    store = CheckpointStore(run.checkpoints, build_mesh(ParallelConfig()))
    return json.loads(store.extra(store.latest()))


def test_every_step_has_the_shares_and_each_set_its_own_epochs(file, run):
    recipe = load_any_recipe(file)
    task = supervised(recipe.data, recipe.trainer.batch, run.path / "model")
    assert task.data.sizes == {"sums": 10, "letters": 38}
    assert {name: len(kept) for name, kept in task.data.held_out.items()} == {
        "sums": 2,
        "letters": 2,
        "exam": 3,
    }
    place = {example.token_ids.tobytes(): i for i, example in enumerate(task.data.train)}
    assert len(place) == 48
    drawn: list[int] = []
    for step in range(15):
        rows = task.data.of_step(recipe.trainer.batch, step)
        places = [place[row.token_ids.tobytes()] for row in rows]
        assert sum(p < 10 for p in places) == 2  # a quarter of eight
        drawn += places
        sizes = [batch.token_ids.shape[0] for batch in task.batches(step, rank=0, size=1)]
        assert sum(sizes) == 8
    sums = [p for p in drawn if p < 10]
    epochs = [sums[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    letters = [p for p in drawn if p >= 10]
    assert len(set(letters[:38])) == 38
    assert task.data.position(15 * 8) == {
        "sums": {"num_examples": 10, "turns": 250, "drawn": 30},
        "letters": {"num_examples": 38, "turns": 750, "drawn": 90},
    }


def test_a_resumed_run_takes_the_steps_that_it_would_have_taken(folder, file, run):
    recipe = load_any_recipe(file)
    whole = trained(recipe, run, range(STEPS))
    assert whole[-1]["epochs/sums"] == STEPS * 2 / 10
    assert whole[-1]["epochs/letters"] == STEPS * 6 / 38
    text = config_to_json(recipe)
    with RunDirectory.create(folder / "again", config_json=text, now_s=0.0) as again:
        prepare_model(recipe, again)
        parts = trained(recipe, again, range(2))
        assert position(again)["sets"] == {
            "sums": {"num_examples": 10, "turns": 250, "drawn": 4},
            "letters": {"num_examples": 38, "turns": 750, "drawn": 12},
        }
        parts += trained(recipe, again, range(2, STEPS))
    for name in ("loss", "grad_norm", "trained_tokens", "epochs/sums"):
        assert [step[name] for step in parts] == [step[name] for step in whole]


def test_another_stream_is_refused_with_the_name_of_the_set(file, run):
    recipe = load_any_recipe(file)
    trained(recipe, run, range(1))
    sums, letters, exam = recipe.data.sets

    def resumed(*sets):
        other = replace(recipe, data=replace(recipe.data, sets=sets))
        GivenTrainer(other, run, build_mesh(ParallelConfig()))

    with pytest.raises(WrongStreamError, match="turns of data set 'sums' was 250 and is 500"):
        resumed(sums, replace(letters, share=1.0), exam)
    with pytest.raises(WrongStreamError, match="of data set 'letters' was 750 and is None"):
        resumed(sums, exam)
    with pytest.raises(WrongStreamError, match="drawn of data set 'math' was None and is 2"):
        resumed(replace(sums, name="math"), letters, exam)
    alone = replace(recipe.data, sets=(), path=sums.path)
    with pytest.raises(WrongStreamError, match="drawn of data set 'sums' was 2 and is None"):
        GivenTrainer(replace(recipe, data=alone), run, build_mesh(ParallelConfig()))


def test_a_run_with_one_data_set_has_the_position_it_always_had(folder, file, run):
    recipe = load_any_recipe(file)
    data = replace(recipe.data, sets=(), path=folder / "sums.jsonl")
    figures = trained(replace(recipe, data=data), run, range(2))
    assert position(run) == {"num_examples": 10, "batch_size": 8, "seed": 0}
    assert not any("/" in name for name in figures[0])
    assert trained(replace(recipe, data=data), run, range(2, 3))[0]["examples"] == 10


def test_losses_are_of_each_set_and_of_all_tokens_together(file, run):
    recipe = load_any_recipe(file)
    trainer = GivenTrainer(recipe, run, build_mesh(ParallelConfig()))
    try:
        found = trainer.validate()
    finally:
        trainer.close()
    assert found.data_sets.keys() == {"sums", "letters", "exam"}
    task = supervised(recipe.data, recipe.trainer.batch, run.path / "model")
    tokens = {
        name: sum(int(example.trainable[1:].sum()) for example in examples)
        for name, examples in task.data.held_out.items()
    }
    assert tokens == {"sums": 6, "letters": 4, "exam": 21}  # each is ended by <eos>
    mean = sum(found.data_sets[name] * count for name, count in tokens.items()) / 31
    assert found.loss == pytest.approx(mean)
    assert len(set(found.data_sets.values())) == 3


def test_without_shares_all_rows_are_drawn_alike(file, run):
    recipe = load_any_recipe(file)
    sets = tuple(replace(each, share=None) for each in recipe.data.sets)
    data = replace(recipe.data, sets=sets)
    task = supervised(data, recipe.trainer.batch, run.path / "model")
    drawn = [id(row) for step in range(6) for row in task.data.of_step(recipe.trainer.batch, step)]
    assert set(drawn) == {id(row) for row in task.data.train}  # 48 examples in six steps of eight
    assert task.data.position(48) == {"sums": {"num_examples": 10}, "letters": {"num_examples": 38}}


def test_what_would_become_of_each_set_is_forecast(file, capsys):
    recipe = load_any_recipe(file)
    forecast = forecast_given(recipe)
    assert (forecast.rows, forecast.epochs) == (52, 1.0)
    assert forecast.data_sets == {
        "sums": SetForecast(rows=10, share=0.25, epochs=1.2),
        "letters": SetForecast(rows=38, share=0.75, epochs=36 / 38),
        "exam": SetForecast(rows=0, share=0.0, epochs=0.0),
    }
    assert check_given(recipe, as_json=False) == 0
    said = capsys.readouterr().out
    assert "data set sums: 25.0% of the examples, 10 rows each seen 1.20 times" in said
    assert "data set exam: only measured" in said


def test_a_set_with_files_of_its_own_to_validate_on_keeps_no_row_back(folder, file):
    sums = f"{{name='sums', path='{folder}/sums.jsonl', held_out_path='{folder}/exam.jsonl'}}"
    recipe = load_any_recipe(file, [f"data.sets=[{sums}]"])
    (source,) = sources_of(recipe.data)
    assert (source.held_out, source.is_validated) == (0, True)
    assert check_inputs(recipe) == 12


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model"])
def test_preferences_come_from_several_sets_too(tmp_path, kind):
    torch.set_num_threads(1)
    for name, count in (("one", 4), ("two", 9)):
        rows = [
            {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "no", "response": f"{n + 1}"}
            | {"label": n % 2 == 0}
            for n in range(count)
        ]
        written(tmp_path / f"{name}.jsonl", rows)
    recipe_kind = "reward_model" if kind == "reward_model" else "preference"
    algorithm = "" if kind == "reward_model" else f'[algorithm]\nkind = "{kind}"\n'
    file = tmp_path / "recipe.toml"
    file.write_text(
        f'kind = "{recipe_kind}"\n[data]\nheld_out = 1\nsets = [{{name="one", share=1, '
        f'path="{tmp_path}/one.jsonl"}}, {{name="two", share=1, path="{tmp_path}/two.jsonl"}}]\n'
        f"[trainer]\nsteps = 2\nbatch = {{ batch_size = 4 }}\n{algorithm}"
        "[model.tiny]\nhidden_size = 32\nnum_layers = 1\nnum_heads = 2\n"
    )
    recipe = load_any_recipe(file)
    assert check_inputs(recipe) == 13
    with RunDirectory.create(
        tmp_path / "run", config_json=config_to_json(recipe), now_s=0.0
    ) as run:
        prepare_model(recipe, run)
        task = open_task(recipe, run.path / "model", build_mesh(ParallelConfig()))
        assert task.data.sizes == {"one": 3, "two": 8}
        assert task.data.position(8)["one"] == {"num_examples": 3, "turns": 500, "drawn": 4}
        trainer = GivenTrainer(recipe, run, build_mesh(ParallelConfig()))
        try:
            figures = trainer.train(Seat(step=0, index=0, names=("a",), wants_stop=False))
            found = trainer.validate()
        finally:
            trainer.close()
    assert figures["epochs/one"] == pytest.approx(2 / 3)
    assert found.data_sets.keys() == {"one", "two"}
    assert found.loss == pytest.approx(sum(found.data_sets.values()) / 2)  # of one row each


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ("[{name='a', path='x'}, {name='a', path='y'}]", "two sets are called 'a'"),
        ("[{name='a', path='x', share=0}]", "share of data set 'a' is 0.0; want a positive"),
        ("[{name='a', path='x', share=-1}]", "share of data set 'a' is -1.0; want a positive"),
        ("[{name='a', path='x'}, {name='b', path='y', share=1}]", "'a' has no share"),
        ("[{name='a', held_out_path='x'}]", "nothing to train on"),
        ("[{name='a', path='x', share=1}, {name='b', path='y', share=1e-5}]", "'b' has a share"),
        ("[]", "set data.path, or data.sets"),
    ],
)
def test_sets_that_cannot_be_meant_are_refused(file, sets, problem):
    with pytest.raises(ConfigError, match=problem):
        load_any_recipe(file, [f"data.sets={sets}"])


def test_a_path_beside_sets_is_refused(file, folder):
    for key in ("path", "validation_path"):
        with pytest.raises(ConfigError, match=r"want one of them.*data\.path=none"):
            load_any_recipe(file, [f"data.{key}=x"])
    whole = load_any_recipe(file, [f"data.path={folder}/sums.jsonl", "data.sets=[]"])
    assert load_any_recipe(file, ["data.path=none"]).data.sets
    assert [source.name for source in sources_of(whole.data)] == [""]


def test_validating_wants_something_to_validate_on(file, folder):
    settings = ["data.held_out=0", "trainer.validate_every=2"]
    assert load_any_recipe(file, settings)  # the exam
    only = f"data.sets=[{{name='sums', path='{folder}/sums.jsonl'}}]"
    with pytest.raises(ConfigError, match="nothing to validate on"):
        load_any_recipe(file, [*settings, only])


def test_what_is_wrong_with_a_set_is_told_by_its_name(file, folder):
    recipe = load_any_recipe(file)
    with pytest.raises(DataError, match=r"data set 'sums': data\.held_out is 12, but .* 12 rows"):
        check_inputs(replace(recipe, data=replace(recipe.data, held_out=12)))
    rows = replace(recipe.data.rows, max_tokens=7)
    written(folder / "sums.jsonl", [{"prompt": "10+10=", "response": "20"}] * 4)
    with pytest.raises(SftDataError, match=r"data set 'sums': .* no example of at most 7 tokens"):
        prepare_and_read(replace(recipe, data=replace(recipe.data, rows=rows)), folder)
    (folder / "letters.jsonl").write_text("")
    with pytest.raises(SftDataError, match=r"data set 'letters': .*letters.jsonl: there is no row"):
        check_inputs(recipe)
    (folder / "exam.jsonl").write_text('{"prompt": "say"}\n')
    written(folder / "letters.jsonl", [{"prompt": "a", "response": "b"}] * 4)
    with pytest.raises(SftDataError, match=r"data set 'exam': .*exam.jsonl:1: field 'response'"):
        check_inputs(recipe)


def prepare_and_read(recipe, folder: Path) -> None:
    with RunDirectory.create(
        folder / "short", config_json=config_to_json(recipe), now_s=0.0
    ) as run:
        prepare_model(recipe, run)
        supervised(recipe.data, recipe.trainer.batch, run.path / "model")
