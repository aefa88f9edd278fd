"""What vLLM is told of a model that sees, and of one that does not."""

import importlib.util
import json
from typing import Any

import pytest

from cosmos_rollout.engines.vllm_arguments import missing_for_sight, sight_arguments

VISION: dict[str, Any] = {"vision_config": {}}
MEAN = {"image_mean": [0.5, 0.5, 0.5]}
BLIND = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
SIGHT = {"limit_mm_per_prompt": {"image": 4, "video": 0}, "skip_tokenizer_init": False}


@pytest.mark.parametrize(
    ("config", "files", "images", "arguments"),
    [
        ({"vocab_size": 8}, {"preprocessor_config.json": {}}, 4, {}),
        (VISION, {}, 4, BLIND),
        (VISION, {"preprocessor_config.json": MEAN}, 0, BLIND),
        (VISION, {"preprocessor_config.json": MEAN}, 4, SIGHT),
        (VISION, {"processor_config.json": {"image_processor": MEAN}}, 4, SIGHT),
        (VISION, {"preprocessor_config.json": {}}, 4, {**SIGHT, "mm_device_do_normalize": False}),
    ],
)
def test_a_model_sees_if_it_has_vision_and_says_how_pictures_are_cut(
    tmp_path, config, files, images, arguments
):
    for name, content in {"config.json": config, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert sight_arguments(tmp_path, images) == arguments


def test_a_model_that_sees_says_that_torchvision_is_missing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VISION))
    is_there = importlib.util.find_spec("torchvision") is not None
    assert ("need torchvision" in missing_for_sight(tmp_path)) == (not is_there)
    (tmp_path / "config.json").write_text("{}")
    assert missing_for_sight(tmp_path) == ""
