"""Where vLLM has its sockets."""

import os
import tempfile
from pathlib import Path

import pytest

from cosmos_app.roles.sockets import own_sockets

PLACE = "VLLM_RPC_BASE_PATH"


@pytest.fixture
def short(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        monkeypatch.setenv(PLACE, folder)
        yield Path(folder)


def test_sockets_go_with_their_folder(short):
    with own_sockets():
        folder = Path(os.environ[PLACE])
        assert folder.parent == short
        (folder / "b10aab3c").touch()
    assert not folder.exists()
    assert os.environ[PLACE] == str(short)


def test_the_environment_is_as_it_was(short, monkeypatch):
    monkeypatch.delenv(PLACE)
    with own_sockets():
        assert Path(os.environ[PLACE]).is_dir()
    assert PLACE not in os.environ


def test_a_folder_too_long_for_a_socket_is_not_used(short, monkeypatch):
    long = short / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv(PLACE, str(long))
    with own_sockets():
        assert os.environ[PLACE] == str(long)
