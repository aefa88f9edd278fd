"""What this machine or its user cannot write is told in a line; other errors keep tracebacks."""

import errno
from pathlib import Path

import pytest

from cosmos_app.errors import said_of_files
from cosmos_app.guarded import guarded


def test_a_full_disk_is_a_line_with_the_file(tmp_path: Path, capsys) -> None:
    def fill() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "report.json"))

    with pytest.raises(SystemExit) as ended:
        guarded(fill)
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/report.json: No space left on device\n"


def test_a_lack_of_rights_has_no_name_at_times() -> None:
    assert said_of_files(PermissionError(errno.EACCES, "Permission denied")) == "Permission denied"


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "No such file", "x"), ValueError("x"), OSError("x")]
)
def test_what_may_be_a_mistake_of_ours_is_not_hidden(error: Exception) -> None:
    assert said_of_files(error) == ""
