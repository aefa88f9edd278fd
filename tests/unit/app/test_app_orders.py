"""What a policy replica is to do next: commands in their order, and to publish what it owes."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from cosmos_app.roles.orders import orders
from cosmos_core.messages import Command, Stop


async def commands_of(queue: asyncio.Queue[Command | Exception]) -> AsyncGenerator[Command]:
    while True:
        match await queue.get():
            case Exception() as error:
                raise error
            case command:
                yield command


async def test_commands_come_in_their_order_and_between_them_what_is_owed() -> None:
    queue: asyncio.Queue[Command | Exception] = asyncio.Queue()
    owes = True
    given = orders(commands_of(queue), lambda: owes)
    async with asyncio.timeout(20):
        assert await anext(given) is None
        assert await anext(given) is None
        for reason in ("one", "two"):
            queue.put_nowait(Stop(reason=reason))
        assert [await anext(given), await anext(given)] == [Stop(reason="one"), Stop(reason="two")]
        assert await anext(given) is None, "none is lost, and it is still owed"
        owes = False
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(given), 1.0)
    await given.aclose()


async def test_a_line_that_breaks_is_told_to_who_waits_for_commands() -> None:
    queue: asyncio.Queue[Command | Exception] = asyncio.Queue()
    owes = True
    given = orders(commands_of(queue), lambda: owes)
    assert await anext(given) is None
    owes = False
    queue.put_nowait(ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        await asyncio.wait_for(anext(given), 20.0)


async def test_nothing_is_left_running_when_it_is_closed() -> None:
    queue: asyncio.Queue[Command | Exception] = asyncio.Queue()
    given = orders(commands_of(queue), lambda: True)
    assert await anext(given) is None
    await given.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
