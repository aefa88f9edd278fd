"""Versions as directories: whole or not there, read by box, refused where a byte is wrong."""

import json
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import (
    Box,
    ConfigurationError,
    CorruptFileError,
    DeadlineError,
    DigestError,
    FileReceiver,
    FileReceiverConfig,
    FileSender,
    FileSenderConfig,
    PeerLostError,
    Shard,
    ShardSpec,
    StorageFullError,
    UnknownTensorError,
    VersionError,
    read_checkpoint,
    shards_of,
)
from cosmos_weightsync.files.manifests import CHUNK_BYTES
from cosmos_weightsync.files.pulling import pull_directory
from cosmos_weightsync.files.reading import slabs
from cosmos_weightsync.files.storage import LocalStorage


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(1000, 300, generator=generator),  # 1.2 MB: two chunks
        "wide": torch.randn(64, 96, 128, generator=generator),  # 3.1 MB: three chunks
        "bias": torch.randn(7, generator=generator),
        "scale": torch.randn((), generator=generator),
        "steps": torch.arange(5),
    }


def part(name: str, whole: torch.Tensor, box: Box) -> Shard:
    dtype = str(whole.dtype).removeprefix("torch.")
    view = whole[box.relative_to(Box.full(whole.shape))]
    return Shard(ShardSpec(name, tuple(whole.shape), box, dtype), view)


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def test_what_is_published_is_what_is_read(tmp_path):
    source = tensors()
    digest = FileSender(shards_of(source.items()), tmp_path).publish(3)
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    receiver = FileReceiver(tmp_path, wanted=shards_of(target.items()))
    staged = receiver.stage()
    assert all(not tensor.any() for tensor in target.values())  # Beside what is in use.
    assert receiver.commit() == 3
    assert all(torch.equal(target[name], tensor) for name, tensor in source.items())
    assert staged.digest == digest == receiver.verify()


