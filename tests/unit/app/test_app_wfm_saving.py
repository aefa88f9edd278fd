"""A run of a world model that saves and does not come to an end is ended, and can go on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from blocked_saves import block_a_save

pytest.importorskip("diffusers")

from cosmos_wfm import save_pipeline, tiny_sd3_pipeline

DEADLINE_S = 120.0
SAVE_S = 2.0


def run(recipe: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cosmos_app", "run", str(recipe), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_checkpoint_that_never_ends_ends_the_run_which_goes_on_from_a_whole_one(tmp_path):
    save_pipeline(tiny_sd3_pipeline(num_layers=1), tmp_path / "model")
    recipe, output = tmp_path / "rl.toml", tmp_path / "out"
    recipe.write_text(
        f'kind = "wfm_rl"\nmodel = "{tmp_path}/model"\nprompts = "mock"\noutput = "{output}"\n'
        f"groups_per_step = 1\nsamples_per_group = 2\ncheckpoint_every = 1\nsave_s = {SAVE_S}\n"
        "[rewards]\nprompt_colour = 1.0\n"
        "[sampler]\nnum_steps = 2\nheight = 16\nwidth = 16\n"
    )
    hung = run(recipe, "num_steps=100000", "dashboard.enabled=false")
    blocked = block_a_save(output / "checkpoints", hung)
    _, said = hung.communicate(timeout=DEADLINE_S)

    assert hung.returncode == 1, said
    why = f"rank 0: writing for {output} (save_s; --resume goes on from a checkpoint) took more"
    assert said.count(why) == 1
    assert "checkpoint_files.py" in said.partition(why)[0]

    lost = int(blocked.name.rpartition("-")[2])
    more = run(recipe, f"num_steps={lost + 1}", "dashboard.enabled=false", "--resume")
    _, said = more.communicate(timeout=DEADLINE_S)
    assert more.returncode == 0, said
    rows = (output / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-2:] == [lost, lost + 1]
    assert (output / "safetensors" / f"step_{lost + 1}").is_dir()
