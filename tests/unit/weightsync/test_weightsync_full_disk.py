"""A disk without room: who was writing what is said, and what was there stays in use."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from capabilities import skip_without

from cosmos_weightsync import (
    Box,
    FileReceiver,
    FileSender,
    FileSenderConfig,
    PeerLostError,
    Shard,
    ShardSpec,
    StorageFullError,
    shards_of,
)
from cosmos_weightsync.files.storage import LocalStorage


@pytest.mark.slow  # A process of its own, which imports torch.
def test_a_full_file_system_keeps_the_version_in_use_and_takes_the_next_once_it_has_room(tmp_path):
    may_mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    try:
        subprocess.run(may_mount, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        skip_without("namespaces", "no mounts")
    script = Path(__file__).with_name("full_disk_process.py")
    command = ["unshare", "-rm", sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout)
    room = os.strerror(errno.ENOSPC)
    assert found["told"].startswith("sender rank 0: ")
    assert f"model.safetensors: no room left ({room}); stopped at wide [0:512, 0:" in found["told"]
    assert found["left"] == ["v00000001"]
    assert found["before"] == [1, 1, [1.0]]
    assert found["after"] == [3, [3.0]]


class FullDisk(LocalStorage):
    """A disk that has no room after so many bytes of a file."""

    def __init__(self, root: Path, room: int) -> None:
        super().__init__(root)
        self.room = room

    def write(self, path: str, parts: Iterable[memoryview | bytes]) -> None:
        super().write(path, self._until_full(parts))

    def _until_full(self, parts: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
        left = self.room
        for part in parts:
            left -= len(part)
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield part


def test_the_rank_without_room_is_named_to_all_with_its_tensor_and_region(tmp_path):
    """Rank 1 has rows 32 to 64 of ``wide`` and a disk that is full; rank 0 has the others."""
    full = torch.arange(64.0 * 512).view(64, 512)
    disks = [LocalStorage(tmp_path), FullDisk(tmp_path, 1 << 30)]
    settings = FileSenderConfig(session="s", timeout_s=60)
    senders = []
    for rank, disk in enumerate(disks):
        box = Box((32 * rank, 0), (32 * rank + 32, 512))
        held = Shard(ShardSpec("wide", (64, 512), box, "float32"), full[32 * rank : 32 * rank + 32])
        senders.append(FileSender([held], disk, rank=rank, num_ranks=2, config=settings))

    def publish(version: int) -> list[BaseException | None]:
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(sender.publish, version) for sender in senders]
            return [future.exception() for future in futures]

    served = torch.zeros(64, 512)
    receiver = FileReceiver(tmp_path, wanted=shards_of([("wide", served)]))
    assert publish(1) == [None, None]
    receiver.stage(1)
    receiver.commit()
    first = full.clone()
    full.add_(1.0)
    disks[1].room = 1 << 15
    other, own = publish(2)
    words = r"sender rank 1: .*no room left \(.*\); stopped at wide \[32:64, 0:512\]"
    with pytest.raises(StorageFullError, match=words):
        raise own
    with pytest.raises(PeerLostError, match=f"rank 1: StorageFullError: {words}"):
        raise other
    assert receiver.stage().version == receiver.version == 1
    assert torch.equal(served, first)
    disks[1].room = 1 << 30
    assert publish(3) == [None, None]
    receiver.stage(3)
    assert receiver.commit() == 3
    assert torch.equal(served, full)
