"""Prompt data: rows from JSON lines, Parquet or a list, in an order that needs no state.

Which row the prompt with ordinal k of a stream is follows from k and the seed alone, so that a
restarted run, or another replica, asks the same question.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from cosmos_core.media import MediaError, media_beside, text_of, with_media
from cosmos_rollout.errors import PromptDataError, PromptTextError

Order = Literal["shuffled", "file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One row: either ``prompt``, a text, or ``messages``, a conversation.

    Attributes:
        prompt_id: the row's ``id``, or its position in its file.
        prompt: the prompt's text; empty if there are messages.
        messages: role and content of each turn, and whatever else the chat template knows, such as
            ``tool_calls``; empty if there is a prompt. Where there are pictures or videos, a
            content is a list of texts and marks (`cosmos_core.media.with_media`).
        images: references of the pictures and videos, one for each mark, in order.
        answer: what a reward compares with; None if the row has none.
        fields: the row's other fields; ``data_set`` names the set that the row is of.
        tools: schemas of tools that the chat template is to show, beside messages.
    """

    prompt_id: str
    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    images: tuple[str, ...] = ()
    answer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # whatever the row holds
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def data_set(self) -> str:
        """Name of the data set that the row says it is of; empty if it says none."""
        return data_set_of(self.fields)


class PromptSource(Protocol):
    """What a stream of prompts is drawn from."""

    def row(self, ordinal: int) -> PromptRow:
        """Return the row of the ``ordinal``-th prompt: always the same one."""
        ...


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, by default with the special ones the model wants."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> Any:  # a text, if ``tokenize`` is False
        """Return a conversation as the model wants it, the next turn opened."""
        ...


