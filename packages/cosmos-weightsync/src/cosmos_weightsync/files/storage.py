"""Where files lie: a local directory, or a prefix of an object store reached through fsspec.

Paths are relative to the root, with ``/`` between their parts. Every failure of the system below
is a `StorageError` that names the file.
"""

import contextlib
import errno
import importlib
import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import Any, Protocol

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    ConfigurationError,
    CorruptFileError,
    DeadlineError,
    StorageError,
    StorageFullError,
    WeightSyncError,
)

__all__ = [
    "LocalStorage",
    "ReadableStorage",
    "RemoteStorage",
    "Storage",
    "open_storage",
    "translated",
    "within",
    "write_all",
]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_EXTRAS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class ReadableStorage(Protocol):
    """What fetching needs."""

    @property
    def url(self) -> str:
        """The root, as a person would write it."""
        ...

    def names(self, directory: str = "") -> list[str]:
        """What lies directly in a directory, sorted; nothing where there is no directory."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of a file; ``None`` where there is none."""
        ...

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        """Fill the view from this offset.

        Raises:
            CorruptFileError: the file ends before.
            StorageError: it cannot be read.
        """
        ...


class Storage(ReadableStorage, Protocol):
    """What publishing needs."""

    @property
    def can_rename(self) -> bool:
        """Whether `rename` of a directory is one atomic step."""
        ...

    def write(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """Make a file of these parts; it is durable, or not there at all.

        Raises:
            StorageFullError: there is no room.
            StorageError: it cannot be written.
        """
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file or directory; the target must not exist."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all in it; nothing happens where there is none."""
        ...


@contextlib.contextmanager
def translated(what: str) -> Generator[None]:
    """Raise what the system complains of as an error of ours."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFullError(f"{what}: no room left ({error.strerror})") from error
        raise StorageError(f"{what}: {error}") from error


@contextlib.contextmanager
def driven(what: str) -> Generator[None]:
    """As `translated`, where a driver raises errors of its own, such as botocore's."""
    try:
        with translated(what):
            yield
    except WeightSyncError:
        raise
    except Exception as error:
        raise StorageError(f"{what}: {type(error).__name__}: {error}") from error


class LocalStorage:
    """A directory of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """The directory."""
        return str(self._root)

    @property
    def can_rename(self) -> bool:
        """Always."""
        return True

    def names(self, directory: str = "") -> list[str]:
        """What lies directly in a directory."""
        try:
            with translated(str(self._root / directory)):
                return sorted(entry.name for entry in os.scandir(self._root / directory))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return []
            raise

    def size(self, path: str) -> int | None:
        """Bytes of a file."""
        file = self._root / path
        with translated(str(file)):
            return file.stat().st_size if file.is_file() else None

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        """Fill the view from this offset."""
        file = self._root / path
        with translated(str(file)):
            handle = os.open(file, os.O_RDONLY)
            try:
                filled = 0
                while filled < len(view):
                    count = os.preadv(handle, [view[filled:]], offset + filled)
                    if count == 0:
                        raise CorruptFileError(
                            f"{file}: ends before byte {offset + len(view)}: it was truncated"
                        )
                    filled += count
            finally:
                os.close(handle)

    def write(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write beside the file, make it durable, then rename."""
        file = self._root / path
        beside = file.with_name(f".{file.name}.{os.getpid()}.part")
        with translated(str(file)):
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with beside.open("wb", buffering=0) as handle:
                    for part in parts:
                        write_all(handle.fileno(), memoryview(part).cast("B"))
                    os.fsync(handle.fileno())
                beside.replace(file)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
            _sync_directory(file.parent)

    def rename(self, source: str, target: str) -> None:
        """One atomic step, made durable."""
        with translated(str(self._root / target)):
            (self._root / source).rename(self._root / target)
            _sync_directory((self._root / target).parent)

    def remove(self, path: str) -> None:
        """Remove a file or a directory."""
        target = self._root / path
        with translated(str(target)):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)


