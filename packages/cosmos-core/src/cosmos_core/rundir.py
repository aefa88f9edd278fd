"""The directory of one run: which files it has, who may write to it, and how a run is found again.

runs/quickstart/
  run.json         marks the directory as ours; when the run was created
  lock             held by the one live launcher, with its process id and host
  config.json      the resolved configuration, which runs again to the same result; no passwords
  metrics.jsonl    every metric record
  report.json      the facts of the report
  logs/ checkpoints/ export/ redis/
"""

import errno
import fcntl
import json
import os
import secrets
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from cosmos_core.errors import CosmosError
from cosmos_core.run_holder import Holder, note_holder, noted_holder

_MARKER = "run.json"
_FIGURES = "metrics.jsonl"
_CONFIG = "config.json"
_FOLDERS = ("logs", "checkpoints", "export", "redis")
_FORMAT = 1
_BLOCK = 1 << 16
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP})
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})


class RunDirectoryError(CosmosError):
    """Parent of what can be wrong with a run directory."""


class RunExistsError(RunDirectoryError):
    """Raised by `create` where a run, or files that are not ours, lie already."""


class RunNotWritableError(RunDirectoryError):
    """Raised by `create` where a directory cannot be made or written to."""


class NotARunDirectoryError(RunDirectoryError):
    """Raised by `open`, `resume` and `latest_run` where no run of ours lies."""


class RunInUseError(RunDirectoryError):
    """Raised when another live process holds the directory.

    Attributes:
        holder: that process.
    """

    def __init__(self, path: Path, holder: Holder) -> None:
        super().__init__(
            f"{path} is in use by {holder}: stop that run first, or choose another directory"
        )
        self.holder = holder


class RunDirectory:
    """Paths of one run; made by `create`, `resume` (which lock it) or `open` (which only looks).

    The lock lasts until `close`, or the death of the process.

    Attributes:
        path: the directory.
        created_s: when the run was created, seconds since the epoch.
    """

    def __init__(self, path: Path, created_s: float, lock: IO[str] | None) -> None:
        self.path = path
        self.created_s = created_s
        self._lock = lock

    @classmethod
    def create(cls, path: Path, *, config_json: str, now_s: float) -> Self:
        """Make and lock the directory of a new run.

        Raises:
            RunInUseError: if a live process holds it.
            RunExistsError: if it holds a run or anything else already.
            RunNotWritableError: if it cannot be made or written to.
        """
        path = path.absolute()
        if path.is_file():
            raise RunExistsError(f"{path} is a file; a run needs a directory of its own")
        _require_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
            try:
                if (path / _MARKER).exists():  # who had the lock has made a run meanwhile
                    raise _exists_error(path)
                run = cls(path, now_s, lock)
                for folder in _FOLDERS:
                    (path / folder).mkdir(exist_ok=True)
                write_atomic(run.config, config_json)
                marker = json.dumps({"format": _FORMAT, "created_s": now_s}) + "\n"
                write_atomic(path / _MARKER, marker)
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise RunNotWritableError(
                f"{path} cannot be the directory of a run: {error.strerror or error} "
                f"({error.filename or path}); choose another with output=DIRECTORY"
            ) from error
        return run

    @classmethod
    def resume(cls, path: Path) -> Self:
        """Lock the directory of a run that has stopped, to go on with it.

        Raises:
            NotARunDirectoryError: if no run lies there.
            RunInUseError: if a live process holds it.
            RunNotWritableError: if its file system has no locks.
        """
        created_s = _read_marker(path)
        return cls(path.absolute(), created_s, _take_lock(path.absolute()))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Look at a run, live or not, without locking it.

        Raises:
            NotARunDirectoryError: if no run lies there.
        """
        return cls(path.absolute(), _read_marker(path), None)

    @property
    def name(self) -> str:
        """Name of the run: that of its directory."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / _CONFIG

    @property
    def metrics(self) -> Path:
        """Every metric record, as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The facts of the report."""
        return self.path / "report.json"

    @property
    def logs(self) -> Path:
        """One log file for each process."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one folder a step."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model, in Hugging Face format."""
        return self.path / "export"

    @property
    def redis(self) -> Path:
        """What the bundled Redis server keeps."""
        return self.path / "redis"

    def holder(self) -> Holder | None:
        """Return the live process that holds the directory.

        ``None`` if nobody does, as far as this machine and this user can tell.
        """
        return _holder(self.path)

    def close(self) -> None:
        """Give the directory back; may be called twice."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def latest_run(root: Path) -> Path:
    """Return the run under ``root`` that was created last.

    Raises:
        NotARunDirectoryError: if there is none.
    """
    runs = [marker.parent for marker in root.glob(f"*/{_MARKER}")]
    if not runs:
        raise NotARunDirectoryError(f"no run under {root}: `cosmos-app run` makes one")
    return max(runs, key=lambda path: (_read_marker(path), path.name))


def write_atomic(path: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Write a file whole or not at all: a reader, or a crash, never meets half of it.

    Args:
        path: the file; it may be there.
        data: its content.
        mode: what its permissions are at most, from its first byte on; the user's umask takes away
            from that, as from those of any other new file.

    Raises:
        OSError: if it cannot be written; what was there stays.
    """
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Make names durable, where the file system does that: some of networks do not."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(directory)


