"""Controllers started by hand have names of their own; one of the same name takes a lease over."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cosmos_app.cli import main
from cosmos_app.roles import controller


def test_a_controller_without_a_name_is_taken_for_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owners = list[str]()

    async def note(_run_dir: Path, _redis_url: str | None, owner: str) -> int:
        owners.append(owner)
        return 0

    monkeypatch.setattr(controller, "run_controller", note)
    for arguments in ([], [], ["--name", "controller"]):
        result = CliRunner().invoke(main, ["controller", str(tmp_path), *arguments])
        assert result.exit_code == 0, result.output
    assert len(set(owners)) == 3
    assert owners[-1] == "controller"
