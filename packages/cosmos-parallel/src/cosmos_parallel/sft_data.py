"""Supervised examples: JSON lines in, token ids with a mask of what is trained on out.

A line has ``prompt`` and ``response`` (strings), or ``messages`` in chat form; then every message
of the assistant is trained on, and nothing else. Token ids are made here once and travel on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cosmos_parallel.errors import SftDataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Any: a line of a user's file, before it is looked at
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SftExample:
    """One example of T tokens.

    Attributes:
        token_ids: int32[T].
        trainable: bool[T], true where the model should have said the token.
    """

    token_ids: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class SftData:
    """A data set in memory.

    Attributes:
        examples: in the order of the file.
        num_dropped: examples left out because they were longer than allowed.
    """

    examples: tuple[SftExample, ...]
    num_dropped: int = 0


def load_sft_data(
    path: Path, tokenizer: "PreTrainedTokenizerBase", *, max_tokens: int = 4096
) -> SftData:
    """Read a JSON-lines file; examples longer than ``max_tokens`` are dropped and counted.

    Raises:
        SftDataError: if the file is missing or empty, or a line is not an example; the message
            names file, line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SftDataError(f"cannot read SFT data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SftDataError(f"SFT data {path} is not UTF-8 text: {error}") from error
    examples: list[SftExample] = []
    num_dropped = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            example = encode_example(
                _parse(line, f"{path}:{number}"), tokenizer, f"{path}:{number}"
            )
            if len(example.token_ids) > max_tokens:
                num_dropped += 1
            else:
                examples.append(example)
    if not examples:
        raise SftDataError(
            f"SFT data {path} has no example of at most {max_tokens} tokens "
            f"({num_dropped} are longer)"
        )
    return SftData(examples=tuple(examples), num_dropped=num_dropped)


def encode_example(
    row: Row, tokenizer: "PreTrainedTokenizerBase", where: str = "example"
) -> SftExample:
    """Turn one row into tokens.

    ``prompt`` is tokenised as a prompt is for generation (with the special tokens that the
    tokenizer puts before a text), ``response`` by itself and ended by the end-of-sequence token:
    the boundary between them is where generation would begin.

    Args:
        row: ``{"prompt", "response"}`` or ``{"messages"}``.
        tokenizer: of the model.
        where: named in errors.

    Raises:
        SftDataError: if a field is missing or has another type, or the chat template cannot be
            used.
    """
    if "messages" in row:
        return _encode_chat(row["messages"], tokenizer, where)
    for field in ("prompt", "response"):
        if not isinstance(row.get(field), str):
            found = f"is {type(row[field]).__name__}" if field in row else "is missing"
            raise SftDataError(
                f"{where}: field {field!r} {found}; a row has 'prompt' and 'response' as text, "
                f"or 'messages' (found: {', '.join(sorted(row)) or 'nothing'})"
            )
    prompt = _token_ids(tokenizer(row["prompt"]))
    response = _token_ids(tokenizer(row["response"], add_special_tokens=False))
    end = tokenizer.eos_token_id
    if isinstance(end, int):
        prompt = prompt[:-1] if prompt[-1:] == [end] else prompt
        response = [*response, end]
    return _example([(prompt, False), (response, True)])


def _encode_chat(messages: object, tokenizer: "PreTrainedTokenizerBase", where: str) -> SftExample:
    if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
        raise SftDataError(
            f"{where}: field 'messages' must be a list of {{'role', 'content'}} with text in both"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise SftDataError(f"{where}: field 'messages' has no message of the assistant to train on")
    if tokenizer.chat_template is None:
        raise SftDataError(
            f"{where}: has 'messages', but the tokenizer has no chat template; give rows of "
            "'prompt' and 'response', or a tokenizer with a chat template"
        )
    parts: list[tuple[list[int], bool]] = []
    done: list[int] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            for end, trained in ((index, False), (index + 1, True)):
                ids = _apply_template(tokenizer, messages[:end], where, prompting=not trained)
                if ids[: len(done)] != done:
                    raise SftDataError(
                        f"{where}: message {index}: the chat template writes earlier messages "
                        "differently once later ones follow, so what is trained cannot be told "
                        "apart; split the conversation into one row per answer"
                    )
                parts.append((ids[len(done) :], trained))
                done = ids
    return _example(parts)


def _apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict[str, str]],
    where: str,
    *,
    prompting: bool,
) -> list[int]:
    from jinja2 import TemplateError

    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=prompting, tokenize=True, return_dict=True
        )
    except (TemplateError, ValueError) as error:
        raise SftDataError(f"{where}: the chat template refuses the messages: {error}") from error
    return _token_ids(encoded)


def _token_ids(encoded: Any) -> list[int]:
    # Any: a BatchEncoding, whose stubs do not say what its values are
    return [int(token) for token in encoded["input_ids"]]


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def _example(parts: Sequence[tuple[list[int], bool]]) -> SftExample:
    return SftExample(
        token_ids=np.asarray([token for ids, _ in parts for token in ids], dtype=np.int32),
        trainable=np.asarray([trained for ids, trained in parts for _ in ids], dtype=np.bool_),
    )


def _parse(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SftDataError(f"{where}: is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise SftDataError(f"{where}: is a JSON {type(row).__name__}; each line must be an object")
    return row
