"""A complete Stable Diffusion 3 pipeline of 0.2 M random weights, built without any download.

Real component classes and tokenizers, the released scheduler and latent settings; only widths are
small. For tests, demonstrations and trying a recipe before a real model is there.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

_TEXT_WIDTH = 32
_JOINT_WIDTH = 64
_LATENT_CHANNELS = 4
_COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 30),
    "blue": (30, 30, 220),
    "yellow": (220, 220, 30),
    "white": (250, 250, 250),
    "black": (5, 5, 5),
}


def tiny_sd3_pipeline(*, seed: int = 0, num_layers: int = 2, width: int = 32) -> Any:
    """Build a ``StableDiffusion3Pipeline`` for images of multiples of 4 pixels, 32 by default.

    Args:
        seed: of the weights; the global random state is left as it was.
        num_layers: of the transformer.
        width: of the transformer, a multiple of 16.

    Returns:
        The pipeline, in evaluation mode (diffusers has no usable type for it).
    """
    diffusers = _library("diffusers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = diffusers.StableDiffusion3Pipeline(
            transformer=_transformer(num_layers, width).eval(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae().eval(),
            text_encoder=_clip_encoder().eval(),
            tokenizer=_clip_tokenizer(),
            text_encoder_2=_clip_encoder().eval(),
            tokenizer_2=_clip_tokenizer(),
            text_encoder_3=_t5_encoder().eval(),
            tokenizer_3=_t5_tokenizer(),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_captions(directory: Path, *, size: int = 32) -> None:
    """Write six pictures of a coloured square on grey, with captions, into a new directory.

    Args:
        directory: made if it is not there; holds ``0001.png`` and ``0001.json`` and so on.
        size: of the pictures, in pixels.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for number, (name, colour) in enumerate(_COLOURS.items(), start=1):
        picture = Image.new("RGB", (size, size), (128, 128, 128))
        picture.paste(colour, (size // 4, size // 4, 3 * size // 4, 3 * size // 4))
        picture.save(directory / f"{number:04}.png")
        caption = json.dumps({"prompt": f"a {name} square"})
        (directory / f"{number:04}.json").write_text(caption)


def _transformer(num_layers: int, width: int) -> Any:
    diffusers = _library("diffusers")
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_layers=num_layers,
        num_attention_heads=4,
        attention_head_dim=width // 4,
        caption_projection_dim=width,
        joint_attention_dim=_JOINT_WIDTH,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
    )


def _vae() -> Any:
    diffusers = _library("diffusers")
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=_LATENT_CHANNELS,
        sample_size=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5305,
    )


def _clip_encoder() -> Any:
    transformers = _library("transformers")
    size = 2 * len(_byte_characters()) + 2
    return transformers.CLIPTextModelWithProjection(
        transformers.CLIPTextConfig(
            vocab_size=size,
            bos_token_id=size - 2,
            eos_token_id=size - 1,
            pad_token_id=size - 1,
            hidden_size=_TEXT_WIDTH,
            projection_dim=_TEXT_WIDTH,
            intermediate_size=2 * _TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_act="gelu",
        )
    )


def _clip_tokenizer() -> Any:
    transformers = _library("transformers")
    characters = _byte_characters()
    pieces = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _t5_encoder() -> Any:
    transformers = _library("transformers")
    return transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=len(_t5_pieces()),
            d_model=_JOINT_WIDTH,
            d_kv=8,
            d_ff=_JOINT_WIDTH,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def _t5_tokenizer() -> Any:
    transformers = _library("transformers")
    return transformers.T5TokenizerFast(vocab=_t5_pieces(), extra_ids=0, model_max_length=512)


def _t5_pieces() -> list[tuple[str, float]]:
    """Return unigram pieces with their scores: the printable characters, one by one."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    return special + [(chr(code), -2.0) for code in range(ord("!"), ord("~") + 1)]


def _byte_characters() -> list[str]:
    """Return the 256 printable stand-ins for bytes that byte-level BPE vocabularies use."""
    printable = [
        code
        for first, last in (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
        for code in range(ord(first), ord(last) + 1)
    ]
    others = len(set(range(256)) - set(printable))
    return [chr(code) for code in [*printable, *range(256, 256 + others)]]


def _library(name: str) -> Any:
    """Import late and without types: both libraries are lazy modules that checkers misread."""
    return importlib.import_module(name)
