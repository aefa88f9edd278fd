"""Files of lines that grow with a run, and are bounded: the oldest lines go.

A file that has grown long becomes ``NAME.1``, instead of the one before, and begins anew.
"""

from pathlib import Path

from cosmos_core.rundir import append_whole, cut_torn_line


def append_bounded(path: Path, data: bytes, *, most_bytes: int) -> None:
    """Append lines, all of them or none.

    Args:
        path: the file; made if missing. A torn last line of a process that was killed goes.
        data: whole lines.
        most_bytes: the file, and the one before it, together do not grow beyond this.

    Raises:
        OSError: if they cannot be written, as on a disk that is full.
    """
    if path.exists() and path.stat().st_size + len(data) > most_bytes // 2:
        path.replace(before_of(path))
    with path.open("a+b", buffering=0) as file:
        cut_torn_line(file)
        append_whole(file, data)


def before_of(path: Path) -> Path:
    """Return where the lines before those of a file lie, once it was too long for all."""
    return path.with_name(f"{path.name}.1")
