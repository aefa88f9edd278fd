"""Whether a tokenizer knows words, which transformers does not ask when it loads one."""

from typing import Any


def has_words(tokenizer: Any) -> bool:
    """Return whether a tokenizer of transformers has more tokens than those added to it.

    Where the files of its vocabulary are missing, as after a download that was cut short,
    transformers 5 makes some classes (Qwen2's, Gemma's, GPT-2's) of special tokens alone: a text
    is no token to them, or unknown ones.
    """
    known: set[str] = set(tokenizer.get_vocab())
    return bool(known - set(tokenizer.get_added_vocab()) - set(tokenizer.all_special_tokens))
