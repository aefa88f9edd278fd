"""Tokens of pictures and videos: marks in a prompt, and what must stand in a row in their place."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_core.media import MediaError
from cosmos_core.videos import is_video, video_sources
from cosmos_parallel.errors import PictureError

_CHARACTERS_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What one kind of references has for tokens.

    Attributes:
        name: ``pictures`` or ``videos``.
        mark: what a chat template writes for one of them.
        mark_id: its token.
        token_ids: the tokens in whose places the model puts what it sees of them.
    """

    name: str
    mark: str
    mark_id: int
    token_ids: tuple[int, ...]


def kinds_of(token_ids: Tensor, kinds: Sequence[Kind]) -> Tensor:
    """Return int64 of the same shape: the number of a token's kind from 1 on, and 0 for text."""
    numbers = torch.zeros_like(token_ids, dtype=torch.int64)
    for number, kind in enumerate(kinds, start=1):
        numbers[torch.isin(token_ids, torch.tensor(kind.token_ids).to(token_ids))] = number
    return numbers


def check_marks(
    token_ids: Sequence[int], images: Sequence[str], kinds: Sequence[Kind], where: str
) -> None:
    """Refuse a prompt whose marks are not those of its references, in their order.

    Raises:
        PictureError: beginning with ``where``.
    """
    by_mark = {kind.mark_id: kind for kind in kinds}
    marks = [by_mark[token] for token in token_ids if token in by_mark]
    wanted = [kinds[is_video(reference)] for reference in images]
    if marks == wanted:
        return
    counts = [(marks.count(kind), kind, wanted.count(kind)) for kind in kinds]
    if any(num_marks != num_wanted for num_marks, _, num_wanted in counts):
        counted = " and ".join(
            f"{num_marks} marks {kind.mark!r} for {num_wanted} {kind.name}"
            for num_marks, kind, num_wanted in counts
            if num_marks or num_wanted
        )
        raise PictureError(
            f"{where}: its tokens have {counted}; the chat template must write one for each, and "
            "texts none"
        )
    place = next(i for i, mark in enumerate(marks) if mark != wanted[i])
    raise PictureError(
        f"{where}: mark {place + 1} is {marks[place].mark!r}, for {marks[place].name}, and "
        f"{short(images[place])} is one of {wanted[place].name}; give them in the order of marks"
    )


def check_row(
    token_ids: Tensor, shown: Sequence[tuple[str, Tensor]], kinds: Sequence[Kind], name: str
) -> None:
    """Refuse a row whose tokens are not those that its pictures and videos take.

    Args:
        token_ids: int64[T].
        shown: references, and the tokens int64[N] that each takes.
        kinds: of the tokens.
        name: of the row.

    Raises:
        PictureError: beginning with ``name``.
    """
    places = kinds_of(token_ids, kinds).nonzero().flatten()
    insides = [kinds_of(expansion, kinds).nonzero().flatten() for _, expansion in shown]
    sizes = [len(inside) for inside in insides]
    if sum(sizes) != len(places):
        raise PictureError(
            f"{name}: has {len(places)} tokens of pictures and videos, and the {len(shown)} that "
            f"it shows take {sum(sizes)}"
        )
    for (reference, expansion), inside, part in zip(
        shown, insides, places.split(sizes), strict=True
    ):
        # the tokens around those of a picture may be joined with text
        whole = is_video(reference)
        first, end = (0, len(expansion)) if whole else (int(inside[0]), int(inside[-1]) + 1)
        start = max(int(part[0] - inside[0]), 0)
        if not torch.equal(token_ids[start + first : start + end], expansion[first:end]):
            raise PictureError(
                f"{name}: its tokens are not those that {short(reference)} takes; it was shown "
                "otherwise where they were made"
            )


@contextmanager
def naming(reference: str, where: str) -> Generator[None]:
    """Have what is wrong with a picture or video be a `PictureError` that says which, and where."""
    try:
        yield
    except MediaError as error:  # names it
        raise PictureError(f"{where}: {error}") from error
    except ValueError as error:  # such as too long and narrow a shape
        raise PictureError(f"{where}: {short(reference)}: {error}") from error


def short(reference: str) -> str:
    """Return what to call a picture or video in errors."""
    source = video_sources(reference)[0] if is_video(reference) else reference
    return source if len(source) < _CHARACTERS_SHOWN else f"{source[:40]}..."
