"""Rows of preferences: pairs of answers to one prompt, or single answers that are good or bad."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cosmos_algos import LabelledTokens
from cosmos_core.videos import VideoSampling
from cosmos_parallel import (
    PictureReader,
    SftDataError,
    SftFormat,
    check_example,
    encode_examples,
    read_rows_in,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Pair = tuple[LabelledTokens, LabelledTokens]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceFormat:
    """How rows are read.

    Attributes:
        prompt: field of the prompt: text, or the messages before the answer.
        chosen: field of the better answer: text, or messages; with the prompt in them when the row
            has no field for it, or also when it has.
        rejected: field of the worse answer, likewise.
        response: field of a single answer, likewise.
        label: field of its mark, true or 1 for a good one.
        images: field of a row's pictures, which parts of its messages may name themselves.
        videos: field of a row's videos, likewise.
        video_sampling: which frames are shown of videos that do not say it themselves.
        split: which split of a directory.
        max_tokens: rows with a longer sample are left out.
    """

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    response: str = "response"
    label: str = "label"
    images: str = "images"
    videos: str = "videos"
    video_sampling: VideoSampling = field(default_factory=VideoSampling)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """What turns rows into tokens.

    Attributes:
        tokenizer: of the model.
        reader: what shows it pictures; ``None`` for a model that sees none.
    """

    tokenizer: "PreTrainedTokenizerBase"
    reader: PictureReader | None = None


def load_pairs(path: Path, encoder: Encoder, rows: PreferenceFormat) -> list[Pair]:
    """Read (chosen, rejected) pairs; one with a sample that is too long is left out.

    Raises:
        SftDataError: if the data cannot be read, or a row is no pair; names file, line and field.
    """
    pairs: list[Pair] = []
    for folder, where, row in read_rows_in(path, rows.split):
        one, other = (
            _encode(Place(row, where, folder), encoder, rows, field)
            for field in (rows.chosen, rows.rejected)
        )
        if np.array_equal(one.token_ids, other.token_ids):
            raise _same_error(where, rows)
        if max(len(one.token_ids), len(other.token_ids)) <= rows.max_tokens:
            pairs.append((one, other))
    return pairs


def load_marked(path: Path, encoder: Encoder, rows: PreferenceFormat) -> list[MarkedSample]:
    """Read single answers with marks; those that are too long are left out.

    Raises:
        SftDataError: if the data cannot be read, or a row has no mark; names file, line and field.
    """
    samples: list[MarkedSample] = []
    for folder, where, row in read_rows_in(path, rows.split):
        _check_mark(row, where, rows)
        tokens = _encode(Place(row, where, folder), encoder, rows, rows.response)
        if len(tokens.token_ids) <= rows.max_tokens:
            begin = int(tokens.trainable.argmax())
            prompt = tuple(tokens.token_ids[:begin].tolist())
            samples.append(
                MarkedSample(prompt=prompt, tokens=tokens, desirable=bool(row[rows.label]))
            )
    return samples


def check_preference(
    row: Mapping[str, Any], where: str, rows: PreferenceFormat, *, is_marked: bool
) -> None:
    """Check that a row has the fields that are due, which needs no tokenizer.

    Args:
        row: as it was read.
        where: named in errors.
        rows: which fields hold what.
        is_marked: it is a single answer with a mark, and no pair.

    Raises:
        SftDataError: naming the field that is missing or of another type, or the two that are one.
    """
    if is_marked:
        _check_mark(row, where, rows)
    for name in (rows.response,) if is_marked else (rows.chosen, rows.rejected):
        _check_answer(row, where, rows, name)
    if not is_marked and row[rows.chosen] == row[rows.rejected]:
        raise _same_error(where, rows)


def _same_error(where: str, rows: PreferenceFormat) -> SftDataError:
    return SftDataError(f"{where}: {rows.chosen!r} and {rows.rejected!r} are the same")


def _check_mark(row: Mapping[str, Any], where: str, rows: PreferenceFormat) -> None:
    mark = row.get(rows.label)
    if not isinstance(mark, int) or mark not in (0, 1):
        raise SftDataError(f"{where}: field {rows.label!r} must be true or false, or 1 or 0")


def _check_answer(
    row: Mapping[str, Any], where: str, rows: PreferenceFormat, answer_field: str
) -> None:
    """Look whether an answer and what it answers are of types that go together."""
    prompt, answer = row.get(rows.prompt), row.get(answer_field)
    if not isinstance(answer, str | list):
        found = f"is {type(answer).__name__}" if answer_field in row else "is missing"
        raise SftDataError(
            f"{where}: field {answer_field!r} {found}; a row has it as messages, or "
            f"{rows.prompt!r} and {answer_field!r} as text (found: "
            f"{', '.join(sorted(row)) or 'nothing'})"
        )
    if isinstance(answer, str):
        check_example(row, where, _names(rows, answer_field))
    elif not (prompt is None or isinstance(prompt, str | list)):
        raise SftDataError(
            f"{where}: field {rows.prompt!r} is {type(prompt).__name__}; before messages it must "
            "be text, or messages too"
        )


def _names(rows: PreferenceFormat, answer_field: str) -> SftFormat:
    return SftFormat(
        prompt=rows.prompt,
        response=answer_field,
        messages="",
        images=rows.images,
        videos=rows.videos,
        video_sampling=rows.video_sampling,
    )


def mismatched(samples: Sequence[MarkedSample], longest: int = 0) -> list[LabelledTokens]:
    """Return each prompt with the answer of the next sample that has another prompt.

    KTO's estimate of a divergence is over answers that say nothing about their prompts. Samples of
    one and the same prompt have none.

    Args:
        samples: of a step.
        longest: answers are cut to what leaves so many tokens with their prompt; 0 for no limit.
    """
    found: list[LabelledTokens] = []
    for index, sample in enumerate(samples):
        after = (*samples[index + 1 :], *samples[:index])
        other = next((one for one in after if one.prompt != sample.prompt), None)
        if other is not None:
            begin = len(other.prompt)
            end = begin + longest - len(sample.prompt) if longest else None
            answer, mask = other.tokens.token_ids[begin:end], other.tokens.trainable[begin:end]
            before = np.asarray(sample.prompt, np.int32)
            found.append(
                LabelledTokens(
                    token_ids=np.concatenate([before, answer]).astype(np.int32),
                    trainable=np.concatenate([np.zeros(len(before), np.bool_), mask]),
                    name=f"{sample.tokens.name} with the answer of {other.tokens.name}",
                    images=sample.tokens.images,
                )
            )
    return found


class Place(NamedTuple):
    """A row of a user's file, where it stands, and what its paths are relative to."""

    row: Any  # before it is looked at
    where: str
    folder: Path