def test_a_version_of_whole_tensors_is_a_checkpoint_as_others_write_them(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    source = tensors()
    config = FileSenderConfig(file_bytes=2 << 20)
    FileSender(shards_of(source.items()), tmp_path, config=config).publish(1)
    directory = tmp_path / "v00000001"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(library.load_file(directory / file)[name], source[name])
    assert read_checkpoint(directory).layout().digest() != ""


def publish_together(senders: list[FileSender], version: int) -> list[object]:
    found: list[object] = [None] * len(senders)

    def publish(rank: int) -> None:
        try:
            found[rank] = senders[rank].publish(version)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found[rank] = error

    threads = [threading.Thread(target=publish, args=(rank,)) for rank in range(len(senders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def four_ranks(where: Path, source: dict[str, torch.Tensor], **config) -> list[FileSender]:
    """Two by two: rows of "embed", columns of "wide" and copies of the rest on every rank."""
    senders = []
    for rank in range(4):
        row, column = divmod(rank, 2)
        held = [
            part("embed", source["embed"], Box((500 * row, 0), (500 * row + 500, 300))),
            part("wide", source["wide"], Box((0, 48 * column, 0), (64, 48 * column + 48, 128))),
            part("bias", source["bias"], Box((0,), (7,))),
        ]
        settings = FileSenderConfig(session="s", timeout_s=30, **config)
        senders.append(FileSender(held, where, rank=rank, num_ranks=4, config=settings))
    return senders


def test_every_rank_writes_its_own_shards_and_no_box_twice(tmp_path):
    source = tensors()
    digests = publish_together(four_ranks(tmp_path, source), 1)
    assert len(set(digests)) == 1
    assert isinstance(digests[0], str)
    sizes = [path.stat().st_size for path in (tmp_path / "v00000001").glob("*.safetensors")]
    held = sum(source[name].numel() * 4 for name in ("embed", "wide", "bias"))
    assert held < sum(sizes) < held + 4096
    receiver = FileReceiver(tmp_path)
    receiver.stage(1)
    for shard in receiver.staged_shards():
        assert torch.equal(shard.tensor, source[shard.spec.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000001"]


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 0), (64, 96, 128)),
        Box((3, 0, 0), (5, 96, 128)),  # rows
        Box((0, 40, 0), (64, 60, 128)),  # columns over the cut between two files
        Box((1, 2, 3), (60, 90, 100)),
        Box((63, 95, 127), (64, 96, 128)),  # one element
    ],
    ids=str,
)
def test_any_box_of_any_cut_is_read_exactly(tmp_path, box):
    source = tensors()
    publish_together(four_ranks(tmp_path, source), 1)
    wanted = ShardSpec("wide", (64, 96, 128), box, "float32")
    receiver = FileReceiver(tmp_path, wanted=[wanted], config=FileReceiverConfig(buffer_bytes=1))
    receiver.stage()
    (shard,) = receiver.staged_shards()
    assert torch.equal(shard.tensor, source["wide"][box.relative_to(Box.full((64, 96, 128)))])


def test_only_the_chunks_of_what_is_wanted_are_read(tmp_path):
    big = torch.arange(32 << 18, dtype=torch.int32).view(32, -1)  # 32 rows of 1 MiB
    FileSender(shards_of([("big", big), ("other", big)]), tmp_path).publish(1)
    box = Box((7, 0), (9, 1 << 18))
    receiver = FileReceiver(tmp_path, wanted=[ShardSpec("big", (32, 1 << 18), box, "int32")])
    receiver.stage()
    assert receiver.bytes_read == 2 * CHUNK_BYTES
    assert torch.equal(receiver.staged_shards()[0].tensor, big[7:9])


@pytest.mark.parametrize("limit", [1, 7, 40, 10_000])
def test_slabs_cover_a_box_once_and_span_little(limit):
    origin, box = Box((2, 0, 1), (9, 8, 9)), Box((3, 1, 2), (8, 7, 6))
    seen = torch.zeros(7, 8, 8)
    for slab in slabs(box, origin, limit):
        view = seen[slab.relative_to(origin)]
        view += 1
        assert view.numel() == 1 or (
            sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) < limit
        )
    assert seen[box.relative_to(origin)].eq(1).all()
    assert seen.sum() == box.numel


def test_values_are_cast_when_written_and_again_when_committed(tmp_path):
    source = torch.randn(4, 4)
    FileSender(
        shards_of([("w", source)]), tmp_path, config=FileSenderConfig(wire_dtype="bfloat16")
    ).publish(1)
    assert read_checkpoint(tmp_path / "v00000001").tensors["w"].spec.dtype == "bfloat16"
    target = torch.zeros(4, 4)
    receiver = FileReceiver(tmp_path, wanted=shards_of([("w", target)]))
    receiver.stage()
    receiver.commit()
    assert torch.equal(target, source.bfloat16().float())


def test_old_versions_are_removed_and_the_newest_is_read(tmp_path):
    weight = torch.zeros(3)
    sender = FileSender(shards_of([("w", weight)]), tmp_path, config=FileSenderConfig(keep=2))
    for version in (1, 2, 5):
        weight.fill_(version)
        sender.publish(version)
    receiver = FileReceiver(tmp_path)
    assert receiver.versions() == [2, 5]
    assert receiver.stage(2).version == 5
    assert receiver.staged_shards()[0].tensor.tolist() == [5, 5, 5]


def test_a_version_is_published_once(tmp_path):
    sender = FileSender(shards_of(tensors().items()), tmp_path)
    sender.publish(1)
    with pytest.raises(VersionError, match="v00000001 is there already"):
        sender.publish(1)


def test_what_a_killed_writer_left_is_no_version_and_goes_with_the_next(tmp_path):
    left = tmp_path / ".staging-v00000001-dead"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (tmp_path / "v00000009").mkdir()  # Without a manifest.
    sender = FileSender(shards_of(tensors().items()), tmp_path)
    receiver = FileReceiver(tmp_path)
    assert receiver.versions() == []
    with pytest.raises(DeadlineError, match="version 0 to be published"):
        receiver.stage(timeout_s=0.3)
    sender.publish(1)
    assert receiver.versions() == [1]
    assert not left.exists()


def committed(tmp_path: Path) -> tuple[FileReceiver, dict[str, torch.Tensor], Path]:
    """A receiver that uses version 1 while version 2 is there."""
    source = tensors()
    sender = FileSender(shards_of(source.items()), tmp_path)
    sender.publish(1)
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    receiver = FileReceiver(tmp_path, wanted=shards_of(target.items()))
    receiver.stage()
    receiver.commit()
    sender.publish(2)
    return receiver, target, tmp_path / "v00000002"


@pytest.mark.parametrize("at", [-1, -3_000_000])
def test_a_flipped_bit_is_found_and_named_and_nothing_changes(tmp_path, at):
    receiver, target, directory = committed(tmp_path)
    file = directory / "model.safetensors"
    damage(file, file.stat().st_size + at)
    name = "steps" if at == -1 else "wide"
    with pytest.raises(DigestError, match=rf"model\.safetensors: {name} .*are damaged"):
        receiver.stage(2)
    assert receiver.version == 1
    assert all(torch.equal(target[n], t) for n, t in tensors().items())
    with pytest.raises(VersionError, match="nothing is staged"):
        receiver.commit()


def test_a_truncated_file_is_found_and_named(tmp_path):
    receiver, _, directory = committed(tmp_path)
    file = directory / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 1)
    with pytest.raises(
        CorruptFileError,
        match=r"v00000002/model\.safetensors: \d+ bytes, not \d+; steps \[0:\d+\] is",
    ):
        receiver.stage(2)


