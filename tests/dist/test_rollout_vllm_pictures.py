"""vLLM with models that see: what it makes of pictures and videos, before and after new weights.

Everything of a model is measured in one process, by ``seeing_engine_process.py``: starting vLLM is
most of the time. Differences are of log-probs, between vLLM and transformers with the same weights.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from capabilities import needs

pytest.importorskip("vllm")
pytest.importorskip("cosmos_weightsync")
pytest.importorskip("av")

from forked_scripts import ENGINES, finished, warm
from seeing import can_cut_pictures, seeing_environment

SCRIPT = Path(__file__).with_name("seeing_engine_process.py")
EXACT = 1e-5
OTHER = 1e-2  # what other weights would differ by, at least
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def seeing(*families):
    """Mark a test of what the processes of these families measured."""

    def mark(test):
        is_there = needs("torchvision", can_cut_pictures())
        of_families = pytest.mark.parametrize("measured", families, indirect=True)
        return pytest.mark.slow(is_there(of_families(test)))

    return mark


with_pictures = seeing("qwen2_5_vl")
with_videos = seeing(*FAMILIES)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, request) -> dict[str, Any]:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    origin = warm(ENGINES, seeing_environment())
    finished([SCRIPT, folder, family], origin, 500)
    return {"family": family, **json.loads((folder / "found.json").read_text())}


@with_pictures
@pytest.mark.parametrize(
    ("name", "num_prompt_tokens"),
    [("sampled", 32), ("greedy", 32), ("two", 42), ("resized", 36), ("text", 0)],
)
def test_log_probs_are_those_of_transformers_with_the_same_pictures(
    measured, name, num_prompt_tokens
):
    for found in measured["pictures"][name]:
        assert found["difference"] < EXACT
        assert found["to_other_weights"] > OTHER
        assert found["num_prompt_tokens"] == num_prompt_tokens
        assert found["is_greedy"] == (name == "greedy")


@with_pictures
def test_an_episode_of_pictures_has_log_probs_as_one_forward_pass_gives(measured):
    found = measured["pictures"]["episode"]
    assert (found["num_turns"], found["num_marks"]) == (2, 4 + 4)
    assert found["num_sampled"] >= 2
    assert found["difference"] < EXACT


@with_pictures
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "PictureError: request r: cannot read the picture .*gone.png: No such file"),
        ("unmarked", "PictureError: request r is refused by vLLM"),
        ("spelled", "PictureError: request r: its text has tokens .* its 0 pictures"),
        ("many", "PictureError: .* At most 4 image"),
        ("long", "PromptTooLongError: request r: the prompt has 1026 tokens"),
        ("unshown", "PictureError: request score-.: its text has tokens .* its 0 pictures"),
        ("other", "PictureError: request score-.: it has 29 tokens .* here they are 32 or others"),
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(measured, name, words):
    assert re.match(words, measured["pictures"]["refused"][name])


@with_pictures
def test_scores_of_a_teacher_are_those_of_transformers_with_the_same_pictures(measured):
    assert measured["pictures"]["scored"] < EXACT


@with_videos
def test_scores_of_a_teacher_are_those_of_transformers_with_the_same_videos(measured):
    assert measured["videos"]["scored"] < EXACT


@with_videos
@pytest.mark.parametrize("version", [1, 2])
def test_new_weights_look_anew_at_what_older_ones_saw(measured, version):
    (found,) = measured["swaps"][f"after-{version}"]
    assert found["versions"] == [[version, 16]]
    assert found["difference"] < EXACT
    assert found["to_other_weights"] > OTHER
    assert found["is_greedy"]


@with_videos
def test_requests_in_flight_that_are_recomputed_look_anew(measured):
    # others of version 1 had left keys and values of the same pictures before
    (found,) = measured["swaps"]["through-2"]
    assert [span[0] for span in found["versions"]] == [1, 2]
    assert found["difference"] < EXACT


@with_videos
@pytest.mark.parametrize("version", [1, 2])
def test_no_response_has_a_mark_of_a_picture_or_video(measured, version):
    (found,) = measured["swaps"][f"through-{version}"]
    assert (found["num_tokens"], found["num_marks"]) == (600, 0)  # 11 of them by chance


@with_videos
@pytest.mark.parametrize(
    ("name", "num_prompt_tokens"),
    [
        ("quick", (36, 66)),  # four frames are two pairs of four tokens; Qwen3-VL says their times
        ("large", (76, 124)),
        ("odd", (40, 86)),
        ("several", (46, 106)),
        ("mixed", (56, 116)),
    ],
)
def test_log_probs_are_those_of_transformers_with_the_same_frames(
    measured, name, num_prompt_tokens
):
    (found,) = measured["videos"][name]
    assert found["difference"] < EXACT
    assert found["to_other_weights"] > OTHER
    assert found["num_prompt_tokens"] == num_prompt_tokens[measured["family"] == "qwen3_vl"]


@with_videos
def test_positions_are_transformers_own_unless_a_video_is_longer_than_wide(measured):
    videos = measured["videos"]
    assert {"quick", "several"} <= set(videos["as_transformers"])
    # behind a longer one transformers 5 goes on too early; vLLM as the models were trained
    assert ("large" in videos["as_transformers"]) == (measured["family"] == "qwen3_vl")


@with_videos
def test_the_same_frames_at_another_rate_are_another_video(measured):
    videos = measured["videos"]
    assert videos["contrast"]["frames"] > OTHER
    if measured["family"] == "qwen2_vl":  # which is told no time
        assert videos["contrast"]["rate"] == 0.0
    else:
        assert videos["contrast"]["rate"] > 50 * EXACT
    for name in ("quick", "slow"):
        (found,) = videos[name]
        assert found["difference"] < EXACT


@with_videos
def test_siblings_read_a_video_once(measured):
    found = measured["videos"]["siblings"]  # the file was gone before the last two
    assert [sibling["difference"] < EXACT for sibling in found] == [True] * 4
    assert re.match(
        "PictureError: request s0: cannot read the video .*clip.mp4: No such file",
        measured["videos"]["refused"]["evicted"],
    )


@with_videos
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "PictureError: request r: cannot read the video .*gone.mp4: No such file"),
        ("picture", "PictureError: request r is refused by vLLM"),
        ("spelled", "PictureError: request r: its text has tokens .* of its 0 pictures"),
        ("many", "PictureError: .* At most 2 video"),
    ],
)
def test_videos_that_cannot_be_seen_are_refused_by_name(measured, name, words):
    assert re.match(words, measured["videos"]["refused"][name])


@with_videos
def test_a_single_frame_is_a_video(measured):
    assert measured["videos"]["single"][0]["difference"] < EXACT
