"""Directories of files: pulled by one at a time, and checked as others will read them."""

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import (
    Box,
    ConfigurationError,
    FileSender,
    FileSenderConfig,
    Shard,
    ShardSpec,
    StorageError,
    shards_of,
)
from cosmos_weightsync.files.pulling import PushedDirectory, pull_directory
from cosmos_weightsync.files.pushing import DirectoryServer
from cosmos_weightsync.files.storage import LocalStorage
from cosmos_weightsync.files.verifying import verify_against_manifest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {name: torch.arange(6.0).view(2, 3) for name in ("a", "b")}
    FileSender(shards_of(tensors.items()), str(tmp_path / "run")).publish(1)
    return tmp_path / "run" / "v00000001"


def test_a_second_pull_into_a_directory_is_refused_while_the_first_is_at_work(checkpoint, tmp_path):
    source, target = LocalStorage(checkpoint), tmp_path / "copy"
    refused: list[str] = []

    def meanwhile(_: int) -> None:
        with pytest.raises(StorageError, match="another pull is at work there") as caught:
            pull_directory(source, target, lambda _: None)
        refused.append(str(caught.value))

    pull_directory(source, target, meanwhile)
    assert refused
    again = pull_directory(source, target, lambda _: None)
    assert all(file.num_kept == file.num_bytes for file in again)


@pytest.mark.parametrize(
    ("position", "content", "complaint"),
    [
        (7, b"\xff", "not a safetensors file"),
        (8, b"!", "the header is damaged"),
    ],
)
def test_a_damaged_header_is_a_difference(checkpoint, position, content, complaint):
    (file,) = checkpoint.glob("*.safetensors")
    with file.open("r+b") as handle:
        handle.seek(position)
        handle.write(content)
    _, found = verify_against_manifest(LocalStorage(checkpoint), lambda _: None)
    assert [item.name for item in found] == [file.name]
    assert complaint in found[0].reason


def test_a_header_that_places_a_tensor_elsewhere_is_a_difference(checkpoint):
    (file,) = checkpoint.glob("*.safetensors")
    content = file.read_bytes()
    assert content.count(b"[2,3]") == 2
    file.write_bytes(content.replace(b"[2,3]", b"[3,2]", 1))
    _, found = verify_against_manifest(LocalStorage(checkpoint), lambda _: None)
    assert [item.reason for item in found] == [f"the header of {file.name} does not place it"]


def test_a_header_that_calls_a_tensor_otherwise_is_a_difference(checkpoint):
    (file,) = checkpoint.glob("*.safetensors")
    content = file.read_bytes()
    assert content.count(b'"b"') == 1
    file.write_bytes(content.replace(b'"b"', b'"c"'))
    _, found = verify_against_manifest(LocalStorage(checkpoint), lambda _: None)
    assert [(item.name, item.reason) for item in found] == [
        ("b [0:2, 0:3]", f"the header of {file.name} does not place it")
    ]


def _damage_index(directory: Path, how: str) -> None:
    index = directory / "model.safetensors.index.json"
    text = index.read_text()
    if how == "gone":
        index.unlink()
    elif how == "damaged":
        index.write_text(text[:-9])
    elif how == "moved":
        first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
        index.write_text(text.replace(first, second))
    else:
        index.write_text(text.replace('"b"', '"c"'))


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("gone", ["model.safetensors.index.json"]),
        ("damaged", ["model.safetensors.index.json"]),
        ("moved", ["a"]),
        ("renamed", ["b", "c"]),
    ],
)
def test_an_index_that_places_tensors_elsewhere_is_a_difference(tmp_path, how, names):
    tensors = {name: torch.arange(6.0).view(2, 3) for name in ("a", "b")}
    config = FileSenderConfig(file_bytes=24)
    FileSender(shards_of(tensors.items()), tmp_path, config=config).publish(1)
    directory = tmp_path / "v00000001"
    assert verify_against_manifest(LocalStorage(directory), lambda _: None)[1] == []
    _damage_index(directory, how)
    _, found = verify_against_manifest(LocalStorage(directory), lambda _: None)
    assert [item.name for item in found] == names


def test_headers_of_parts_of_tensors_are_those_of_the_manifest(tmp_path):
    halves = [Box((0, 0), (1, 3)), Box((1, 0), (2, 3))]
    shards = [Shard(ShardSpec("a", (2, 3), box, "float32"), torch.zeros(1, 3)) for box in halves]
    FileSender(shards, tmp_path).publish(1)
    _, found = verify_against_manifest(LocalStorage(tmp_path / "v00000001"), lambda _: None)
    assert found == []


