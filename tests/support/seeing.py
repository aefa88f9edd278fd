"""Tiny models that see, pictures and videos for them, and processes that can cut these up."""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_models import write_random
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

if TYPE_CHECKING:
    from cosmos_parallel import PictureReader

COLOURS = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 230)}
MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<unk>",
)
LETTERS = (*(chr(code) for code in range(32, 127)), "\n")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARK_IDS = {
    "image_token_id": MARKS.index("<|image_pad|>"),
    "video_token_id": MARKS.index("<|video_pad|>"),
    "vision_start_token_id": MARKS.index("<|vision_start|>"),
    "vision_end_token_id": MARKS.index("<|vision_end|>"),
}
TEXT_SIZES = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_TURNING = TEXT_SIZES | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
_EYE = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14}
_PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_EYE_3 = _EYE | {"out_hidden_size": 32, "num_position_embeddings": 16}
_EYE_3 |= {"deepstack_visual_indexes": [0]}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48}
# of rotary axes: their configuration, its parts of text and of sight, and their processor
FAMILIES = {
    "qwen2_vl": (
        transformers.Qwen2VLConfig,
        _TURNING,
        _EYE | {"embed_dim": 32},
        "Qwen2VLProcessor",
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        _TURNING,
        _EYE | {"out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]},
        "Qwen2_5_VLProcessor",
    ),
    "qwen3_vl": (transformers.Qwen3VLConfig, _TURNING, _EYE_3, "Qwen3VLProcessor"),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeConfig,
        _TURNING | _EXPERTS,
        _EYE_3,
        "Qwen3VLProcessor",
    ),
}
_BESIDE = Path(sys.prefix) / "torchvision"


def can_cut_pictures() -> bool:
    """Whether a process started with `seeing_environment` finds torchvision."""
    return importlib.util.find_spec("torchvision") is not None or _BESIDE.is_dir()


def seeing_environment() -> dict[str, str]:
    """Return what a process needs in its environment to import torchvision, which vLLM wants.

    What this process imports from comes after it.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(_BESIDE), *filter(None, sys.path)])}


def write_seeing_model(folder: Path, *, seed: int = 0, context: int = 512) -> None:
    """Write a tiny Qwen2.5-VL with one token per letter, which reads 28 pixels as one token."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate([*MARKS, *LETTERS])}
    _write_tokenizer(folder, vocabulary, context)
    text = {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # heads of 32, as vLLM's attention on CPUs wants them
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **MARK_IDS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    _write_processor(folder, "Qwen2_5_VLProcessor")


def write_seeing_family(folder: Path, kind: str) -> None:
    """Write a tiny model of one of ``FAMILIES``, with the tokens and pixels of the model above."""
    write_seeing_model(folder)  # for its tokenizer
    make, text, eye, processor = FAMILIES[kind]
    write_random(make(text_config=dict(text), vision_config=dict(eye), **MARK_IDS), folder)
    _write_processor(folder, processor)
    if kind.startswith("qwen3"):
        sizes = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 128 * 28 * 28}}
        video = {"video_processor_type": "Qwen3VLVideoProcessor", **_PATCHES, **sizes}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def write_seeing_world(folder: Path) -> None:
    """Write a tiny model of each of ``FAMILIES``, by its name, pictures (p) and videos (v)."""
    write_pictures(folder / "p")
    write_videos(folder / "v")
    for kind in FAMILIES:
        write_seeing_family(folder / kind, kind)


def reader_of(folder: Path) -> "PictureReader":
    """Return the reader of a model that sees."""
    from cosmos_parallel import PictureReader  # which processes of engines do not load

    reader = PictureReader.of(folder)
    assert reader is not None
    return reader


def _write_processor(folder: Path, processor_class: str) -> None:
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor_class,
        **_PATCHES,
        "min_pixels": 28 * 28,
        "max_pixels": 16 * 28 * 28,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], context: int) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=list(MARKS[3:7]),
        model_max_length=context,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_pictures(
    folder: Path, sizes: Sequence[tuple[int, int]] = ((28, 28), (56, 28), (56, 56))
) -> dict[str, list[str]]:
    """Write plain pictures of each colour, ``red-28x28.png`` and so on; return names by colour."""
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, list[str]] = {}
    for colour, value in COLOURS.items():
        for width, height in sizes:
            name = f"{colour}-{width}x{height}.png"
            Image.new("RGB", (width, height), value).save(folder / name)
            names.setdefault(colour, []).append(name)
    return names


def write_videos(folder: Path) -> dict[str, str]:
    """Write videos of noise that moves, ten frames a second; return names by what is special."""
    from clips import write_frames  # and what it imports, which not all processes have

    folder.mkdir(parents=True, exist_ok=True)
    names = {"plain": (30, 56, 84), "odd": (7, 70, 44), "still": (1, 56, 56)}
    for name, (num_frames, height, width) in names.items():
        noise = np.random.default_rng(len(name)).integers(
            0, 255, (height, width, 3), dtype=np.uint8
        )
        moved = (np.roll(noise, 3 * number, axis=1) for number in range(num_frames))
        write_frames(folder / f"{name}.mp4", moved, fps=10)
    return {name: f"{name}.mp4" for name in names}
