"""Tiny models that see and count tokens of pictures as those of text, and what they are given."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

MARK = 5
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_EYE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}


def _made(kind: str, text: str, eye: str | None, **settings: Any) -> PretrainedConfig:
    words = transformers.CONFIG_MAPPING[text](**_TEXT | settings.pop("words", {}))
    eyes = _EYE | settings.pop("eyes", {})
    vision = transformers.CONFIG_MAPPING[eye](**eyes) if eye else eyes
    return transformers.CONFIG_MAPPING[kind](
        text_config=words, vision_config=vision, image_token_id=MARK, **settings
    )


_WINDOWS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
# by name: the type, its decoder and vision part, and what is set besides
_MADE: Mapping[str, Callable[[], PretrainedConfig]] = {
    "llava": lambda: _made("llava", "llama", "clip_vision_model", vision_feature_layer=-1),
    "llava-pixtral": lambda: _made(
        "llava",
        "mistral",
        "pixtral",
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "vipllava": lambda: _made(
        "vipllava", "llama", "clip_vision_model", vision_feature_layers=[-2, -1]
    ),
    "llava_next": lambda: _made(
        "llava_next",
        "mistral",
        "clip_vision_model",
        vision_feature_layer=-1,
        image_grid_pinpoints=[[28, 56], [56, 28]],
    ),
    "llava_onevision": lambda: _made(
        "llava_onevision",
        "qwen2",
        "siglip_vision_model",
        image_grid_pinpoints=[[28, 56], [56, 28]],
        vision_aspect_ratio="anyres_max_9",
        video_token_id=6,
    ),
    "mistral3": lambda: _made("mistral3", "mistral", "pixtral", vision_feature_layer=-1),
    "internvl": lambda: _made(
        "internvl", "qwen2", None, eyes={"image_size": [28, 28], "patch_size": [7, 7]}
    ),
    "aya_vision": lambda: _made(
        "aya_vision", "cohere2", "siglip_vision_model", vision_feature_layer=-1
    ),
    "cohere2_vision": lambda: _made(
        "cohere2_vision", "cohere2", "siglip_vision_model", alignment_intermediate_size=64
    ),
    # tokens of its pictures see each other both ways, those before as far as a window reaches
    "gemma3": lambda: _made(
        "gemma3", "gemma3_text", "siglip_vision_model", mm_tokens_per_image=4, words=_WINDOWS
    ),
    "idefics3": lambda: _made("idefics3", "llama", None, scale_factor=2),
    "smolvlm": lambda: _made("smolvlm", "llama", None, scale_factor=2),
}
FAMILIES = tuple(_MADE)
_NUM_PICTURES = 3


def config_of(name: str) -> PretrainedConfig:
    """Return the config of one of `FAMILIES`."""
    return _MADE[name]()


def pictures_of(name: str) -> dict[str, Tensor]:
    """Return three pictures as a model of the family is given them."""
    generator = torch.Generator().manual_seed(1)
    settings: Any = config_of(name).vision_config
    size = settings.image_size if isinstance(settings.image_size, int) else settings.image_size[0]
    shape = (3, size, size)
    if name in ("idefics3", "smolvlm"):
        # rows of pictures: two of the first, one of the second and one that is all padding
        pixels = torch.randn(2, 2, *shape, generator=generator)
        pixels[1, 1] = 0.0
        return {"pixel_values": pixels}
    if name in ("llava_next", "llava_onevision"):  # the whole, and two tiles
        pixels = torch.randn(_NUM_PICTURES, 3, *shape, generator=generator)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[28, 56]] * _NUM_PICTURES)}
    pixels = torch.randn(_NUM_PICTURES, *shape, generator=generator)
    if name in ("llava-pixtral", "mistral3"):
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[size, size]] * _NUM_PICTURES)}
    return {"pixel_values": pixels}


def rows_of(tokens_of_one: int) -> Tensor:
    """Return int64[2, T]: two pictures in the first row, one in the second, and other lengths."""
    generator = torch.Generator().manual_seed(2)

    def words(count: int) -> list[int]:
        return torch.randint(7, 64, (count,), generator=generator).tolist()

    picture = [MARK] * tokens_of_one
    first = [*words(3), *picture, *words(2), *picture, *words(4)]
    second = [*words(5), *picture]
    return torch.tensor([first, [*second, *words(len(first) - len(second))]])