def _encode(
    place: Place, encoder: Encoder, rows: PreferenceFormat, answer_field: str
) -> LabelledTokens:
    """Encode a prompt with an answer, of which the answer's last turn is judged."""
    row, where, folder = place
    _check_answer(row, where, rows, answer_field)
    prompt, answer = row.get(rows.prompt), row.get(answer_field)
    names = _names(rows, answer_field)
    if isinstance(answer, list):
        before = prompt if isinstance(prompt, list) else []
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else before
        # some data sets repeat the prompt at the head of both answers
        said = answer if answer[: len(asked)] == asked else [*asked, *answer]
        row = {**row, answer_field: said}  # with its tools, pictures and videos
        names = replace(names, messages=answer_field)
    *_, example = encode_examples(
        row, encoder.tokenizer, where, rows=names, reader=encoder.reader, folder=folder
    )
    marks = example.trainable.copy()
    marks[:1] = False  # an answer to nothing, before which the tokenizer puts nothing
    # only the last run of judged tokens: earlier turns of the assistant belong to the prompt
    ends = np.flatnonzero(marks)
    if not len(ends):
        raise SftDataError(f"{where}: field {answer_field!r} has no token to be judged by")
    gaps = np.flatnonzero(~marks[: ends[-1]])
    marks[: (gaps[-1] + 1 if len(gaps) else 0)] = False
    return LabelledTokens(
        token_ids=example.token_ids,
        trainable=marks,
        name=f"{where} {answer_field}",
        images=example.images,
    )
