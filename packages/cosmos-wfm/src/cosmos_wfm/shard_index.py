"""What a shard holds and where: found by its headers, and kept for the next time."""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.rundir import write_atomic
from cosmos_wfm.captions import IMAGE_SUFFIXES
from cosmos_wfm.errors import CaptionDataError
from cosmos_wfm.videos import VIDEO_SUFFIXES

_CAPTIONS = ("json", "txt")
_IMAGES = tuple(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)
_VIDEOS = tuple(suffix.removeprefix(".") for suffix in VIDEO_SUFFIXES)
_HEADER_BLOCK = 1 << 17

Row = tuple[str, dict[str, tuple[int, int]], tuple[int, int]]
"""Of an index: key, (offset, length) of each kind of caption, and of the media."""


def find_samples(files: Any, path: str, url: str, *, video: bool) -> tuple[list[Row], list[str]]:
    """Read a shard's headers; return its samples, and what is wrong with others."""
    members: dict[str, dict[str, tuple[int, int]]] = {}
    problems, twice = list[str](), set[str]()
    try:
        with (
            files.open(path, "rb", block_size=_HEADER_BLOCK) as stream,
            tarfile.open(fileobj=stream, mode="r:") as tar,
        ):
            for member in tar:
                key, kind = _key_and_kind(member.name)
                # without a key: what systems put beside others, as ._0001.jpg
                if key and member.isfile():
                    twice |= {key} if kind in members.setdefault(key, {}) else set()
                    members[key][kind] = (member.offset_data, member.size)
    except (tarfile.TarError, EOFError) as error:
        problems.append(f"{url}: no whole tar file: {error}; {len(members)} samples before that")
        if members:  # the last one may be cut short
            members.pop(list(members)[-1])
    except OSError as error:
        raise CaptionDataError(f"{url} cannot be read: {error}") from error
    rows: list[Row] = []
    for key, kinds in members.items():
        captions = {kind: kinds[kind] for kind in _CAPTIONS if kind in kinds}
        media = [kind for kind in (_VIDEOS if video else _IMAGES) if kind in kinds]
        if key in twice:
            problems.append(f"{url} {key}: there are two samples of that name, or two versions")
        elif captions and len(media) == 1:
            rows.append((key, captions, kinds[media[0]]))
        else:
            wanted = "videos" if video else "images"
            problems.append(
                f"{url} {key}: {len(captions)} captions and {len(media)} {wanted}, one of each "
                f"is needed; it has {', '.join(sorted(kinds))}"
            )
    return rows, problems


def read_index(kept: Path) -> tuple[list[Row], list[str]] | None:
    """Return what an earlier run found; ``None`` without it, or if it was torn as by a crash."""
    try:
        found: Any = json.loads(kept.read_bytes())
        return found["samples"], found["problems"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_index(kept: Path, samples: Sequence[Row], problems: Sequence[str]) -> None:
    """Keep what was found in a shard; the file appears whole.

    Raises:
        CaptionDataError: if it cannot be written.
    """
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, json.dumps({"samples": samples, "problems": problems}))
    except OSError as error:
        raise CaptionDataError(
            f"index: {kept.parent} cannot be written: {error.strerror}; name a directory that can, "
            "or leave index empty, which reads the headers of all shards each time"
        ) from error


def _key_and_kind(name: str) -> tuple[str, str]:
    """Split a member's path at the first dot of its last part, as webdataset does.

    What is hidden has no key.
    """
    directory, slash, last = name.rpartition("/")
    stem, _, kind = last.partition(".")
    return directory + slash + stem if stem else "", kind.lower()
