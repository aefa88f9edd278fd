"""Which attention transformers is to run a model with, where its own choice is another model."""

from pathlib import Path
from typing import Any


def attention_of(path: Path | str) -> str | None:
    """Return ``eager`` for a model that bounds its scores (Gemma 2), else ``None``.

    By default transformers takes torch's attention, which drops the bound without a word.

    Args:
        path: directory of a model in Hugging Face form.

    Raises:
        OSError: if there is no such directory, or no config in it.
        ValueError: if transformers does not know such a model.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(path).get_text_config()
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None
