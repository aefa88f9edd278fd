"""Ctrl-C at a run of a world model: it stops with a checkpoint, and goes on from there."""

import json
import os
import signal
import threading
import time

import pytest
from click.testing import CliRunner

pytest.importorskip("diffusers")

from cosmos_app.cli import main
from cosmos_app.wfm.stopping import stop_requests
from cosmos_wfm import save_pipeline, tiny_sd3_pipeline

DEADLINE_S = 120.0


def test_the_first_signal_asks_and_a_later_one_kills():
    before = signal.getsignal(signal.SIGINT)
    with stop_requests(says=False) as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)  # the same Ctrl-C once more, as torchrun passes it on
        assert stopping()
        time.sleep(1.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)

    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_is_stopped_by_ctrl_c_goes_on_where_it_was(tmp_path):
    save_pipeline(tiny_sd3_pipeline(num_layers=1), tmp_path / "model")
    (tmp_path / "rl.toml").write_text(
        f'kind = "wfm_rl"\nmodel = "{tmp_path}/model"\nprompts = "mock"\n'
        f'output = "{tmp_path}/out"\ngroups_per_step = 1\nsamples_per_group = 2\n'
        "[rewards]\nprompt_colour = 1.0\n"
        "[sampler]\nnum_steps = 2\nheight = 16\nwidth = 16\n"
    )
    metrics = tmp_path / "out" / "metrics.jsonl"

    def press():
        end = time.monotonic() + DEADLINE_S
        while not metrics.exists() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    def rows():
        return [json.loads(row)["step"] for row in metrics.read_text().splitlines()]

    presser = threading.Thread(target=press)
    presser.start()
    stopped = CliRunner().invoke(main, ["run", str(tmp_path / "rl.toml"), "num_steps=100000"])
    presser.join()
    done = len(rows())

    assert stopped.exit_code == 3, stopped.output
    assert f"stopped after step {done} of 100000; --resume goes on" in stopped.stderr
    more = ["run", str(tmp_path / "rl.toml"), f"num_steps={done + 1}", "--resume"]
    resumed = CliRunner().invoke(main, more)
    assert resumed.exit_code == 0, resumed.output
    assert rows() == list(range(1, done + 2))
    assert (tmp_path / "out" / "safetensors" / f"step_{done + 1}").is_dir()

    written = (tmp_path / "out" / "recipe.json").read_bytes()
    refused = CliRunner().invoke(main, ["run", str(tmp_path / "rl.toml"), "num_steps=7"])
    assert refused.exit_code == 2, refused.output
    assert "has checkpoints of a run" in refused.stderr
    assert (tmp_path / "out" / "recipe.json").read_bytes() == written
