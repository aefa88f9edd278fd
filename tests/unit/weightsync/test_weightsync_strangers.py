"""Who has not shown the token yet can neither take memory nor end a thread."""

import gc
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import (
    DeadlineError,
    PeerLostError,
    ProtocolError,
    WeightDirectory,
    WeightSender,
    WeightSyncError,
    shards_of,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.files.pushing import PROTOCOL as FILES_PROTOCOL
from cosmos_weightsync.files.pushing import DirectoryServer
from cosmos_weightsync.frames import connect_control
from cosmos_weightsync.server import MOST_STRANGERS, SOON_S
from cosmos_weightsync.serving import PROTOCOL
from cosmos_weightsync.transports import TcpTransport

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


def test_a_connection_for_which_no_thread_is_left_is_closed_and_the_next_is_served(endpoint):
    host, _, port = endpoint.rpartition(":")
    usual = threading.stack_size(1 << 46)  # More than any machine has: no thread can be started.
    try:
        with socket.create_connection((host, int(port)), timeout=20) as refused:
            assert refused.recv(1) == b""
    finally:
        threading.stack_size(usual)
    assert reply(endpoint, _LENGTH.pack(2) + b"[]")["class"] == "ProtocolError"


HUGE = {
    "num_ranks": 1,
    "geometries": [{"shape": [1 << 70], "ranks": [], "starts": [], "stops": []}],
}


@pytest.mark.parametrize(
    ("kind", "frame"),
    [
        ("pin", {"at_least": math.inf, "prefer": "newest", "seconds": 1}),
        ("pin", {"at_least": 0, "prefer": "newest", "seconds": math.nan}),
        (["pin"], {}),
        ("open", {"transport": "tcp", "bucket_bytes": 1, "pieces": HUGE, "seconds": 1}),
    ],
)
def test_a_strange_request_to_a_sender_is_answered(kind, frame):
    """The reader is told what was wrong; a thread that ended would look like a lost peer."""
    with (
        WeightSender(shards_of([("w", torch.ones(2))])) as sender,
        closing(connect_control(sender.endpoint, Deadline.after(20))) as reader,
    ):
        reader.send("hello", {"protocol": PROTOCOL, "token": ""}, Deadline.after(20))
        reader.receive(Deadline.after(20), expect="welcome")
        reader.send(kind, frame, Deadline.after(20))
        with pytest.raises(WeightSyncError, match="says: "):
            reader.receive(Deadline.after(20))


def test_strangers_that_say_nothing_do_not_take_all_threads(endpoint):
    """The oldest go when more come, and others still get in."""
    host, port = endpoint.rsplit(":", 1)
    with ExitStack() as stack:
        first, *_ = (
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            for _ in range(MOST_STRANGERS // 2)
        )
        time.sleep(2 * SOON_S)
        for _ in range(MOST_STRANGERS // 2 + 1):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        first.settimeout(2 * SOON_S)
        for _ in range(10):  # on a busy machine those before are let in late
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            with suppress(TimeoutError):
                assert first.recv(1) == b""
                break
        else:
            pytest.fail("the oldest is still there")
        assert reply(endpoint, _LENGTH.pack(1 << 20))["class"] == "ProtocolError"


def test_strangers_do_not_take_the_place_of_a_receiver():
    """Port scanners, health checks: some say nothing, some something else, some leave."""
    with closing(TcpTransport().prepare("sender", "127.0.0.1")) as sender, ExitStack() as stack:
        told = sender.description
        meeting = stack.enter_context(ThreadPoolExecutor(1)).submit(
            sender.connect, {}, Deadline.after(20)
        )
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 2, told["key"][:5].encode(), *[b""] * 20):
            caller = socket.create_connection((told["host"], told["port"]), timeout=20)
            caller.sendall(said)
            stack.enter_context(caller)
        caller = socket.create_connection((told["host"], told["port"]), timeout=20)
        caller.close()
        receiver = TcpTransport().prepare("receiver", "127.0.0.1")
        receiving = stack.enter_context(closing(receiver.connect(told, Deadline.after(20))))
        sending = stack.enter_context(closing(meeting.result()))
        view = torch.zeros(3, dtype=torch.uint8)
        sending.send(torch.tensor([1, 2, 3], dtype=torch.uint8), Deadline.after(20))
        receiving.recv_into(view, Deadline.after(20))
        assert view.tolist() == [1, 2, 3]


@pytest.mark.parametrize("how", ["in_time", "by_closing"])
def test_strangers_do_not_keep_a_sender_waiting(how):
    with closing(TcpTransport().prepare("sender", "127.0.0.1")) as sender, ExitStack() as stack:
        told = sender.description
        stack.enter_context(socket.create_connection((told["host"], told["port"]), timeout=20))
        meeting = stack.enter_context(ThreadPoolExecutor(1)).submit(
            sender.connect, {}, Deadline.after(0.3 if how == "in_time" else 60)
        )
        if how == "by_closing":
            time.sleep(0.1)
            sender.close()
        with pytest.raises(DeadlineError if how == "in_time" else PeerLostError):
            meeting.result(timeout=20)


def test_nothing_is_left_open_by_a_receiver_that_shows_the_key_and_dies():
    """A socket that is left to the garbage collector is a warning, and so an error of tests."""
    with closing(TcpTransport().prepare("sender", "127.0.0.1")) as sender:
        told = sender.description
        with socket.create_connection((told["host"], told["port"]), timeout=20) as receiver:
            receiver.sendall(told["key"].encode())
            reset = struct.pack("@ii", 1, 0)
            receiver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        with pytest.raises(PeerLostError, match="no receiver connected"):
            sender.connect({}, Deadline.after(20))
    gc.collect()


@pytest.mark.parametrize("size", [math.inf, [], "all"])
def test_a_strange_request_to_a_pusher_is_answered(tmp_path, size):
    (tmp_path / "file").write_text("content")
    with (
        closing(DirectoryServer(tmp_path, token="right")) as server,
        closing(connect_control(server.endpoint, Deadline.after(20))) as reader,
    ):
        hello = {"protocol": FILES_PROTOCOL, "token": "right"}
        reader.send("hello", hello, Deadline.after(20))
        reader.receive(Deadline.after(20), expect="welcome")
        reader.send("read", {"path": "file", "offset": 0, "size": size}, Deadline.after(20))
        with pytest.raises(ProtocolError, match="malformed 'read'"):
            reader.receive(Deadline.after(20))
