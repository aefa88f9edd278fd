"""A directory served to other machines, read only: what ``cosmos-weightsync push`` runs.

```
puller                         pusher
hello(token)             ─►
                         ◄─    welcome(files: path and size of each)
read(path, offset, size) ─►
                         ◄─    bytes(xxh3), then the bytes
sums(path, size)         ─►                      of the first `size` bytes, by chunk
                         ◄─    sums
```
Only the files listed in the welcome are ever opened, and only as long as they are what they were:
half of an old file and half of a new one would be nobody's.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    DeadlineError,
    LayoutError,
    PeerLostError,
    ProtocolError,
    StorageError,
    WeightSyncError,
)
from cosmos_weightsync.files.manifests import CHUNK_BYTES
from cosmos_weightsync.files.storage import LocalStorage, ReadableStorage, translated
from cosmos_weightsync.frames import ControlConnection
from cosmos_weightsync.server import Server, check_exposure, receive_hello

__all__ = ["MAX_READ_BYTES", "PROTOCOL", "DirectoryServer", "chunk_sums", "files_below"]

PROTOCOL = "files-1"
MAX_READ_BYTES = 16 << 20
_IDLE_S = 3600.0
_ANSWER_S = 300.0


def files_below(root: Path) -> dict[str, int]:
    """Every regular file and its size, by path relative to the root; hidden ones left out."""
    found: dict[str, int] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if not name.startswith(".") and path.is_file():
                found[path.relative_to(root).as_posix()] = path.stat().st_size
    return found


def chunk_sums(storage: ReadableStorage, path: str, num_bytes: int) -> list[str]:
    """The xxh3_64 of each chunk of the first ``num_bytes`` of a file, in hex."""
    buffer = bytearray(min(CHUNK_BYTES, max(num_bytes, 1)))
    sums: list[str] = []
    for low in range(0, num_bytes, CHUNK_BYTES):
        view = memoryview(buffer)[: min(CHUNK_BYTES, num_bytes - low)]
        storage.read_into(path, low, view)
        sums.append(xxhash.xxh3_64_hexdigest(view))
    return sums


class _ListedFiles:
    """The files below a directory, as they were when they were listed.

    Attributes:
        sizes: Bytes of each, by its path.
        storage: The directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.sizes = files_below(root)
        self.storage = LocalStorage(root)
        self._states = {path: self._state(path) for path in self.sizes}

    def check(self, path: str) -> None:
        """Refuse to go on with a file that was written to, or has given way to another.

        Raises:
            StorageError: it was, or has.
        """
        if self._state(path) != self._states[path]:
            raise StorageError(
                f"{self._root / path} has changed since 'push' began: what was pulled of it before "
                "is of another file; begin 'push' again, then 'pull'"
            )

    def _state(self, path: str) -> tuple[int, int, int]:
        with translated(str(self._root / path)):
            found = (self._root / path).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns


class DirectoryServer:
    """Serves a directory until closed.

    Args:
        root: The directory.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        token: What others must show; must be given unless ``host`` is loopback.

    Raises:
        LayoutError: there is no such directory, or it is empty.
        ConfigurationError: the address cannot be listened on, or needs a token.
    """

    def __init__(
        self, root: Path, *, host: str = "127.0.0.1", port: int = 0, token: str = ""
    ) -> None:
        check_exposure(host, token)
        self._listed = _ListedFiles(root)
        if not self.files:
            raise LayoutError(f"{root}: no files there to push")
        self.token = token
        self._lock = threading.Lock()
        self._num_finished = 0
        self._bytes_sent = 0
        self._server = Server((host, port), self._converse, "directory-server")

    @property
    def files(self) -> Mapping[str, int]:
        """Bytes of every file that is served, by its path."""
        return self._listed.sizes

    @property
    def endpoint(self) -> str:
        """Where it is reached: ``host:port``."""
        return self._server.endpoint

    @property
    def bytes_sent(self) -> int:
        """To all pullers together."""
        return self._bytes_sent

    @property
    def num_finished(self) -> int:
        """How many pullers said that they have everything."""
        return self._num_finished

    @property
    def num_open(self) -> int:
        """How many pullers are connected."""
        return self._server.num_open

    def close(self, timeout_s: float = 10.0) -> None:
        """Hang up on everybody. May be repeated."""
        self._server.close(Deadline.after(timeout_s))

    def _converse(self, connection: ControlConnection) -> "_Session":
        return _Session(self._listed, self.token, connection, self._count)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._bytes_sent += num_bytes
            self._num_finished += num_bytes == 0


class _Session:
    def __init__(
        self,
        listed: _ListedFiles,
        token: str,
        connection: ControlConnection,
        count: Any,
    ) -> None:
        self._listed = listed
        self._token = token
        self._connection = connection
        # Callable[[int], None]: bytes sent; 0 says that a puller has everything.
        self._count = count

    def run(self) -> None:
        try:
            self._greet()
            while True:
                frame = self._connection.receive(Deadline.after(_IDLE_S))
                try:
                    self._answer(frame)
                except (TypeError, ValueError, OverflowError) as error:
                    raise ProtocolError(f"malformed {frame['kind']!r}: {error!r}") from error
        except (PeerLostError, DeadlineError):
            pass  # The puller left, or slept; it may come back and go on.
        except WeightSyncError as error:
            self._complain(error)
        finally:
            self.close()

    def close(self) -> None:
        self._connection.close()

    def _greet(self) -> None:
        hello = receive_hello(self._connection, self._token, "the one that 'push' printed")
        if hello.get("protocol") != PROTOCOL:
            raise ProtocolError(f"this side pushes files ({PROTOCOL}), and is asked for others")
        welcome = {"protocol": PROTOCOL, "files": self._listed.sizes}
        self._connection.send("welcome", welcome, Deadline.after(_ANSWER_S))

    def _answer(self, frame: Mapping[str, Any]) -> None:
        deadline = Deadline.after(_ANSWER_S)
        if frame["kind"] == "finished":
            self._count(0)
            return
        storage, sizes = self._listed.storage, self._listed.sizes
        path, size = str(frame.get("path")), int(frame.get("size", -1))
        offset = int(frame.get("offset", 0))
        if path not in sizes or not 0 <= offset <= offset + size <= sizes[path]:
            raise ProtocolError(f"{path!r} has no bytes {offset}:{offset + size}")
        if frame["kind"] == "sums":
            sums = chunk_sums(storage, path, size)
            self._listed.check(path)
            self._connection.send("sums", {"sums": sums}, deadline)
        elif frame["kind"] == "read" and size <= MAX_READ_BYTES:
            content = memoryview(bytearray(size))
            storage.read_into(path, offset, content)
            self._listed.check(path)
            checksum = xxhash.xxh3_64_hexdigest(content)
            self._connection.send("bytes", {"xxh3": checksum}, deadline)
            self._connection.send_bytes(content, deadline)
            self._count(size)
        else:
            raise ProtocolError(f"a pusher does not know {frame['kind']!r}")

    def _complain(self, error: WeightSyncError) -> None:
        try:
            content = {"class": type(error).__name__, "message": str(error)}
            self._connection.send("error", content, Deadline.after(5.0))
        except WeightSyncError:
            pass  # Nobody is there to hear it.
