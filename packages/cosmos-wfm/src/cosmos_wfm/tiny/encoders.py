"""Text encoders of the real classes, two layers each."""

from typing import Any

from cosmos_wfm.tiny.libraries import library
from cosmos_wfm.tiny.tokenizers import byte_characters, t5_pieces

CLIP_WIDTH = 32
T5_WIDTH = 64


def clip_encoder() -> Any:
    """Return a CLIP text model with projection."""
    transformers = library("transformers")
    size = 2 * len(byte_characters()) + 2
    return transformers.CLIPTextModelWithProjection(
        transformers.CLIPTextConfig(
            vocab_size=size,
            bos_token_id=size - 2,
            eos_token_id=size - 1,
            pad_token_id=size - 1,
            hidden_size=CLIP_WIDTH,
            projection_dim=CLIP_WIDTH,
            intermediate_size=2 * CLIP_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_act="gelu",
        )
    ).eval()


def t5_encoder() -> Any:
    """Return a T5 encoder."""
    transformers = library("transformers")
    return transformers.T5EncoderModel(transformers.T5Config(**_t5_settings(T5_WIDTH))).eval()


def umt5_encoder(width: int) -> Any:
    """Return a UMT5 encoder."""
    transformers = library("transformers")
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5_settings(width))).eval()


def gemma_encoder(tokenizer: Any, width: int) -> Any:
    """Return a Gemma 2 decoder without head."""
    transformers = library("transformers")
    return transformers.Gemma2Model(
        transformers.Gemma2Config(
            vocab_size=len(tokenizer),
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            hidden_size=width,
            intermediate_size=2 * width,
            head_dim=8,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_hidden_layers=2,
            max_position_embeddings=4096,
            attn_implementation="eager",
        )
    ).eval()


def qwen_encoder(tokenizer: Any, width: int, num_layers: int) -> Any:
    """Return a Qwen2.5-VL, of which only the language model is asked."""
    transformers = library("transformers")
    number = tokenizer.get_vocab()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        "rope_theta": 1e6,
        "pad_token_id": number["<|endoftext|>"],
        "bos_token_id": number["<|endoftext|>"],
        "eos_token_id": number["<|im_end|>"],
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": width,
    }
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision,
            vision_start_token_id=number["<|vision_start|>"],
            vision_end_token_id=number["<|vision_end|>"],
            vision_token_id=number["<|vision_pad|>"],
            image_token_id=number["<|image_pad|>"],
            video_token_id=number["<|video_pad|>"],
        )
    ).eval()


def _t5_settings(width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(t5_pieces()),
        "d_model": width,
        "d_kv": 8,
        "d_ff": width,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
