"""Where checkpoints lie: a local directory, or a prefix of an object store reached by fsspec.

Both answer the same questions and differ in how a checkpoint appears:

local    .writing-00000020/ ──one rename──► step-00000020/
remote   step-00000020.0/ is there once its manifest.json is, which is written last; a step that
         is saved again goes to step-00000020.1/, and then the one before is removed
"""

import contextlib
import json
import logging
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from cosmos_parallel.checkpoint_index import CheckpointReader
from cosmos_parallel.errors import CheckpointError, CheckpointPlaceError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MANIFEST = "manifest.json"
_NOT_DELETED = (OSError, RuntimeError)  # what drivers of stores say; that of Azure the latter
_STEP_NAME = re.compile(r"step-(\d{8,})")
_ATTEMPT_NAME = re.compile(r"step-(\d{8,})\.(\d+)")
_READ_BYTES = 1 << 22
_LOG = logging.getLogger(__name__)

# length of a file and the CRC-32 of its content; -1 where the store vouches for the content
FileSum = list[int]


class CheckpointFiles(Protocol):
    """What a checkpoint store needs of a place. Only the writer calls what changes something."""

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        ...

    def path(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        ...

    def next_path(self, step: int) -> str:
        """Return where the next save of a step is written; the same on all ranks."""
        ...

    def prepare(self, writing: str) -> None:
        """Make room for a save, and remove what killed saves left."""
        ...

    def abandon(self, writing: str) -> None:
        """Remove what was written of a save that failed, as far as that can be done."""
        ...

    def publish(self, writing: str, step: int, manifest: bytes) -> None:
        """Make what was written the checkpoint of a step, at one instant."""
        ...

    def remove(self, step: int) -> None:
        """Remove a complete checkpoint."""
        ...

    def write(self, directory: str, name: str, data: bytes) -> None:
        """Write a small file durably."""
        ...

    def read(self, directory: str, name: str) -> bytes:
        """Read a small file whole."""
        ...

    def names(self, directory: str) -> list[str]:
        """Return the files of a directory."""
        ...

    def sum_of(self, directory: str, name: str) -> FileSum:
        """Return what a manifest says of a file."""
        ...

    def discard(self, directory: str, name: str) -> None:
        """Remove one file."""
        ...

    def writer(self, directory: str) -> FileSystemWriter:
        """Return what torch.distributed.checkpoint writes with."""
        ...

    def reader(self, directory: str) -> FileSystemReader:
        """Return what torch.distributed.checkpoint reads with."""
        ...


class LocalFiles:
    """A directory that all ranks see."""

    def __init__(self, root: Path, *, is_writer: bool) -> None:
        """Open the directory, made if need be; a save cut short between two renames is undone.

        Raises:
            OSError: if it cannot be made.
        """
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        if is_writer:
            self._put_back_replaced()

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        found = (_STEP_NAME.fullmatch(entry.name) for entry in self._root.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        return str(self._root / f"step-{step:08d}")

    def next_path(self, step: int) -> str:
        """Return where the next save of a step is written."""
        return str(self._root / f".writing-{step:08d}")

    def prepare(self, writing: str) -> None:
        """Make the directory to write in.

        What is left of others is removed as far as that can be done now: over NFS a file that
        somebody reads keeps its directory. It takes room, and the next save tries again.
        """
        for stale in self._root.glob(".writing-*"):
            shutil.rmtree(stale, ignore_errors=stale != Path(writing))
        Path(writing).mkdir()

    def abandon(self, writing: str) -> None:
        """Remove what was written: the disk that it filled is the run's as well."""
        shutil.rmtree(writing, ignore_errors=True)

    def publish(self, writing: str, step: int, manifest: bytes) -> None:
        """Rename what was written to its name."""
        self.write(writing, MANIFEST, manifest)
        _sync_directory(Path(writing))
        final, replaced = Path(self.path(step)), self._root / f".replaced-{step:08d}"
        if final.exists():
            final.rename(replaced)
        Path(writing).rename(final)
        _sync_directory(self._root)
        shutil.rmtree(replaced, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Remove a complete checkpoint; one killed in mid-removal leaves no half of it."""
        doomed = self._root / f".writing-removed-{step:08d}"
        Path(self.path(step)).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # else the next save removes it

    def write(self, directory: str, name: str, data: bytes) -> None:
        """Write a small file durably."""
        with (Path(directory) / name).open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())

    def read(self, directory: str, name: str) -> bytes:
        """Read a small file whole."""
        return (Path(directory) / name).read_bytes()

    def names(self, directory: str) -> list[str]:
        """Return the files of a directory; none where there is no directory."""
        path = Path(directory)
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def sum_of(self, directory: str, name: str) -> FileSum:
        """Return the length and the CRC-32 of a file."""
        length = crc = 0
        with (Path(directory) / name).open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                length += len(block)
                crc = zlib.crc32(block, crc)
        return [length, crc]

    def discard(self, directory: str, name: str) -> None:
        """Remove one file."""
        (Path(directory) / name).unlink()

    def writer(self, directory: str) -> FileSystemWriter:
        """Write files and sync them."""
        return FileSystemWriter(directory, sync_files=True)

    def reader(self, directory: str) -> FileSystemReader:
        """Read files."""
        return CheckpointReader(directory)

    def _put_back_replaced(self) -> None:
        for replaced in self._root.glob(".replaced-*"):
            final = Path(self.path(int(replaced.name.rpartition("-")[2])))
            if final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)


class RemoteFiles:
    """A prefix of an object store; credentials come from where its fsspec driver looks for them."""

    def __init__(self, url: str) -> None:
        """Open the store.

        Raises:
            CheckpointPlaceError: if no driver for it is installed.
        """
        from fsspec.core import url_to_fs

        try:
            # Any: fsspec has no type stubs
            opened: Any = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointPlaceError(f"checkpoints at {url}: {error}") from error
        self._url = url.rstrip("/")
        self._files: AbstractFileSystem = opened[0]
        self._root = str(opened[1]).rstrip("/")
        self._is_said = False  # that something was not removed

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        return sorted({step for step, attempt in self._attempts() if self._is_whole(step, attempt)})

    def path(self, step: int) -> str:
        """Return where the checkpoint of a step is, or would be."""
        whole = [a for s, a in self._attempts() if s == step and self._is_whole(s, a)]
        return self._url_of(step, max(whole, default=0))

    def next_path(self, step: int) -> str:
        """Return where the next save of a step is written: an attempt that nobody began."""
        return self._url_of(step, max((a + 1 for s, a in self._attempts() if s == step), default=0))

    def prepare(self, writing: str) -> None:
        """Remove what killed saves left; prefixes of an object store need not be made."""
        for step, attempt in self._attempts():
            if not self._is_whole(step, attempt):
                self._remove_attempt(step, attempt)
        self._files.makedirs(self._inside(writing), exist_ok=True)

    def abandon(self, writing: str) -> None:
        """Leave it to the next save: the store may be what failed."""

    def publish(self, writing: str, step: int, manifest: bytes) -> None:
        """Write the manifest, by which the checkpoint is there; remove the ones before it."""
        self.write(writing, MANIFEST, manifest)
        for other, attempt in self._attempts():
            if other == step and self._url_of(step, attempt) != writing:
                self._remove_attempt(step, attempt)

    def remove(self, step: int) -> None:
        """Remove a complete checkpoint, its manifest first."""
        for other, attempt in self._attempts():
            if other == step:
                self._remove_attempt(step, attempt)

    def write(self, directory: str, name: str, data: bytes) -> None:
        """Write an object."""
        self._files.pipe_file(f"{self._inside(directory)}/{name}", data)

    def read(self, directory: str, name: str) -> bytes:
        """Read an object whole."""
        with self._files.open(f"{self._inside(directory)}/{name}", "rb") as stream:
            # Any: fsspec's stubs leave text or bytes open
            data: Any = stream.read()
        return data

    def names(self, directory: str) -> list[str]:
        """Return the objects under a prefix."""
        return self._list(self._inside(directory))

    def sum_of(self, directory: str, name: str) -> FileSum:
        """Return the length of an object; its content is the store's to vouch for."""
        return [int(self._files.size(f"{self._inside(directory)}/{name}") or 0), -1]

    def discard(self, directory: str, name: str) -> None:
        """Remove one object, if the store deletes any."""
        with contextlib.suppress(*_NOT_DELETED):
            self._files.rm_file(f"{self._inside(directory)}/{name}")

    def writer(self, directory: str) -> FileSystemWriter:
        """Write objects."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        from cosmos_parallel.kept_objects import AddingFiles

        writer = FsspecWriter(directory, sync_files=False)
        writer.fs = AddingFiles(_NOT_DELETED)
        writer.path = writer.fs.init_path(directory)
        return writer

    def reader(self, directory: str) -> FileSystemReader:
        """Read objects."""
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

        return CheckpointReader(directory, FileSystem())

    def _url_of(self, step: int, attempt: int) -> str:
        return f"{self._url}/step-{step:08d}.{attempt}"

    def _inside(self, url: str) -> str:
        return self._root + url.removeprefix(self._url)

    def _attempts(self) -> list[tuple[int, int]]:
        found = (_ATTEMPT_NAME.fullmatch(name) for name in self._list(self._root))
        return sorted((int(match[1]), int(match[2])) for match in found if match)

    def _is_whole(self, step: int, attempt: int) -> bool:
        return bool(self._files.exists(f"{self._inside(self._url_of(step, attempt))}/{MANIFEST}"))

    def _remove_attempt(self, step: int, attempt: int) -> None:
        """Remove what is there of one, its manifest first; what a store does not delete stays.

        That is said once, as it fills the store.
        """
        url = self._url_of(step, attempt)
        inside = self._inside(url)
        try:
            if self._files.exists(f"{inside}/{MANIFEST}"):
                self._files.rm_file(f"{inside}/{MANIFEST}")
            if self._files.exists(inside):
                self._files.rm(inside, recursive=True)
        except _NOT_DELETED as error:
            if not self._is_said:
                _LOG.warning(
                    "%s is one checkpoint too many, and the store does not remove it (%s: %s); let "
                    "the run delete there, or have a rule of the store remove what is old",
                    *(url, type(error).__name__, error),
                )
            self._is_said = True

    def _list(self, inside: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            entries = self._files.ls(inside, detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(entry).rstrip("/").rpartition("/")[2] for entry in entries})


def open_files(place: Path | str, *, is_writer: bool) -> CheckpointFiles:
    """Open a local directory, or a URL such as ``s3://bucket/run``.

    Raises:
        CheckpointError: if it cannot be opened.
    """
    if "://" in str(place):
        return RemoteFiles(str(place))
    try:
        return LocalFiles(Path(place), is_writer=is_writer)
    except OSError as error:
        raise CheckpointError(f"cannot make checkpoint directory {place}: {error}") from error


def check_place(place: Path | str) -> None:
    """Look whether a URL is one of a store that a driver is installed for; nobody is asked.

    Raises:
        CheckpointPlaceError: if it is not.
    """
    if "://" in str(place):
        RemoteFiles(str(place))


def parse_manifest(data: bytes, path: str, known_format: int) -> dict[str, Any]:
    """Read a manifest.

    Raises:
        CheckpointError: if it is damaged or of another format.
    """
    try:
        manifest: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST}: {error}") from error
    if manifest.get("format") != known_format:
        raise CheckpointError(
            f"checkpoint {path} has format {manifest.get('format')}; this version reads "
            f"{known_format}"
        )
    return manifest


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
