"""Who has not shown the token yet can neither take memory nor end a thread."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import WeightDirectory, WeightSender, shards_of
from cosmos_weightsync.files.pushing import DirectoryServer

_LENGTH = struct.Struct("!I")


def reply(endpoint: str, said: bytes) -> dict[str, str]:
    """What is answered to these bytes; the other side hangs up after it."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(said)
        with connection.makefile("rb") as stream:
            (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
            return json.loads(stream.read(length))


@pytest.fixture(params=["sender", "directory", "pusher"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "sender":
            sender = stack.enter_context(WeightSender(shards_of([("w", torch.ones(2))])))
            yield sender.endpoint
        elif request.param == "directory":
            yield stack.enter_context(WeightDirectory()).endpoint
        else:
            (tmp_path / "file").write_text("content")
            server = DirectoryServer(tmp_path, token="right")
            stack.callback(server.close)
            yield server.endpoint


def test_a_long_hello_is_refused_before_it_is_read(endpoint):
    said = reply(endpoint, _LENGTH.pack(1 << 20))  # And nothing of it follows.
    assert said["class"] == "ProtocolError"
    assert "announces a frame of 1048576 bytes" in said["message"]


@pytest.mark.parametrize(
    "hello",
    [b"[" * 60_000, b'{"kind": "hello", "token": "\\ud800"}', b'{"kind": "hello", "token": [1]}'],
    ids=["nested", "half_a_character", "list"],
)
def test_a_strange_hello_is_answered(endpoint, hello):
    """A thread that ended by an error of its own would be a warning, and so an error here."""
    said = reply(endpoint, _LENGTH.pack(len(hello)) + hello)
    assert said["class"] == "ProtocolError"
