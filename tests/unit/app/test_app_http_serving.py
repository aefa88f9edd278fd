"""Who says half a request, or nothing, keeps nobody else from being answered."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from cosmos_app.dashboard.gate import TokenGate
from cosmos_app.http_serving import ImpatientHttp, http_server
from cosmos_core.addresses import listen_on

TOKEN = "a-token-of-our-own"
RIGHT = f"GET / HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
HALF = b"GET / HTTP/1.1\r\nHost: here\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[bytes], Awaitable[Connection]]


class Quick(ImpatientHttp):
    most_idle_s: ClassVar[float] = 0.3
    most_idle: ClassVar[int] = 8


class Narrow(Quick):
    most_idle_s: ClassVar[float] = 60.0


async def slow_app(scope, receive, send) -> None:
    if scope["type"] == "lifespan":
        return
    await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


@asynccontextmanager
async def served(protocol: type[ImpatientHttp]) -> AsyncIterator[Connect]:
    server = http_server(TokenGate(slow_app, TOKEN), grace_s=1)
    server.config.http = protocol
    opened: list[asyncio.StreamWriter] = []
    with listen_on("127.0.0.1", 0) as taken:
        host, port = taken.getsockname()[:2]
        serving = asyncio.create_task(server.serve(sockets=[taken]))

        async def connect(said: bytes) -> Connection:
            reader, writer = await asyncio.open_connection(host, port)
            opened.append(writer)
            writer.write(said)
            await writer.drain()
            return reader, writer

        try:
            yield connect
        finally:
            for writer in opened:
                writer.close()
            server.should_exit = True
            await serving


async def spell_out(writer: asyncio.StreamWriter, letters: int) -> None:
    for _ in range(letters):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def answer_of(connection: Connection) -> bytes:
    return await asyncio.wait_for(connection[0].readline(), 10.0)


@pytest.mark.parametrize("said", [b"", HALF], ids=["nothing", "half a head"])
async def test_silence_is_hung_up_on(said: bytes) -> None:
    async with served(Quick) as connect:
        assert await answer_of(await connect(said)) == b""


async def test_a_head_said_letter_by_letter_is_hung_up_on() -> None:
    async with served(Quick) as connect:
        reader, writer = await connect(HALF)
        with pytest.raises(ConnectionError):
            await spell_out(writer, 100)
        assert reader.at_eof()


async def test_a_body_that_nobody_wants_is_not_waited_for() -> None:
    """The token is looked at first; letters of a body that follow then keep nothing open."""
    async with served(Quick) as connect:
        head = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n"
        reader, writer = await connect(head)
        assert await answer_of((reader, writer)) == b"HTTP/1.1 401 Unauthorized\r\n"
        with pytest.raises(ConnectionError):
            await spell_out(writer, 100)


async def test_an_answer_may_take_longer_than_the_question() -> None:
    async with served(Quick) as connect:
        assert await answer_of(await connect(RIGHT)) == b"HTTP/1.1 200 OK\r\n"


async def test_of_too_many_connections_the_one_idle_for_longest_goes() -> None:
    async with served(Narrow) as connect:
        working = await connect(RIGHT)
        await asyncio.sleep(0.1)
        idle = [await connect(HALF) for _ in range(20)]
        assert await answer_of(await connect(RIGHT)) == b"HTTP/1.1 200 OK\r\n"
        assert await answer_of(working) == b"HTTP/1.1 200 OK\r\n"
        assert [reader.at_eof() for reader, _ in idle] == [True] * 13 + [False] * 7
