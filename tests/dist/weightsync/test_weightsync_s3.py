"""Versions in an object store that speaks S3, and in moto's stand-in for one."""

from collections.abc import Iterator

import pytest
import torch
from s3_server import SERVERS, s3_server

from cosmos_weightsync import (
    Box,
    DigestError,
    FileReceiver,
    FileReceiverConfig,
    FileSender,
    FileSenderConfig,
    ShardSpec,
    StorageError,
    read_checkpoint,
    shards_of,
)

s3fs = pytest.importorskip("s3fs")

WIDTH = 1 << 12
SEVERAL_PARTS = 1 << 20
"""36 MiB go to S3 in several parts."""


@pytest.fixture(scope="module", params=SERVERS)
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    with s3_server("weights", request.param) as found:
        yield found


def tensors(width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "big": torch.randn(9, width, generator=generator),
        "small": torch.randn(5, generator=generator),
    }


def publish(options, prefix: str, versions: tuple[int, ...] = (1,), width: int = WIDTH) -> str:
    where = f"s3://weights/{prefix}"
    config = FileSenderConfig(options=options, keep=1)
    sender = FileSender(shards_of(tensors(width).items()), where, config=config)
    for version in versions:
        sender.publish(version)
    return where


def test_a_version_goes_through_s3_bit_for_bit(options):
    where = publish(options, "whole", width=SEVERAL_PARTS)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors(SEVERAL_PARTS).items()}
    config = FileReceiverConfig(options=options)
    receiver = FileReceiver(where, wanted=shards_of(target.items()), config=config)
    receiver.stage()
    assert receiver.commit() == 1
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors(SEVERAL_PARTS).items())
    assert receiver.verify()


def test_only_the_ranges_of_what_is_wanted_are_fetched(options):
    where = publish(options, "ranges", width=SEVERAL_PARTS)
    box = Box((4, 0), (5, SEVERAL_PARTS))
    receiver = FileReceiver(
        where,
        wanted=[ShardSpec("big", (9, SEVERAL_PARTS), box, "float32")],
        config=FileReceiverConfig(options=options),
    )
    receiver.stage()
    assert torch.equal(receiver.staged_shards()[0].tensor[0], tensors(SEVERAL_PARTS)["big"][4])
    assert receiver.bytes_read == 4 * SEVERAL_PARTS


def test_the_manifest_is_the_commit_and_old_versions_go(options):
    where = publish(options, "kept", (1, 2, 3))
    receiver = FileReceiver(where, config=FileReceiverConfig(options=options))
    assert receiver.versions() == [3]
    system = s3fs.S3FileSystem(**options, use_listings_cache=False)
    assert system.ls("weights/kept", detail=False) == ["weights/kept/v00000003"]
    system.rm("weights/kept/v00000003/manifest.json")
    assert receiver.versions() == []


def test_an_object_that_was_damaged_is_found(options):
    where = publish(options, "damaged")
    system = s3fs.S3FileSystem(**options, use_listings_cache=False)
    path = "weights/damaged/v00000001/model.safetensors"
    content = bytearray(system.cat_file(path))
    content[-1] ^= 1
    system.pipe_file(path, bytes(content))
    with pytest.raises(DigestError, match=r"model\.safetensors: small .*are damaged"):
        FileReceiver(where, config=FileReceiverConfig(options=options)).stage()


def test_a_checkpoint_in_s3_is_a_layout(options):
    where = publish(options, "layout")
    found = read_checkpoint(f"{where}/v00000001", options)
    assert found.layout().shape_of("big") == (9, WIDTH)


def test_a_bucket_that_is_not_there_is_a_storage_error(options):
    config = FileSenderConfig(options=options)
    sender = FileSender(shards_of(tensors(WIDTH).items()), "s3://nowhere/x", config=config)
    with pytest.raises(StorageError, match="s3://nowhere/x"):
        sender.publish(1)
