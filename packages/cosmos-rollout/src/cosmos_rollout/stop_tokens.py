"""The tokens that end an answer: the tokenizer's, and those that the model was published with."""

import json
from pathlib import Path
from typing import Any

from cosmos_rollout.errors import EngineStartError


def stop_tokens(tokenizer: Any, model_path: Path) -> tuple[int, ...]:
    """Return the tokens after which a model has said what it had to say.

    A tokenizer knows one, and often not the one that ends a turn: Gemma's turns end with
    <end_of_turn>, Phi 3's with <|end|>, calls of tools with <|eom_id|> (Llama), <|call|> (GPT-OSS)
    and <|observation|> (GLM). Those are in ``generation_config.json``, where servers look too.

    Args:
        tokenizer: of transformers; its own comes first.
        model_path: the model's directory.

    Raises:
        EngineStartError: if the file is there and cannot be read.
    """
    path = model_path / "generation_config.json"
    try:
        said: Any = json.loads(path.read_text())["eos_token_id"] if path.is_file() else None
    except KeyError:
        said = None
    except (OSError, TypeError, ValueError) as error:
        raise EngineStartError(f"{path} cannot be read: {error}") from error
    listed = said if isinstance(said, list) else [said]
    found = [tokenizer.eos_token_id, *listed]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))