def test_an_older_checkpoint_is_not_half_replaced(tmp_path):
    """Two versions in several files of one size; the second pull is ended after its first file."""
    for value in (1.0, 2.0):
        tensors = {name: torch.full((64,), value) for name in ("a", "b", "c")}
        config = FileSenderConfig(file_bytes=256)
        FileSender(shards_of(tensors), tmp_path / "run", config=config).publish(int(value))
    target = tmp_path / "copy"
    pull_directory(LocalStorage(tmp_path / "run" / "v00000001"), target, lambda _: None)
    moved: list[int] = []

    def interrupted(num_bytes: int) -> None:
        moved.append(num_bytes)
        if sum(map(bool, moved)) > 1:
            raise KeyboardInterrupt

    newer = LocalStorage(tmp_path / "run" / "v00000002")
    with pytest.raises(KeyboardInterrupt):
        pull_directory(newer, target, interrupted)
    manifest, found = verify_against_manifest(LocalStorage(target), lambda _: None)
    assert (manifest.version, found) == (1, [])
    pulled = pull_directory(newer, target, lambda _: None)
    assert pulled[0].num_kept == pulled[0].num_bytes
    manifest, found = verify_against_manifest(LocalStorage(target), lambda _: None)
    assert (manifest.version, found) == (2, [])
    assert not (target / ".pull").exists()


@pytest.mark.parametrize("replaced", ["written over", "renamed into its place"])
def test_old_and_new_files_of_a_push_are_not_mixed(tmp_path, replaced):
    """The second file changes, to one of the same size, when the first has been pulled."""
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / "from" / name).write_text("old")
        os.utime(tmp_path / "from" / name, (0, 0))  # Clocks of file systems tick slowly.

    def change(num_bytes: int) -> None:
        if num_bytes and replaced == "written over":
            (tmp_path / "from" / "b").write_text("new")
        elif num_bytes:
            (tmp_path / "new").write_text("new")
            (tmp_path / "new").rename(tmp_path / "from" / "b")

    with (
        closing(DirectoryServer(tmp_path / "from")) as server,
        closing(PushedDirectory(server.endpoint)) as source,
        pytest.raises(StorageError, match="from/b has changed since 'push' began"),
    ):
        pull_directory(source, tmp_path / "to", change)
    assert [path.name for path in (tmp_path / "to").iterdir()] == [".pull"]


def test_a_part_of_a_file_that_is_in_place_is_not_put_over_it(checkpoint, tmp_path):
    target = tmp_path / "copy"
    pull_directory(LocalStorage(checkpoint), target, lambda _: None)
    (target / ".pull").mkdir()
    (target / ".pull" / "model.safetensors").write_bytes(b"half of another")
    pull_directory(LocalStorage(checkpoint), target, lambda _: None)
    _, found = verify_against_manifest(LocalStorage(target), lambda _: None)
    assert found == []


@pytest.mark.parametrize(("old", "new"), [(None, 256), (256, None)])
def test_one_file_is_not_put_beside_an_index_nor_an_index_beside_one_file(tmp_path, old, new):
    """Transformers reads the one file then, and others the index: the older weights for one."""
    for version, file_bytes in ((1, old), (2, new)):
        tensors = {name: torch.full((64,), float(version)) for name in ("a", "b")}
        config = FileSenderConfig() if file_bytes is None else FileSenderConfig(file_bytes=256)
        FileSender(shards_of(tensors), tmp_path / "run", config=config).publish(version)
        if file_bytes is None:  # as transformers writes one file
            (tmp_path / "run" / f"v{version:08d}" / "model.safetensors.index.json").unlink()
    target = tmp_path / "copy"
    pull_directory(LocalStorage(tmp_path / "run" / "v00000001"), target, lambda _: None)
    newer = LocalStorage(tmp_path / "run" / "v00000002")
    with pytest.raises(ConfigurationError, match="is of an older checkpoint") as caught:
        pull_directory(newer, target, lambda _: None)
    manifest, found = verify_against_manifest(LocalStorage(target), lambda _: None)
    assert (manifest.version, found) == (1, [])
    Path(str(caught.value).partition(" is of an older")[0]).unlink()
    pull_directory(newer, target, lambda _: None)
    manifest, found = verify_against_manifest(LocalStorage(target), lambda _: None)
    assert (manifest.version, found) == (2, [])
