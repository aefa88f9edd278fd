"""Errors that file systems behind a URL raise by classes of their own are errors of ours."""

from collections.abc import Callable
from typing import Any

import fsspec
import pytest
import torch
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

from cosmos_weightsync import FileReceiver, FileSender, StorageError, shards_of
from cosmos_weightsync.command_line import main
from cosmos_weightsync.files.storage import RemoteStorage, open_storage


class _LostError(Exception):
    """As botocore's: no OSError."""


class _LostFileSystem(MemoryFileSystem):
    """A store that does not answer."""

    protocol = "lost"

    def _lost(self, *_: Any, **__: Any) -> Any:
        raise _LostError("unable to locate credentials")

    ls = info = cat_file = rm = open = _lost


@pytest.fixture(autouse=True)
def lost():
    fsspec.register_implementation("lost", _LostFileSystem, clobber=True)


@pytest.mark.parametrize(
    "use",
    [
        lambda storage: storage.names(),
        lambda storage: storage.size("file"),
        lambda storage: storage.read_into("file", 0, memoryview(bytearray(1))),
        lambda storage: storage.write("file", [b"content"]),
        lambda storage: storage.remove("file"),
        lambda storage: FileSender(shards_of({"w": torch.ones(2)}), storage).publish(1),
        lambda storage: FileReceiver(storage).stage(1),
    ],
    ids=["names", "size", "read", "write", "remove", "publish", "stage"],
)
def test_what_a_driver_raises_is_a_storage_error(use: Callable[[RemoteStorage], object]) -> None:
    complaint = "lost://bucket/run.*_LostError: unable to locate credentials"
    with pytest.raises(StorageError, match=complaint):
        use(open_storage("lost://bucket/run"))


def test_commands_say_so_in_a_line(tmp_path):
    result = CliRunner().invoke(main, ["pull", "lost://bucket/run", str(tmp_path / "copy")])
    assert result.exit_code == 1
    assert "Error: lost://bucket/run" in result.stderr


@pytest.mark.parametrize("arguments", [["pull", "", "copy"], ["verify", "", "."]])
def test_nothing_is_no_name_of_the_current_directory(arguments, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("content")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "an empty" in result.stderr
    assert not (tmp_path / "copy").exists()


def test_a_place_where_nothing_is_is_not_pulled(tmp_path):
    """A store has no directories: a name that is misspelt is an empty one."""
    copy = tmp_path / "copy"
    result = CliRunner().invoke(main, ["pull", "memory://bucket/misspelt", str(copy)])
    assert result.exit_code == 1
    assert "Error: memory://bucket/misspelt: no files there to pull" in result.stderr
    assert not copy.exists()