def write_all(handle: int, view: memoryview) -> None:
    """Write all of it; the system may take less at a time."""
    written = 0
    while written < len(view):
        written += os.write(handle, view[written : written + (64 << 20)])


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class RemoteStorage:
    """A prefix of an object store. Objects appear whole; there is no rename.

    Args:
        url: Such as ``s3://bucket/prefix``.
        options: For the fsspec file system: ``key``, ``secret``, ``endpoint_url``, ...
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            fsspec = importlib.import_module("fsspec")
            # Typed Any: fsspec has no stubs, and each file system has options of its own.
            self._system: Any = fsspec.filesystem(protocol, use_listings_cache=False, **options)
        except ImportError as error:
            extra = _EXTRAS.get(protocol, f"an fsspec driver of {protocol}")
            raise ConfigurationError(f"{url} needs {extra}: pip install {extra}") from error
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{url}: {error}") from error
        self._prefix = self._url.partition("://")[2]
        self._deadline: Deadline | None = None

    def within(self, deadline: Deadline) -> "RemoteStorage":
        """The same, whose questions end with the deadline if the driver can end them.

        Without one the driver says when to give up: s3fs asks 25 times, for 15 s each.
        """
        bound = copy(self)
        bound._deadline = deadline
        return bound

    @property
    def url(self) -> str:
        """The prefix."""
        return self._url

    @property
    def can_rename(self) -> bool:
        """Never."""
        return False

    def names(self, directory: str = "") -> list[str]:
        """What lies directly below a prefix."""
        target = self._at(directory)
        with driven(f"{self._url}/{directory}"):
            try:
                found = self._ask(directory, "ls", target, detail=False)
            except FileNotFoundError:
                return []
        own = target.rstrip("/")
        names = (str(path).rstrip("/") for path in found)
        return sorted(name.rpartition("/")[2] for name in names if name != own)

    def size(self, path: str) -> int | None:
        """Bytes of an object."""
        with driven(f"{self._url}/{path}"):
            try:
                found = self._ask(path, "info", self._at(path))
            except FileNotFoundError:
                return None
        return int(found["size"]) if found["type"] == "file" else None

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        """One range request."""
        file = f"{self._url}/{path}"
        with driven(file):
            end = offset + len(view)
            data = self._ask(path, "cat_file", self._at(path), start=offset, end=end)
        if len(data) != len(view):
            raise CorruptFileError(
                f"{file}: ends before byte {offset + len(view)}: it was truncated"
            )
        view[:] = data

    def write(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        """In several parts where it is large; the object appears when the last is there."""
        with driven(f"{self._url}/{path}"):
            handle = self._system.open(self._at(path), "wb", block_size=16 << 20)
            try:
                for part in parts:
                    view = memoryview(part).cast("B")
                    for low in range(0, len(view), 16 << 20):
                        handle.write(view[low : low + (16 << 20)])
                handle.close()
            except BaseException as error:
                self._discard(path, handle, error)
                raise

    def rename(self, source: str, target: str) -> None:
        """Not to be had."""
        raise StorageError(f"{self._url}: an object store cannot rename {source} to {target}")

    def remove(self, path: str) -> None:
        """Remove all objects below a prefix."""
        with driven(f"{self._url}/{path}"), contextlib.suppress(FileNotFoundError):
            self._system.rm(self._at(path), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._prefix}/{path}".rstrip("/")

    def _ask(self, path: str, method: str, *arguments: Any, **more: Any) -> Any:
        """Have the driver do it, in the time there is where it can be told."""
        ask = getattr(self._system, method)
        if self._deadline is None or not getattr(self._system, "async_impl", False):
            return ask(*arguments, **more)
        left = self._deadline.remaining(f"{self._url}/{path}")
        try:
            return ask(*arguments, timeout=left, **more)
        except TimeoutError as error:
            raise DeadlineError(f"{self._url}/{path}: the store did not answer in time") from error

    def _discard(self, path: str, handle: Any, error: BaseException) -> None:
        """Have the driver forget what it was given of a file, also when the store is gone."""
        try:
            with driven(f"{self._url}/{path}"):
                handle.discard()
        except StorageError as worse:
            error.add_note(f"parts of it may stay in the store, unseen: {worse}")
        finally:
            with contextlib.suppress(AttributeError):  # fsspec's memory: it has nothing left.
                # Or it writes the rest when it is collected, over what is there by then.
                handle.closed = True


def open_storage(
    where: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None = None
) -> Storage:
    """The storage at a local path or a URL.

    Args:
        where: A path, a URL that fsspec knows, or a storage, which is returned as it is.
        options: What fsspec is given with a URL.

    Raises:
        ConfigurationError: the driver for this kind of URL is missing.
    """
    if not isinstance(where, str | os.PathLike):
        return where
    text = os.fspath(where)
    if "://" not in text:
        return LocalStorage(Path(text))
    if text.startswith("file://"):
        return LocalStorage(Path(text.removeprefix("file://")))
    return RemoteStorage(text, options or {})


def within(storage: Storage, deadline: Deadline) -> Storage:
    """The same storage, whose questions end with the deadline where it can be told of one.

    A directory is not: whoever waits for its file system cannot be interrupted.
    """
    return storage.within(deadline) if isinstance(storage, RemoteStorage) else storage
