"""Recipes of supervised runs: told apart by kind, checked before anything starts."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from cosmos_app.errors import REFUSED, DataError, NothingToResumeError, exit_code_of
from cosmos_app.export import export_checkpoint
from cosmos_app.given.check import check_given, forecast_given
from cosmos_app.given.files import prepare_model, tokenizer_of
from cosmos_app.given.launch import child_specs, run_given_recipe
from cosmos_app.given.recipe import GivenTrainerConfig, SftRecipe
from cosmos_app.given.tasks import supervised
from cosmos_app.given.trainer import GivenTrainer
from cosmos_app.prepare import build_once
from cosmos_app.quickstart.tiny_model import TinyModelConfig
from cosmos_app.recipe import PolicyConfig, Recipe
from cosmos_app.recipes import load_any_recipe, recipe_of_run
from cosmos_core.config import ConfigError, config_to_json, load_config
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    AdapterError,
    CheckpointPlaceError,
    FreezeError,
    ParallelConfig,
    Seat,
    SftDataError,
    build_mesh,
)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def file(tmp_path, data):
    path = tmp_path / "sft.toml"
    path.write_text(
        f'kind = "sft"\n[data]\npath = "{data}"\nheld_out = 2\n[trainer]\nsteps = 4\n'
        "batch = { batch_size = 4 }\n[model.tiny]\n"
        "hidden_size = 32\nnum_layers = 1\nnum_heads = 2\n"
    )
    return path


@pytest.fixture
def run(tmp_path, file):
    text = config_to_json(load_any_recipe(file))
    with RunDirectory.create(tmp_path / "run", config_json=text, now_s=0.0) as created:
        yield created


def test_the_kind_says_which_recipe_it_is(tmp_path, file):
    assert isinstance(load_any_recipe(file), SftRecipe)
    other = tmp_path / "rl.toml"
    for text in ("seed = 1\n", 'kind = "rl"\n'):
        other.write_text(text)
        assert isinstance(load_any_recipe(other), Recipe)
    other.write_text('kind = "ppo"\n')
    with pytest.raises(ConfigError, match="kind"):
        load_any_recipe(other)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stepz=3", "did you mean trainer.steps"),
        ("data.validation_split=test", "data.held_out keeps examples back"),
        ("data.rows.max_tokens=1", "max_tokens is 1"),
        ("trainer.steps=0", "steps is 0"),
        ("policy.parallel.dp_replicate=2", "2"),
        ("launch.standbys=1", "a run on given data has no controller"),
        ("launch.external=true", "a run on given data has no controller"),
        ("launch.stall_s=0", "stall_s is 0.0; it must be above 0, and finite"),
        ("model.training.value_head=true", "a run has a value head by its algorithm"),
        ("seed=-1", "seed is -1; it must be 0 or more"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(file, override, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        load_any_recipe(file, [override])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.validate_every=5", "trainer.validate_every is 5, and there is nothing"),
        ("trainer.retention.keep_best=1", "trainer.retention.keep_best is 1, and there is nothing"),
    ],
)
def test_validation_and_the_best_checkpoint_need_examples_to_validate_on(file, setting, message):
    load_any_recipe(file, [setting])
    load_any_recipe(file, [setting, "data.held_out=0", "data.validation_split=test"])
    with pytest.raises(ConfigError, match=message):
        load_any_recipe(file, [setting, "data.held_out=0"])


def test_a_schedule_that_ends_before_the_run_is_refused_where_it_ends_at_0(tmp_path, file):
    rl = tmp_path / "rl.toml"
    rl.write_text("trainer.steps = 2\nalgorithm = { kind = 'ppo', epochs = 2 }\n")
    set_ = "learner.optimizer.schedule={{shape='cosine',num_steps={},final_factor={}}}"
    for recipe in (file, rl):  # of 4 updates each
        for num_steps, final_factor in ((4, 0.0), (9, 0.0), (2, 0.1)):
            load_any_recipe(recipe, [set_.format(num_steps, final_factor)])
        with pytest.raises(ConfigError, match=r"num_steps is 3, of 4 updates.*the last 1 would"):
            load_any_recipe(recipe, [set_.format(3, 0.0)])


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "distillation"])
def test_stages_learn_from_a_second_model(tmp_path, data, algorithm):
    kind, table = "preference", f'algorithm = {{ kind = "{algorithm}" }}\n'
    fields = ["prompt", "chosen", "rejected"] if algorithm == "dpo" else ["prompt", "response"]
    rows = [{f: f"{n} {f}" for f in fields} | {"label": n % 2 == 0} for n in range(10)]
    if algorithm == "distillation":
        tied = TinyModelConfig(num_layers=2, num_heads=2, tie_embeddings=False)
        build_once(tmp_path / "model", ["0123456789+="], tied, seed=0)
        kind, table = algorithm, f'teacher = "{tmp_path / "model"}"\n'
    data.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "given.toml"
    path.write_text(f'kind = "{kind}"\n{table}data.path = "{data}"\n')
    small = ["model.tiny.num_layers=2", "model.tiny.tie_embeddings=false"]
    recipe = load_any_recipe(path, [*small, "policy.ranks=2", "policy.parallel.pp=2"])
    assert check_given(recipe, as_json=True) == 0


def test_a_teacher_that_the_ranks_cannot_divide_is_refused(tmp_path, data):
    for name in ("model", "teacher"):
        build_once(tmp_path / name, ["0123456789+="], TinyModelConfig(num_heads=4), seed=0)
    file = tmp_path / "teacher" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_key_value_heads": 1}))
    path = tmp_path / "given.toml"
    path.write_text(
        f'kind = "distillation"\nteacher = "{tmp_path / "teacher"}"\n'
        f'data.path = "{data}"\nmodel.path = "{tmp_path / "model"}"\n'
    )
    check_given(load_any_recipe(path), as_json=True)
    split = load_any_recipe(path, ["policy.ranks=2", "policy.parallel.tp=2"])
    with pytest.raises(DataError, match="teacher: qwen3 model: tp 2 does not divide its 1 key-val"):
        check_given(split, as_json=True)


def test_a_run_directory_gives_its_recipe_back(run, file):
    assert recipe_of_run(run) == load_any_recipe(file)


def test_the_tiny_model_knows_characters_that_are_not_shown(run, file, data):
    data.write_text(json.dumps({"prompt": "1\n\t2", "response": "\u200b\ud83d"}))
    prepare_model(load_any_recipe(file), run)
    known = tokenizer_of(run.path / "model").get_vocab()
    assert {"1", "\n", "\t", "\u200b"} <= known.keys()


def test_examples_are_kept_back_and_the_tiny_model_knows_their_characters(run, file, data):
    recipe = load_any_recipe(file)
    assert prepare_model(recipe, run) > 0
    assert prepare_model(recipe, run) == 0  # made once
    task = supervised(recipe.data, recipe.trainer.batch, run.path / "model")
    assert len(task.data.train) == 8
    held_out = task.held_out(rank=0, size=1)[""]
    assert sum(len(batch.token_ids) for batch in held_out) == 2  # padded: a row each
    forecast = forecast_given(recipe)
    # 4 steps of 4 examples over the 8 that are trained on
    assert (forecast.rows, forecast.epochs, forecast.processes) == (10, 2.0, 1)
    data.unlink()
    with pytest.raises(SftDataError, match="No such file"):
        forecast_given(recipe)


@pytest.mark.parametrize("count", [10, 11])
def test_keeping_every_row_back_is_refused_before_anything_starts(file, count):
    recipe = load_any_recipe(file, [f"data.held_out={count}"])
    with pytest.raises(DataError, match=rf"data\.held_out is {count}, but .* has 10 rows"):
        check_given(recipe, as_json=True)


def test_gradients_and_moments_are_forecast_for_what_is_trained_alone(file):
    whole = forecast_given(load_any_recipe(file))
    adapters = forecast_given(load_any_recipe(file, ["model.training.lora={rank=1}"]))
    frozen = forecast_given(load_any_recipe(file, ["model.training.freeze=['lm_head.*']"]))
    count = whole.parameters
    assert whole.trained_parameters == adapters.parameters == count
    assert whole.memory_mib == 4 * 4 * count / 2**20
    assert 0 < adapters.trained_parameters < count / 8
    assert adapters.memory_mib == 4 * (count + 4 * adapters.trained_parameters) / 2**20
    assert count - frozen.trained_parameters in range(1, count // 2)
    assert frozen.memory_mib == 4 * (count + 3 * frozen.trained_parameters) / 2**20


@pytest.mark.parametrize("setting", ["freeze=['*visual*']", "lora={targets=['q_pro']}"])
def test_what_fits_no_layer_is_found_before_anything_starts(file, setting):
    recipe = load_any_recipe(file, [f"model.training.{setting}"])
    with pytest.raises((FreezeError, AdapterError)) as refused:
        check_given(recipe, as_json=True)
    assert exit_code_of(refused.value) == REFUSED


@pytest.mark.parametrize(
    "settings",
    [
        ["policy.ranks=2", "policy.parallel.cp=2", "trainer.export_dtype=bfloat16"],
        ["model.training.compute_dtype=bfloat16", "model.training.implementation=native"],
    ],
)
def test_a_checkpoint_is_exported_whatever_it_was_trained_on(tmp_path, capsys, file, settings):
    torch.set_num_threads(1)
    recipe = load_any_recipe(file, settings)
    created = RunDirectory.create(tmp_path / "run", config_json=config_to_json(recipe), now_s=0.0)
    with created as run:
        prepare_model(recipe, run)
        # what the recipe makes of two ranks, or in bfloat16, one makes here under the same names
        held = replace(recipe.model.training, implementation="native", compute_dtype="float32")
        alone = replace(recipe, model=replace(recipe.model, training=held), policy=PolicyConfig())
        trainer = GivenTrainer(alone, run, build_mesh(ParallelConfig()))
        try:
            trainer.train(Seat(step=0, index=0, names=("a",), wants_stop=False))
            trainer.save(None)
            trainer.export()
        finally:
            trainer.close()
        export_checkpoint(run.path, tmp_path / "again", step=1)
        assert "step 1 of" in " ".join(capsys.readouterr().out.split())
        with pytest.raises(NothingToResumeError, match=r"no checkpoint of step 2; it has: 1$"):
            export_checkpoint(run.path, tmp_path / "again", step=2)
        written = load_file(run.export / "model" / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == again.keys()
    for name, value in written.items():
        assert value.dtype == again[name].dtype
        assert torch.equal(value, again[name])


def test_averaged_weights_are_validated_and_exported(tmp_path, file):
    torch.set_num_threads(1)
    recipe = load_any_recipe(file, ["learner.ema.decay=0.9", "learner.optimizer.lr=0.1"])
    created = RunDirectory.create(tmp_path / "run", config_json=config_to_json(recipe), now_s=0.0)
    with created as run:
        prepare_model(recipe, run)
        trainer = GivenTrainer(recipe, run, build_mesh(ParallelConfig()))
        try:
            for step in range(2):
                trainer.train(Seat(step=step, index=0, names=("a",), wants_stop=False))
            own, averages = trainer.learner.model.state_dict(), trainer.learner.ema.averages
            own = {name: value.clone() for name, value in own.items()}
            loss = trainer.validate().loss
            trainer.save(loss)
            trainer.export()
            now = trainer.learner.model.state_dict()
            assert all(torch.equal(now[name], value) for name, value in own.items())
            trainer.learner.ema = None
            assert trainer.validate().loss != loss
            trainer.learner.model.load_state_dict(averages, strict=False)
            assert trainer.validate().loss == loss
        finally:
            trainer.close()
        export_checkpoint(run.path, tmp_path / "again", step=2)
        for directory in (run.export / "model", tmp_path / "again"):
            written = load_file(directory / "model.safetensors")
            assert set(written) <= set(averages)
            assert all(torch.equal(value, averages[name]) for name, value in written.items())


def test_several_replicas_have_a_meeting_place(run, file):
    alone = child_specs(load_any_recipe(file), run)
    assert [spec.name for spec in alone] == ["policy-0"]
    two = child_specs(load_any_recipe(file, ["policy.replicas=2", "policy.ranks=2"]), run)
    assert [spec.name for spec in two] == ["meeting", "policy-0", "policy-1"]
    assert "--nproc-per-node=2" in two[1].argv


def test_checkpoints_at_an_address_that_nothing_reaches_are_refused(file, tmp_path):
    place = "trainer.checkpoints=nonsense://bucket/run"
    recipe = load_any_recipe(file, [place, f"output={tmp_path / 'out'}"])
    for look in (
        lambda: asyncio.run(run_given_recipe(recipe, resume=False, as_json=False)),
        lambda: check_given(recipe, as_json=False),
    ):
        with pytest.raises(CheckpointPlaceError, match="nonsense://bucket/run: Protocol not known"):
            look()
    assert not (tmp_path / "out").exists()
    assert check_given(replace(recipe, trainer=GivenTrainerConfig(checkpoints="memory://x")),
                       as_json=True) == 0  # fmt: skip


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (None, "", "No such file"),
        ("", "", "there is no row"),
        ('{"prompt": "1", "response": "2"}\nnot json\n', "", r"rows.jsonl:2: is not JSON"),
        ('{"prompt": "1", "answer": "2"}\n', "model.path={model}", "rows.jsonl:1: .*'response'"),
        ('{"prompt": "1", "response": "2"}\n{"prompt": "1"}\n', "", "rows.jsonl:2: .*'response'"),
        ('{"prompt": "1", "response": "2"}\n', "data.validation_path=/nowhere", "/nowhere"),
        ('{"prompt": "1", "response": "2"}\n', "model.path=/nowhere", "no such directory"),
    ],
)
def test_wrong_files_are_refused_before_there_is_a_run_directory(
    file, data, tmp_path, text, override, message
):
    output = tmp_path / "out"
    model = tmp_path / "model"
    changes = [override.format(model=model)] if override else []
    recipe = load_any_recipe(file, [f"output={output}", "data.held_out=0", *changes])
    build_once(model, ["1+2="], recipe.model.tiny, 0)
    if text is None:
        data.unlink()
    else:
        data.write_text(text)

    for look in (
        lambda: asyncio.run(run_given_recipe(recipe, resume=False, as_json=False)),
        lambda: check_given(recipe, as_json=False),
    ):
        with pytest.raises((SftDataError, DataError), match=message):
            look()
    assert not output.exists()


@pytest.mark.parametrize(
    ("algorithm", "row", "message"),
    [
        ("dpo", {"prompt": "1", "response": "2"}, "'chosen' as text .found: prompt, response"),
        ("dpo", {"prompt": "1", "chosen": "2", "rejected": 3}, "'rejected' is int"),
        ("kto", {"prompt": "1", "response": "2"}, "'label' must be true or false"),
    ],
)
def test_rows_that_are_no_preferences_are_refused_before_there_is_a_run_directory(
    tmp_path, data, algorithm, row, message
):
    good = {"prompt": "1", "chosen": "2", "rejected": "3", "response": "2", "label": True}
    data.write_text("\n".join(map(json.dumps, [good, row])))
    file, output = tmp_path / "preferences.toml", tmp_path / "out"
    file.write_text(
        f'kind = "preference"\noutput = "{output}"\n[data]\npath = "{data}"\n'
        f'[algorithm]\nkind = "{algorithm}"\n'
    )
    recipe = load_any_recipe(file)
    for look in (
        lambda: asyncio.run(run_given_recipe(recipe, resume=False, as_json=False)),
        lambda: check_given(recipe, as_json=False),
    ):
        with pytest.raises(SftDataError, match=rf"rows\.jsonl:2: .*{message}"):
            look()
    assert not output.exists()


def test_a_row_may_be_several_examples_of_which_the_long_ones_are_counted(tmp_path, file, data):
    build_once(tmp_path / "model", ["ua-123456"], TinyModelConfig(num_layers=1, num_heads=2), 0)
    told = tmp_path / "model" / "tokenizer_config.json"
    template = (  # marks the last answer alone, as those do that forget earlier thoughts
        "{% for m in messages %}{{ m.role[0] }}{% if loop.last and m.role == 'assistant' %}-"
        "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    told.write_text(json.dumps(json.loads(told.read_text()) | {"chat_template": template}))
    turns = [{"role": ("user", "assistant")[n % 2], "content": str(n + 1)} for n in range(6)]
    data.write_text("\n".join(json.dumps({"messages": turns}) for _ in range(4)))
    recipe = load_any_recipe(file, ["data.rows.max_tokens=10"])  # they have 5, 9 and 13
    task = supervised(recipe.data, recipe.trainer.batch, tmp_path / "model")
    # two whole conversations are held out, with the two examples that each of them is
    assert (len(task.data.train), task.num_left_out) == (2 * 2, 4)
    held_out = task.held_out(rank=0, size=1)[""]
    assert sum(len(batch.token_ids) for batch in held_out) == 2 * 2


def test_rows_that_are_too_long_are_told(tmp_path, file, capsys):
    settings = [f"output={tmp_path / 'out'}", "data.rows.max_tokens=7", "trainer.steps=1"]
    recipe = load_any_recipe(file, settings)  # 5+5=10 and two marks are 8
    assert asyncio.run(run_given_recipe(recipe, resume=False, as_json=False)) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["examples"], report["left_out"]) == (3, 5)
    said = capsys.readouterr().out
    assert "5 of 10 examples are longer than data.rows.max_tokens=7 and left out" in said
    assert "3, 5 left out as too long" in said
    assert "after step 1 " in said


def test_a_run_that_is_beyond_its_last_step_is_done(tmp_path, file, capsys):
    """As one that goes on with fewer steps wanted: whatever starts it again would for ever."""
    for steps, is_resumed in ((2, False), (1, True)):
        settings = [f"output={tmp_path / 'out'}", f"trainer.steps={steps}"]
        recipe = load_any_recipe(file, settings)
        assert asyncio.run(run_given_recipe(recipe, resume=is_resumed, as_json=True)) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["finished"], report["steps"]) == (True, 2)


@pytest.mark.parametrize("setting", ["retention.keep=0", "retention.keep_best=-1", "batch.seed=-1"])
def test_a_number_of_the_trainer_that_is_out_of_range_is_named_with_its_place(setting: str) -> None:
    place, _, name = setting.partition("=")[0].rpartition(".")
    with pytest.raises(ConfigError, match=rf"trainer\.{place}: {name} is "):
        load_config(SftRecipe, {"data": {"path": "x"}}, [f"trainer.{setting}"])
