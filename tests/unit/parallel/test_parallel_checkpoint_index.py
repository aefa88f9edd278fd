"""What a checkpoint's index may name: the tensors of the checkpoint, and nothing that is run."""

import io
import pickle
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from cosmos_parallel import (
    CheckpointError,
    CheckpointStore,
    Learner,
    LearnerConfig,
    ParallelConfig,
    build_mesh,
)
from cosmos_parallel.checkpoint_files import MANIFEST
from cosmos_parallel.checkpoint_index import read_index


def make_learner() -> Learner:
    torch.manual_seed(0)
    return Learner(nn.Linear(3, 1), LearnerConfig())


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", build_mesh(ParallelConfig()))
    store.save(3, make_learner())
    yield store
    store.close()


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def change_index(directory: Path, change) -> None:
    """Write another index, and a manifest that vouches for it."""
    index = change(pickle.loads((directory / ".metadata").read_bytes()))
    data = pickle.dumps(index)
    (directory / ".metadata").write_bytes(data)
    manifest = (directory / MANIFEST).read_text()
    begin = manifest.index('".metadata"')
    end = manifest.index("]", begin)
    told = f'".metadata": [{len(data)}, {zlib.crc32(data)}'
    (directory / MANIFEST).write_text(manifest[:begin] + told + manifest[end:])


def test_code_in_an_index_is_refused_and_not_run(store, tmp_path):
    touched = tmp_path / "touched"
    change_index(Path(store.path(3)), lambda index: replace(index, planner_data=Touch(touched)))
    with pytest.raises(CheckpointError, match=r"step-00000003 cannot be read: its index names .*"):
        store.load(make_learner(), 3)
    assert not touched.exists()


def test_objects_that_would_be_unpickled_later_are_refused(store):
    def change(index: Metadata) -> Metadata:
        index.state_dict_metadata["num_updates"] = BytesStorageMetadata()
        return index

    change_index(Path(store.path(3)), change)
    with pytest.raises(CheckpointError, match=r"names torch\..*BytesStorageMetadata"):
        store.load(make_learner(), 3)


@pytest.mark.parametrize("place", ["../secret", "/etc/secret", ".."])
def test_tensors_outside_of_a_checkpoint_are_not_read(store, place):
    def change(index: Metadata) -> Metadata:
        index.storage_data = {
            key: replace(where, relative_path=place)
            for key, where in (index.storage_data or {}).items()
        }
        return index

    change_index(Path(store.path(3)), change)
    with pytest.raises(CheckpointError, match=r"its index places a tensor in .*, outside of it"):
        store.load(make_learner(), 3)


@pytest.mark.parametrize("name", ["eval", "getattr", "__import__"])
def test_builtins_are_not_built(name):
    data = b"cbuiltins\n" + name.encode() + b"\n."
    with pytest.raises(CheckpointError, match=f"names builtins.{name}"):
        read_index(io.BytesIO(data))
