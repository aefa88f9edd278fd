"""An object store whose servers are killed, or hang, while versions are written and read."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from swift_servers import ALL, Swift, swift_servers

from cosmos_weightsync import (
    DeadlineError,
    FileReceiver,
    FileReceiverConfig,
    FileSender,
    FileSenderConfig,
    StorageError,
    shards_of,
)

s3fs = pytest.importorskip("s3fs")

pytestmark = pytest.mark.slow
Driver = Mapping[str, object]
WIDTH = 1 << 20
NUM_ROWS = 12
"""48 MiB, which go to S3 in three parts."""
DEADLINE_S = 180
HURRIED: Driver = {"config_kwargs": {"retries": {"max_attempts": 0}}}
"""For the driver, which else asks a store that is gone for a minute or more."""
PATIENT: Driver = {"config_kwargs": {"retries": {"mode": "standard", "max_attempts": 10}}}


@pytest.fixture(scope="module")
def servers() -> Iterator[Swift]:
    with swift_servers() as found:
        s3fs.S3FileSystem(**found.settings).mkdir("weights")
        yield found


@pytest.fixture
def store(servers):
    """The store, all of whose servers run before and after."""
    yield servers
    for process in servers.processes.values():
        process.send_signal(signal.SIGCONT)
    servers.start(name for name in ALL if name not in servers.processes)


def tensors(value: float) -> dict[str, torch.Tensor]:
    shapes = {"big": (NUM_ROWS, WIDTH), "small": (5,)}
    return {name: torch.full(shape, float(value)) for name, shape in shapes.items()}


def sender(store: Swift, where: str, value: float, driver: Driver = HURRIED) -> FileSender:
    config = FileSenderConfig(options={**store.settings, **driver})
    return FileSender(shards_of(tensors(value).items()), where, config=config)


def receiver(
    store: Swift, where: str, driver: Driver = HURRIED
) -> tuple[FileReceiver, dict[str, torch.Tensor]]:
    target = tensors(0)
    config = FileReceiverConfig(options={**store.settings, **driver})
    return FileReceiver(where, wanted=shards_of(target.items()), config=config), target


def open_objects(store: Swift) -> list[str]:
    """What the object server writes, which has no name yet, and what it reads."""
    found: list[str] = []
    for descriptor in Path(f"/proc/{store.processes['object'].pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            path = str(descriptor.readlink())
            if path.startswith(str(store.disk / "objects")):
                found.append(path)
    return found


@contextmanager
def meanwhile(is_time: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """Do something once it is time for it, beside what stands within."""
    failed: list[str] = []

    def wait() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_time():
            if time.monotonic() > deadline:
                failed.append("it was never time")
                return
            time.sleep(0.001)
        act()

    beside = threading.Thread(target=wait)
    beside.start()
    try:
        yield
    finally:
        beside.join()
    assert not failed


def writes_a_later_part(store: Swift) -> Callable[[], bool]:
    """Whether a part is being written, and one has been: what begins an upload is an object too."""

    def num_stored() -> int:
        return sum(1 for _ in store.disk.glob("objects/**/*.data"))

    before = num_stored()
    return lambda: num_stored() > before + 1 and any("#" in path for path in open_objects(store))


def reads(store: Swift) -> bool:
    return any(path.endswith(".data") for path in open_objects(store))


def test_a_store_killed_in_mid_write_has_the_version_before(store):
    where = "s3://weights/written"
    sender(store, where, 1).publish(1)
    reading, target = receiver(store, where)
    reading.stage()
    reading.commit()

    second = sender(store, where, 2)
    killing = meanwhile(writes_a_later_part(store), store.kill)
    complaint = rf"rank 0: {where}/v00000002/model\.safetensors: .* stopped at big \[0:12"
    with pytest.raises(StorageError, match=complaint) as raised, killing:
        second.publish(2)
    store.start()

    assert reading.versions() == [1]
    assert (reading.version, target["big"].unique().tolist()) == (1, [1.0])
    second.publish(2)
    del raised
    gc.collect()  # and with it what the driver still had of the first try
    assert reading.stage().version == 2
    assert reading.commit() == 2
    assert target["big"].unique().tolist() == [2.0]
    assert reading.verify()


@pytest.mark.parametrize("victims", [ALL, ("object",)], ids=["all", "object"])
def test_a_store_killed_in_mid_read_leaves_the_reader_what_it_had(store, victims):
    where = f"s3://weights/read-from-{len(victims)}"
    sender(store, where, 1).publish(1)
    reading, target = receiver(store, where)
    reading.stage()
    reading.commit()
    sender(store, where, 2).publish(2)

    killing = meanwhile(lambda: reads(store), lambda: store.kill(victims))
    with pytest.raises(StorageError, match=where), killing:
        reading.stage()
    assert reading.staged is None
    assert (reading.version, target["big"].unique().tolist()) == (1, [1.0])

    store.start(victims)
    assert reading.stage().version == 2
    assert reading.commit() == 2
    assert target["big"].unique().tolist() == [2.0]
    assert reading.verify()


def test_a_patient_driver_goes_on_with_a_store_that_comes_back(store):
    where = "s3://weights/restarted"

    def restart() -> None:
        store.kill()
        store.start()

    with meanwhile(writes_a_later_part(store), restart):
        sender(store, where, 1, PATIENT).publish(1)
    reading, target = receiver(store, where, PATIENT)
    with meanwhile(lambda: reads(store), restart):
        reading.stage()
    assert reading.commit() == 1
    assert target["big"].unique().tolist() == [1.0]
    assert reading.verify()


@pytest.mark.parametrize("hanging", ["proxy", "object"])
def test_a_store_that_hangs_is_waited_for_until_the_deadline(store, hanging):
    where = f"s3://weights/hung-{hanging}"
    sender(store, where, 1).publish(1)
    reading, _ = receiver(store, where)
    store.processes[hanging].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=rf"{where}/.*: the store did not answer in time"):
        reading.stage(timeout_s=3)
    assert time.monotonic() - began < 10

    store.processes[hanging].send_signal(signal.SIGCONT)
    assert reading.stage().version == 1


def test_a_store_that_is_full_refuses_a_version_and_serves_the_one_before(store):
    where = "s3://weights/full"
    sender(store, where, 1).publish(1)
    store.kill(("object",))
    store.start(("object",), kept_free="100%")
    try:
        with pytest.raises(StorageError, match=rf"rank 0: {where}/v00000002.* at big \[0:12"):
            sender(store, where, 2).publish(2)
    finally:
        store.kill(("object",))
        store.start(("object",))
    reading, target = receiver(store, where)
    assert reading.stage().version == 1
    assert reading.commit() == 1
    assert target["big"].unique().tolist() == [1.0]
