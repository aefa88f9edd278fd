"""Where prompts come from: made-up ones, a file, or several data sets that have shares."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from cosmos_app.data_sets import DataSetConfig, check_sets, shares_of
from cosmos_app.quickstart.arithmetic import ArithmeticConfig, Row, arithmetic_rows
from cosmos_app.quickstart.reversal import ReversalConfig, reversal_rows
from cosmos_app.ranges import require_at_least
from cosmos_core.videos import VideoSampling
from cosmos_rollout import RewardPoolConfig


class Source(NamedTuple):
    """Files of one data set: rows that are trained on, and those that are only measured."""

    name: str
    path: Path | None
    held_out_path: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Prompts with answers.

    Attributes:
        path: JSON lines of {"prompt", "answer", ...} or {"messages", "answer", ...}, Parquet, or a
            directory of such files; rows may have ``images`` and ``videos``. When there is none,
            rows are those of the environment, if it is one of `verifiers`, or else made up.
        held_out_path: rows for validation; the last of ``path`` are kept back when there is none.
        sets: several data sets in place of ``path`` and ``held_out_path``.
        held_out: how many rows of each ``path`` are kept back, at most a tenth of it; 0 for none,
            and no validation.
        too_long: what becomes of prompts that ``rollout.engine`` has no room for. ``refuse``: a run
            is not begun with a file that has one, as far as that is seen without the engine;
            ``drop``: they are dropped, and counted, as a run comes to them.
        video_sampling: which frames are shown of videos whose rows do not say it.
        arithmetic: the sums that are generated.
        reversal: strings of digits to be written backwards, generated instead.
    """

    path: Path | None = None
    held_out_path: Path | None = None
    sets: tuple[DataSetConfig, ...] = ()
    held_out: int = 256
    too_long: Literal["refuse", "drop"] = "refuse"
    video_sampling: VideoSampling = field(default_factory=VideoSampling)
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    reversal: ReversalConfig | None = None

    def __post_init__(self) -> None:
        """Check that the parts go together.

        Raises:
            ValueError: naming those that do not.
        """
        require_at_least(self, {"held_out": 0})
        if not self.sets:
            if self.path is None and self.held_out_path is not None:
                raise ValueError(
                    "held_out_path is given and path is not: made-up rows would be trained on, and "
                    "validated on; set data.path, or data.sets"
                )
            return
        if self.path is not None or self.held_out_path is not None:
            raise ValueError("sets and path (or held_out_path) are given; want one of them")
        check_sets(self.sets)

    @property
    def is_generated(self) -> bool:
        """Whether no file has the prompts: they are made up, or the environment brings them."""
        return self.path is None and not self.sets

    def generate(self, seed: int) -> tuple[list[Row], list[Row]]:
        """Return the made-up rows to train on, and those held out.

        Raises:
            DataError: if there are not as many.
        """
        if self.reversal is not None:
            return reversal_rows(self.reversal, seed)
        return arithmetic_rows(self.arithmetic, seed)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Files of every data set, or of the one that has no name; none if rows are made up."""
        if self.sets:
            return tuple(Source(each.name, each.path, each.held_out_path) for each in self.sets)
        return () if self.path is None else (Source("", self.path, self.held_out_path),)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each set that is trained on; empty if rows are drawn alike."""
        return shares_of(self.sets)

    @property
    def has_no_held_out(self) -> bool:
        """Whether all rows of all files are trained on."""
        if self.is_generated or self.held_out:
            return False
        return all(source.held_out_path is None for source in self.sources)


def check_judged(data: DataConfig, rewards: RewardPoolConfig) -> None:
    """Refuse rewards of data sets that are not there, and data sets that no reward judges.

    Raises:
        ValueError: naming the set.
    """
    names = [each.name for each in data.sets]
    for reward, judged in rewards.sets.items():
        unknown = [name for name in judged if names and name not in names]
        if unknown:
            raise ValueError(
                f"reward.sets.{reward} names the data set {unknown[0]!r}; data.sets are called: "
                f"{', '.join(names)}"
            )
    parts = (*rewards.rewards, *rewards.group_rewards)
    for name in names:
        if not any(rewards.judges(part.name, name) for part in parts):
            raise ValueError(
                f"no reward judges the data set {name!r}: reward.sets gives each to others"
            )
