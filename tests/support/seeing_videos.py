"""Tiny models of the families that see videos, and videos for them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import clips
import numpy as np
import torch
from PIL import Image
from seeing import MARK_IDS, write_seeing_model
from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def write_video_model(folder: Path, family: Family, *, seed: int = 0, context: int = 512) -> None:
    """Write a tiny model with one token per letter; its processor would choose frames itself.

    28 pixels of a frame become one token, those of Qwen3-VL 32.
    """
    write_seeing_model(folder, seed=seed, context=context)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    if family != "qwen2_5_vl":
        configuration = json.loads((folder / "config.json").read_text())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _qwen2_vl(configuration) if family == "qwen2_vl" else _qwen3_vl(configuration)
            model.float().save_pretrained(folder)
    if family == "qwen2_vl":
        processor["processor_class"] = "Qwen2VLProcessor"
    if family == "qwen3_vl":
        half = [0.5, 0.5, 0.5]
        processor |= {
            "processor_class": "Qwen3VLProcessor",
            "patch_size": 16,
            "image_mean": half,
            "image_std": half,
            "size": {"shortest_edge": 32 * 32, "longest_edge": 16 * 32 * 32},
        }
        del processor["min_pixels"], processor["max_pixels"]
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    kind = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
    videos = {**processor, "video_processor_type": kind, "do_sample_frames": True, "fps": 1}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


def write_clip(
    path: Path, *, num_frames: int, fps: int, width: int, height: int, seed: int = 0
) -> Path:
    """Write a video of noise, no frame like the other."""
    return clips.write_frames(path, _noise(num_frames, width, height, seed), fps=fps)


def write_frames(folder: Path, *, num_frames: int, width: int, height: int) -> list[str]:
    """Write pictures of noise, the frames of a video; return their paths."""
    paths = [str(folder / f"frame-{width}x{height}-{number}.png") for number in range(num_frames)]
    for path, pixels in zip(paths, _noise(num_frames, width, height, 1), strict=True):
        Image.fromarray(pixels).save(path)
    return paths


def _noise(num_frames: int, width: int, height: int, seed: int) -> Sequence[np.ndarray]:
    """Return plain patches of 7 pixels, which resampling and coding leave something of."""
    shape = (num_frames, -(-height // 7), -(-width // 7), 3)
    coarse = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    return list(coarse.repeat(7, axis=1).repeat(7, axis=2)[:, :height, :width])


def _qwen2_vl(written: dict) -> Qwen2VLForConditionalGeneration:
    text = {**written["text_config"], "model_type": "qwen2_vl_text"}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 1, "num_heads": 2}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **MARK_IDS)
    )


def _qwen3_vl(written: dict) -> Qwen3VLForConditionalGeneration:
    text = {**written["text_config"], "model_type": "qwen3_vl_text", "head_dim": 32}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **MARK_IDS)
    )
