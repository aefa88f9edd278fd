"""Supervised examples: rows in, token ids with a mask of what is trained on out.

A row has ``prompt`` and ``response`` (strings), or ``messages`` in chat form; then every message
of the assistant is trained on, its calls of tools too, and nothing else. Either may have pictures
and videos. Token ids are made here once and travel on.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from cosmos_core.media import MediaError, media_beside, text_of
from cosmos_core.videos import VideoSampling
from cosmos_parallel.errors import SftDataError
from cosmos_parallel.pictures import PictureReader
from cosmos_parallel.sft_examples import SftData, SftExample
from cosmos_parallel.sft_pictures import take_media, widen
from cosmos_parallel.sft_rows import Row, read_rows_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# a template that marks what the assistant says
_MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SftFormat:
    """How rows are read.

    Attributes:
        prompt: field of the prompt.
        response: field of the response.
        messages: field of a conversation; a row that has it needs no other.
        images: field of a row's pictures, which parts of its messages may name themselves; a row
            without ``images`` may have its one picture as ``image``.
        videos: field of a row's videos, likewise.
        video_sampling: which frames are shown of videos that do not say it themselves.
        split: which split of a directory.
        max_tokens: longer examples are dropped and counted.
    """

    prompt: str = "prompt"
    response: str = "response"
    messages: str = "messages"
    images: str = "images"
    videos: str = "videos"
    video_sampling: VideoSampling = field(default_factory=VideoSampling)
    split: str = "train"
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        """Check the length.

        Raises:
            ValueError: if no example could have it.
        """
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be 2 or more")


def load_sft_data(
    path: Path | str,
    tokenizer: "PreTrainedTokenizerBase",
    rows: SftFormat | None = None,
    reader: PictureReader | None = None,
) -> SftData:
    """Read a data set into memory as tokens.

    Of pictures only the sizes are read, and of videos which frames are shown; their paths are
    relative to the file that names them.

    Args:
        path: JSON lines, Parquet, or a directory (see ``read_rows``).
        tokenizer: of the model.
        rows: which fields hold what; the defaults when ``None``.
        reader: of the model; ``None`` for one that sees nothing.

    Raises:
        SftDataError: if the data is missing or empty, a row is not an example, or a picture or
            video is not there; the message names file, line and field.
    """
    rows = rows or SftFormat()
    examples: list[SftExample] = []
    num_dropped = 0
    for folder, where, row in read_rows_in(Path(path), rows.split):
        example = encode_example(row, tokenizer, where, rows=rows, reader=reader, folder=folder)
        if len(example.token_ids) > rows.max_tokens:
            num_dropped += 1
        else:
            examples.append(example)
    if not examples:
        raise SftDataError(
            f"SFT data {path} has no example of at most {rows.max_tokens} tokens "
            f"({num_dropped} are longer)"
        )
    return SftData(examples=tuple(examples), num_dropped=num_dropped, reader=reader)


def encode_example(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    where: str = "example",
    *,
    rows: SftFormat | None = None,
    reader: PictureReader | None = None,
    folder: Path = Path(),
) -> SftExample:
    """Turn one row into tokens.

    The prompt is tokenised as a prompt is for generation (with the special tokens that the
    tokenizer puts before a text), the response by itself and ended by the end-of-sequence token:
    the boundary between them is where generation would begin. Of a conversation the assistant's
    messages are trained on: those parts that the chat template marks as generated, or else all
    that follows where it would prompt for one. A prompt with pictures or videos and its response
    are such a conversation.

    Args:
        row: ``{"prompt", "response"}`` or ``{"messages"}``, and ``tools``, ``images`` or
            ``videos`` if there are any.
        tokenizer: of the model.
        where: named in errors.
        rows: which fields hold what; the defaults when ``None``.
        reader: of the model; ``None`` for one that sees nothing.
        folder: paths of pictures and videos are relative to it.

    Raises:
        SftDataError: if a field is missing or has another type, a picture or video cannot
            be read, or the chat template cannot be used.
    """
    rows = rows or SftFormat()
    try:
        shown = {name: media_beside(row, getattr(rows, name)) for name in ("images", "videos")}
    except MediaError as error:
        raise SftDataError(f"{where}: {error}") from error
    take = partial(take_media, **shown, folder=folder, sampling=rows.video_sampling)
    if row.get(rows.messages) is not None:
        subject = f"{where}: field {rows.messages!r}"
        messages, references = take(_checked(row[rows.messages], subject), subject)
        tools = _tools_of(row, where)
        chat = _Chat(tokenizer=tokenizer, where=where, messages=messages, tools=tools)
        return widen(_encode_chat(chat, rows.messages), references, reader, where)
    _check_texts(row, rows, where)
    if not any(shown.values()):
        return widen(_encode_texts(row, tokenizer, where, rows), (), reader, where)
    said = [
        {"role": role, "content": row[name]}
        for role, name in (("user", rows.prompt), ("assistant", rows.response))
    ]
    named = rows.images if shown["images"] else rows.videos
    messages, references = take(said, f"{where}: {named!r}")
    chat = _Chat(tokenizer=tokenizer, where=where, messages=messages)
    return widen(_encode_chat(chat, named), references, reader, where)


def check_example(row: Row, where: str, rows: SftFormat) -> None:
    """Check that a row has the fields of an example, which needs no tokenizer.

    Raises:
        SftDataError: naming ``where`` and the field that is missing or of another type.
    """
    if row.get(rows.messages) is None:
        _check_texts(row, rows, where)


def _check_texts(row: Row, rows: SftFormat, where: str) -> None:
    for name in (rows.prompt, rows.response):
        if not isinstance(row.get(name), str):
            found = f"is {type(row[name]).__name__}" if name in row else "is missing"
            or_messages = f", or {rows.messages!r}" if rows.messages else ""
            raise SftDataError(
                f"{where}: field {name!r} {found}; a row has {rows.prompt!r} and "
                f"{rows.response!r} as text{or_messages} "
                f"(found: {', '.join(sorted(row)) or 'nothing'})"
            )


def _encode_texts(
    row: Row, tokenizer: "PreTrainedTokenizerBase", where: str, rows: SftFormat
) -> SftExample:
    try:
        prompt = _token_ids(tokenizer(row[rows.prompt]))
        response = _token_ids(tokenizer(row[rows.response], add_special_tokens=False))
    except TypeError as error:  # half of a character outside the first plane, as \\ud83d, is
        raise SftDataError(
            f"{where}: the tokenizer does not take its text, which has broken Unicode: {error}"
        ) from error
    end = tokenizer.eos_token_id
    if isinstance(end, int):
        # one that the tokenizer adds; it may also be what the prompt's text ends with, or begins
        is_added = prompt[-1:] == [end] and _token_ids(tokenizer("a"))[-1] == end
        prompt = prompt[:-1] if is_added else prompt
        response = [*response, end]
    return _example([(prompt, False), (response, True)])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chat:
    """One conversation under one template; ``where`` is named in errors."""

    tokenizer: "PreTrainedTokenizerBase"
    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = field(default=None)

    def encode(self, end: int, *, prompting: bool = False, marking: bool = False) -> Any:
        """Apply the template to the messages before ``end``.

        Args:
            end: how many messages.
            prompting: add what would prompt for an answer.
            marking: say which tokens the template marks as generated.
        """
        form = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": marking}
        return self._applied(end, prompting, form)

    def write(self, end: int, *, prompting: bool) -> str:
        """Apply the template as `encode` does, for its text."""
        return str(self._applied(end, prompting, {"tokenize": False}))

    def _applied(self, end: int, prompting: bool, form: dict[str, Any]) -> Any:
        from jinja2 import TemplateError

        try:
            # a text, or a BatchEncoding, whose stubs do not say what its values are
            applied: Any = self.tokenizer.apply_chat_template(
                self.messages[:end], tools=self.tools, add_generation_prompt=prompting, **form
            )
        except (TemplateError, ValueError, TypeError) as error:  # whatever its expressions raise
            raise SftDataError(
                f"{self.where}: the chat template refuses the messages: {error}"
            ) from error
        return applied


def _encode_chat(chat: _Chat, name: str) -> SftExample:
    """Return a conversation as tokens, those of a picture still one mark; ``name`` is its field."""
    roles = sorted({str(message["role"]) for message in chat.messages})
    if "assistant" not in roles:
        raise SftDataError(
            f"{chat.where}: field {name!r} has no message of the assistant to train on (roles: "
            f"{', '.join(roles) or 'none'}; that of the answers must be 'assistant')"
        )
    if chat.tokenizer.chat_template is None:
        raise SftDataError(
            f"{chat.where}: has {name!r}, but the tokenizer has no chat template; give rows of "
            "'prompt' and 'response', or a tokenizer with a chat template"
        )
    if _MARKS_GENERATION.search(str(chat.tokenizer.chat_template)):
        return _marked_by_template(chat)
    return _marked_by_prefixes(chat)


def _marked_by_template(chat: _Chat) -> SftExample:
    encoded = chat.encode(len(chat.messages), marking=True)
    mask = np.asarray(encoded["assistant_masks"], dtype=np.bool_)
    if not mask.any():
        raise SftDataError(
            f"{chat.where}: the chat template marks nothing as generated, so nothing is trained on"
        )
    return SftExample(
        token_ids=np.asarray(_token_ids(encoded), dtype=np.int32),
        trainable=mask,
    )


def _marked_by_prefixes(chat: _Chat) -> SftExample:
    """Tell the assistant's tokens by what the template adds for each of its messages."""
    parts: list[tuple[list[int], bool]] = []
    done: list[int] = []
    before = (0, False)
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            for end, trained in ((index, False), (index + 1, True)):
                ids = _token_ids(chat.encode(end, prompting=not trained)) if end else _opening(chat)
                is_longer = ids[: len(done)] == done
                added = ids[len(done) :] if is_longer else _added_text(chat, before, (end, trained))
                parts.append((added, trained))
                done, before = ids, (end, trained)
    return _example(parts)


