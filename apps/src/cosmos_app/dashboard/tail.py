"""Reading a file that grows, a bounded piece at a time."""

from pathlib import Path

_MOST_BYTES = 1 << 20


class Tail:
    """Gives the whole lines that were added to a file since the last look.

    A file that is not there yet has no lines; one that became shorter is read anew.
    """

    def __init__(self, path: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        """Read nothing yet; ``most_bytes`` is what one look reads, a longer line is passed over."""
        self.path = path
        self._most_bytes = most_bytes
        self._offset = 0
        self._is_inside_long_line = False

    def lines(self) -> list[bytes]:
        """Return new whole lines, oldest first; look again until there are none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(self._most_bytes)
        except OSError:
            return []
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:
            if len(data) == self._most_bytes:
                self._offset += len(data)
                self._is_inside_long_line = True
            return []
        self._offset += len(whole) + 1
        lines = whole.split(b"\n")
        if self._is_inside_long_line:
            self._is_inside_long_line = False
            return lines[1:]
        return lines
