"""Webdataset shards: tar files of captioned images or videos, local or in an object store.

    s3://bucket/shards/{000..127}.tar        000.tar:  0001.jpg  0001.json  0002.jpg  0002.json ...

A shard is never unpacked and, where it is remote, never fetched whole: its headers are read once,
then each sample by the one range of bytes that holds its members.
"""

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from fsspec.core import url_to_fs

from cosmos_wfm.caption_data import BrokenPolicy, CaptionedImage, Problems, prompt_of
from cosmos_wfm.captions import fit_sizes, read_image
from cosmos_wfm.errors import CaptionDataError
from cosmos_wfm.prompt_lengths import evenly_spaced
from cosmos_wfm.ranges import check_at_least
from cosmos_wfm.shard_index import find_samples, read_index, write_index
from cosmos_wfm.videos import read_clip

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_BETWEEN = 1 << 17
_MOST_CAPTIONS = 100
_INDEX = "all captions, nothing twice"
"""Another one for each change of what an index holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCaptionsConfig:
    """Where the shards are, and what is taken of each sample.

    Attributes:
        path: a directory of ``*.tar``, one tar file, a pattern (``s3://bucket/train-*.tar``) or a
            range (``train-{000..127}.tar``); anything that fsspec has a driver for.
        frames: of a sample: 1 takes the image of a sample, more the first frames of its video.
        fps: frames of a second of a sample, see ``VideoCaptionsConfig``; 0 takes every frame.
        height: of a sample, in pixels.
        width: of a sample, in pixels.
        buckets: sizes [height, width], of which each sample gets the one nearest in shape; empty
            gives all samples the one above.
        max_enlargement: largest factor by which a sample may be scaled up to that size; one that is
            smaller is broken. 0 takes every sample.
        lanes: places of an epoch that are read in turn, each from one shard after the other; with
            a multiple of the number of ranks, a rank reads shards of its own.
        index: directory that keeps what was found in which shard; empty looks each time.
        broken: what to do with a sample that has no caption or no media, a wrong size, or that
            cannot be decoded, and with a shard that is cut short: ``fatal``, or ``skip``, which
            names and counts it.
    """

    kind: Literal["shards"] = "shards"
    path: str
    frames: int = 1
    fps: float = 0.0
    height: int = 1024
    width: int = 1024
    buckets: tuple[tuple[int, int], ...] = ()
    max_enlargement: float = 0.0
    lanes: int = 8
    index: str = ""
    broken: BrokenPolicy = "fatal"

    def __post_init__(self) -> None:
        """Check the ranges; sizes are held against the model.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_at_least("data", self, max_enlargement=0, lanes=1, fps=0)

    def build(self) -> "ShardCaptions":
        """Read the headers of all shards.

        Raises:
            CaptionDataError: if there is no usable sample, or a broken one and that is fatal.
        """
        return ShardCaptions(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSample:
    """Where a sample lies in its shard.

    Attributes:
        key: its name: the members' paths up to the first dot.
        captions: offset and length of the bytes of each kind of caption, ``json`` or ``txt``.
        media: offset and length of the image's or video's bytes.
    """

    key: str
    captions: Mapping[str, tuple[int, int]]
    media: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    url: str
    files: Any  # an fsspec file system; fsspec's stubs leave most of it open
    path: str
    version: str
    samples: tuple[ShardSample, ...]

    def read(self, sample: ShardSample) -> tuple[dict[str, bytes], bytes]:
        """Return captions and media, by one request if nothing large lies between them."""
        parts = [*sample.captions.values(), sample.media]
        first, last = min(start for start, _ in parts), max(start + size for start, size in parts)
        if last - first > 2 * sum(size for _, size in parts) + _BETWEEN:
            found = [self._range(start, start + size) for start, size in parts]
        else:
            data = self._range(first, last)
            found = [data[start - first :][:size] for start, size in parts]
        return dict(zip(sample.captions, found[:-1], strict=True)), found[-1]

    def read_captions(self, sample: ShardSample) -> dict[str, bytes]:
        """Return the captions of a sample alone."""
        places = sample.captions.items()
        return {kind: self._range(start, start + size) for kind, (start, size) in places}

    def _range(self, start: int, end: int) -> bytes:
        try:
            return cast("bytes", self.files.cat_file(self.path, start=start, end=end))
        except OSError as error:
            raise CaptionDataError(f"{self.url} cannot be read: {error}") from error


class ShardCaptions(Sequence[CaptionedImage]):
    """The samples of all shards, in order of shards and of the members in each.

    Attributes:
        problems: what was left out, each named with its reason.
    """

    def __init__(self, config: ShardCaptionsConfig) -> None:
        """Read headers, or what an earlier run found.

        Raises:
            CaptionDataError: see ``ShardCaptionsConfig.build``.
        """
        self._config = config
        self.problems = Problems(config.path, config.broken)
        shards = [self._opened(files, path) for files, path in _locations(config.path)]
        self.problems.refuse()
        self._shards = [shard for shard in shards if shard.samples]
        sizes = [len(shard.samples) for shard in self._shards]
        self._starts = np.cumsum([0, *sizes])
        if not sizes:
            media = "video" if config.frames > 1 else "image"
            raise CaptionDataError(
                f"{config.path}: {len(shards)} shards, but no sample has a caption (json with a "
                f"prompt, else txt) and one {media} ({len(self.problems)} left out)"
            )

        @lru_cache(maxsize=2)
        def epoch_order(epoch: int, seed: int) -> npt.NDArray[np.int64]:
            return interleaved_order(sizes, config.lanes, seed, epoch)

        self._epoch_order = epoch_order

    def __len__(self) -> int:
        """Return the number of samples that have a caption and media."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> CaptionedImage:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read and decode one sample; where broken ones are skipped, the next one in their place.

        Raises:
            CaptionDataError: if it cannot be decoded, or the shard not be read.
        """
        return self.problems.usable(index, len(self), self._decoded)

    def captions(self, most: int) -> list[str]:
        """Return prompts of at most so many samples, and of a hundred: each is a request.

        Those that are broken are left out, and named when their turn comes.
        """
        found: list[str] = []
        for index in evenly_spaced(range(len(self)), min(most, _MOST_CAPTIONS)):
            shard, sample = self._place(index)
            with suppress(CaptionDataError):
                found.append(prompt_of(shard.read_captions(sample), name=sample.key))
        return found

    def order(self, position: int, seed: int) -> int:
        """Return the sample at a position: shards in random order, shuffled, read in lanes."""
        epoch, place = divmod(position, len(self))
        return int(self._epoch_order(epoch, seed)[place])

    def identity(self, index: int) -> str:
        """Return shard, version of the shard, and where in it the sample is."""
        shard, sample = self._place(index)
        return f"{shard.url} {shard.version} {sample.key} {sample.media} {dict(sample.captions)}"

    def shard_of(self, index: int) -> str:
        """Return the URL of the shard that holds a sample."""
        return self._place(index)[0].url

    def _place(self, index: int) -> tuple[_Shard, ShardSample]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard = self._shards[number]
        return shard, shard.samples[index - int(self._starts[number])]

    def _decoded(self, index: int) -> CaptionedImage:
        config = self._config
        shard, sample = self._place(index)
        captions, media = shard.read(sample)
        name = f"{shard.url} {sample.key}"
        prompt = prompt_of(captions, name=name)
        if config.frames > 1:
            return CaptionedImage(prompt, read_clip(io.BytesIO(media), config, name=name))
        image = read_image(io.BytesIO(media), name=name)
        return CaptionedImage(prompt, fit_sizes(image, config, name=name))

    def _opened(self, files: Any, path: str) -> _Shard:
        """Return a shard with its index, which is read if there is one of this very file."""
        url = str(files.unstrip_protocol(path)).removeprefix("file://")
        try:
            version = str(files.ukey(path))
        except OSError as error:
            raise CaptionDataError(f"{url} cannot be read: {error}") from error
        kept = self._kept_index(url, version)
        found = read_index(kept) if kept is not None else None
        samples, problems = found or find_samples(files, path, url, video=self._config.frames > 1)
        if kept is not None and found is None:
            write_index(kept, samples, problems)
        for problem in problems:
            self.problems.add(problem)
        rows = tuple(
            ShardSample(
                key=key,
                captions={kind: (start, size) for kind, (start, size) in captions.items()},
                media=(media[0], media[1]),
            )
            for key, captions, media in samples
        )
        return _Shard(url=url, files=files, path=path, version=version, samples=rows)

    def _kept_index(self, url: str, version: str) -> Path | None:
        if not self._config.index:
            return None
        kind = "videos" if self._config.frames > 1 else "images"
        name = hashlib.sha256(f"{url} {version} {kind} {_INDEX}".encode()).hexdigest()[:32]
        return Path(self._config.index) / f"{name}.json"


def interleaved_order(
    sizes: Sequence[int], lanes: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Return an epoch's order of the samples of shards, each sample once.

    Shards come in random order, each shuffled; that sequence is cut into lanes of equal length
    (to within one), and the lanes are read in turn:

        2 shards of 3, 2 lanes:   b2 b0 b1 | a1 a2 a0   ->   b2 a1 b0 a2 b1 a0

    Args:
        sizes: samples of each shard.
        lanes: how many are read in turn.
        seed: of the order.
        epoch: of the order.
    """
    rng = np.random.default_rng((seed, epoch))
    starts = np.cumsum([0, *sizes])
    shards = [starts[s] + rng.permutation(sizes[s]) for s in rng.permutation(len(sizes))]
    sequence = np.concatenate(shards)
    lanes = max(1, min(lanes, len(sequence)))
    rows = -(-len(sequence) // lanes)
    grid = np.full((rows, lanes), -1, dtype=np.int64)
    for lane, part in enumerate(np.array_split(sequence, lanes)):
        grid[: len(part), lane] = part
    order = grid.reshape(-1)
    return order[order >= 0]


def expand_ranges(path: str) -> list[str]:
    """Return the paths that ``{000..127}`` stands for, with the digits of its first number.

    Raises:
        CaptionDataError: if a range ends before it begins.
    """
    match = _RANGE.search(path)
    if match is None:
        return [path]
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise CaptionDataError(f"{path}: the range {match[0]} is empty")
    digits = len(match[1])
    numbers = (f"{number:0{digits}d}" for number in range(first, last + 1))
    head, tail = path[: match.start()], path[match.end() :]
    return [whole for number in numbers for whole in expand_ranges(head + number + tail)]


def check_first_shard(path: str) -> None:
    """Look whether the first shard of a path is there, without reading it.

    Raises:
        CaptionDataError: if there is none, or no driver for such addresses.
    """
    files, first = _locations(path)[0]
    try:
        is_there = bool(files.exists(first))
    except (ImportError, ValueError, OSError) as error:
        raise CaptionDataError(f"shards at {path}: {error}") from error
    if not is_there:
        raise CaptionDataError(f"there is no shard at {path}: {first} is not there")


def _locations(path: str) -> list[tuple[Any, str]]:
    """Return file system and path of each shard.

    Raises:
        CaptionDataError: if there is none, or no driver for such addresses.
    """
    found: list[tuple[Any, str]] = []
    for url in expand_ranges(path):
        try:
            files, inside = cast("tuple[Any, str]", url_to_fs(url))
            if "*" in inside or "?" in inside or "[" in inside:
                shards: list[str] = sorted(files.glob(inside))
            elif files.isdir(inside):
                shards = sorted(files.glob(f"{inside.rstrip('/')}/*.tar"))
            else:
                shards = [inside]
        except (ImportError, ValueError, OSError) as error:
            raise CaptionDataError(f"shards at {url}: {error}") from error
        found += [(files, shard) for shard in shards]
    if not found:
        raise CaptionDataError(f"there is no shard at {path}")
    return found
