"""The indices of a run's validations: which samples there are, and which files may be served.

An index is read as what it is, a file that anybody may have written: what it names is served only
if it lies in the directory of its validation.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

_INDEX = "index.json"
_MOST_BYTES = 8 << 20
_MOST_VALIDATIONS = 200
_MOST_DIGITS = 12
MEDIA_TYPES = {".png": "image/png", ".mp4": "video/mp4"}
"""Of the files that are served; there are no others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedSample:
    """One sample of a validation, as its index has it; see ``cosmos_wfm.gallery.GallerySample``.

    Attributes:
        row: of its prompt.
        column: which sample of the prompt.
        prompt: what was asked for.
        seed: of the validation's noise.
        rewards: by name.
        reward: weighted sum; null if there is none.
        problems: why rewards failed.
        picture: the picture, or a video's first frame, under ``/api/gallery/STEP/``.
        video: the video, under the same; empty for a picture.
    """

    row: int
    column: int
    prompt: str
    seed: int
    rewards: dict[str, float]
    reward: float | None
    picture: str
    video: str
    problems: tuple[str, ...] = ()


class _Index(msgspec.Struct, frozen=True):
    samples: list[IndexedSample]


@dataclass(frozen=True, slots=True)
class _Known:
    stamp: tuple[int, int]
    samples: tuple[IndexedSample, ...]


class Galleries:
    """The samples of a run's validations, by step.

    Of very many validations the first and the newest are known.

    Attributes:
        num_bad: indices that cannot be read.
    """

    def __init__(self, run_dir: Path) -> None:
        """Nothing is read yet."""
        self.num_bad = 0
        self._root = run_dir / "validation"
        self._known = dict[int, _Known]()

    def look(self) -> bool:
        """Take in what is new, and let go of what was removed; tell whether anything was."""
        found = self._found()
        known = {step: self._known[step] for step in found if step in self._known}
        num_bad = 0
        for step, (path, stamp) in found.items():
            if step not in known or known[step].stamp != stamp:
                samples = _read(path)
                known[step] = _Known(stamp, samples or ())
            num_bad += not known[step].samples
        is_new = known != self._known or num_bad != self.num_bad
        self._known, self.num_bad = known, num_bad
        return is_new

    def by_step(self) -> dict[int, tuple[IndexedSample, ...]]:
        """Return the samples of each validation that has any, in the order of steps."""
        return {step: self._known[step].samples for step in sorted(self._known) if self._has(step)}

    def file_of(self, step: int, name: str) -> Path | None:
        """Return a file that the index of a step names; of no other file is anything told."""
        if not self._has(step):
            return None
        samples = self._known[step].samples
        named = {file for sample in samples for file in (sample.picture, sample.video) if file}
        if name not in named or Path(name).suffix not in MEDIA_TYPES:
            return None
        directory = self._root.resolve() / f"step_{step}"
        try:
            path = (directory / name).resolve()
        except (OSError, ValueError):
            return None
        return path if path.is_relative_to(directory) and path.is_file() else None

    def _has(self, step: int) -> bool:
        return step in self._known and bool(self._known[step].samples)

    def _found(self) -> dict[int, tuple[Path, tuple[int, int]]]:
        found: dict[int, tuple[Path, tuple[int, int]]] = {}
        for path in self._root.glob(f"step_*/{_INDEX}"):
            digits = path.parent.name.removeprefix("step_")
            if not (digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS):
                continue
            try:
                status = path.stat()
            except OSError:  # it was removed meanwhile
                continue
            found[int(digits)] = (path, (status.st_mtime_ns, status.st_size))
        steps = sorted(found)
        shown = steps[:1] + steps[1:][-(_MOST_VALIDATIONS - 1) :]
        return {step: found[step] for step in shown}


def _read(path: Path) -> tuple[IndexedSample, ...] | None:
    """Return the samples of an index; none of one that is too large or is no index."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        return tuple(msgspec.json.decode(path.read_bytes(), type=_Index).samples)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
