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
    "worker_cls": "cosmos_rollout.engines.vllm_workers.EmulatingCPUWorker",
}
# where configs say how many tokens a model was made for, and scalings after which they say it
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_SCALED_LENGTH = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_VIDEO_PROCESSOR = "video_preprocessor_config.json"
_NORMALISING = ("image_mean", "image_std", "rescale_factor", "do_normalize", "do_rescale")
ALWAYS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,  # token ids in and out; text never passes through
    "generation_config": "vllm",  # sampling settings come with each request, not with the model
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,
}


def cpu_arguments(model_path: Path, dtype: str = "auto") -> dict[str, Any]:
    """What vLLM needs to be told on a CPU.

    Its kernel that turns queries takes the distance of heads for that of tokens where queries have
    three dimensions, as in latent attention (DeepSeek-V3, Moonlight): there torch's own operations
    take its place. Latent attention on AMX, vLLM's choice where a CPU has it, is for bfloat16 and
    heads of a multiple of 32 alone; all others are given to the kernel without AMX.

    Args:
        model_path: With the model's ``config.json``.
        dtype: Of weights and computation; "auto" is what the model says.
    """
    arguments: dict[str, Any] = dict(_CPU_ARGUMENTS)
    config = _json(model_path / "config.json")
    text = {**config, **(config.get("text_config") or {})}
    if "kv_lora_rank" in text:
        arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        said = text.get("dtype") or text.get("torch_dtype")
        is_half = (said if dtype == "auto" else dtype) == "bfloat16"
        if not is_half or any(
            text.get(name, 0) % 32 for name in ("qk_nope_head_dim", "v_head_dim")
        ):
            arguments["attention_backend"] = "CPU_MLA"
    return arguments


def sight_arguments(
    model_path: Path, images_per_prompt: int, videos_per_prompt: int
) -> dict[str, Any]:
    """Return what vLLM is to be told of a model that sees; nothing for one of text alone.

    A model sees if it has a part for vision and says how pictures are cut up. Its tokenizer has
    to be loaded then, which the processor of pictures asks for. vLLM scales pixels on the device
    by the mean that the model names for pictures: not where it leaves that to its class, or has
    another for videos.
    """
    if not _has_vision(model_path):
        return {}
    has_processor = any((model_path / name).exists() for name in _PROCESSORS)
    if not has_processor or not (images_per_prompt or videos_per_prompt):
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    arguments: dict[str, Any] = {
        "limit_mm_per_prompt": {"image": images_per_prompt, "video": videos_per_prompt},
        "skip_tokenizer_init": False,
    }
    of_pictures, of_videos = _normalising(model_path)
    if "image_mean" not in of_pictures or (videos_per_prompt and of_videos != of_pictures):
        arguments["mm_device_do_normalize"] = False
    return arguments


def missing_for_sight(model_path: Path) -> str:
    """Return what a model that sees is lacking here, in words; empty if nothing is."""
    if not _has_vision(model_path) or importlib.util.find_spec("torchvision") is not None:
        return ""
    return "models that see need torchvision, which is not installed where vLLM would find it"


def _normalising(model_path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what a model says of scaling pixels of pictures, and of videos."""
    simple, joint = (_json(model_path / name) for name in _PROCESSORS)
    pictures = joint.get("image_processor") or simple or joint
    videos = joint.get("video_processor") or _json(model_path / _VIDEO_PROCESSOR) or pictures
    found = [{key: of[key] for key in _NORMALISING if key in of} for of in (pictures, videos)]
    return found[0], found[1]


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _has_vision(model_path: Path) -> bool:
    return "vision_config" in _json(model_path / "config.json")


def longest_context(model_path: Path) -> int | None:
    """Return how many tokens of prompt and response vLLM lets a model have; ``None``: any number.

    That is what the model's config says, times the factor of those rotary scalings whose config
    names the length before them.

    Args:
        model_path: a local Hugging Face model directory.
    """
    from transformers import AutoConfig

    # Any: of its own class in each model
    settings: Any = AutoConfig.from_pretrained(model_path).get_text_config()
    given = [getattr(settings, name, None) for name in _LENGTHS]
    lengths = [length for length in given if length is not None]
    own: int | None = getattr(settings, "model_max_length", None) or min(lengths, default=None)
    if own is None or "gemma3" in settings.model_type:  # whose length is after the scaling
        return own
    rope: Mapping[str, Any] = getattr(settings, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if kind]
    factors = [
        kind.get("factor") or 1.0 for kind in kinds if kind.get("rope_type") not in _SCALED_LENGTH
    ]
    return int(own * max(factors, default=1.0))
