"""A tiny model of pictures and text, pictures for it, and processes that can cut pictures up."""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

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
_BESIDE = Path(sys.prefix) / "torchvision"


def can_cut_pictures() -> bool:
    """Whether a process started with `seeing_environment` finds torchvision."""
    return importlib.util.find_spec("torchvision") is not None or _BESIDE.is_dir()


def seeing_environment() -> dict[str, str]:
    """Return what a process needs in its environment to import torchvision, which vLLM wants."""
    if importlib.util.find_spec("torchvision") is not None:
        return {}
    paths = [str(_BESIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


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
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 16 * 28 * 28,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


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
