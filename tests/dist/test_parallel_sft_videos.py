"""Supervised rows with videos: what is read, what is trained on, and what a batch holds."""

import json
import re
from pathlib import Path

import pytest
from capabilities import needs
from process_trees import run_tree
from seeing import (
    can_cut_pictures,
    seeing_environment,
    write_pictures,
    write_seeing_family,
    write_videos,
)

pytestmark = [
    pytest.mark.slow,
    needs("torchvision", can_cut_pictures()),
]
ROWS = Path(__file__).with_name("video_rows.py")
PICTURE = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("rows")
    write_pictures(directory / "p")
    write_videos(directory / "v")
    write_seeing_family(directory / "model", "qwen2_5_vl")
    run_tree(ROWS, directory, deadline_s=300, environment=seeing_environment())
    return json.loads((directory / "rows_found.json").read_text())


def video(num_pairs: int, num_tokens: int = 6) -> str:
    """Return the tokens of a video, each pair of frames so many."""
    return "<|vision_start|>" + "<|video_pad|>" * num_pairs * num_tokens + "<|vision_end|>"


def asked(content: str, answer: str) -> list[str]:
    """Return a conversation, and what of it is trained on."""
    said = f"{answer}<|im_end|>\n"
    return [f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n{said}", said]


def test_every_way_to_name_a_video_gives_the_tokens_it_takes(found):
    assert found["spelt"] == [
        asked(video(2) + "what?", "it moves"),
        asked("what?" + video(2) + PICTURE, "it moves"),
        asked(PICTURE + video(2) + "what?", "noise"),
        asked(video(2, 4) + "what?", "it moves"),  # three frames, listed
        ["what?nothing<|im_end|>", "nothing<|im_end|>"],
    ]
    assert found["frames"] == [[4], [4], [4], [3], []]


def test_a_saved_data_set_keeps_its_videos_as_they_are_stored(found):
    whole, _ = asked(video(3) + "what?", "noise")  # two frames a second of three
    assert found["saved"] == [whole, whole]


@pytest.mark.parametrize("layout", ["padded", "several", "packed"])
def test_the_loss_is_that_of_each_row_alone(found, layout):
    assert found["losses"][layout] == pytest.approx(found["losses"]["alone"], rel=1e-5)


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model", "distillation"])
def test_every_task_trains_on_videos_and_has_the_loss_of_rows_alone(found, kind):
    alone, together = found["tasks"][kind]
    assert alone["batches"] > together["batches"] == 1
    for one, other in zip(alone["steps"], together["steps"], strict=True):
        assert one == pytest.approx(other, rel=2e-4)
        assert min(one) > 0
    assert alone["sees"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("none", r"rows.jsonl:1: cannot read the video .*/none.mp4"),
        ("text", r"rows.jsonl:1: the video .*video_rows.py is no video"),
        ("fps", r"rows.jsonl:1: field 'messages': .* fps > 0"),
        ("marks", r"rows.jsonl:1: its tokens have 2 marks '<\|video_pad\|>' for 1 videos"),
        ("gone", r"rows.jsonl:1: cannot read the video .*/gone.mp4"),
    ],
)
def test_rows_with_wrong_videos_are_named(found, case, words):
    assert re.search(words, found["errors"][case])
