"""Commands and recipes of world models."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytest.importorskip("diffusers")

from cosmos_app.cli import main
from cosmos_app.wfm.figures import step_line
from cosmos_app.wfm.report import print_world_model_report, world_model_report
from cosmos_app.wfm.running import load_wfm_recipe
from cosmos_core.config import ConfigError
from cosmos_wfm import NftConfig, VideoCaptionsConfig, tiny_captions, tiny_sd3_pipeline

_SMALL = ("groups_per_step=1", "samples_per_group=2", "tuning.rank=2", "dashboard.enabled=false")
_CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs" / "wfm").glob("*.toml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("app-wfm") / "model"
    tiny_sd3_pipeline(num_layers=1).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_parses_and_checks(path):
    recipe = load_wfm_recipe(path)

    assert recipe.output == f"runs/wfm/{path.stem}"


@pytest.fixture
def recipe(model, tmp_path):
    """A recipe with rewards, in a file; what it needs is there."""
    (tmp_path / "rl.toml").write_text(
        f'kind = "wfm_rl"\nmodel = "{model}"\nprompts = "mock"\noutput = "{tmp_path}/out"\n'
        "[rewards]\nprompt_colour = 1.0\n"
        "[sampler]\nnum_steps = 2\nheight = 16\nwidth = 16\n"
    )
    return str(tmp_path / "rl.toml")


def test_check_says_what_a_recipe_of_a_world_model_would_start_and_starts_nothing(recipe, tmp_path):
    shown = CliRunner().invoke(main, ["check", recipe, "parallel.cp=2", "num_steps=4"])
    listed = CliRunner().invoke(main, ["check", recipe, "num_steps=4", "--json"])

    assert shown.exit_code == 0, shown.output
    assert "parallel.cp=2\n" in shown.stdout
    assert "ranks: 2 or a multiple; replicas that draw: 0" in shown.stdout
    found = json.loads(listed.stdout)
    assert found["warnings"] == []
    assert (found["forecast"]["prompts"], found["forecast"]["rounds"]) == (16, 2.0)
    assert not (tmp_path / "out").exists()
    rising = "learner.optimizer.schedule.num_warmup_steps=4"
    listed = CliRunner().invoke(main, ["check", recipe, "num_steps=4", rising, "--json"])
    assert "num_warmup_steps is 4, and num_steps 4" in json.loads(listed.stdout)["warnings"][0]


def test_check_refuses_checkpoints_at_an_address_that_nothing_reaches(recipe):
    result = CliRunner().invoke(main, ["check", recipe, "checkpoints=nonsense://bucket/run"])

    assert result.exit_code == 2, result.output
    assert "checkpoints at nonsense://bucket/run: Protocol not known" in result.output


def test_a_run_of_a_world_model_reports_itself_to_programs(recipe, tmp_path):
    ran = CliRunner().invoke(main, ["run", recipe, *_SMALL, "num_steps=2", "--json"])

    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert (report["finished"], report["steps"], report["skipped"]) == (True, 2, 0)
    assert report["losses"] == {str(row["step"]): row["loss"] for row in rows}
    assert list(report["rewards"].values()) == [row["reward"] for row in rows]
    assert [report[n] for n in ("samples_trained", "samples_left_out", "rewards_failed")] == [
        4,
        0,
        0,
    ]
    assert report["seconds"] == pytest.approx(sum(row["step_s"] for row in rows))
    assert report["part_s"]["train_s"] == pytest.approx(sum(row["train_s"] for row in rows) / 2)
    assert report["speeds"]["samples_per_s"] > 0
    assert report["memory_mib"]["peak_memory_mib"] == rows[1]["peak_memory_mib"]
    assert report["export"] == str(tmp_path / "out" / "safetensors" / "step_2")
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    told = ran.stderr.splitlines()
    assert any(line.startswith("step 2/2  loss ") and "samples/s" in line for line in told)


def test_a_line_of_a_step_says_where_its_seconds_went():
    figures = {"loss": 0.25, "reward": 0.5, "step_s": 3.0, "samples_per_s": 8 / 3}
    figures |= {"sample_s": 1.25, "reward_s": 0.001, "wait_s": 0.25, "train_s": 1.5}
    figures |= {"peak_memory_mib": 2048.4, "mfu": 0.31}

    assert step_line(3, 10, figures) == (
        "step 3/10  loss 0.2500  reward 0.5000  3.00 s (sampling 1.25, waiting 0.25, training "
        "1.50)  2.67 samples/s  MFU 31%  2,048 MiB"
    )
    assert "reward 0.5000  2 samples without reward  3" in step_line(
        3, 10, {**figures, "rewards_failed": 2.0}
    )
    elsewhere = step_line(3, 10, {**figures, "replica_peak_memory_mib": 1.0})
    assert "3.00 s (waiting 0.25, training 1.50)" in elsewhere


def test_a_run_that_was_stopped_reports_how_far_it_came(tmp_path):
    rows = [{"step": n, "loss": 1 / n, "step_s": 2.0, "skipped": n == 2} for n in (1, 2, 3)]
    rows[1] |= {"samples_trained": 1000, "samples_left_out": 3, "rewards_failed": 2}
    rows[2] |= {"samples_trained": 1003, "samples_left_out": 0, "rewards_failed": 0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = world_model_report(tmp_path, num_steps=5, export="")

    assert (report.finished, report.steps, report.seconds, report.step_s) == (False, 3, 6.0, 2.0)
    assert (report.part_s, report.speeds, report.memory_mib, report.rewards) == ({}, {}, {}, {})
    console = Console(file=StringIO(), width=100)
    print_world_model_report(report, console)
    shown = console.file.getvalue()
    assert "1.0000 -> 0.3333" in shown
    assert "2,003 trained on, 3 left out, as 2 had no reward" in shown
    assert "the run did not come to its end" in shown
    assert print_world_model_report(world_model_report(tmp_path / "no", num_steps=1, export=""),
                                    console) is None  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rewards.beauty=1.0", "beauty is no reward; there are brightness"),
        ("num_step=1", "did you mean num_steps?"),
        ("num_steps=many", "num_steps"),
        ("model=/nowhere", "/nowhere is no diffusers pipeline"),
        ("prompts=/nowhere", "there is no file of prompts /nowhere"),
        ("rewards={}", "reward: nothing is no reward"),
        ("sampler.height=17", "sampler: 17x16 pixels, but this model needs multiples"),
        ("sampler.frames=5", "this is a model of images"),
        ("parallel.tp=2", "denoisers are shared by dp_shard"),
        ("parallel.cp=5", "cannot be divided among the 5 ranks"),
    ],
)
def test_check_refuses_a_recipe_of_a_world_model_that_cannot_run(recipe, change, said):
    for form in ([], ["--json"]):
        refused = CliRunner().invoke(main, ["check", recipe, change, *form])
        assert refused.exit_code == 2, refused.output
        assert said in " ".join(refused.stderr.split())
        assert refused.stdout == ""


def test_check_refuses_missing_data_and_warns_of_what_the_environment_lacks(
    recipe, model, tmp_path, monkeypatch
):
    monkeypatch.delenv("REMOTE_REWARD_ENQUEUE_URL", raising=False)
    (tmp_path / "sft.toml").write_text(
        f'kind = "wfm_sft"\nmodel = "{model}"\noutput = "{tmp_path}/out"\n'
        f'[data]\nkind = "images"\npath = "{tmp_path}/none"\nheight = 16\nwidth = 16\n'
    )
    missing = CliRunner().invoke(main, ["check", str(tmp_path / "sft.toml")])
    warned = CliRunner().invoke(main, ["check", recipe, "reward_service.clip=2.0", "--json"])

    assert missing.exit_code == 2
    assert f"{tmp_path}/none is not a directory" in " ".join(missing.stderr.split())
    assert warned.exit_code == 0, warned.output
    [warning] = json.loads(warned.stdout)["warnings"]
    assert "REMOTE_REWARD_ENQUEUE_URL is not set" in warning


@pytest.mark.parametrize(
    "change", ["model=/nowhere", "prompts=/nowhere", "data.kind=images data.path=/nowhere"]
)
def test_a_run_whose_files_are_not_there_writes_nothing(recipe, tmp_path, change):
    changes = change.split()
    if len(changes) > 1:
        changes += ["algorithm.kind=ddrl"]
    failed = CliRunner().invoke(main, ["run", recipe, *changes])

    assert failed.exit_code == 2, failed.output
    assert "/nowhere" in failed.stderr
    assert not (tmp_path / "out").exists()


def test_there_are_recipes():
    assert len(_CONFIGS) > 10


def test_a_pipeline_is_checked_in_five_points(model, tmp_path):
    shown = CliRunner().invoke(main, ["wfm", "check", str(model)])
    listed = CliRunner().invoke(main, ["wfm", "check", str(model), "--json"])
    absent = CliRunner().invoke(main, ["wfm", "check", str(tmp_path)])

    assert shown.exit_code == 0, shown.output
    assert "5. ok   rollout step and RL forward" in shown.stdout
    assert [point["passed"] for point in json.loads(listed.stdout)] == [True] * 5
    assert absent.exit_code == 1
    assert "1. FAIL class name" in absent.stdout
    assert "points 2 to 5 build on that one" in absent.stdout


def test_a_recipe_goes_from_a_file_to_a_checkpoint(model, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red square\na blue square\n")
    (tmp_path / "rl.toml").write_text(
        f'kind = "wfm_rl"\nmodel = "{model}"\nprompts = "{tmp_path}/prompts.txt"\n'
        f'output = "{tmp_path}/out"\nnum_steps = 2\ngroups_per_step = 2\nsamples_per_group = 2\n'
        "[rewards]\nprompt_colour = 1.0\n"
        "[sampler]\nnum_steps = 2\nheight = 16\nwidth = 16\n"
        '[algorithm]\nkind = "nft"\n[tuning]\nkind = "lora"\nrank = 2\nalpha = 4\n'
    )
    ran = CliRunner().invoke(main, ["wfm", "run", str(tmp_path / "rl.toml"), "num_steps=1"])

    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[-1] == str(tmp_path / "out" / "safetensors" / "step_1")
    assert (tmp_path / "out" / "safetensors" / "step_1" / "lora" / "model.safetensors").is_file()
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1]
    assert {"loss", "reward", "kl", "old_deviation", "groups_without_signal"} <= rows[0].keys()
    assert {"step_s", "sample_s", "train_s", "wait_s", "samples_per_s"} <= rows[0].keys()


def test_supervised_recipes_run_too_in_bfloat16_from_a_cache_with_pictures_logged(model, tmp_path):
    tiny_captions(tmp_path / "pairs", size=16)
    (tmp_path / "sft.toml").write_text(
        f'kind = "wfm_sft"\nmodel = "{model}"\noutput = "{tmp_path}/out"\nnum_steps = 1\n'
        f'batch_size = 2\ncache = "{tmp_path}/cache"\n'
        f'[data]\nkind = "images"\npath = "{tmp_path}/pairs"\nheight = 16\nwidth = 16\n'
        '[compute]\ndtype = "bfloat16"\n[[loggers]]\nkind = "tensorboard"\n'
        '[validation]\nprompts = ["a red square"]\nsamples_per_prompt = 2\n'
        "sampler = { num_steps = 1, height = 16, width = 16 }\n"
    )
    filled = CliRunner().invoke(main, ["wfm", "cache", str(tmp_path / "sft.toml")])
    again = CliRunner().invoke(main, ["wfm", "cache", str(tmp_path / "sft.toml")])
    ran = CliRunner().invoke(main, ["run", str(tmp_path / "sft.toml")])

    assert filled.stdout == "6 samples encoded, 0 were there\n", filled.output
    assert again.stdout == "0 samples encoded, 6 were there\n", again.output
    assert ran.exit_code == 0, ran.output
    assert os.path.isdir(ran.stdout.splitlines()[-1])
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard" / "policy-0"))
    events.Reload()
    assert [point.step for point in events.Scalars("policy/loss")] == [1]
    assert events.Scalars("policy/samples_per_s")[0].value > 0
    images = events.Images("policy/validation/grid")
    assert [(image.step, image.width, image.height) for image in images] == [
        (0, 32, 16),
        (1, 32, 16),
    ]


@pytest.mark.parametrize("name", ["sd3_sft_mock", "sd3_nft_mock"])
def test_recipes_on_mock_data_need_a_model_only(name, model, tmp_path):
    smaller = {
        "sd3_sft_mock": ("batch_size=2", "data.height=16", "data.width=16"),
        "sd3_nft_mock": (
            "groups_per_step=1", "samples_per_group=2", "sampler.num_steps=2",
            "sampler.height=16", "sampler.width=16", "algorithm.timestep_fraction=0.5",
        ),
    }[name]  # fmt: skip
    [path] = [config for config in _CONFIGS if config.stem == name]
    out = (f"model={model}", f"output={tmp_path}/out", "num_steps=1")
    ran = CliRunner().invoke(main, ["wfm", "run", str(path), *out, *smaller])

    assert ran.exit_code == 0, ran.output
    assert os.path.isdir(ran.stdout.splitlines()[-1])


def test_unknown_keys_and_kinds_are_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        'kind = "wfm_rl"\nmodel = "m"\nprompts = "p"\noutput = "o"\n'
        '[rewards]\nbrightness = 1.0\n[algorithm]\nkind = "nft"\n'
        "timesteps_fraction = 0.9\n"
    )

    # The other spelling is not ignored in silence: the right one is suggested.
    with pytest.raises(ConfigError, match="timestep_fraction"):
        load_wfm_recipe(path)
    path.write_text(path.read_text().replace("timesteps_fraction", "timestep_fraction"))
    assert load_wfm_recipe(path).algorithm == NftConfig(timestep_fraction=0.9)
    path.write_text("seed = 1\n")
    wrong = CliRunner().invoke(main, ["wfm", "run", str(path)])
    assert wrong.exit_code == 2
    assert "kind is none of wfm_rl, wfm_sft" in wrong.output


def test_recipes_on_videos_take_them_at_the_rate_of_their_models():
    recipes = [load_wfm_recipe(path) for path in _CONFIGS]
    rates = [r.data.fps for r in recipes if isinstance(r.data, VideoCaptionsConfig)]

    assert len(rates) >= 11
    assert set(rates) == {16}  # a second: Wan, SANA-Video, Cosmos-Predict2.5


def _rows(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_validation_rewards_are_figures_of_their_step_once_also_when_a_run_goes_on(
    recipe, tmp_path
):
    shown = (
        "validation.prompts=['a red square', 'a word']", "validation.every=1",
        "validation.samples_per_prompt=1", "validation.sampler.num_steps=1",
        "validation.sampler.height=16", "validation.sampler.width=16", "checkpoint_every=1",
    )  # fmt: skip
    ran = CliRunner().invoke(main, ["run", recipe, *_SMALL, *shown, "num_steps=1"])
    assert ran.exit_code == 0, ran.output
    before = _rows(tmp_path / "out")
    told = [line for line in ran.stdout.splitlines() if line.startswith("validation after")]
    reward = before[0]["validation/reward"]
    assert told[0] == f"validation after step 0  reward {reward:.4f}"
    (tmp_path / "out/validation/step_1/prompts.txt").unlink()  # killed before all was written
    again = CliRunner().invoke(main, ["run", recipe, *_SMALL, *shown, "num_steps=2", "--resume"])

    assert again.exit_code == 0, again.output
    rows = _rows(tmp_path / "out")
    assert [(row["step"], "loss" in row) for row in rows] == [
        (0, False), (1, True), (1, False), (2, True), (2, False),
    ]  # fmt: skip
    assert rows[1] == before[1]
    assert rows[2]["validation/reward"] == before[2]["validation/reward"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["validation_rewards"].keys() == {"0", "1", "2"}
    assert report["validation_failed"] == 0


def test_a_service_that_is_down_at_validation_is_said_and_the_run_goes_on(
    model, tmp_path, monkeypatch
):
    tiny_captions(tmp_path / "pairs", size=16)
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "a-token-of-our-own")
    dead = "http://127.0.0.1:9"
    (tmp_path / "sft.toml").write_text(
        f'kind = "wfm_sft"\nmodel = "{model}"\noutput = "{tmp_path}/out"\nnum_steps = 1\n'
        "batch_size = 1\ndashboard = { enabled = false }\n"
        f'[data]\nkind = "images"\npath = "{tmp_path}/pairs"\nheight = 16\nwidth = 16\n'
        '[validation]\nprompts = ["a red square"]\nsamples_per_prompt = 2\ndeadline_s = 0.5\n'
        "sampler = { num_steps = 1, height = 16, width = 16 }\nrewards = { mine = 1.0 }\n"
        f'reward_service = {{ enqueue_url = "{dead}/enqueue", fetch_url = "{dead}/pull" }}\n'
    )
    ran = CliRunner().invoke(main, ["run", str(tmp_path / "sft.toml")])

    assert ran.exit_code == 0, ran.output
    rows = [row for row in _rows(tmp_path / "out") if "validation/failed" in row]
    assert [(row["step"], row["validation/failed"]) for row in rows] == [(0, 2.0), (1, 2.0)]
    assert "validation after step 1  no reward  2 samples failed: no " in ran.stdout
    assert "validation reward" in ran.stdout
    monkeypatch.delenv("REMOTE_REWARD_TOKEN")
    checked = CliRunner().invoke(main, ["check", str(tmp_path / "sft.toml"), "--json"])
    assert "REMOTE_REWARD_TOKEN is not set" in json.loads(checked.stdout)["warnings"][0]
