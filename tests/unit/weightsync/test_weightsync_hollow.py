"""Tensors that have no element at all are part of a model like any others."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import (
    FileReceiver,
    FileSender,
    FileSenderConfig,
    ReceiverConfig,
    SenderConfig,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
    checkpoint_shards,
    shards_of,
)
from cosmos_weightsync.encodings import BlockFp8, encode

MODEL = {"none": torch.zeros(0, 4), "w": torch.ones(4, 4), "no_ids": torch.zeros(2, 0).long()}
KINDS = {"none": ((0, 4), "float32"), "w": ((4, 4), "float32"), "no_ids": ((2, 0), "int64")}


def kinds(receiver: WeightReceiver | FileReceiver) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        shard.spec.name: (tuple(shard.tensor.shape), shard.spec.dtype)
        for shard in receiver.staged_shards()
    }


@pytest.mark.parametrize("reuse", ["nothing", "changes"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_receiver_of_everything_has_them(transport, reuse):
    config = ReceiverConfig(transport=transport, reuse=reuse)
    with (
        WeightSender(shards_of(MODEL)) as sender,
        WeightReceiver([sender.endpoint], config=config) as receiver,
    ):
        for version in (1, 2):
            sender.publish(version)
            receiver.stage(version)
            assert kinds(receiver) == KINDS
            receiver.commit()
            receiver.verify()


def test_also_by_a_directory_and_from_another_receiver():
    with ExitStack() as stack:
        directory = stack.enter_context(WeightDirectory()).endpoint
        sender = WeightSender(shards_of(MODEL), config=SenderConfig(directory=directory))
        sender.publish(1)
        config = ReceiverConfig(directory=directory, serve_host="127.0.0.1")
        first = stack.enter_context(WeightReceiver(config=config))
        first.stage(1)
        sender.close()
        second = stack.enter_context(WeightReceiver(config=config))
        second.stage(1)
        assert kinds(first) == kinds(second) == KINDS


def test_a_cast_is_said_of_them_and_an_encoding_of_blocks_leaves_them():
    encoded = encode(shards_of(MODEL), [BlockFp8(names=("none", "w"))])
    with WeightSender(encoded) as sender:
        assert {s.name: s.dtype for s in sender.layout.full_specs()} == {
            "none": "float32",
            "w": "float8_e4m3fn",
            "w_scale_inv": "float32",
            "no_ids": "int64",
        }
    config = SenderConfig(wire_dtype="bfloat16")
    with WeightSender(shards_of(MODEL), config=config) as sender:
        assert {s.dtype for s in sender.layout.hollow_specs()} == {"bfloat16", "int64"}


def test_they_are_in_files_with_their_shapes(tmp_path: Path):
    config = FileSenderConfig(file_bytes=1)
    FileSender(shards_of(MODEL), tmp_path / "many", config=config).publish(1)
    FileSender(shards_of(MODEL), tmp_path / "one").publish(1)
    for where in ("many", "one"):
        receiver = FileReceiver(tmp_path / where)
        receiver.stage()
        assert kinds(receiver) == KINDS
        receiver.commit()
        receiver.verify()
        shards = checkpoint_shards(tmp_path / where / "v00000001")
        assert {shard.spec.name for shard in shards} == set(MODEL)
    header = (tmp_path / "one" / "v00000001" / "model.safetensors").read_bytes()[8:]
    assert b'"none":{"dtype":"F32","shape":[0,4]' in header
