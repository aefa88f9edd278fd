"""A directory fetched from wherever it is, so that a restart goes on where the last run ended.

Files are written beside their places, as ``.pull/<path>``, and put there when all are whole, so
that an older checkpoint in their place is not half replaced. What an earlier run left is compared
with the source chunk by chunk and kept as far as it is the same. The small files go last: a
directory that has its ``config.json`` has its tensors.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Container, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    ConfigurationError,
    CorruptFileError,
    DigestError,
    LayoutError,
    ProtocolError,
    StorageError,
)
from cosmos_weightsync.files.manifests import CHUNK_BYTES
from cosmos_weightsync.files.pushing import MAX_READ_BYTES, PROTOCOL, chunk_sums
from cosmos_weightsync.files.storage import (
    LocalStorage,
    ReadableStorage,
    translated,
    write_all,
)
from cosmos_weightsync.frames import connect_control

__all__ = ["PulledFile", "PushedDirectory", "files_of", "pull_directory"]

_PARTS = ".pull"
_INDEX = ".index.json"
_BLOCK_BYTES = 8 * CHUNK_BYTES


class PushedDirectory:
    """What a `DirectoryServer` serves, as a storage that can only be read.

    Args:
        endpoint: ``host:port`` of the server.
        token: Its token.
        timeout_s: How long any one answer may take.

    Raises:
        PeerLostError: nobody is there.
        ProtocolError: the token is wrong, or the other side does not push files.
    """

    def __init__(self, endpoint: str, *, token: str = "", timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._url = f"pushed://{endpoint}"
        self._connection = connect_control(endpoint, self._deadline())
        try:
            hello = {"protocol": PROTOCOL, "token": token}
            self._connection.send("hello", hello, self._deadline())
            welcome = self._connection.receive(self._deadline(), expect="welcome")
            if welcome.get("protocol") != PROTOCOL:
                raise ProtocolError(f"{endpoint} does not push files: is it a 'push'?")
            self._files = {str(k): int(v) for k, v in welcome["files"].items()}
        except BaseException:
            self._connection.close()
            raise

    @property
    def url(self) -> str:
        """The endpoint."""
        return self._url

    def names(self, directory: str = "") -> list[str]:
        """What lies directly in a directory."""
        start = f"{directory}/" if directory else ""
        below = [path[len(start) :] for path in self._files if path.startswith(start)]
        return sorted({path.partition("/")[0] for path in below})

    def size(self, path: str) -> int | None:
        """Bytes of a file."""
        return self._files.get(path)

    def read_into(self, path: str, offset: int, view: memoryview) -> None:
        """Fill the view; every answer carries a checksum.

        Raises:
            DigestError: bytes changed on the way.
            PeerLostError: the pusher is gone.
        """
        for low in range(0, len(view), MAX_READ_BYTES):
            part = view[low : low + MAX_READ_BYTES]
            request = {"path": path, "offset": offset + low, "size": len(part)}
            self._connection.send("read", request, self._deadline())
            announced = self._connection.receive(self._deadline(), expect="bytes")
            self._connection.receive_into(part, self._deadline())
            if xxhash.xxh3_64_hexdigest(part) != announced.get("xxh3"):
                raise DigestError(f"{self._url}/{path}: bytes at {offset + low} changed on the way")

    def sums(self, path: str, num_bytes: int) -> list[str]:
        """The checksums of the chunks of the first bytes of a file, as the pusher reads them."""
        self._connection.send("sums", {"path": path, "size": num_bytes}, self._deadline(100.0))
        answer = self._connection.receive(self._deadline(100.0), expect="sums")
        return [str(item) for item in answer["sums"]]

    def finish(self) -> None:
        """Tell the pusher that this side has everything."""
        self._connection.send("finished", {}, self._deadline())

    def close(self) -> None:
        """Hang up. May be repeated."""
        self._connection.close()

    def _deadline(self, factor: float = 1.0) -> Deadline:
        return Deadline.after(self._timeout_s * factor)


@dataclass(frozen=True, slots=True)
class PulledFile:
    """How one file was obtained: ``num_kept`` of its bytes were there from an earlier run."""

    path: str
    num_bytes: int
    num_kept: int


def pull_directory(
    source: ReadableStorage, target: Path, progress: Callable[[int], None]
) -> list[PulledFile]:
    """Make ``target`` hold what ``source`` holds; call it again after an interruption.

    Args:
        source: A `PushedDirectory`, or any other storage.
        target: A directory, made if it is not there. Files that the source does not have stay.
        progress: Told how many more bytes are in place.

    Raises:
        LayoutError: there is nothing at the source.
        CorruptFileError: a file's path leads out of the target.
        ConfigurationError: the target holds the same weights in another form, which readers would
            take for these; nothing is fetched.
        StorageFullError: there is no room, also for what is replaced as long as the rest is not
            there; what was fetched stays for the next attempt.
        StorageError: another pull is at work in the target.
        TransferError: the source failed.
    """
    listing = dict(files_of(source))
    if not listing:
        raise LayoutError(f"{source.url}: no files there to pull; is it the right place?")
    _check_form(listing, target)
    order = sorted(listing, key=lambda path: (not path.endswith(".safetensors"), path))
    with _alone(target):
        pulled = [_pull(source, target, path, listing[path], progress) for path in order]
        parts = target / _PARTS
        for path in order:
            _put(parts / path, target / path)
        with translated(str(parts)):
            if parts.exists():  # Also what an earlier run left of files not wanted any more.
                shutil.rmtree(parts)
    if isinstance(source, PushedDirectory):
        source.finish()
    return pulled


def _check_form(listing: Container[str], target: Path) -> None:
    """Refuse one file beside the index of an older checkpoint, and an index beside its one file."""
    found = {path.relative_to(target).as_posix() for path in target.rglob("*.safetensors*")}
    for path in sorted(found):
        other = path.removesuffix(_INDEX) if path.endswith(_INDEX) else path + _INDEX
        if path not in listing and other in listing:
            raise ConfigurationError(
                f"{target / path} is of an older checkpoint, and what is pulled has {other} in its "
                "place: readers would not know which counts; remove it, or pull into another "
                "directory"
            )


@contextlib.contextmanager
def _alone(target: Path) -> Generator[None]:
    """Keep other pulls out of a directory: they would cut and move the same unfinished files.

    Where the file system has no locks, nothing is kept out.
    """
    with translated(str(target)):
        target.mkdir(parents=True, exist_ok=True)
        handle = os.open(target, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StorageError(
                    f"{target}: another pull is at work there: let it end, or name another place"
                ) from error
        yield
    finally:
        os.close(handle)


def files_of(source: ReadableStorage, directory: str = "") -> Iterator[tuple[str, int]]:
    """Every file that `pull_directory` would fetch, and its size."""
    for name in source.names(directory):
        path = f"{directory}/{name}" if directory else name
        size = source.size(path)
        if name.startswith("."):
            continue
        if size is None:
            yield from files_of(source, path)
        else:
            yield path, size


def _pull(
    source: ReadableStorage,
    target: Path,
    path: str,
    num_bytes: int,
    progress: Callable[[int], None],
) -> PulledFile:
    if path.startswith("/") or ".." in path.split("/"):
        raise CorruptFileError(f"{source.url} names a file {path!r}, outside of the directory")
    local = LocalStorage(target)
    part = f"{_PARTS}/{path}"
    if local.size(path) == num_bytes and _kept(source, local, path, num_bytes) == num_bytes:
        local.remove(part)
        progress(num_bytes)
        return PulledFile(path, num_bytes, num_bytes)
    size = min(local.size(part) or 0, num_bytes)
    kept = _kept(source, local, part, size) if size else 0
    progress(kept)
    file = target / part
    with translated(str(target / path)):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("r+b" if file.exists() else "wb", buffering=0) as handle:
            handle.truncate(kept)
            handle.seek(kept)
            buffer = memoryview(bytearray(_BLOCK_BYTES))
            for low in range(kept, num_bytes, _BLOCK_BYTES):
                view = buffer[: min(_BLOCK_BYTES, num_bytes - low)]
                source.read_into(path, low, view)
                write_all(handle.fileno(), view)
                progress(len(view))
            os.fsync(handle.fileno())
    return PulledFile(path, num_bytes, kept)


def _put(file: Path, place: Path) -> None:
    with translated(str(place)):
        if file.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)


def _kept(source: ReadableStorage, local: LocalStorage, path: str, size: int) -> int:
    """How many of the first bytes of a local file are the source's, in whole chunks."""
    original = path.removeprefix(f"{_PARTS}/")
    theirs = (
        source.sums(original, size)
        if isinstance(source, PushedDirectory)
        else chunk_sums(source, original, size)
    )
    ours = chunk_sums(local, path, size)
    alike = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return size if alike is None and len(ours) == len(theirs) else (alike or 0) * CHUNK_BYTES
