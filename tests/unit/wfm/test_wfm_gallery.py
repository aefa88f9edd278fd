"""Validation samples as files of their own: what the index says of them, and which are kept."""

import json
from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from cosmos_wfm import (
    DiffusionRlConfig,
    LoraTuning,
    SamplerConfig,
    ValidationConfig,
    local_sample_scorer,
    train_rl,
)
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.gallery import gallery_steps, thin_galleries, write_gallery
from cosmos_wfm.sample_rewards import collect_rewards
from cosmos_wfm.validation import write_samples

CONFIG = ValidationConfig(prompts=("a red square", "<b>nothing</b>", "a third"), gallery=2, seed=7)
COLOURS = {"brightness": 2.0, "prompt_colour": 1.0}


def index_of(directory: Path) -> dict:
    return json.loads((directory / "index.json").read_text())


def written(directory: Path, pixels: torch.Tensor, *, step: int = 4) -> dict:
    write_samples(pixels, directory)
    scorer = local_sample_scorer(COLOURS)
    asked = [
        [scorer(one, p) for one in row] for row, p in zip(pixels, CONFIG.prompts, strict=False)
    ]
    write_gallery(pixels, directory, CONFIG, step=step, rewards=collect_rewards(asked, 10))
    return index_of(directory)


def test_the_index_says_what_each_sample_is_and_how_it_was_rewarded(tmp_path):
    pixels = torch.full((3, 2, 3, 16, 16), -1.0)
    pixels[:, 1, 0] = 1.0  # the second of each prompt is red
    index = written(tmp_path, pixels)

    assert index["step"] == 4
    places = [(sample["row"], sample["column"]) for sample in index["samples"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)], "two prompts of three"
    red = index["samples"][1]
    assert (red["prompt"], red["seed"], red["video"]) == ("a red square", 7, "")
    assert red["rewards"]["brightness"] == pytest.approx(1 / 3)
    total = 2 * red["rewards"]["brightness"] + red["rewards"]["prompt_colour"]
    assert red["reward"] == pytest.approx(total)
    assert Image.open(tmp_path / red["picture"]).getpixel((3, 3)) == (255, 0, 0)
    nameless = index["samples"][3]
    assert nameless["rewards"].keys() == {"brightness"}, "it names no colour"
    assert nameless["reward"] is None


def test_a_video_has_its_first_frame_as_a_picture(tmp_path):
    pixels = torch.full((1, 1, 3, 5, 16, 16), -1.0)
    pixels[:, :, 2, 0] = 1.0
    (sample,) = written(tmp_path, pixels)["samples"]

    assert Image.open(tmp_path / sample["picture"]).getpixel((3, 3)) == (0, 0, 255)
    with av.open(str(tmp_path / sample["video"])) as video:
        assert sum(1 for _ in video.decode(video=0)) == 5


def test_an_index_is_away_while_what_it_names_is_written_anew(tmp_path):
    pixels = torch.zeros(1, 1, 3, 16, 16)
    written(tmp_path, pixels)
    (tmp_path / "samples" / "0_0.png").unlink()
    (tmp_path / "samples" / "0_0.png").mkdir()  # what cannot be written over
    with pytest.raises(OSError, match="0_0"):
        written(tmp_path, pixels)
    assert not (tmp_path / "index.json").exists()


def test_first_and_newest_stay_and_what_is_between_is_thinned_evenly(tmp_path):
    for step in range(0, 70, 10):
        written(tmp_path / f"step_{step}", torch.zeros(1, 1, 3, 5, 16, 16), step=step)
        thin_galleries(tmp_path, 4)
    assert gallery_steps(tmp_path) == [0, 20, 40, 60]
    left = sorted(path.name for path in (tmp_path / "step_10").iterdir())
    assert left == ["grid.png"], "neither pictures nor videos"
    thin_galleries(tmp_path, 0)
    assert gallery_steps(tmp_path) == [0, 20, 40, 60]


@pytest.mark.parametrize(
    ("change", "message"), [({"keep": 1}, "keep is 1"), ({"gallery": -1}, "gallery is -1")]
)
def test_bounds_that_leave_nothing_to_see_are_refused(change, message):
    with pytest.raises(WfmConfigError, match=message):
        replace(CONFIG, **change)


def test_a_run_of_rl_and_the_run_that_goes_on_from_it_leave_the_same_indices(model_dirs, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square\na blue disc\n")
    sampler = SamplerConfig(num_steps=1, height=16, width=16)
    recipe = DiffusionRlConfig(
        model=str(model_dirs("sd3")),
        prompts=str(prompts),
        output=str(tmp_path / "out"),
        rewards=COLOURS,
        num_steps=1,
        groups_per_step=1,
        samples_per_group=2,
        checkpoint_every=1,
        sampler=sampler,
        validation=replace(CONFIG, sampler=sampler, samples_per_prompt=1, every=1),
        tuning=LoraTuning(rank=2, alpha=4),
    )
    train_rl(recipe)
    validations = tmp_path / "out" / "validation"
    assert gallery_steps(validations) == [0, 1]
    before = index_of(validations / "step_1")
    assert before["samples"][0]["rewards"].keys() == COLOURS.keys()

    (validations / "step_1" / "index.json").unlink()
    (validations / "step_1" / "prompts.txt").unlink()  # killed before all was written
    train_rl(replace(recipe, num_steps=2), resume=True)
    assert gallery_steps(validations) == [0, 1, 2]
    assert index_of(validations / "step_1") == before
