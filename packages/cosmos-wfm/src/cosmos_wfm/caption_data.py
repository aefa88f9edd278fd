"""What training asks of captioned data, and what becomes of samples that are broken.

Data is read by position in an endless stream of epochs, each with every sample once. Which sample a
position has depends on nothing but the data, the position and a seed, so that any number of ranks
share a stream, and a run that goes on goes on where it was.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.errors import CaptionDataError
from cosmos_wfm.prompt_lengths import evenly_spaced

CAPTION_SUFFIXES = (".json", ".txt")
BrokenPolicy = Literal["fatal", "skip"]
_SHOWN = 5


class CaptionedImage(NamedTuple):
    """One sample: its prompt, and its pixels in [-1, 1]; a video has its frames before H."""

    prompt: str
    pixels: Float[Tensor, "3 ..."]


class CaptionData(Protocol):
    """Samples by number, and the order in which training has them."""

    @property
    def problems(self) -> "Problems":
        """What was left out so far."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> CaptionedImage:
        """Read and decode one sample.

        Raises:
            CaptionDataError: if it cannot be.
        """
        ...

    def captions(self, most: int) -> list[str]:
        """Return prompts of at most so many samples, evenly spaced; none is decoded."""
        ...

    def order(self, position: int, seed: int) -> int:
        """Return the number of the sample at a position of the endless stream."""
        ...

    def identity(self, index: int) -> str:
        """Return what changes when the sample does, found without decoding it."""
        ...


class Problems(Sequence[str]):
    """Samples that cannot be used: named and counted where they are skipped, else an error.

    Each is its name and the reason, in the order in which they were met.

    Attributes:
        broken: numbers of samples that others were taken for.
    """

    def __init__(self, where: str, policy: BrokenPolicy) -> None:
        """Begin with none.

        Args:
            where: of the data set, as errors name it.
            policy: ``fatal`` or ``skip``.
        """
        self.broken: set[int] = set()
        self._names: dict[str, None] = {}
        self._where = where
        self._policy: BrokenPolicy = policy

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._names)

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return one."""
        return list(self._names)[index]

    def __iter__(self) -> Iterator[str]:
        """Return all of them, at once rather than by number."""
        return iter(self._names)

    def add(self, problem: str) -> None:
        """Note one, unless it was noted before."""
        self._names[problem] = None

    def refuse(self) -> None:
        """Refuse the data set if problems are fatal and there are any.

        Raises:
            CaptionDataError: names the first few, and how many there are.
        """
        if self._names and self._policy == "fatal":
            more = "; ..." if len(self) > _SHOWN else ""
            shown = "; ".join(list(self._names)[:_SHOWN]) + more
            raise CaptionDataError(f"{self._where}: {len(self)} broken pairs: {shown}")

    def usable(
        self, index: int, num: int, decode: Callable[[int], CaptionedImage]
    ) -> CaptionedImage:
        """Decode a sample, or where broken ones are skipped the next one that is whole.

        Args:
            index: of the sample.
            num: of samples; behind the last comes the first.
            decode: raises CaptionDataError for a broken one.

        Raises:
            IndexError: if there is no sample of that number.
            CaptionDataError: if it is broken and that is fatal, or all are.
        """
        if not 0 <= index < num:
            raise IndexError(f"there is no sample {index} among {num}")
        for step in range(num):
            try:
                return decode((index + step) % num)
            except CaptionDataError as error:
                if self._policy == "fatal":
                    raise
                self.add(str(error))
                self.broken.add((index + step) % num)
        raise CaptionDataError(f"{self._where}: none of {num} samples can be decoded")


class CaptionedFiles(Sequence[CaptionedImage], ABC):
    """Samples with a prompt and a local file each, decoded on access.

    Attributes:
        problems: what was left out, each named with its reason.
    """

    def __init__(self, root: Path, broken: BrokenPolicy) -> None:
        """Begin with no pairs.

        Raises:
            CaptionDataError: if there is no such directory.
        """
        if not root.is_dir():
            raise CaptionDataError(f"{root} is not a directory")
        self.problems = Problems(str(root), broken)
        self._pairs: list[tuple[str, Path]] = []

    def __len__(self) -> int:
        """Return the number of usable pairs."""
        return len(self._pairs)

    def __getitem__(self, index: int) -> CaptionedImage:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Decode one sample; where broken ones are skipped, the next one in its place.

        Raises:
            CaptionDataError: if the file cannot be decoded.
        """
        return self.problems.usable(
            index, len(self), lambda each: self._decoded(*self._pairs[each])
        )

    def captions(self, most: int) -> list[str]:
        """Return prompts of at most so many pairs."""
        return [prompt for prompt, _ in evenly_spaced(self._pairs, most)]

    def order(self, position: int, seed: int) -> int:
        """Return the pair at a position of the endless stream."""
        return sample_index(len(self), position, seed)

    def identity(self, index: int) -> str:
        """Return the prompt, and the file's path, size and time of change."""
        prompt, path = self._pairs[index]
        found = path.stat()
        return f"{path.absolute()} {found.st_size} {found.st_mtime_ns} {prompt}"

    @abstractmethod
    def _decoded(self, prompt: str, path: Path) -> CaptionedImage:
        """Decode a file; raises CaptionDataError if it is broken."""


