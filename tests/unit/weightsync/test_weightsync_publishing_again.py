"""A version that failed is published again; one that was published stays, whatever comes after."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import (
    Box,
    FileReceiver,
    FileSender,
    FileSenderConfig,
    PeerLostError,
    Shard,
    ShardSpec,
    StorageError,
    StorageFullError,
    WeightSyncError,
    shards_of,
)
from cosmos_weightsync.files.storage import LocalStorage, RemoteStorage

_ROWS = [Box((0, 0), (2, 4)), Box((2, 0), (4, 4))]


class _Full(LocalStorage):
    """Has no room for the files of one rank, until it has."""

    refused = ""

    def write(self, path: str, parts) -> None:
        if self.refused and self.refused in path:
            raise StorageFullError(f"{path}: no room left")
        super().write(path, parts)


def _ranks(weight: torch.Tensor, storage: LocalStorage) -> list[FileSender]:
    settings = FileSenderConfig(session="s", timeout_s=30)
    shards = [
        Shard(ShardSpec("weight", (4, 4), box, "float32"), weight[box.start[0] : box.stop[0]])
        for box in _ROWS
    ]
    return [
        FileSender([shard], storage, rank=rank, num_ranks=2, config=settings)
        for rank, shard in enumerate(shards)
    ]


def _publish(senders: list[FileSender], version: int) -> list[str | WeightSyncError]:
    def one(sender: FileSender) -> str | WeightSyncError:
        try:
            return sender.publish(version)
        except WeightSyncError as error:
            return error

    with ThreadPoolExecutor(len(senders)) as pool:
        return list(pool.map(one, senders))


@pytest.mark.parametrize("first", [1, 2], ids=["the first version", "a later one"])
@pytest.mark.parametrize("refused", ["00001-of", "00002-of", "layout-0"])
def test_a_version_that_failed_is_published_again_with_the_weights_of_then(
    tmp_path: Path, refused: str, first: int
) -> None:
    weight, storage = torch.zeros(4, 4), _Full(tmp_path)
    senders = _ranks(weight, storage)
    if first == 2:
        assert len(set(_publish(senders, 1))) == 1
    storage.refused = refused if first == 1 or "layout" not in refused else "manifest.json"
    failed = _publish(senders, first)
    assert {type(item) for item in failed} == {StorageFullError, PeerLostError}

    storage.refused = ""
    weight.fill_(3.0)
    assert len(set(_publish(senders, first))) == 1
    receiver = FileReceiver(tmp_path)
    assert receiver.stage().version == first
    assert torch.equal(receiver.staged_shards()[0].tensor, weight)
    assert not list(tmp_path.rglob(".*"))


class _Kept(RemoteStorage):
    """Lets nothing be removed of version 1."""

    def remove(self, path: str) -> None:
        if path.startswith("v00000001"):
            raise StorageError(f"{path}: access denied")
        super().remove(path)


def test_a_version_stays_though_an_old_one_cannot_be_removed() -> None:
    storage = _Kept("memory://weightsync-kept", {})
    sender = FileSender(
        shards_of([("weight", torch.ones(3))]), storage, config=FileSenderConfig(keep=1)
    )
    storage_of_all = RemoteStorage("memory://weightsync-kept", {})
    sender_of_all = FileSender(shards_of([("weight", torch.zeros(3))]), storage_of_all)
    sender_of_all.publish(1)
    with pytest.raises(StorageError, match=r"v00000001.*access denied"):
        sender.publish(2)
    receiver = FileReceiver(storage_of_all)
    assert receiver.stage().version == 2
    assert torch.equal(receiver.staged_shards()[0].tensor, torch.ones(3))


def test_what_a_killed_writer_left_in_an_object_store_goes_with_the_next_version() -> None:
    storage = RemoteStorage("memory://weightsync-left", {})
    for version in (1, 2, 4):
        storage.write(f"v{version:08d}/model-00001-of-00002.safetensors", [b"half"])
    storage.write("vocabulary/merges.txt", [b"of somebody else"])
    FileSender(shards_of([("weight", torch.ones(3))]), storage).publish(3)
    assert storage.names() == ["v00000003", "v00000004", "vocabulary"]