def append_whole(file: FileIO, data: bytes) -> None:
    """Append to a file all of ``data`` or, on a disk that is full, nothing of it.

    Args:
        file: opened with ``open("ab", buffering=0)``; nobody else appends to it meanwhile.
        data: such as a line, which would be torn otherwise, and the next one lost with it.

    Raises:
        OSError: if it cannot be written.
    """
    end = file.seek(0, os.SEEK_END)
    try:
        written = file.write(data)
        while written < len(data):
            written += file.write(data[written:])  # what did not fit raises now
    except OSError:
        file.truncate(end)
        raise


def cut_torn_line(file: FileIO) -> None:
    """Cut off a last line that is not whole, with which the one that follows would be lost.

    A process that was killed leaves one, or a machine that lost its power.

    Args:
        file: opened with ``open("a+b", buffering=0)``; nobody else appends to it meanwhile.
    """
    end = begin = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read(1) in (b"", b"\n"):
        return  # as nearly always, before each line that is appended
    whole = 0
    while begin and not whole:
        begin, before = max(0, begin - _BLOCK), begin
        file.seek(begin)
        block = file.read(before - begin)
        whole = begin + block.rfind(b"\n") + 1 if b"\n" in block else 0
    file.truncate(whole)


def _require_free(path: Path) -> None:
    """Check that no run and nothing of anybody else's lies in a directory.

    What a `create` left that was killed, or whose disk was full, is nobody's.

    Raises:
        RunInUseError: if a live process holds a run there.
        RunExistsError: if there is a run or anything else.
    """
    entries = sorted(path.iterdir()) if path.exists() else []
    if (path / _MARKER).exists():
        holder = _holder(path)
        raise _exists_error(path) if holder is None else RunInUseError(path, holder)
    strangers = [entry.name for entry in entries if not _is_half_made(entry)]
    if strangers:
        raise RunExistsError(
            f"{path} is not empty and not a run of ours (it holds {strangers[0]}): "
            "choose another directory"
        )


def _is_half_made(entry: Path) -> bool:
    """Whether something in a directory without a marker is what `create` makes before that."""
    if entry.name in _FOLDERS:
        return entry.is_dir() and not any(entry.iterdir())
    temporaries = (f".{_CONFIG}.", f".{_MARKER}.")
    return entry.name in {"lock", _CONFIG} or entry.name.startswith(temporaries)


def _exists_error(path: Path) -> RunExistsError:
    return RunExistsError(
        f"{path} holds a run already: resume it with --resume, or choose another directory"
    )


def _holder(path: Path) -> Holder | None:
    """Return the live process that holds a run; none if nobody does."""
    try:
        with (path / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return noted_holder(file)
    except OSError:
        return None  # nothing to lock, or not by us
    return None


def _take_lock(path: Path) -> IO[str]:
    """Lock ``path``; the kernel lets go of it when the process dies, however that happens."""
    file = (path / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with file:
            raise RunInUseError(path, noted_holder(file)) from error
    except OSError as error:
        file.close()
        if error.errno not in _NO_LOCKS:
            raise
        raise RunNotWritableError(
            f"{path} lies on a file system that locks no files ({error.strerror}), so that two "
            "runs could write to it: mount it with locks (NFS: lockd, or local_lock=flock where "
            "one machine alone runs), or choose another directory"
        ) from error
    note_holder(file)
    return file


def _read_marker(path: Path) -> float:
    path = path.absolute()  # so that errors say what a relative one was relative to
    marker = path / _MARKER
    if not path.exists():
        raise NotARunDirectoryError(
            f"{path} is not the directory of a run: there is nothing; 'cosmos-app run' makes one"
        )
    if not marker.is_file():
        runs = sorted(found.parent.name for found in path.glob(f"*/{_MARKER}"))
        within = f"; there are runs in it: {', '.join(runs)}" if runs else ""
        if (path / _FIGURES).is_file():
            within = f"; a run without controller, of a world model, wrote {path / _FIGURES}"
        raise NotARunDirectoryError(
            f"{path} is not the directory of a run: it has no {_MARKER}{within}"
        )
    try:
        fields: dict[str, Any] = json.loads(marker.read_text())
        created_s, version = float(fields["created_s"]), int(fields["format"])
    except (ValueError, TypeError, KeyError) as error:
        raise NotARunDirectoryError(f"{marker} is damaged: {error!r}") from error
    if version != _FORMAT:
        raise NotARunDirectoryError(f"{path} has format {version}; this version reads {_FORMAT}")
    return created_s