def files_by_stem(root: Path) -> dict[str, list[Path]]:
    """Return the files below a directory by their paths in it without suffix, each in order.

    Folders are descended into, those behind links too, each of them once, whichever way leads
    there. Files and folders that begin with a dot are left out: systems put them beside others
    (``._0001.png``).

    Raises:
        CaptionDataError: if a folder cannot be read.
    """
    found: dict[str, list[Path]] = {}
    for path in _files_below(root, set()):
        found.setdefault(str(path.relative_to(root).with_name(path.stem)), []).append(path)
    return found


def _files_below(directory: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Yield the files of a directory by name, then those of its folders."""
    try:
        place = directory.stat()
        if (place.st_dev, place.st_ino) in seen:
            return
        seen.add((place.st_dev, place.st_ino))
        with os.scandir(directory) as entries:
            shown = sorted((e.name, _kind_of(e)) for e in entries if not e.name.startswith("."))
    except OSError as error:
        raise CaptionDataError(f"{directory} cannot be read: {error}") from error
    yield from (directory / name for name, kind in shown if kind == "file")
    for name, kind in shown:
        if kind == "folder":
            yield from _files_below(directory / name, seen)


def _kind_of(entry: "os.DirEntry[str]") -> Literal["file", "folder", "other"]:
    """Return what an entry is, or what a link leads to: nothing, where it leads to itself."""
    try:
        if entry.is_file():
            return "file"
        return "folder" if entry.is_dir() else "other"
    except OSError:
        return "other"


def of_suffix(files: Iterable[Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files with one of these suffixes, in capitals too, as cameras write them."""
    return [path for path in files if path.suffix.lower() in suffixes]


def read_caption(captions: Sequence[Path], *, name: str) -> str:
    """Return the prompt in the ``.json`` or ``.txt`` of a sample, see ``prompt_of``.

    Raises:
        CaptionDataError: says under ``name`` what is wrong with it.
    """
    try:
        found = {path.suffix[1:].lower(): path.read_bytes() for path in captions}
    except OSError as error:
        raise CaptionDataError(f"{name} cannot be read: {error}") from error
    return prompt_of(found, name=name)


def prompt_of(captions: Mapping[str, bytes], *, name: str) -> str:
    """Return the ``prompt`` of a json, or where it has none the txt beside it.

    Args:
        captions: bytes by kind, ``json``, ``txt`` or both.
        name: of the sample, for errors.

    Raises:
        CaptionDataError: says under ``name`` what is wrong with it.
    """
    text = captions.get("txt")
    try:
        if "json" in captions:
            found: Any = json.loads(captions["json"].decode("utf-8-sig"))
            if text is None or (isinstance(found, dict) and "prompt" in found):
                prompt: object = found["prompt"]
                if not isinstance(prompt, str):
                    raise CaptionDataError(f"{name}: prompt is {type(prompt).__name__}, not text")
                return prompt
        assert text is not None
        return text.decode("utf-8-sig").strip()
    except (ValueError, KeyError, TypeError) as error:
        raise CaptionDataError(f"{name}: no prompt ({error!r})") from error


def sample_index(num_samples: int, position: int, seed: int) -> int:
    """Return the sample at a position of the endless stream: each epoch is a new permutation."""
    epoch, place = divmod(position, num_samples)
    return int(_permutation(num_samples, seed, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(num_samples)
