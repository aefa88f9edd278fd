"""Videos become what a model's own processor makes of them, and are seen as by the model itself."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from capabilities import needs
from process_trees import run_tree
from seeing import (
    FAMILIES,
    can_cut_pictures,
    reader_of,
    seeing_environment,
    write_seeing_family,
    write_seeing_world,
    write_videos,
)

from cosmos_core.videos import VideoSampling, video_reference
from cosmos_parallel import PictureError

NUMBERS = Path(__file__).with_name("video_numbers.py")
SLOW, FAST = 5, 6  # rows of the same frames, a second and a third of one apart
needs_torchvision = needs("torchvision", can_cut_pictures())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("videos")
    write_seeing_world(directory)
    run_tree(NUMBERS, directory, deadline_s=300, environment=seeing_environment())
    return torch.load(directory / "found.pt")


@pytest.mark.slow
@needs_torchvision
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_mark_becomes_the_tokens_of_the_model_s_own_processor(found, kind):
    for mine, theirs in found[kind]["tokens"]:
        assert mine.tolist() == theirs.tolist()


@pytest.mark.slow
@needs_torchvision
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_of_text_pictures_and_videos_have_the_logits_of_each_alone(found, kind, layout):
    for mine, theirs in found[kind][layout]:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_torchvision
@pytest.mark.parametrize("kind", FAMILIES)
def test_samples_of_a_step_are_scored_as_each_alone(found, kind):
    for mine, theirs in found[kind]["shares"]:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_torchvision
@pytest.mark.parametrize("kind", FAMILIES)
def test_models_that_know_of_time_see_how_fast_a_video_is(found, kind):
    slow, fast = (found[kind]["padded"][row][0][-1] for row in (SLOW, FAST))
    assert torch.equal(slow, fast) is (kind == "qwen2_vl")


@pytest.mark.slow
@needs_torchvision
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("order", r"line 3: mark 1 is '<\|video_pad\|>', for videos, and .*green-56x56.png is one"),
        ("kind", r"1 marks '<\|image_pad\|>' for 0 pictures and 1 marks '<\|video_pad\|>' for 2"),
        ("none", r"line 3: cannot read the video .*none.mp4"),
        ("frames", r"line 3: its tokens are not those that .*plain.mp4 takes"),
        ("swapped", r"line 3: its tokens are not those that .*green-56x56.png takes"),
    ],
)
def test_what_does_not_meet_its_mark_or_its_tokens_is_refused(found, case, words):
    assert re.search(words, found["refusals"][case])


def test_a_video_needs_torchvision_and_a_model_that_is_shown_videos(tmp_path):
    write_videos(tmp_path)
    write_seeing_family(tmp_path / "model", "qwen2_5_vl")
    video = video_reference("plain.mp4", tmp_path, VideoSampling())
    reader = reader_of(tmp_path / "model")
    assert reader.expand([20, 21], []) == [20, 21]
    if importlib.util.find_spec("torchvision") is None:
        with pytest.raises(PictureError, match=r"plain.mp4: .*'pip install torchvision'"):
            reader.expand([20, reader.mark_ids[1]], [video])
        with pytest.raises(PictureError, match=r"row 0: .*plain.mp4: .*'pip install torchvision'"):
            reader.inputs(torch.tensor([[20, 6]]), [[video]])
    with pytest.raises(PictureError, match=r"prompt: .* 1 marks '<\|video_pad\|>' for 0"):
        reader.expand([20, reader.mark_ids[1]], [])
