"""A run of a world model that does not end, as it saves or reads, is ended, and can go on."""

import json
import os
import time
from pathlib import Path

import pytest
from blocked_saves import block_a_save, block_reading
from forked_scripts import TRAINERS, Forked, warm

pytest.importorskip("diffusers")

from cosmos_wfm import save_pipeline, tiny_captions, tiny_sd3_pipeline

DEADLINE_S = 120.0
SAVE_S = 2.0
STALL_S = 8.0


class Run(Forked):
    """A run, with what it says as errors."""

    def __init__(self, recipe: Path, *words: str) -> None:
        self.errors = recipe.with_suffix(".log")
        command = ["-m", "cosmos_app", "run", recipe, *words]
        with self.errors.open("wb") as errors, Path(os.devnull).open("wb") as nothing:
            away, log = nothing.fileno(), errors.fileno()
            super().__init__(command, warm(TRAINERS), stdout=away, stderr=log)

    def said(self) -> str:
        self.wait(DEADLINE_S)
        return self.errors.read_text()


def test_a_checkpoint_that_never_ends_ends_the_run_which_goes_on_from_a_whole_one(tmp_path):
    save_pipeline(tiny_sd3_pipeline(num_layers=1), tmp_path / "model")
    recipe, output = tmp_path / "rl.toml", tmp_path / "out"
    recipe.write_text(
        f'kind = "wfm_rl"\nmodel = "{tmp_path}/model"\nprompts = "mock"\noutput = "{output}"\n'
        f"groups_per_step = 1\nsamples_per_group = 2\ncheckpoint_every = 1\nsave_s = {SAVE_S}\n"
        "[rewards]\nprompt_colour = 1.0\n"
        "[sampler]\nnum_steps = 2\nheight = 16\nwidth = 16\n"
    )
    hung = Run(recipe, "num_steps=100000", "dashboard.enabled=false")
    blocked = block_a_save(output / "checkpoints", hung)
    said = hung.said()

    assert hung.returncode == 1, said
    why = f"rank 0: writing for {output} (save_s; --resume goes on from a checkpoint) took more"
    assert said.count(why) == 1
    assert "checkpoint_files.py" in said.partition(why)[0]

    lost = int(blocked.name.rpartition("-")[2])
    more = Run(recipe, f"num_steps={lost + 1}", "dashboard.enabled=false", "--resume")
    said = more.said()
    assert more.returncode == 0, said
    rows = (output / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows][-2:] == [lost, lost + 1]
    assert (output / "safetensors" / f"step_{lost + 1}").is_dir()


def test_pictures_that_are_never_read_end_the_run_which_goes_on_when_they_can_be(tmp_path):
    save_pipeline(tiny_sd3_pipeline(num_layers=1), tmp_path / "model")
    tiny_captions(tmp_path / "pairs", size=16)
    recipe, output = tmp_path / "sft.toml", tmp_path / "out"
    recipe.write_text(
        f'kind = "wfm_sft"\nmodel = "{tmp_path}/model"\noutput = "{output}"\n'
        f"batch_size = 1\ncheckpoint_every = 1\nsave_s = {SAVE_S}\nstall_s = {STALL_S}\n"
        f'[data]\nkind = "images"\npath = "{tmp_path}/pairs"\nheight = 16\nwidth = 16\n'
    )
    hung = Run(recipe, "num_steps=100000", "dashboard.enabled=false")
    while hung.poll() is None and not any(output.glob("checkpoints/step-*")):
        time.sleep(0.01)
    pictures = sorted((tmp_path / "pairs").glob("*.png"))
    kept = [block_reading(picture) for picture in pictures]
    said = hung.said()

    assert hung.returncode == 1, said
    why = (
        "rank 0: a part of its work (stall_s, and what it may wait for; --resume goes on) took more"
    )
    assert said.count(why) == 1
    assert "caption_data.py" in said.partition(why)[0]

    for picture, there in zip(pictures, kept, strict=True):
        there.rename(picture)
    steps = [int(path.name.rpartition("-")[2]) for path in output.glob("checkpoints/step-*")]
    more = Run(recipe, f"num_steps={max(steps) + 1}", "dashboard.enabled=false", "--resume")
    said = more.said()
    assert more.returncode == 0, said
    rows = (output / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, max(steps) + 2))
