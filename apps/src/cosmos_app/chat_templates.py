"""Whether a model's tokenizer can write a conversation."""

from pathlib import Path
from typing import Any

from cosmos_app.errors import DataError


def require_chat_template(model: Path | None, what: str) -> None:
    """Check that a tokenizer has a chat template that takes a question.

    Args:
        model: its directory; ``None`` for the model that is built, whose tokenizer has none.
        what: wants it.

    Raises:
        DataError: if it has none.
    """
    if model is None:
        raise DataError(
            f"{what} needs a chat template, which the model that is built for a run has not; name "
            "one that has by model.path"
        )
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)  # of any model
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template may raise anything
        raise DataError(
            f"{what} needs a chat template that takes a question; that of model.path={model} does "
            f"not: {error}"
        ) from error
