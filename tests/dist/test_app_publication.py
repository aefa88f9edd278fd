"""Ranks of a policy publish a version together or not at all, and tell the stall of the slowest."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_app.roles.publication import Publication
from cosmos_weightsync import Box, Shard, ShardSpec, WeightReceiver

RANK = """
import json, sys
from dataclasses import asdict
from pathlib import Path

import torch

from cosmos_app.roles.publication import publish_together
from cosmos_app.roles.ranks import gather_texts
from cosmos_parallel import init_distributed, shutdown_distributed
from cosmos_weightsync import Box, SenderConfig, Shard, ShardSpec, WeightSender
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.receiver_session import ReceiverSession

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
# the first has a row, the second many
ROWS, COLUMNS = (1, 4096), 4096
start = sum(ROWS[:rank])
init_distributed(rank, 2, init_method=f"file://{folder}/meeting")
live = torch.zeros(ROWS[rank], COLUMNS)
box = Box((start, 0), (start + ROWS[rank], COLUMNS))
spec = ShardSpec("w", (sum(ROWS), COLUMNS), box, "float32")
config = SenderConfig(max_snapshots=2, run_id="one")
sender = WeightSender([Shard(spec, live)], rank=rank, num_ranks=2, config=config)

def publish(version):
    live.fill_(float(version))
    return print(json.dumps(asdict(publish_together(sender, version))), flush=True)

def reader(version):
    session = ReceiverSession(sender.endpoint, "", Deadline.after(60))
    assert session.pin(version, "newest", Deadline.after(60)) == version
    return session

readers = []
for version in (1, 2):
    publish(version)
    if rank == 1:
        readers.append(reader(version))
publish(3)
if rank == 1:
    readers[0].close()
    while sender.num_sessions > 1:
        pass
gather_texts("somebody is done")
publish(4)
print(sender.endpoint, flush=True)
sys.stdin.readline()
sender.close()
shutdown_distributed()
"""
pytestmark = pytest.mark.timeout(300)


def start(rank: int, folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", RANK, str(rank), str(folder)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def test_a_rank_without_room_has_all_skip_and_the_slowest_is_what_is_told(tmp_path: Path) -> None:
    ranks = [start(rank, tmp_path) for rank in range(2)]
    try:
        told: list[list[dict[str, Any]]] = [
            [json.loads(line(rank)) for _ in range(4)] for rank in ranks
        ]
        endpoints = [line(rank) for rank in ranks]
        assert told[0] == told[1], "each knows of all"
        assert told[0][0].keys() == asdict(Publication(version=0)).keys()
        assert [each["is_published"] for each in told[0]] == [True, True, False, True]
        assert [each["version"] for each in told[0]] == [1, 2, 3, 4]
        skipped = told[0][2]
        assert skipped["held_by"] == (
            "rank 1: version 1 by receiver at 127.0.0.1; version 2 by receiver at 127.0.0.1"
        )
        # 64 MiB in new memory, where rank 0 has 16 KiB
        assert told[0][0]["stall_s"] > 2e-3
        assert skipped["stall_s"] < 1.0
        into = torch.zeros(4097, 4096)
        spec = ShardSpec("w", (4097, 4096), Box.full((4097, 4096)), "float32")
        with WeightReceiver(endpoints, wanted=[Shard(spec, into)]) as receiver:
            assert receiver.stage().version == 4
            receiver.commit()
        assert into.eq(4.0).all()
        for rank in ranks:
            rank.communicate("done\n", timeout=60)
        assert [rank.returncode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
