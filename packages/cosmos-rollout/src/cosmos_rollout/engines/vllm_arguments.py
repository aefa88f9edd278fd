"""What vLLM is told beside the settings: what it needs on a CPU, and of a model that sees."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CPU_ARGUMENTS = {
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "enforce_eager": True,
    # After a part of a prompt vLLM winds the request's generator back, which torch's on a CPU
    # cannot: more prompt tokens than fit into one step would end the engine.
    "enable_chunked_prefill": False,
}
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
ALWAYS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,  # token ids in and out; text never passes through
    "generation_config": "vllm",  # sampling settings come with each request, not with the model
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,
}


def cpu_arguments(model_path: Path) -> dict[str, Any]:
    """What vLLM needs to be told on a CPU.

    Its kernel that turns queries takes the distance of heads for that of tokens where queries have
    three dimensions, as in latent attention (DeepSeek-V3, Moonlight): there torch's own operations
    take its place.
    """
    arguments: dict[str, Any] = dict(_CPU_ARGUMENTS)
    config = model_path / "config.json"
    if config.exists() and "kv_lora_rank" in json.loads(config.read_text()):
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


def sight_arguments(model_path: Path, images_per_prompt: int) -> dict[str, Any]:
    """Return what vLLM is to be told of a model that sees; nothing for one of text alone.

    A model sees if it has a part for vision and says how pictures are cut up. Its tokenizer has
    to be loaded then, which the processor of pictures asks for. Where it leaves the mean of pixels
    to its class, vLLM would take another when it scales them on the device.
    """
    if not _has_vision(model_path):
        return {}
    files = [model_path / name for name in _PROCESSORS if (model_path / name).exists()]
    if not files or not images_per_prompt:
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    arguments: dict[str, Any] = {
        "limit_mm_per_prompt": {"image": images_per_prompt, "video": 0},
        "skip_tokenizer_init": False,
    }
    if not any('"image_mean"' in file.read_text() for file in files):
        arguments["mm_device_do_normalize"] = False
    return arguments


def missing_for_sight(model_path: Path) -> str:
    """Return what a model that sees is lacking here, in words; empty if nothing is."""
    if not _has_vision(model_path) or importlib.util.find_spec("torchvision") is not None:
        return ""
    return "models that see need torchvision, which is not installed where vLLM would find it"


def _has_vision(model_path: Path) -> bool:
    file = model_path / "config.json"
    return file.exists() and "vision_config" in json.loads(file.read_text())