def _added_text(chat: _Chat, before: tuple[int, bool], now: tuple[int, bool]) -> list[int]:
    """Return the tokens of what the template adds, where its first would join those before it.

    An answer that begins with a new line does after a prompt that ends with one. Where generation
    begins, a token does.

    Args:
        chat: the conversation.
        before: up to which message, and whether with its text or what prompts for it.
        now: likewise.
    """
    written, longer = (chat.write(end, prompting=not said) for end, said in (before, now))
    if not longer.startswith(written):
        raise SftDataError(
            f"{chat.where}: message {now[0] - now[1]}: the chat template writes earlier messages "
            "differently once later ones follow, so what is trained cannot be told apart; split "
            "the conversation into one row per answer"
        )
    return _token_ids(chat.tokenizer(longer[len(written) :], add_special_tokens=False))


def _opening(chat: _Chat) -> list[int]:
    """Return what the template writes before the text of a first message, if the assistant's.

    That is what it would prompt with, and what comes before: a system text of its own, say. Where
    the text begins is seen by comparison with another text.
    """
    asked = replace(chat, messages=[{"role": "user", "content": "a"}])
    plain, prompting = (_token_ids(asked.encode(1, prompting=asks)) for asks in (False, True))
    prompt = prompting[len(plain) :]
    content = text_of(chat.messages[0]["content"])
    other = {"role": "assistant", "content": "b" if content.startswith("a") else "a"}
    said = _token_ids(chat.encode(1))
    pairs = zip(said, _token_ids(replace(chat, messages=[other]).encode(1)), strict=False)
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for end in range(num_same, len(prompt) - 1, -1):
        if prompt and said[end - len(prompt) : end] == prompt:
            return said[:end]
    raise SftDataError(
        f"{chat.where}: message 0 is the assistant's, and the chat template does not say where its "
        "text begins; put a message of the user before it, or leave it out"
    )


