"""Prompt sets: a file of lines, a file of JSON lines, or a directory that holds one of either.

What else a JSON line says goes with its prompt to the rewards.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

from cosmos_wfm.errors import WfmConfigError

MOCK_PROMPTS = "mock"
_MOCK_COLOURS = ("red", "green", "blue", "yellow")
_MOCK_SHAPES = ("square", "disc", "triangle", "cross")

_FILES = ("train_metadata.jsonl", "train.jsonl", "train.txt", "prompts.jsonl", "prompts.txt")


class Prompt(str):
    """A prompt, and what its line of a prompt set says beside it.

    Attributes:
        metadata: the line's other fields; empty for a line of text.
    """

    metadata: Mapping[str, Any]

    def __new__(cls, text: str, metadata: Mapping[str, Any] | None = None) -> Self:
        """Make one; it is a string like any other."""
        made = super().__new__(cls, text)
        made.metadata = dict(metadata or {})
        return made


def metadata_of(prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Return what is said beside each prompt; nothing for a string."""
    return [dict(p.metadata) if isinstance(p, Prompt) else {} for p in prompts]


def request_fields(prompts: Sequence[str]) -> dict[str, list[Any]]:
    """Return what a reward request says of its prompts' metadata; nothing if none has any.

    ``prompt_metadata`` is all of it, a dict for each sample. GenEval's ``tag`` and ``include`` go
    by the names that existing services know as well.
    """
    rows = metadata_of(prompts)
    if not any(rows):
        return {}
    fields: dict[str, list[Any]] = {"prompt_metadata": rows}
    for name, wire in (("include", "geneval_includes"), ("tag", "geneval_tags")):
        if all(name in row for row in rows):
            fields[wire] = [row[name] for row in rows]
    return fields


def read_prompts(path: Path, at_least: int) -> list[Prompt]:
    """Return the prompts of a set, in order, empty lines left out.

    Args:
        path: a text file with a prompt on each line; a ``.jsonl`` file of objects with a
            ``prompt``; or the directory of a published set (``pickscore``, ``ocr``, ``geneval``,
            ``dance_grpo_t2v``), whose training prompts are taken; ``mock`` where nothing is called
            that: coloured shapes, to try a recipe without data.
        at_least: how many a step needs.

    Raises:
        WfmConfigError: if there is no such set, it is no UTF-8, a line of it is wrong, or it has
            too few.
    """
    if str(path) == MOCK_PROMPTS and not path.exists():
        return [Prompt(f"a {colour} {s}") for s in _MOCK_SHAPES for colour in _MOCK_COLOURS]
    file = _file_of(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise WfmConfigError(f"prompts: {file} is no text in UTF-8: {error}") from error
    # not splitlines(), to which a line separator within a prompt ends the line
    lines = [line.strip() for line in text.split("\n")]
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line]
    is_json = file.suffix == ".jsonl"
    prompts = [_prompt_of(line, file, n) if is_json else Prompt(line) for n, line in rows]
    if len(prompts) < at_least:
        raise WfmConfigError(
            f"prompts: {file} has {len(prompts)} prompts, but {at_least} are needed at once"
        )
    return prompts


def _file_of(path: Path) -> Path:
    if path.is_dir():
        found = next((path / name for name in _FILES if (path / name).is_file()), None)
        if found is None:
            raise WfmConfigError(f"prompts: {path} has none of {', '.join(_FILES)}")
        return found
    if not path.is_file():
        raise WfmConfigError(f"prompts: there is no file of prompts {path}")
    return path


def _prompt_of(line: str, file: Path, number: int) -> Prompt:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise WfmConfigError(f"prompts: {file} line {number} is no JSON: {error}") from error
    row = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    prompt: object = row.pop("prompt", None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise WfmConfigError(f"prompts: {file} line {number} has no text called prompt")
    return Prompt(prompt.strip(), row)
