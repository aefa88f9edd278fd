"""Tokenizers of the real classes, whose vocabularies are characters and bytes."""

from typing import Any

from cosmos_wfm.tiny.libraries import library

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def clip_tokenizer() -> Any:
    """Return a byte-level CLIP tokenizer; its last two tokens begin and end a text."""
    characters = byte_characters()
    pieces = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return library("transformers").CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    """Return a unigram tokenizer of single characters."""
    return library("transformers").T5TokenizerFast(
        vocab=t5_pieces(), extra_ids=0, model_max_length=512
    )


def t5_pieces() -> list[tuple[str, float]]:
    """Return unigram pieces with their scores: the printable characters, one by one."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    return special + [(chr(code), -2.0) for code in range(ord("!"), ord("~") + 1)]


def gemma_tokenizer() -> Any:
    """Return a tokenizer of characters that falls back to bytes."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return library("transformers").GemmaTokenizer(
        vocab=vocabulary, merges=[], model_max_length=8192
    )


def qwen_tokenizer() -> Any:
    """Return a byte-level Qwen tokenizer with a chat template of text messages."""
    pieces = [*byte_characters(), *_QWEN_SPECIAL]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = library("transformers").Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        model_max_length=512,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def byte_characters() -> list[str]:
    """Return the 256 printable stand-ins for bytes that byte-level BPE vocabularies use."""
    printable = [
        code
        for first, last in (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
        for code in range(ord(first), ord(last) + 1)
    ]
    others = len(set(range(256)) - set(printable))
    return [chr(code) for code in [*printable, *range(256, 256 + others)]]
