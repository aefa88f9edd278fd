"""Rows of preferences: pairs of answers to one prompt, or single answers that are good or bad."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_algos import LabelledTokens
from cosmos_parallel import SftDataError, SftFormat, encode_example, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair = tuple[LabelledTokens, LabelledTokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceFormat:
    """How rows are read.

    Attributes:
        prompt: field of the prompt: text, or the messages before the answer.
        chosen: field of the better answer: text, or messages; with the prompt in them when the row
            has no field for it.
        rejected: field of the worse answer, likewise.
        response: field of a single answer, likewise.
        label: field of its mark, true for a good one.
        split: which split of a directory.
        max_tokens: rows with a longer sample are left out.
    """

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    response: str = "response"
    label: str = "label"
    split: str = "train"
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        """Check the length.

        Raises:
            ValueError: if no sample could have it.
        """
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be 2 or more")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MarkedSample:
    """An answer that is good or bad.

    Attributes:
        prompt: token ids before the answer.
        tokens: prompt and answer, of which the answer is judged.
        desirable: whether it is good.
    """

    prompt: tuple[int, ...]
    tokens: LabelledTokens
    desirable: bool


def load_pairs(
    path: Path, tokenizer: "PreTrainedTokenizerBase", rows: PreferenceFormat
) -> list[Pair]:
    """Read (chosen, rejected) pairs; one with a sample that is too long is left out.

    Raises:
        SftDataError: if the data cannot be read, or a row is no pair; names file, line and field.
    """
    pairs: list[Pair] = []
    for where, row in read_rows(path, rows.split):
        one, other = (
            _encode(row, tokenizer, where, (rows.prompt, field))
            for field in (rows.chosen, rows.rejected)
        )
        if np.array_equal(one.token_ids, other.token_ids):
            raise SftDataError(f"{where}: {rows.chosen!r} and {rows.rejected!r} are the same")
        if max(len(one.token_ids), len(other.token_ids)) <= rows.max_tokens:
            pairs.append((one, other))
    return pairs


def load_marked(
    path: Path, tokenizer: "PreTrainedTokenizerBase", rows: PreferenceFormat
) -> list[MarkedSample]:
    """Read single answers with marks; those that are too long are left out.

    Raises:
        SftDataError: if the data cannot be read, or a row has no mark; names file, line and field.
    """
    samples: list[MarkedSample] = []
    for where, row in read_rows(path, rows.split):
        if not isinstance(row.get(rows.label), bool):
            raise SftDataError(f"{where}: field {rows.label!r} must be true or false")
        tokens = _encode(row, tokenizer, where, (rows.prompt, rows.response))
        if len(tokens.token_ids) <= rows.max_tokens:
            begin = int(tokens.trainable.argmax())
            prompt = tuple(tokens.token_ids[:begin].tolist())
            samples.append(MarkedSample(prompt=prompt, tokens=tokens, desirable=row[rows.label]))
    return samples


def mismatched(samples: Sequence[MarkedSample]) -> list[LabelledTokens]:
    """Return each prompt with the answer of the next sample that has another prompt.

    KTO's estimate of a divergence is over answers that say nothing about their prompts. Samples of
    one and the same prompt have none.
    """
    found: list[LabelledTokens] = []
    for index, sample in enumerate(samples):
        after = (*samples[index + 1 :], *samples[:index])
        other = next((one for one in after if one.prompt != sample.prompt), None)
        if other is not None:
            answer = other.tokens.token_ids[len(other.prompt) :]
            mask = other.tokens.trainable[len(other.prompt) :]
            before = np.asarray(sample.prompt, np.int32)
            found.append(
                LabelledTokens(
                    token_ids=np.concatenate([before, answer]).astype(np.int32),
                    trainable=np.concatenate([np.zeros(len(before), np.bool_), mask]),
                    name=f"{sample.tokens.name} with the answer of {other.tokens.name}",
                )
            )
    return found


def _encode(
    row: Any,  # a row of a user's file, before it is looked at
    tokenizer: "PreTrainedTokenizerBase",
    where: str,
    fields: tuple[str, str],
) -> LabelledTokens:
    """Encode a prompt with an answer, of which the answer's last turn is judged."""
    prompt, answer = row.get(fields[0]), row.get(fields[1])
    if isinstance(answer, list):
        before = prompt if isinstance(prompt, list) else []
        text = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else before
        example = encode_example({"messages": [*text, *answer]}, tokenizer, where)
    else:
        names = SftFormat(prompt=fields[0], response=fields[1], messages="")
        example = encode_example(row, tokenizer, where, rows=names)
    marks = example.trainable.copy()
    # only the last run of judged tokens: earlier turns of the assistant belong to the prompt
    ends = np.flatnonzero(marks)
    if not len(ends):
        raise SftDataError(f"{where}: field {fields[1]!r} has no token to be judged by")
    gaps = np.flatnonzero(~marks[: ends[-1]])
    marks[: (gaps[-1] + 1 if len(gaps) else 0)] = False
    return LabelledTokens(token_ids=example.token_ids, trainable=marks, name=f"{where} {fields[1]}")
