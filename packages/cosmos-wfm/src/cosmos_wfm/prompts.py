"""Prompt sets: a file of lines, a file of JSON lines, or a directory that holds one of either."""

import json
from pathlib import Path
from typing import Any

from cosmos_wfm.errors import WfmConfigError

_FILES = ("train_metadata.jsonl", "train.jsonl", "train.txt", "prompts.jsonl", "prompts.txt")


def read_prompts(path: Path, at_least: int) -> list[str]:
    """Return the prompts of a set, in order, empty lines left out.

    Args:
        path: a text file with a prompt on each line; a ``.jsonl`` file of objects with a
            ``prompt``; or the directory of a published set (``pickscore``, ``ocr``, ``geneval``,
            ``dance_grpo_t2v``), whose training prompts are taken.
        at_least: how many a step needs.

    Raises:
        WfmConfigError: if there is no such set, a line of it is wrong, or it has too few.
    """
    file = _file_of(path)
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line]
    is_json = file.suffix == ".jsonl"
    prompts = [_prompt_of(line, file, n) if is_json else line for n, line in rows]
    if len(prompts) < at_least:
        raise WfmConfigError(
            f"rl: {file} has {len(prompts)} prompts, but a step has {at_least} groups"
        )
    return prompts


def _file_of(path: Path) -> Path:
    if path.is_dir():
        found = next((path / name for name in _FILES if (path / name).is_file()), None)
        if found is None:
            raise WfmConfigError(f"rl: {path} has none of {', '.join(_FILES)}")
        return found
    if not path.is_file():
        raise WfmConfigError(f"rl: there is no file of prompts {path}")
    return path


def _prompt_of(line: str, file: Path, number: int) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise WfmConfigError(f"rl: {file} line {number} is no JSON: {error}") from error
    prompt: object = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise WfmConfigError(f"rl: {file} line {number} has no text called prompt")
    return prompt.strip()
