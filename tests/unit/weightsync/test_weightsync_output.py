"""What commands show: a bar for people, nothing but JSON for scripts, one line for errors."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cosmos_weightsync import FileSender, shards_of
from cosmos_weightsync.command_line import main
from cosmos_weightsync.command_line.output import report


@pytest.fixture
def published(tmp_path: Path) -> Path:
    FileSender(shards_of([("w", torch.arange(6.0))]), tmp_path).publish(1)
    return tmp_path / "v00000001"


def test_long_work_shows_a_bar_that_gets_to_its_end(published):
    result = CliRunner().invoke(main, ["verify", str(published)])
    assert result.exit_code == 0
    assert "verifying" in result.stderr
    assert "24/24 bytes" in result.stderr  # Six numbers of four bytes.


def test_scripts_get_json_and_no_bar(published):
    result = CliRunner().invoke(main, ["verify", str(published), "--json"])
    assert result.stderr == ""
    assert isinstance(json.loads(result.stdout), dict)


def test_a_difference_is_named_and_ends_with_status_1(published):
    (file,) = published.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    result = CliRunner().invoke(main, ["verify", str(published)])
    assert result.exit_code == 1
    assert "w [0:6]" in result.stdout
    assert "1 differences" in result.stderr


def test_an_error_is_a_line_and_what_to_do_about_it(published):
    (file,) = published.glob("*.safetensors")
    file.write_bytes(b"\x01")
    result = CliRunner().invoke(main, ["verify", str(published), str(published)])
    assert result.exit_code == 1
    assert file.name in result.stderr
    assert "Fetch or publish it again." in result.stderr


def test_a_token_that_cannot_be_read_is_an_error_with_the_name_of_its_file(tmp_path):
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe")
    result = CliRunner().invoke(main, ["pull", "127.0.0.1:1", "copy", "--token-file", str(file)])
    assert result.exit_code == 1
    assert f"{file}: no token can be read there" in result.stderr


def test_the_list_of_commands_says_each_in_whole_sentences():
    lines = CliRunner().invoke(main, ["--help"]).stdout.partition("Commands:")[2].splitlines()
    said = [line for line in lines if line.startswith("  ")][:6]
    assert [line.split()[0] for line in said] == sorted(main.commands)
    assert all(line.endswith(".") and "..." not in line for line in said)


@pytest.mark.parametrize("option", ["--size", "--repeats"])
def test_nothing_cannot_be_measured(option):
    result = CliRunner().invoke(main, ["bench", option, "0"])
    assert result.exit_code == 2
    assert "x>=1" in result.stderr


def test_a_command_that_is_shown_is_on_one_line_to_be_copied(capsys):
    command = "cosmos-weightsync pull 10.0.0.5:4321 DIR --token " + 60 * "t"
    report({"total_bytes": 2000, "pull": command, "hosts": ["a", "b"]}, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        " total bytes  2.0 KB",
        f" pull         {command}",
        " hosts        a",
        "              b",
    ]
