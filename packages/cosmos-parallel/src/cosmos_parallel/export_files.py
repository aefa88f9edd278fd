"""Which rank writes which tensors of an export, and into which files.

    layers   0 1 2 3 4 5 6 7 head          about max_bytes each
    writers  0 . . 1 . . 0 . .             ranks of the stage that has the layers, in turn

Tensors of one layer stay together, since files may have them joined or cut up otherwise.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of the model, whole.

    Attributes:
        name: as the model calls it.
        shape: of the whole.
        dtype: that is written.
        stage: pipeline stage that has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int

    @property
    def num_bytes(self) -> int:
        """What it takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Tensors that one rank writes together.

    Attributes:
        writer: rank within the replica.
        tensors: in the order of the model.
    """

    writer: int
    tensors: tuple[TensorPlace, ...]


def plan_files(
    tensors: Sequence[TensorPlace], *, max_bytes: int, ranks_per_stage: int
) -> list[FilePlan]:
    """Divide tensors among files and files among the ranks of their stage; the same on every rank.

    What fits into one file is rank 0's. A layer larger than ``max_bytes`` has a plan of its own.

    Args:
        tensors: stage after stage, in order.
        max_bytes: of a file.
        ranks_per_stage: how many ranks have a part or a copy of the same layers.
    """
    if sum(tensor.num_bytes for tensor in tensors) <= max_bytes:
        return [FilePlan(0, tuple(tensors))]
    plans: list[FilePlan] = []
    used: dict[int, int] = {}
    open_: list[TensorPlace] = []

    def close() -> None:
        if open_:
            stage = open_[0].stage
            turn = used.get(stage, 0)
            used[stage] = turn + 1
            writer = stage * ranks_per_stage + turn % ranks_per_stage
            plans.append(FilePlan(writer, tuple(open_)))
            open_.clear()

    for group in _layers(tensors):
        size = sum(tensor.num_bytes for tensor in (*open_, *group))
        if open_ and (size > max_bytes or open_[0].stage != group[0].stage):
            close()
        open_ += group
    close()
    return plans


def file_names(counts: Sequence[int]) -> Iterator[list[str]]:
    """Yield the names of every plan's files, given how many each makes."""
    total, number = sum(counts), 0
    for count in counts:
        names: list[str] = []
        for _ in range(count):
            number += 1
            names.append(
                f"model-{number:05d}-of-{total:05d}.safetensors"
                if total > 1
                else "model.safetensors"
            )
        yield names


def _layers(tensors: Sequence[TensorPlace]) -> Iterator[list[TensorPlace]]:
    group: list[TensorPlace] = []
    key: object = None
    for tensor in tensors:
        found = _LAYER.match(tensor.name)
        own = (tensor.stage, found.group(1) if found else tensor.name)
        if group and own != key:
            yield group
            group = []
        group.append(tensor)
        key = own
    if group:
        yield group