def test_a_missing_file_is_found_and_named(tmp_path):
    receiver, _, directory = committed(tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: is missing; \w+ \[.*\] is"):
        receiver.stage(2)


def test_a_damaged_manifest_is_found(tmp_path):
    receiver, _, directory = committed(tmp_path)
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text.replace('"version":2', '"version":3'))
    with pytest.raises(CorruptFileError, match="its checksum is not its own"):
        receiver.stage(2)


def test_memory_that_changed_after_the_commit_does_not_verify(tmp_path):
    receiver, target, _ = committed(tmp_path)
    assert receiver.verify()
    target["bias"][3] += 1
    with pytest.raises(DigestError, match=r"bias .*memory does not hold"):
        receiver.verify()


def test_a_tensor_that_was_not_published_is_refused_by_name(tmp_path):
    FileSender(shards_of(tensors().items()), tmp_path).publish(1)
    with pytest.raises(UnknownTensorError, match="gone"):
        FileReceiver(tmp_path, wanted=[ShardSpec("gone", (2,), Box.full((2,)), "int8")]).stage()


def test_no_room_is_said_with_file_and_tensor_and_leaves_what_was_there(tmp_path):
    source = tensors()
    sender = FileSender(shards_of(source.items()), tmp_path)
    sender.publish(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
    try:
        with pytest.raises(
            StorageFullError,
            match=r"sender rank 0: .*safetensors: no room left .*stopped at wide \[0:64, ",
        ):
            sender.publish(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000001"]
    assert FileReceiver(tmp_path).stage().version == 1
    sender.publish(2)
    assert FileReceiver(tmp_path).stage().version == 2


class NoRoomForTensors(LocalStorage):
    """A quota that small files still fit in."""

    def write(self, path: str, parts) -> None:
        if path.endswith(".safetensors"):
            raise StorageFullError(f"{path}: no room left")
        super().write(path, parts)


def test_a_rank_that_fails_ends_the_publish_of_all(tmp_path):
    senders = four_ranks(tmp_path, tensors())
    settings = FileSenderConfig(session="s", timeout_s=30)
    embed = part("embed", tensors()["embed"], Box((500, 0), (1000, 300)))
    full = NoRoomForTensors(tmp_path)
    senders[2] = FileSender([embed], full, rank=2, num_ranks=4, config=settings)
    found = publish_together(senders, 1)
    assert isinstance(found[2], StorageFullError)
    assert all(isinstance(found[rank], PeerLostError) for rank in (0, 1, 3))
    assert "rank 2: StorageFullError" in str(found[0])
    assert FileReceiver(tmp_path).versions() == []


def test_a_rank_that_never_comes_is_named(tmp_path):
    settings = FileSenderConfig(session="s", timeout_s=0.3)
    alone = FileSender(shards_of(tensors().items()), tmp_path, rank=1, num_ranks=4, config=settings)
    with pytest.raises(DeadlineError, match="rank 0 to write its part"):
        alone.publish(1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"rank": 2, "num_ranks": 2}, "rank 2 is not one of 2"),
        ({"rank": 0, "num_ranks": 2}, "several ranks need a session"),
    ],
)
def test_impossible_senders_are_refused(tmp_path, arguments, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        FileSender([], tmp_path, **arguments)


def test_a_url_without_a_driver_says_what_to_install(tmp_path):
    with pytest.raises(ConfigurationError, match="nosuch"):
        FileSender([], "nosuch://bucket/run")


def test_an_object_store_without_rename_commits_by_its_manifest(tmp_path):
    where = "memory://weightsync-unit"
    source = tensors()
    sender = FileSender(shards_of(source.items()), where, config=FileSenderConfig(keep=1))
    sender.publish(1)
    sender.publish(2)
    receiver = FileReceiver(where)
    assert receiver.versions() == [2]
    receiver.stage()
    for shard in receiver.staged_shards():
        assert torch.equal(shard.tensor, source[shard.spec.name])
    assert read_checkpoint(f"{where}/v00000002").num_bytes == receiver.staged.num_bytes


@pytest.mark.parametrize("version", [-1, 4])
def test_a_version_that_no_receiver_would_take_is_refused(tmp_path, version):
    FileSender(shards_of(tensors().items()), tmp_path).publish(5)
    again = FileSender(shards_of(tensors(1).items()), tmp_path)
    with pytest.raises(VersionError, match="negative" if version < 0 else "has version 5"):
        again.publish(version)
    assert FileReceiver(tmp_path).versions() == [5]


def test_a_pull_does_not_stumble_over_what_another_one_left(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "config.json").write_text("{}")
    (target / ".pull" / "old").mkdir(parents=True)
    (target / ".pull" / "old" / "gone.safetensors").write_bytes(b"half")
    pulled = pull_directory(LocalStorage(source), target, lambda _: None)
    assert [file.path for file in pulled] == ["sub/config.json"]
    assert sorted(path.name for path in target.iterdir()) == ["sub"]
