"""Commands: help that teaches, recipes that are checked before anything starts."""

import json
import os
import re
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cosmos_app.bubble import predict_bubble, predict_validation_wait
from cosmos_app.cli import main
from cosmos_app.control_files import write_address
from cosmos_app.dashboard.example import write_example_run
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import load_recipe
from cosmos_app.recipes import load_any_recipe
from cosmos_app.report import curve
from cosmos_app.wfm.commands import wfm
from cosmos_core.config import config_to_json
from cosmos_core.rundir import RunDirectory

CONFIGS = Path(__file__).parents[3] / "configs"
QUICKSTART, SUMS = CONFIGS / "quickstart.toml", CONFIGS / "sums.toml"
COMMANDS = [
    *((name,) for name in sorted(main.commands)),
    *(("wfm", name) for name in sorted(wfm.commands)),
]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_a_command_says_more_than_its_options(command: tuple[str, ...]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert len(result.output.split("Options:")[0].splitlines()) >= 4


def test_the_main_help_shows_commands_to_copy() -> None:
    output = call("--help").output
    assert "cosmos-app run configs/quickstart.toml --resume" in output
    assert "data.path=my.jsonl model.path=my-hf-model" in output


def test_check_forecasts_the_quickstart_without_starting_anything(tmp_path: Path) -> None:
    result = call("check", str(QUICKSTART), f"output={tmp_path / 'run'}", "--json")
    assert result.exit_code == 0, result.output
    forecast = json.loads(result.output)
    processes = {placement["role"]: placement["processes"] for placement in forecast["placements"]}
    assert processes == {"controller": 1, "policy": 1, "rollout": 2}
    assert 250_000 < forecast["parameters"] < 350_000
    assert not (tmp_path / "run").exists()


def test_check_refuses_slots_that_admission_leaves_empty() -> None:
    result = call("check", str(QUICKSTART), "rollout.slots=100", "--json")
    assert result.exit_code == 2
    assert "136 stay empty; raise staleness.depth" in result.stderr
    forecast = json.loads(result.stdout)
    assert forecast["starved_slots"] == 200 - 64
    assert "staleness.depth" in forecast["warnings"][0]


def test_check_refuses_slots_that_no_step_can_fill_where_sampling_waits_for_training() -> None:
    changes = ("staleness.depth=0", "staleness.bound=0")
    full = call("check", str(QUICKSTART), *changes, "rollout.slots=32", "--json")
    assert full.exit_code == 0, full.output
    assert json.loads(full.stdout)["starved_slots"] == 0
    result = call("check", str(QUICKSTART), *changes, "rollout.slots=33", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["starved_slots"] == 2 * 33 - 64
    said = " ".join(result.stderr.split())
    assert "64 prompts generate for each step (staleness.depth is 0)" in said
    assert "2 stay empty; raise trainer.groups_per_step or lower rollout.slots" in said


def test_check_counts_places_for_scoring_as_the_controller_does() -> None:
    result = call("check", str(QUICKSTART), "rollout.scoring=3", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["slots"] == 2 * (32 + 3)
    said = " ".join(result.stderr.split())
    assert "70 slots, 6 of them for scoring: 6 stay empty" in said
    assert "lower rollout.slots or rollout.scoring" in said


def test_check_prints_the_bubble_that_it_predicts() -> None:
    bubble = predict_bubble(load_recipe(QUICKSTART, []))
    shown = " ".join(call("check", str(QUICKSTART)).output.split())
    assert bubble.policy > 0.0
    assert (
        f"predicted bubble, were both sides equally fast: policy {bubble.policy:.0%}, rollouts "
        f"{bubble.rollout:.0%}; a step takes {bubble.over_bound:.2f} times what it has to"
    ) in shown


def test_check_predicts_the_bubble_of_what_admission_allows() -> None:
    """Waiting for one side after the other is idle on both; two steps of depth are hardly."""
    found = [
        json.loads(call("check", str(SUMS), *changes, "--json").stdout)["bubble"]
        for changes in (
            ("staleness.depth=0", "staleness.bound=0"),
            ("staleness.depth=2", "staleness.bound=4"),
        )
    ]
    synchronous, asynchronous = found
    assert min(synchronous["policy"], synchronous["rollout"]) > 0.4
    assert max(asynchronous["policy"], asynchronous["rollout"]) < 0.1
    assert synchronous["over_bound"] > 1.5 * asynchronous["over_bound"]


def test_check_predicts_how_long_training_waits_for_a_validation_in_between() -> None:
    """A lone rollout keeps its version for 8,192 answers; a step has 512.

    Training goes on meanwhile at a large bound, and where there is another rollout.
    """
    validated = "validation={every=10, samples=8, temperature=1}"
    alone = (validated, "rollout.replicas=1", "data.reversal.held_out=1024")
    waits = [
        predict_validation_wait(load_recipe(QUICKSTART, [*alone, *changes]), 1024)
        for changes in ((), ("staleness.bound=32",), ("rollout.replicas=2",))
    ]
    assert waits[0] > 10.0
    assert waits[1:] == [0.0, 0.0]
    shown = " ".join(call("check", str(QUICKSTART), *alone).output.split())
    assert "s for each validation in between; a second rollout replica" in shown
    several = " ".join(call("check", str(QUICKSTART), validated).output.split())
    assert "training waits for no validation in between" in several


def test_a_large_recipe_is_foreseen_as_fast_as_a_small_one_in_its_proportions() -> None:
    large = load_recipe(
        QUICKSTART,
        ["rollout.sampling.max_new_tokens=1000000000", "trainer.samples_per_group=1000000"],
    )
    small = load_recipe(
        QUICKSTART, ["rollout.sampling.max_new_tokens=1024", "trainer.samples_per_group=64"]
    )
    assert predict_bubble(large) == predict_bubble(small)


def test_different_temperatures_of_sampler_and_trainer_are_refused() -> None:
    result = call("check", str(QUICKSTART), "rollout.sampling.temperature=0.7")
    assert result.exit_code == 2
    assert "algorithm.temperature" in result.output


def test_fewer_bits_for_an_engine_that_serves_none_are_refused() -> None:
    changes = ("weight_sync.quantised=fp8", "rollout.engine.kind=transformers")
    result = call("check", str(QUICKSTART), *changes)
    assert result.exit_code == 2
    assert "only vllm serves quantised weights" in " ".join(result.output.split())


def test_an_engine_that_cannot_stand_still_while_it_fetches_is_refused() -> None:
    changes = ("weight_sync.staged=false", "rollout.engine.kind=transformers")
    result = call("check", str(QUICKSTART), *changes)
    assert result.exit_code == 2
    assert "only vllm stands still while it fetches" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_engine_that_never_gets_what_is_trained_is_refused(command: str, tmp_path: Path) -> None:
    engine = "rollout.engine={kind='endpoint', url='http://localhost:1/v1', model='theirs'}"
    result = call(command, str(QUICKSTART), engine, f"output={tmp_path / 'run'}")
    assert result.exit_code == 2
    assert "cosmos-app evaluate" in result.output
    assert not (tmp_path / "run").exists()


def test_weights_that_vllm_serves_on_some_gpus_alone_are_refused_with_the_reason() -> None:
    changes = ("weight_sync.quantised=mxfp4", "rollout.engine.kind=vllm")
    result = call("check", str(QUICKSTART), *changes)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "weight_sync" in said
    assert "amd-quark" in said
    assert "'nvfp4' has four bits too" in said


def test_status_of_what_is_no_run_says_so(tmp_path: Path) -> None:
    result = call("status", str(tmp_path))
    assert result.exit_code == 2
    assert "not the directory of a run" in result.output


def test_replay_on_a_port_that_is_taken_names_its_own_options(tmp_path: Path) -> None:
    write_example_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = call("replay", str(tmp_path / "run"), "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "choose another with --port" in result.output
    assert "dashboard." not in result.output


def test_a_curve_spans_its_own_range() -> None:
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([]) == ""


def test_models_are_listed_with_whose_implementation_and_axes() -> None:
    listed = {entry["model_type"]: entry for entry in json.loads(call("models", "--json").output)}
    assert listed["qwen3_moe"]["axes"] == ["dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"]
    assert (listed["llama"]["native"], listed["gpt2"]["native"]) == (True, False)
    table = call("models").output
    assert "DeepSeek-V3, Moonlight-MoE" in table
    assert len(table.splitlines()) > 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("policy.ranks=4", "policy.parallel.tp=4"),
            "tp 4 does not divide its 6 attention heads",
        ),
        (
            (
                "policy.ranks=2",
                "policy.parallel.pp=2",
                "policy.parallel.pp_schedule=ZBVZeroBubble",
                "model.training.activation_checkpointing=full",
            ),
            "pp_schedule ZBVZeroBubble runs the backward pass in two parts",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_by_check(
    tmp_path: Path, changes: tuple[str, ...], message: str
) -> None:
    build_tiny_model(tmp_path, ["0"], TinyModelConfig(), seed=0)
    config = {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = call("check", str(QUICKSTART), f"model.path={tmp_path}", *changes)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_a_layout_that_does_not_fit_the_model_to_be_built_is_refused_by_check() -> None:
    result = call("check", str(QUICKSTART), "policy.ranks=4", "policy.parallel.tp=4")
    assert result.exit_code != 0
    assert "tp 4 does not divide its 2 key-value heads" in " ".join(result.output.split())


def test_help_keeps_examples_apart_and_short_lines_whole() -> None:
    for command in ("run", "replay", "scale"):
        text = call(command, "--help").output
        assert "\\b" not in text
        assert re.search(rf"\n +cosmos-app {command} runs?|\n +cosmos-app run configs", text)
    listed = call("--help").output.partition("Commands:")[2].partition("Examples:")[0]
    of_ours = [line for line in listed.splitlines() if not line.startswith(("  wfm", "  reward"))]
    assert not [line for line in of_ours if line.endswith("...")]


@pytest.mark.parametrize("what", ["folder", "file"])
def test_export_replaces_nothing_but_a_model(tmp_path: Path, what: str) -> None:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0):
        pass
    mine = tmp_path / "mine"
    if what == "folder":
        mine.mkdir()
    kept = mine / "thesis.txt" if what == "folder" else mine
    kept.write_text("years of work")
    result = call("export", str(tmp_path / "run"), str(mine))
    assert result.exit_code == 2
    assert "name another directory" in result.output
    assert kept.read_text() == "years of work"


def test_the_resolved_recipe_of_a_run_of_any_kind_is_a_recipe(tmp_path: Path) -> None:
    for name in ("quickstart", "sft", "dpo", "wfm/sd3_nft"):
        recipe = load_any_recipe(CONFIGS / f"{name}.toml")
        resolved = tmp_path / "config.json"
        resolved.write_text(config_to_json(recipe))
        assert load_any_recipe(resolved) == recipe


def test_where_no_run_lies_the_runs_nearby_are_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        RunDirectory.create(tmp_path / name, config_json="{}", now_s=0.0).close()
    nearby = call("status", str(tmp_path))
    assert nearby.exit_code == 2
    assert "there are runs in it: one, two" in nearby.output
    nothing = call("status", str(tmp_path / "three"))
    assert nothing.exit_code == 2
    assert "'cosmos-app run' makes one" in nothing.output
    assert "is a directory" in call("check", str(tmp_path)).output


def test_a_run_that_is_over_says_how_it_ended(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        write_address(run, "redis://127.0.0.1:1/0", "gone")
        held = call("status", str(run.path)).output
        assert f"is held by process {os.getpid()} on {socket.gethostname()} since" in held
    killed = call("status", str(run.path))
    assert killed.exit_code == 1
    assert "--resume" in killed.output
    run.report.write_text(json.dumps({"finished": "all steps done", "steps": 7}))
    over = call("status", str(run.path))
    assert over.exit_code == 0
    assert "has ended at step 7: all steps done" in over.output
    told = json.loads(call("status", str(run.path), "--json").output)
    assert (told["finished"], told["step"]) == ("all steps done", 7)
    stopped = call("stop", str(run.path))
    assert stopped.exit_code == 1
    assert "has ended at step 7" in stopped.output


def test_a_run_whose_directory_was_moved_says_where_its_model_is_now(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        write_address(run, "redis://127.0.0.1:1/0", "gone")
        model = run.export / "model"
        model.mkdir()
        run.report.write_text(json.dumps({"finished": "all steps done", "export": str(model)}))
    moved = run.path.rename(tmp_path / "moved")
    told = json.loads(call("status", str(moved), "--json").output)
    assert told["export"] == str(moved / "export" / "model")
    assert told["report"] == str(moved / "report.json")


@pytest.mark.parametrize(("finished", "said"), [(True, "all steps done"), (False, "stopped; ")])
def test_a_run_on_given_data_that_is_over_says_how_it_ended(
    tmp_path: Path, finished: bool, said: str
) -> None:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        write_address(run, "redis://127.0.0.1:1/0", "gone")
        run.report.write_text(json.dumps({"finished": finished, "steps": 7}))
        output = call("status", str(run.path)).output
    assert f"has ended at step 7: {said}" in output
    assert "replay" not in output, "it has no events to show"
