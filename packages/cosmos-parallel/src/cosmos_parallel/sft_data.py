"""Supervised examples: rows in, token ids with a mask of what is trained on out.

A row has ``prompt`` and ``response`` (strings), or ``messages`` in chat form; then every message
of the assistant is trained on, its calls of tools too, and nothing else. Either may have pictures
and videos. Token ids are made here once and travel on.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cosmos_core.media import MediaError, media_beside
from cosmos_core.videos import VideoSampling
from cosmos_parallel.errors import SftDataError
from cosmos_parallel.pictures import PictureReader
from cosmos_parallel.sft_chats import Chat, encode_chat, joined, token_ids_of
from cosmos_parallel.sft_examples import SftData, SftExample
from cosmos_parallel.sft_pictures import take_media, widen
from cosmos_parallel.sft_rows import Row, read_rows_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    found = encode_rows(read_rows_in(Path(path), rows.split), tokenizer, rows, reader)
    require_examples(Path(path), rows, len(found.examples), found.num_dropped)
    return found


def encode_rows(
    given: Iterable[tuple[Path, str, Row]],
    tokenizer: "PreTrainedTokenizerBase",
    rows: SftFormat,
    reader: PictureReader | None,
) -> SftData:
    """Turn rows into tokens, but for what is too long; it may be all of them.

    Args:
        given: each with its folder and its place, as `read_rows_in` gives them.
        tokenizer: of the model.
        rows: which fields hold what.
        reader: of the model; ``None`` for one that sees nothing.

    Raises:
        SftDataError: as `encode_examples`.
    """
    examples: list[SftExample] = []
    row_sizes: list[int] = []
    num_dropped = 0
    for folder, where, row in given:
        made = encode_examples(row, tokenizer, where, rows=rows, reader=reader, folder=folder)
        kept = [example for example in made if len(example.token_ids) <= rows.max_tokens]
        examples += kept
        row_sizes += [len(kept)] if kept else []
        num_dropped += len(made) - len(kept)
    return SftData(
        examples=tuple(examples),
        num_dropped=num_dropped,
        reader=reader,
        row_sizes=tuple(row_sizes),
    )


def require_examples(path: Path, rows: SftFormat, num_examples: int, num_dropped: int) -> None:
    """Look whether there is any example of a data set.

    Raises:
        SftDataError: if all are too long, or there are no rows.
    """
    if not num_examples:
        raise SftDataError(
            f"data {path} has no example of at most {rows.max_tokens} tokens "
            f"({num_dropped} are longer)"
        )


def encode_examples(
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    where: str = "example",
    *,
    rows: SftFormat | None = None,
    reader: PictureReader | None = None,
    folder: Path = Path(),
) -> tuple[SftExample, ...]:
    """Turn one row into tokens.

    The prompt is tokenised as a prompt is for generation (with the special tokens that the
    tokenizer puts before a text), the response by itself and ended by the end-of-sequence token:
    the boundary between them is where generation would begin. Of a conversation the assistant's
    messages are trained on: those parts that the chat template marks as generated, or else all
    that follows where it would prompt for one. A prompt with pictures or videos and its response
    are such a conversation.

    It is one example, or several where the template writes earlier messages differently once later
    ones follow, as those that leave out earlier thoughts do (Qwen3): each answer is trained once,
    after what a model would be shown before it.

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
        chat = Chat(tokenizer=tokenizer, where=where, messages=messages, tools=tools)
        return _widened(chat, rows.messages, references, reader)
    _check_texts(row, rows, where)
    if not any(shown.values()):
        return (widen(_encode_texts(row, tokenizer, where, rows), (), reader, where),)
    said = [
        {"role": role, "content": row[name]}
        for role, name in (("user", rows.prompt), ("assistant", rows.response))
    ]
    named = rows.images if shown["images"] else rows.videos
    messages, references = take(said, f"{where}: {named!r}")
    chat = Chat(tokenizer=tokenizer, where=where, messages=messages)
    return _widened(chat, named, references, reader)


def _widened(
    chat: Chat, name: str, references: tuple[str, ...], reader: PictureReader | None
) -> tuple[SftExample, ...]:
    """Return the examples of a conversation, each with the pictures of its own messages."""
    found: list[SftExample] = []
    for example, end in encode_chat(chat, name):
        later = sum(_num_marks(message["content"]) for message in chat.messages[end:])
        shown = references[: len(references) - later]
        found.append(widen(example, shown, reader, chat.where))
    return tuple(found)


def _num_marks(content: object) -> int:
    parts = cast("list[object]", content) if isinstance(content, list) else []
    return sum(isinstance(part, dict) and part.get("type") in ("image", "video") for part in parts)


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
        prompt = token_ids_of(tokenizer(row[rows.prompt]))
        response = token_ids_of(tokenizer(row[rows.response], add_special_tokens=False))
    except TypeError as error:  # half of a character outside the first plane, as \\ud83d, is
        raise SftDataError(
            f"{where}: the tokenizer does not take its text, which has broken Unicode: {error}"
        ) from error
    end = tokenizer.eos_token_id
    if isinstance(end, int):
        # one that the tokenizer adds; it may also be what the prompt's text ends with, or begins
        is_added = prompt[-1:] == [end] and token_ids_of(tokenizer("a"))[-1] == end
        prompt = prompt[:-1] if is_added else prompt
        # many data sets have it in the text already
        response = response if response[-1:] == [end] else [*response, end]
    return joined([(prompt, False), (response, True)])


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