class PromptSet:
    """Rows with a seeded order for each epoch.

    Args:
        rows: at least one; a list is copied, a `PromptFile` and the like are not.
        seed: with the ordinal it determines the row.
        order: "shuffled" anew for each epoch, or as in the "file", as validation wants it.
    """

    def __init__(
        self, rows: Sequence[PromptRow], *, seed: int = 0, order: Order = "shuffled"
    ) -> None:
        if not rows:
            raise PromptDataError("a prompt set needs at least one row")
        self._rows = tuple(rows) if isinstance(rows, list) else rows
        self._seed = seed
        self._order: Order = order
        self._shuffle: tuple[int, npt.NDArray[np.int64]] = (-1, np.arange(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)

    def row(self, ordinal: int) -> PromptRow:
        """Return the row of the ``ordinal``-th prompt; each epoch visits every row once."""
        epoch, position = divmod(ordinal, len(self._rows))
        if self._order == "file":
            return self._rows[position]
        if self._shuffle[0] != epoch:  # a cache of one epoch, nothing more
            random = np.random.default_rng([self._seed, epoch])
            self._shuffle = (epoch, random.permutation(len(self._rows)))
        return self._rows[int(self._shuffle[1][position])]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    """Where prompts come from.

    Attributes:
        path: JSON lines (``.jsonl``) or Parquet (``.parquet``) with ``prompt`` or ``messages``,
            and ``answer``, ``id``, ``images``, ``videos`` and anything else.
        validation_path: a file of held-out rows; empty: the rows of ``path`` whose field
            ``split`` is ``validation_split``.
        validation_split: name of the held-out split; its rows are never trained on.
        seed: determines the order of training prompts.
    """

    path: Path
    validation_path: Path | None = None
    validation_split: str = "validation"
    seed: int = 0

    def build(self) -> tuple[PromptSet, PromptSet | None]:
        """Read the files; return the rows to train on and the held-out ones, if there are any.

        Raises:
            PromptDataError: naming file, line and field.
        """
        rows = read_prompts(self.path)
        held_out = [row for row in rows if row.fields.get("split") == self.validation_split]
        train = [row for row in rows if row.fields.get("split") != self.validation_split]
        if self.validation_path is not None:
            held_out = read_prompts(self.validation_path)
        if not train:
            raise PromptDataError(f"{self.path}: no row is left to train on")
        validation = PromptSet(held_out, order="file") if held_out else None
        return PromptSet(train, seed=self.seed), validation


def data_set_of(fields: Mapping[str, Any]) -> str:
    """Return the name of the data set that a row's fields say; empty if they say none."""
    name = fields.get("data_set", "")
    return name if isinstance(name, str) else ""


def read_prompts(path: Path) -> list[PromptRow]:
    """Read rows from a ``.jsonl`` or ``.parquet`` file; paths in them are relative to it.

    Raises:
        PromptDataError: naming file, line and field.
    """
    if not path.is_file():
        raise PromptDataError(f"there is no prompt file {path}")
    if path.suffix == ".parquet":
        numbered = enumerate(_parquet_rows(path), start=1)
    elif path.suffix in (".jsonl", ".json"):
        numbered = _json_rows(path)
    else:
        raise PromptDataError(f"{path}: prompts are read from .jsonl and .parquet files")
    rows = [
        prompt_row(raw, f"{path}:{line}", default_id=str(line), folder=path.parent)
        for line, raw in numbered
    ]
    if not rows:
        raise PromptDataError(f"{path}: the file has no rows")
    return rows


def prompt_row(raw: Any, where: str, *, default_id: str, folder: Path = Path()) -> PromptRow:
    """Check one row.

    A prompt with pictures or videos becomes a message of the user.

    Args:
        raw: from JSON.
        where: of the row, for messages.
        default_id: of a row that has none.
        folder: what paths of pictures and videos are relative to.

    Raises:
        PromptDataError: beginning with ``where``, naming the field.
    """
    if not isinstance(raw, Mapping):
        raise PromptDataError(f"{where}: a row has to be an object, found {type(raw).__name__}")
    row = dict(cast(Mapping[str, Any], raw))
    prompt, messages = row.pop("prompt", None), row.pop("messages", None)
    if (prompt is None) == (messages is None):
        found = ", ".join(sorted(map(str, raw))) or "nothing"
        raise PromptDataError(f"{where}: needs either 'prompt' or 'messages', found {found}")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise PromptDataError(f"{where}: field 'prompt' has to be a text, found {prompt!r}")
    try:
        sources = (media_beside(row, "images"), media_beside(row, "videos"))
    except MediaError as error:
        raise PromptDataError(f"{where}: {error}") from error
    for name in ("images", "image", "videos", "video"):
        row.pop(name, None)
    if prompt is not None and any(sources):
        prompt, messages = None, [{"role": "user", "content": prompt}]
    turns, images = (
        _messages(messages, sources, where, folder) if messages is not None else ((), ())
    )
    return PromptRow(
        prompt_id=default_id if (name := row.pop("id", None)) is None else str(name),
        prompt=prompt or "",
        messages=turns,
        images=images,
        answer=_answer(row.pop("answer", None), where),
        fields=row,
        tools=_tools(row.get("tools"), where) if turns else (),
    )


def prompt_tokens(row: PromptRow, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the row's prompt as token ids; a conversation through the chat template.

    Each picture or video is one mark, which the engine turns into as many tokens as that has.

    Raises:
        PromptTextError: for broken Unicode, such as half of a surrogate pair, and for what the
            chat template refuses.
    """
    try:
        if not row.messages:
            return tuple(tokenizer.encode(row.prompt))
        shown: dict[str, Any] = {"tools": [dict(tool) for tool in row.tools]} if row.tools else {}
        turns = [dict(turn) for turn in row.messages]
        text = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False, **shown
        )
        return tuple(tokenizer.encode(text, add_special_tokens=False))  # the template has them
    except Exception as error:  # a template may raise anything
        raise PromptTextError(
            f"prompt {row.prompt_id} is not taken by the tokenizer or its chat template: {error!r}"
        ) from error


def prompt_text(row: PromptRow) -> str:
    """Return the prompt as rewards see it: the text, or that of the last message."""
    return row.prompt if not row.messages else text_of(row.messages[-1]["content"])


def json_row(line: bytes, where: str) -> Any:
    """Return what a line of a JSON-lines file holds.

    Raises:
        PromptDataError: beginning with ``where``.
    """
    try:
        return json.loads(line.decode("utf-8-sig"))  # some write a mark in front
    except UnicodeDecodeError as error:
        raise PromptDataError(f"{where}: not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise PromptDataError(f"{where}: column {error.colno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # numbers, nesting beyond measure
        raise PromptDataError(f"{where}: cannot be read: {error}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, json_row(line, f"{path}:{number}")


def _parquet_rows(path: Path) -> Iterable[Any]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise PromptDataError(f"{path}: reading Parquet needs 'pip install pyarrow'") from error
    try:
        rows = read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise PromptDataError(f"{path}: not Parquet: {error}") from error
    for row in rows:
        row.update({name: _present(row[name]) for name in ("messages", "tools") if name in row})
    return rows


def _present(value: Any) -> Any:  # a tree of dictionaries and lists
    """Leave out what only other rows of a table have: arguments and properties of other tools."""
    if isinstance(value, list):
        return [_present(inner) for inner in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    named = cast(dict[str, Any], value).items()
    return {name: _present(inner) for name, inner in named if inner is not None}


def _messages(
    messages: Any, sources: tuple[Sequence[object], Sequence[object]], where: str, folder: Path
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Return the turns, and the references of their pictures and videos."""
    if not isinstance(messages, list) or not messages:
        raise PromptDataError(f"{where}: field 'messages' has to be a list of turns")
    for number, turn in enumerate(cast(list[Any], messages)):
        if not _is_turn(turn):
            raise PromptDataError(
                f"{where}: field 'messages', turn {number}: needs texts 'role' and 'content'; the "
                "latter may be a list of parts, and missing beside an assistant's 'tool_calls'"
            )
    # a table has a column for what only some turns have; templates ask whether a key is there
    turns = [
        {"content": ""} | {key: value for key, value in turn.items() if value is not None}
        for turn in messages
    ]
    try:
        plain, images = with_media(turns, *sources, folder=folder)
    except MediaError as error:
        raise PromptDataError(f"{where}: field 'messages': {error}") from error
    if not images:  # many a template takes nothing but texts
        plain = tuple({**turn, "content": text_of(turn["content"])} for turn in plain)
    return plain, images


def _is_turn(turn: Any) -> bool:  # from JSON
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        return False
    content, calls = turn.get("content"), turn.get("tool_calls")
    calls_tools = turn["role"] == "assistant" and isinstance(calls, list) and bool(calls)
    return isinstance(content, str | list) or (calls_tools and content is None)


def _tools(given: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return schemas; many tables have them as a text of JSON."""
    try:
        tools = json.loads(given) if isinstance(given, str) and given else given or []
    except (ValueError, RecursionError):
        tools = given
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) for tool in cast(list[Any], tools)
    ):
        raise PromptDataError(
            f"{where}: field 'tools' has to be a list of schemas, or the JSON of one"
        )
    return tuple(cast(list[Mapping[str, Any]], tools))


def _answer(answer: Any, where: str) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        kind = type(answer).__name__
        raise PromptDataError(f"{where}: field 'answer' has to be text or a number, found {kind}")
    if not math.isfinite(answer):  # as tables have them where nothing is
        raise PromptDataError(f"{where}: field 'answer' is {answer}, which nobody could say")
    return str(answer)
