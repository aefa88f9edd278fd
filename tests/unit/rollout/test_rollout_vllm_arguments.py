"""What vLLM is told by default, on a CPU, of a model that sees, and of one that does not."""

import importlib.util
import json
from typing import Any

import pytest

from cosmos_rollout import VLLMConfig
from cosmos_rollout.engines.vllm_arguments import (
    cpu_arguments,
    missing_for_sight,
    sight_arguments,
)

VISION: dict[str, Any] = {"vision_config": {}}
MEAN = {"image_mean": [0.5, 0.5, 0.5]}
BLIND = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
SIGHT = {"limit_mm_per_prompt": {"image": 4, "video": 0}, "skip_tokenizer_init": False}
OF_VIDEOS = {"limit_mm_per_prompt": {"image": 0, "video": 2}, "skip_tokenizer_init": False}
ON_HOST = {"mm_device_do_normalize": False}


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("config", "files", "images", "arguments"),
    [
        ({"vocab_size": 8}, {"preprocessor_config": {}}, 4, {}),
        (VISION, {}, 4, BLIND),
        (VISION, {"preprocessor_config": MEAN}, 0, BLIND),
        (VISION, {"preprocessor_config": MEAN}, 4, SIGHT),
        (VISION, {"processor_config": {"image_processor": MEAN}}, 4, SIGHT),
        (VISION, {"preprocessor_config": {"size": 8}}, 4, {**SIGHT, **ON_HOST}),
    ],
)
def test_a_model_sees_if_it_has_vision_and_says_how_pictures_are_cut(
    tmp_path, config, files, images, arguments
):
    write(tmp_path, config=config, **files)
    assert sight_arguments(tmp_path, images, 0) == arguments


@pytest.mark.parametrize(
    ("files", "arguments"),
    [
        ({"preprocessor_config": MEAN}, OF_VIDEOS),
        ({"preprocessor_config": MEAN, "video_preprocessor_config": {**MEAN, "fps": 2}}, OF_VIDEOS),
        (
            {"preprocessor_config": MEAN, "video_preprocessor_config": {"fps": 2}},
            {**OF_VIDEOS, **ON_HOST},
        ),
        (
            {"processor_config": {"image_processor": MEAN, "video_processor": {"fps": 2}}},
            {**OF_VIDEOS, **ON_HOST},
        ),
    ],
)
def test_pixels_of_videos_are_scaled_on_the_device_only_as_those_of_pictures_are(
    tmp_path, files, arguments
):
    write(tmp_path, config=VISION, **files)
    assert sight_arguments(tmp_path, 0, 2) == arguments
    without = sight_arguments(tmp_path, 4, 0)
    assert without == SIGHT


def test_a_model_that_sees_says_that_torchvision_is_missing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VISION))
    is_there = importlib.util.find_spec("torchvision") is not None
    assert ("need torchvision" in missing_for_sight(tmp_path)) == (not is_there)
    (tmp_path / "config.json").write_text("{}")
    assert missing_for_sight(tmp_path) == ""


def test_by_default_prompts_share_their_beginnings_and_whether_to_compile_is_left_to_vllm():
    arguments = VLLMConfig().engine_arguments()
    assert arguments["enable_prefix_caching"] is True
    assert "enforce_eager" not in arguments
    assert VLLMConfig(prefix_caching=False).engine_arguments()["enable_prefix_caching"] is False


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "dtype", "backend"),
    [
        (LATENT, "auto", None),  # vLLM's choice: on AMX where there is AMX
        (LATENT, "bfloat16", None),
        (LATENT, "float32", "CPU_MLA"),
        ({**LATENT, "dtype": "float32"}, "auto", "CPU_MLA"),
        ({**LATENT, "v_head_dim": 48}, "auto", "CPU_MLA"),
        ({"text_config": LATENT}, "float16", "CPU_MLA"),
        ({"dtype": "float32", "text_config": None}, "auto", None),
    ],
)
def test_latent_attention_that_amx_cannot_compute_goes_without_it(tmp_path, config, dtype, backend):
    write(tmp_path, config=config)
    arguments = cpu_arguments(tmp_path, dtype)
    assert arguments.get("attention_backend") == backend
    assert ("compilation_config" in arguments) == ("kv_lora_rank" in json.dumps(config))


@pytest.mark.parametrize(("compiled", "is_eager"), [("auto", True), ("yes", False), ("no", True)])
def test_on_a_cpu_nothing_is_compiled_unless_it_is_asked_for(tmp_path, compiled, is_eager):
    asked = VLLMConfig(compiled=compiled).engine_arguments()
    assert {**cpu_arguments(tmp_path), **asked}["enforce_eager"] is is_eager
    assert "enable_prefix_caching" not in cpu_arguments(tmp_path)
