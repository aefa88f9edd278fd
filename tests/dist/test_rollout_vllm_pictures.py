"""vLLM with a model that sees: what it makes of pictures, before and after new weights.

Everything is measured in one process, by ``seeing_engine_process.py``: starting vLLM is most of the
time. Differences are of log-probs, between vLLM and transformers with the same weights.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("cosmos_weightsync")

from seeing import can_cut_pictures, seeing_environment

SCRIPT = Path(__file__).with_name("seeing_engine_process.py")
EXACT = 1e-4
OTHER = 1e-2  # what other weights would differ by, at least


def seeing(test):
    """Mark a test of what the process measured."""
    is_there = pytest.mark.skipif(
        not can_cut_pictures(), reason="needs torchvision beside the environment"
    )
    return pytest.mark.slow(is_there(test))


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("seeing")
    paths = [seeing_environment().get("PYTHONPATH", ""), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ended = subprocess.run(
        [sys.executable, SCRIPT, folder],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    return json.loads((folder / "found.json").read_text())


@seeing
@pytest.mark.parametrize(
    ("name", "num_prompt_tokens"),
    [("sampled", 32), ("greedy", 32), ("two", 42), ("resized", 36), ("text", 0)],
)
def test_log_probs_are_those_of_transformers_with_the_same_pictures(
    measured, name, num_prompt_tokens
):
    for found in measured[name]:
        assert found["difference"] < EXACT
        assert found["to_other_weights"] > OTHER
        assert found["num_prompt_tokens"] == num_prompt_tokens
        assert found["is_greedy"] == (name == "greedy")


@seeing
def test_an_episode_of_pictures_has_log_probs_as_one_forward_pass_gives(measured):
    found = measured["episode"]
    assert (found["num_turns"], found["num_marks"]) == (2, 4 + 4)
    assert found["num_sampled"] >= 2
    assert found["difference"] < EXACT


@seeing
@pytest.mark.parametrize("version", [1, 2])
def test_new_weights_look_anew_at_a_picture_that_older_ones_saw(measured, version):
    (found,) = measured[f"after-{version}"]
    assert found["versions"] == [[version, 16]]
    assert found["difference"] < EXACT
    assert found["to_other_weights"] > OTHER
    assert found["is_greedy"]


@seeing
def test_requests_in_flight_that_are_recomputed_look_anew(measured):
    (found,) = measured["through-2"]
    assert [span[0] for span in found["versions"]] == [1, 2]
    assert found["difference"] < EXACT


@seeing
@pytest.mark.parametrize("version", [1, 2])
def test_no_response_has_a_mark_of_a_picture(measured, version):
    (found,) = measured[f"through-{version}"]
    assert (found["num_tokens"], found["num_marks"]) == (600, 0)  # 11 of them by chance


@seeing
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone", "PictureError: request r: cannot read the picture .*gone.png: No such file"),
        ("unmarked", "PictureError: request r is refused by vLLM"),
        ("spelled", "PictureError: request r: its text has tokens .* its 0 pictures"),
        ("many", "PictureError: .* At most 4 image"),
        ("long", "PromptTooLongError: request r: the prompt has 1026 tokens"),
        ("score", "NoPicturesError: 29 tokens"),
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(measured, name, words):
    assert re.match(words, measured["refused"][name])
