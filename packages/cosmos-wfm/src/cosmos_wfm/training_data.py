"""The data of a run: which kinds there are, opened by all ranks, and what of it was left out."""

import os
from pathlib import Path

from cosmos_parallel import TrainingMesh
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.caption_data import CaptionData
from cosmos_wfm.captions import ImageCaptionsConfig
from cosmos_wfm.errors import CaptionDataError
from cosmos_wfm.families.shared import check_pixels
from cosmos_wfm.mock_data import MockCaptionsConfig
from cosmos_wfm.prompt_lengths import MOST_LOOKED_AT, say_what_is_cut
from cosmos_wfm.shards import ShardCaptionsConfig, check_first_shard
from cosmos_wfm.videos import VideoCaptionsConfig

DataConfig = ImageCaptionsConfig | VideoCaptionsConfig | ShardCaptionsConfig | MockCaptionsConfig


def open_data(
    config: DataConfig, adapter: DiffusionModelAdapter, mesh: TrainingMesh
) -> CaptionData:
    """Open the data that a model is to be trained on; every rank calls.

    Rank 0 goes first, so that the others find the index that it keeps of shards, and says how many
    captions are longer than the model takes.

    Raises:
        WfmConfigError: if size or frames are none that the model takes.
        CaptionDataError: if the data cannot be read.
    """
    check_sizes(config, adapter)
    first = config.build() if mesh.process.rank == 0 else None
    if first is not None:
        say_what_is_cut(adapter, first.captions(MOST_LOOKED_AT), "captions")
    mesh.barrier()
    return first if first is not None else config.build()


def check_data_there(config: DataConfig) -> None:
    """Refuse data that is not there at all: a look that takes no time, and reads no sample.

    Raises:
        CaptionDataError: if there is no such directory, nothing in it, or no shard.
    """
    if isinstance(config, MockCaptionsConfig):
        return
    if isinstance(config, ShardCaptionsConfig):
        check_first_shard(config.path)
        return
    if not Path(config.path).is_dir():
        raise CaptionDataError(f"{config.path} is not a directory")
    with os.scandir(config.path) as entries:
        if next(entries, None) is None:
            raise CaptionDataError(f"{config.path} is an empty directory")


def check_sizes(config: DataConfig, adapter: DiffusionModelAdapter) -> None:
    """Refuse a size or a number of frames that a model has no latents for.

    Raises:
        WfmConfigError: says which are right.
    """
    for frames, height, width in sizes_of(config):
        check_pixels("data", (height, width), frames, adapter)


def sizes_of(config: DataConfig) -> list[tuple[int, int, int]]:
    """Return the frames, height and width that samples may have."""
    frames = 1 if isinstance(config, ImageCaptionsConfig) else config.frames
    return [(frames, *size) for size in config.buckets or ((config.height, config.width),)]


class LeftOut:
    """Keeps ``left_out_rank<R>.txt``: the samples that this rank found broken, a line each."""

    def __init__(self, data: CaptionData, output: Path, rank: int) -> None:
        self._data = data
        self._path = output / f"left_out_rank{rank}.txt"
        self._written = 0

    def write(self) -> None:
        """Write what was found since the last time."""
        problems = self._data.problems
        if len(problems) == self._written:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(f"{problem}\n" for problem in problems), encoding="utf-8")
        self._written = len(problems)
