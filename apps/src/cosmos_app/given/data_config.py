"""Where the rows of a run on given data come from: one data set, or several with shares."""

from dataclasses import dataclass, field
from pathlib import Path

from cosmos_app.data_sets import DataSetConfig, check_sets
from cosmos_app.given.preference_data import PreferenceFormat
from cosmos_parallel import SftFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class SftDataConfig:
    """Examples.

    Attributes:
        path: JSON lines, Parquet, a directory of them, or what ``datasets.save_to_disk`` wrote.
        sets: several data sets in place of ``path`` and ``validation_path``, all in the same form;
            each has its share of the examples of every stretch of steps, and its own epochs.
        rows: which fields hold what, and which split of a directory is trained on.
        validation_path: examples that are only validated on, in the same form.
        validation_split: a split of ``path`` that is only validated on; of each set's that has no
            ``held_out_path``.
        held_out: how many of the last rows are kept back to validate on, when neither is given; 0
            for none. A conversation that is several examples is a row. Of several data sets so many
            of each that has no ``held_out_path``.
    """

    path: Path | None = None
    sets: tuple[DataSetConfig, ...] = ()
    rows: SftFormat = field(default_factory=SftFormat)
    validation_path: Path | None = None
    validation_split: str = ""
    held_out: int = 0

    def __post_init__(self) -> None:
        """Check that the parts go together.

        Raises:
            ValueError: naming those that do not.
        """
        _check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceDataConfig:
    """Pairs of answers, or single answers with marks.

    Attributes:
        path: JSON lines, Parquet, a directory of them, or what ``datasets.save_to_disk`` wrote.
        sets: several data sets in place of ``path`` and ``validation_path``, all in the same form;
            each has its share of the rows of every stretch of steps, and its own epochs.
        rows: which fields hold what, and which split of a directory is trained on.
        validation_path: rows that are only validated on, in the same form.
        validation_split: a split of ``path`` that is only validated on; of each set's that has no
            ``held_out_path``.
        held_out: how many of the last rows are kept back to validate on, when neither is given; 0
            for none. Of several data sets so many of each that has no ``held_out_path``.
    """

    path: Path | None = None
    sets: tuple[DataSetConfig, ...] = ()
    rows: PreferenceFormat = field(default_factory=PreferenceFormat)
    validation_path: Path | None = None
    validation_split: str = ""
    held_out: int = 0

    def __post_init__(self) -> None:
        """Check that the parts go together.

        Raises:
            ValueError: naming those that do not.
        """
        _check(self)


GivenDataConfig = SftDataConfig | PreferenceDataConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSource:
    """One data set of a run.

    Attributes:
        name: empty of the only one, which needs none.
        rows: how its rows are read.
        path: rows to train on; ``None`` of a set that is only measured.
        validation_path: rows that are only validated on.
        validation_split: a split of ``path`` that is only validated on.
        held_out: how many of the last rows of ``path`` are kept back to validate on.
    """

    name: str
    rows: SftFormat | PreferenceFormat
    path: Path | None
    validation_path: Path | None = None
    validation_split: str = ""
    held_out: int = 0

    @property
    def is_validated(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.held_out or self.validation_path or self.validation_split)

    @property
    def parts(self) -> tuple[tuple[Path, str], ...]:
        """Path and split of each part that is read: what is trained on is the first, if any is."""
        found = [] if self.path is None else [(self.path, self.rows.split)]
        if self.validation_path is not None:
            found.append((self.validation_path, self.rows.split))
        elif self.path is not None and self.validation_split:
            found.append((self.path, self.validation_split))
        return tuple(found)

    @property
    def label(self) -> str:
        """How errors call it: by its name, if it has one, with what separates it from the rest."""
        return f"data set {self.name!r}: " if self.name else ""


def sources_of(data: GivenDataConfig) -> tuple[GivenSource, ...]:
    """Return every data set that a recipe names."""
    if not data.sets:
        return (
            GivenSource(
                name="",
                rows=data.rows,
                path=data.path,
                validation_path=data.validation_path,
                validation_split=data.validation_split,
                held_out=data.held_out,
            ),
        )
    return tuple(
        GivenSource(name=each.name, rows=data.rows, path=each.path, validation_path=apart)
        if (apart := each.held_out_path) is not None
        else GivenSource(
            name=each.name,
            rows=data.rows,
            path=each.path,
            validation_split=data.validation_split,
            held_out=data.held_out,
        )
        for each in data.sets
    )


def num_kept_back(data: GivenDataConfig) -> int:
    """Return how many rows of what could be trained on are kept back to validate on."""
    return sum(source.held_out for source in sources_of(data))


def _check(data: GivenDataConfig) -> None:
    if not data.sets:
        if data.path is None:
            raise ValueError("there is nothing to train on: set data.path, or data.sets")
        return
    if data.path is not None or data.validation_path is not None:
        raise ValueError(
            "sets and path (or validation_path) are given; want one of them: each set has its own "
            "path and held_out_path, and data.path=none leaves out that of a recipe"
        )
    check_sets(data.sets)