def _token_ids(encoded: Any) -> list[int]:
    # Any: a BatchEncoding, whose stubs do not say what its values are
    return [int(token) for token in encoded["input_ids"]]


def _tools_of(row: Row, where: str) -> list[Any] | None:
    """Return a row's tools; many tables have them as a text of JSON."""
    given: object = row.get("tools") or None
    try:
        tools = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        tools = given
    if tools is not None and not isinstance(tools, list):
        raise SftDataError(f"{where}: field 'tools' must be a list of schemas, or the JSON of one")
    return cast("list[Any]", tools) or None


def _checked(messages: object, subject: str) -> list[dict[str, Any]]:
    """Return messages as templates take them."""
    wanted = (
        "must be a list of {'role', 'content'} with text in both, or a list of parts as content; "
        "an assistant's message with a list of 'tool_calls' needs no content"
    )
    if not isinstance(messages, list):
        raise SftDataError(f"{subject} is {type(messages).__name__}; it {wanted}")
    given = cast("list[object]", messages)
    for index, message in enumerate(given):
        if not _is_message(message):
            raise SftDataError(f"{subject} {wanted} (message {index} is {_shape(message)})")
    return [_without_absent(message) for message in cast("list[dict[str, Any]]", given)]


def _shape(message: object) -> str:
    """Say what a message is made of."""
    if not isinstance(message, dict):
        return type(message).__name__
    fields = cast("dict[object, object]", message)
    said = (f"{name!r}: {type(value).__name__}" for name, value in fields.items())
    return f"{{{', '.join(said)}}}"


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content, calls = message.get("content"), message.get("tool_calls")
    if message["role"] == "assistant" and isinstance(calls, list) and calls:
        return content is None or isinstance(content, str)
    return isinstance(content, str) or (isinstance(content, list) and bool(content))


def _without_absent(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content and with what else it has.

    A table has a column for what only some messages have; templates ask whether a key is there.
    """
    return {"content": None} | {
        name: value for name, value in message.items() if value is not None or name == "content"
    }


def _example(parts: Sequence[tuple[list[int], bool]]) -> SftExample:
    return SftExample(
        token_ids=np.asarray([token for ids, _ in parts for token in ids], dtype=np.int32),
        trainable=np.asarray([trained for ids, trained in parts for _ in ids], dtype=np.bool_),
    )
